"""`scripts/gpu_check.sh`: what fits into the time, in the order of importance; the table and the files."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch

from ..benchmarks.results import cell
from ..files import write_whole
from .parts import PARTS, Part
from .rows import FAILED, MEASURED, OUT_OF_TIME, PASSED, Row
from .runs import ROOT

SLOWER = 3  # times what a part should take, after which it is ended
START = 120  # seconds in which a worker must have begun


class PartLost(Exception):
    """The worker ended, or did not answer in time."""


class Worker:
    """A process that runs parts; begun anew where one was lost. Its log is `checks.log`."""

    def __init__(self, output: Path, rehearse: bool) -> None:
        self.command = [sys.executable, "-m", "regdrop_titan.gpu_check.worker", "--output", str(output)]
        self.command += ["--rehearse"] if rehearse else []
        self.log = output / "checks.log"
        self.log.unlink(missing_ok=True)
        # later parts find the graphs of earlier ones
        self.environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(output / "compiled")}
        if rehearse:  # on a machine with a GPU too
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.process: subprocess.Popen | None = None
        self.greeting: dict[str, str] = {}

    def _start(self) -> None:
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, bufsize=1, start_new_session=True,
            )  # fmt: skip
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self.answers), daemon=True).start()
        self.greeting = json.loads(self._answer(START))

    @staticmethod
    def _read(process: subprocess.Popen, answers: queue.Queue) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put("")  # it has ended

    def _answer(self, seconds: float) -> str:
        try:
            line = self.answers.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            self.stop()
            raise PartLost(f"ended after {seconds:.0f} s without a result (see {self.log})") from None
        if not line:
            self.stop()
            raise PartLost(f"its process ended (see {self.log})")
        return line

    def ask(self, part: Part, seconds: float) -> list[Row]:
        """The rows of a part, which may take so long. Raises PartLost."""
        ends = time.monotonic() + seconds
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the answer will say
            print(part.name, file=self.process.stdin, flush=True)
        answer = json.loads(self._answer(ends - time.monotonic()))
        if not answer["lives"]:
            self.stop()
        return [Row(**row) for row in answer["rows"]]

    def stop(self) -> None:
        """End it with all that it has started, and at once: nothing is lost."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


Results = dict[str, list[Row]]  # by part


def run_parts(
    parts: Sequence[Part],
    small: bool,
    ask: Callable[[Part, float], list[Row]],
    time_left: Callable[[], float],
    found: Results,
    done: Callable[[], object] = lambda: None,
) -> None:
    """Put the rows of each part into `found`. A part that should take longer than there is time is a row that says so;
    one that is lost is FAILED. No part goes on beyond the time. `done` is called after each."""
    begun = time_left()
    for number, part in enumerate(parts, 1):
        left, expected = time_left(), part.expected(small)
        clock = f"{begun - left:.0f} s gone, {max(left, 0):.0f} s left"
        print(f"[{number}/{len(parts)}] {part.name} (about {expected:.0f} s): {clock}", flush=True)
        if expected > left:
            found[part.name] = [Row(part.name, OUT_OF_TIME)]
            continue
        try:
            found[part.name] = ask(part, min(SLOWER * expected + 30, left))
        except PartLost as error:
            found[part.name] = [Row(part.name, FAILED, message=str(error))]
        for row in found[part.name]:
            if row.status == FAILED:
                print(f"  FAILED {row.name}: {reason(row)}", flush=True)
        done()


def reason(row: Row) -> str:
    """Of a failed row."""
    above = "" if row.error is None else f"error {row.error:.2g}, above {row.bound:.2g}"
    return "; ".join(filter(None, (above, row.message)))


def cells(row: Row) -> list[str]:
    errors = ["" if number is None else f"{number:.1e}" for number in (row.error, row.bound)]
    figures = [f"{name} {cell(value)}" for name, value in row.figures.items()]
    return [row.name, row.status, *errors, "; ".join(filter(None, (", ".join(figures), row.message)))]


def table(found: Results) -> str:
    """All rows, in Markdown."""
    header = ["check or timing", "status", "error", "bound", "figures"]
    lines = [header, ["---"] * len(header)]
    lines += [
        [text.replace("|", "/").replace("\n", " ") for text in cells(row)] for rows in found.values() for row in rows
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def summary(found: Results) -> str:
    statuses = [row.status for rows in found.values() for row in rows]
    counts = [f"{statuses.count(status)} {status}" for status in (PASSED, FAILED, MEASURED)]
    others = sorted(set(statuses) - {PASSED, FAILED, MEASURED})
    return ", ".join(counts + [f"{statuses.count(status)} {status}" for status in others])


def write_results(output: Path, found: Results, about: dict[str, str]) -> None:
    """results.json and results.md, of all that there is so far."""
    rows = {part: [dataclasses.asdict(row) for row in rows] for part, rows in found.items()}
    write_whole(output / "results.json", json.dumps({**about, "parts": rows}, indent=2) + "\n")
    heading = ", ".join(f"{key} {value}" for key, value in about.items())
    write_whole(output / "results.md", f"{heading}: {summary(found)}.\n\n{table(found)}")


def status_of(found: Results) -> int:
    return int(any(row.status == FAILED for rows in found.values() for row in rows))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description="Check every GPU path against its oracle, and time training and generation, on one GPU.",
        epilog="Exit status: 0 all that ran passed; 1 something failed; 2 it cannot run here.",
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="in all; what does not fit is listed (default: 12)")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, at tiny sizes; the table says what it lacks"
    )
    parser.add_argument("--parts", nargs="+", metavar="PART", default=names, help=f"some of: {', '.join(names)}")
    parser.add_argument(
        "--output", type=Path, help="default: outputs/gpu_check, of a rehearsal outputs/gpu_check_rehearsal"
    )
    chosen = parser.parse_args(arguments)
    faults = [f"--parts {name!r}: there are {', '.join(names)}" for name in chosen.parts if name not in names]
    if not (chosen.minutes > 0 and math.isfinite(chosen.minutes)):
        faults.append(f"--minutes {chosen.minutes}: must be above 0")
    if faults:
        parser.error("; ".join(faults))
    return chosen


def main(arguments: Sequence[str]) -> int:
    chosen = parse(arguments)
    if not chosen.rehearse and not torch.cuda.is_available():
        print(
            "torch sees no CUDA device here: run this on a machine with a GPU and a CUDA build of torch, or with "
            "--rehearse for the same at tiny sizes on the CPU",
            file=sys.stderr,
        )
        return 2
    output = (chosen.output or ROOT / f"outputs/gpu_check{'_rehearsal' if chosen.rehearse else ''}").resolve()
    output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * chosen.minutes
    worker, found = Worker(output, chosen.rehearse), Results()
    about = {"date": date.today().isoformat()} | ({"rehearsal": "on a CPU"} if chosen.rehearse else {})

    def write() -> None:
        write_results(output, found, about | worker.greeting)

    status = 0
    try:
        run_parts(
            [part for part in PARTS if part.name in chosen.parts],
            chosen.rehearse, worker.ask, lambda: ends - time.monotonic(), found, write,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("interrupted; these are the results so far", file=sys.stderr)
        status = 128 + signal.SIGINT
    finally:
        worker.stop()
    write()
    seconds = 60 * chosen.minutes - (ends - time.monotonic())
    print(f"\n{table(found)}\n{summary(found)}, in {seconds:.0f} s\nwrote {output}/results.json and results.md")
    return status or status_of(found)

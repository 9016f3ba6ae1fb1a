"""`benchmark.py all`: what a user would pick instead, and bounds that a regression passes."""

import argparse
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ..evaluation.subjects import InputError
from . import attention, dense, generation, input_pipeline, layer_dropout, loader, loss, mamba2, stragglers
from .report import ABOVE, Figure, Section, figures_table, write_report
from .results import ROW, print_table, read_result
from .sizes import size_faults

NAME = "all"
VERBS = (dense, layer_dropout, mamba2, attention, loss, generation, loader, input_pipeline, stragglers)
MODULES = {verb.NAME: verb for verb in VERBS}

Run = tuple[str, tuple[str, ...]]  # a verb and its options

# every run in its order, with its expected seconds on 2 quiet cores
RUNS: dict[Run, int] = {
    ("dense", ()): 270,
    ("dense", ("--compile",)): 350,
    ("layer-dropout", ()): 180,
    ("layer-dropout", ("--compile",)): 220,
    ("mamba2", ()): 35,
    ("attention", ()): 50,
    ("loss", ()): 110,
    ("generation", ("--batch-size", "1")): 25,
    ("generation", ("--batch-size", "1", "--family", "mamba2")): 30,
    ("loader", ()): 20,
    ("input-pipeline", ()): 70,
    ("stragglers", ()): 85,
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a figure of a benchmark may be at most, on 2 cores."""

    verb: str
    options: tuple[str, ...]
    row: str
    most: float
    figure: str = "ratio"

    @property
    def name(self) -> str:
        return " ".join([self.verb, *self.options, self.row, *[self.figure] * (self.figure != "ratio")])


COMPILE = ("--compile",)
BOUNDS = (
    Bound("dense", (), "rope", 1.02),  # TorchTitan's llama3 at equal size
    Bound("dense", (), "nape", 1.02),
    Bound("dense", (), "nape pre_norm", 1.08),  # NAPE without dropout
    Bound("dense", (), "nape pre_linear", 1.08),
    Bound("dense", (), "nape vpad", 1.08),
    Bound("dense", COMPILE, "rope", 1.02),
    Bound("dense", COMPILE, "nape", 1.02),
    Bound("dense", COMPILE, "nape pre_norm", 1.04),
    Bound("dense", COMPILE, "nape pre_linear", 1.04),
    Bound("dense", COMPILE, "nape vpad", 1.04),
    Bound("layer-dropout", (), "skipped 0.25 balanced", 0.80),  # the dense stack: the computed share and 0.05
    Bound("layer-dropout", (), "skipped 0.5 balanced", 0.55),
    Bound("layer-dropout", (), "skipped 0.75 balanced", 0.30),
    Bound("layer-dropout", COMPILE, "skipped 0.25 balanced", 0.80),
    Bound("layer-dropout", COMPILE, "skipped 0.5 balanced", 0.55),
    Bound("layer-dropout", COMPILE, "skipped 0.75 balanced", 0.30),
    Bound("mamba2", (), "ours, chunk 256", 1.0),  # transformers
    Bound("attention", (), "nape, cut / nape, whole", 0.6),
    Bound("attention", (), "nape, cut / causal", 1.0),
    Bound("loss", (), "4 pieces", 0.25, "peak_ratio"),
    Bound("generation", ("--batch-size", "1"), "ours / transformers", 1.0),
    Bound("generation", ("--batch-size", "1", "--family", "mamba2"), "ours / transformers", 1.0),
    Bound("loader", (), "ours", 1.0),  # TorchTitan's loader
    Bound("input-pipeline", (), "device computes, prefetch 1", 0.01, "waiting"),  # of the time, at 1 M tokens/s
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = f"of {', '.join(MODULES)}; the report has the others from earlier runs"
    parser.add_argument("--only", nargs="+", choices=MODULES, default=[], metavar="VERB", help=verbs)
    parser.add_argument("--report", type=Path, default=Path("outputs/benchmarks.md"), help="Markdown page")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="the rest: options of every verb")


def measure(arguments: argparse.Namespace) -> dict:
    """All that is set beside something else, one after another, and a report of it; status 1 where a figure is above
    its bound or missing. About 25 minutes on 2 cores, in which nothing else should run."""
    runs = [run for run in RUNS if not arguments.only or run[0] in arguments.only]
    check(runs, arguments)
    folder = arguments.output.parent / "benchmark_all"
    folder.mkdir(parents=True, exist_ok=True)
    failed = run_all(runs, arguments.options, folder)
    results = {run: find_result(result_file(folder, run)) for run in RUNS}
    states = {run: "failed" if run in failed else "not run" if results[run] is None else "run" for run in RUNS}
    figures = {bound: figure_of(bound, results[bound.verb, bound.options], states) for bound in BOUNDS}
    sections = [
        Section(
            title(run),
            f"python scripts/benchmark.py {title(run)}",
            " ".join((MODULES[run[0]].measure.__doc__ or "").split()),
            f"failed with status {failed[run]}" if run in failed else states[run],
            results[run],
            result_file(folder, run).with_suffix(".png"),
        )
        for run in RUNS
    ]
    write_report(arguments.report, list(figures.values()), sections)
    now = {bound.name: figure for bound, figure in figures.items() if (bound.verb, bound.options) in runs}
    print_table(figures_table(list(now.values())))
    print(f"wrote {arguments.report}")
    return {
        "bounds": {name: dataclasses.asdict(figure) for name, figure in now.items()},
        "failed": {title(run): status for run, status in failed.items()},
        "held": not failed and all(figure.state == "held" for figure in now.values()),
    }


def run_all(runs: list[Run], options: list[str], folder: Path) -> dict[Run, int]:
    """Each run's result into a file of `folder`; the exit status of those that failed."""
    failed: dict[Run, int] = {}
    began = time.monotonic()
    for i, run in enumerate(runs):
        elapsed, done = time.monotonic() - began, sum(RUNS[other] for other in runs[:i])
        left = sum(RUNS[other] for other in runs[i:]) * (elapsed / done if done else 1)
        times = f"{elapsed / 60:.1f} min passed, about {left / 60:.1f} min left"
        print(f"[{i + 1}/{len(runs)}] {title(run)}   {times}", flush=True)
        file = result_file(folder, run)
        command = [sys.executable, sys.argv[0], run[0], *run[1], *options, "--output", str(file)]
        try:
            status, error = run_verb(command)
        except KeyboardInterrupt:
            print(f"interrupted in {title(run)}; results of the {i} runs before it are in {folder}", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
        if status:
            failed[run] = status
            file.unlink(missing_ok=True)  # of an earlier run
            print(f"{title(run)} failed with status {status}:\n{error}", file=sys.stderr, flush=True)
    return failed


def check(runs: list[Run], arguments: argparse.Namespace) -> None:
    """Raise InputError with every option that a verb does not take, before any of them runs."""
    faults = {}
    for verb, options in runs:
        parser = Strict(add_help=False, allow_abbrev=False)
        MODULES[verb].add_arguments(parser)
        try:
            found = parser.parse_args([*options, *arguments.options])
            faults[verb] = size_faults(found)
        except InputError as error:
            faults[verb] = [str(error)]
    lines = [f"--options: {verb}: {fault}" for verb, own in faults.items() for fault in own]
    if arguments.report.is_dir():
        lines.append(f"--report {arguments.report}: is a folder")
    if lines:
        raise InputError("\n".join(lines))


class Strict(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def run_verb(command: list[str]) -> tuple[int, str]:
    """The exit status of a command, and the last lines of what it wrote to stderr, which is shown as it comes. An
    interrupt ends it too."""
    child = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert child.stderr is not None
    tail = b""
    try:
        while written := os.read(child.stderr.fileno(), 2**16):
            sys.stderr.write(written.decode(errors="replace"))
            sys.stderr.flush()
            tail = (tail + written)[-(2**16) :]
        status = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    finally:
        child.stderr.close()
    lines = [line for line in re.split(r"[\r\n]+", tail.decode(errors="replace")) if line.strip()]
    return status, "\n".join(lines[-5:])


def title(run: Run) -> str:
    return " ".join([run[0], *run[1]])


def result_file(folder: Path, run: Run) -> Path:
    return folder / ("_".join([run[0], *run[1]]).replace("--", "") + ".json")


def find_result(file: Path) -> dict[str, Any] | None:
    """The newest result of a run; None where there is none, or one of an older version."""
    try:
        result = read_result(file, "rows", "arguments", "command", "date", "processor", "versions")
    except InputError:
        return None
    return result if all(key in row for row in result["rows"].values() for key in ROW) else None


def figure_of(bound: Bound, result: dict[str, Any] | None, states: dict[Run, str]) -> Figure:
    row = result["rows"].get(bound.row) if result else None
    if row is None:
        state = states[bound.verb, bound.options]
        return Figure(bound.name, bound.most, "not measured" if state == "run" else state)
    found = row[bound.figure]
    quartiles = row["quartiles"] if bound.figure == "ratio" else None
    return Figure(bound.name, bound.most, "held" if found <= bound.most else ABOVE, found, quartiles, row["base"])

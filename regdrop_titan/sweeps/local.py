"""Runs of a sweep on this machine: one after another or a few at once, until all are done or a signal comes.

Each is `train.py` under a launcher of its own, in a session of its own, so that a terminal's Ctrl-C reaches it through
here only, once. What it prints goes to `sweep.log` in its folder. A run that fails does not end the others.
"""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import torch

from ..config import JobConfig
from ..files import write_json
from ..signals import SAME_REQUEST, STOPPED
from .file import Run, Sweep, SweepError
from .runs import (
    RECORD,
    SHIELDED,
    identity,
    is_done,
    last_logged,
    read_record,
    shown_loss,
    table,
    train_command,
    write_summary,
)

LOG, LOCK = "sweep.log", "sweep.lock"
POLL, REPORT = 0.2, 60.0  # seconds between two looks at the runs, and between two reports where there is no terminal
SAVING = (
    "600"  # seconds that torchrun gives ranks to save, in place of its 30; of use from the version on that reads it
)


class StopRequests:
    """While entered, signals that ask to stop are passed on to the runs as SIGINT, which train.py answers by saving. A
    second one, more than a second later, is passed on too: it ends them at once."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self, running: "list[Started]") -> None:
        self.running = running
        self.received = 0  # number of the first signal
        self._passed_on = 0.0

    def __enter__(self) -> "StopRequests":
        self._before = {n: signal.getsignal(n) for n in self.NUMBERS}
        for n, handler in self._before.items():
            if handler != signal.SIG_IGN or n == signal.SIGINT:  # nohup ignores SIGHUP
                signal.signal(n, self._handle)
        return self

    def _handle(self, number: int, _frame: Any) -> None:
        if self.received and time.monotonic() - self._passed_on < SAME_REQUEST:
            return  # a process group and its launcher both send it
        self.received, self._passed_on = self.received or number, time.monotonic()
        for started in self.running:
            started.process.send_signal(signal.SIGINT)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass
class Started:
    """A run in progress."""

    run: Run
    config: JobConfig
    slot: int  # of the runs at once: which GPUs are its own
    process: subprocess.Popen
    record: dict[str, Any]
    log_begins: int  # bytes of sweep.log that are older
    first_step: int  # done before
    begun: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Over all starts of the run."""
        return self.record["seconds"] + time.monotonic() - self.begun


class InUse(Exception):
    """Another process works on this run."""


def devices(slot: int, processes: int, jobs: int) -> str | None:
    """The GPUs of the runs in `slot`, as CUDA_VISIBLE_DEVICES has them; None where there is nothing to share out.

    Raises:
        SweepError: there are GPUs, but too few for `jobs` runs at once.
    """
    if jobs == 1 or not torch.cuda.is_available():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if len(every) < jobs * processes:
        raise SweepError([f"--jobs {jobs}: runs of {processes} GPUs need {jobs * processes}, there are {len(every)}"])
    return ",".join(every[slot * processes : (slot + 1) * processes])


def start(
    run: Run, config: JobConfig, launcher: Sequence[str], world_size: int, slot: int, environment: dict[str, str]
) -> Started:
    """Start or resume `run`. Raises InUse, and OSError where its folder cannot be written."""
    run.folder.mkdir(parents=True, exist_ok=True)
    command = train_command(run, launcher)
    with open(run.folder / LOCK, "a") as lock, open(run.folder / LOG, "ab") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(f"another process works on it ({run.folder / LOCK} is locked)") from None
        before = read_record(run.folder)
        record = {
            "name": run.name,
            "status": "running",
            "exit_status": None,
            "command": shlex.join(command),
            "values": run.values,
            "settings": run.settings,
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "ended": None,
            "seconds": before.get("seconds", 0.0),  # of all starts
            "starts": before.get("starts", 0) + 1,
            **identity(config, world_size),
        }
        write_json(run.folder / RECORD, record)
        log.write(f"$ {record['command']}\n".encode())
        log.flush()
        # The lock is the launcher's as well: it holds as long as the run does, should this process be killed.
        process = subprocess.Popen(
            [*SHIELDED, *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            pass_fds=[lock.fileno()],
        )  # fmt: skip
        return Started(run, config, slot, process, record, log.tell(), last_logged(run).get("step", 0))


def finish(started: Started, asked_to_stop: bool) -> str:
    """The run has ended: put down how. Returns its status: done, stopped or failed."""
    code = started.process.returncode
    with open(started.run.folder / LOG, "rb") as file:
        file.seek(started.log_begins)
        said = file.read().decode(errors="replace")
    status_of_rank = rank_status(said, code)
    stopped = asked_to_stop or status_of_rank == STOPPED
    status = "done" if code == 0 else "stopped" if stopped else "failed"
    started.record |= {
        "status": status,
        "exit_status": status_of_rank,
        "ended": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": round(started.seconds(), 1),
    }
    if status == "failed":
        started.record["reason"] = reason(said, status_of_rank)
    write_json(started.run.folder / RECORD, started.record)
    return status


def rank_status(said: str, code: int) -> int:
    """The exit status of the rank that ended first, from torchrun's report; its own is 1 whatever a rank's is."""
    report = re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", said, re.DOTALL)
    return int(report[1]) if report else code


def reason(said: str, status: int) -> str:
    """Why a run failed, in its own words: train.py's message, else a traceback's last line."""
    message = re.search(r"^error: (.*?)(?=^[EWI]\d{4} |^={5}|^\s*$|\Z)", said, re.DOTALL | re.MULTILINE)
    if message:
        return message[1].strip()
    raised = re.findall(r"^(?!torch\.distributed)[\w.]+(?:Error|Exception|Interrupt)\b.*", said, re.MULTILINE)
    if raised:
        return raised[0]
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class LocalSweep:
    """Runs of `sweep` on this machine.

    Args:
        configs: the configurations of the runs to do, by name; what is done already is passed over.
        jobs: runs at once.
        launcher: what stands before `train.py` and its arguments.
        invalid: faults of the runs that cannot run, for the summary; None where they were not checked.
    """

    def __init__(
        self, sweep: Sweep, configs: dict[str, JobConfig], launcher: Sequence[str], world_size: int, jobs: int = 1,
        invalid: dict[str, list[str]] | None = None,
    ) -> None:  # fmt: skip
        self.sweep, self.configs, self.launcher, self.world_size = sweep, configs, launcher, world_size
        self.jobs, self.invalid = jobs, invalid
        self.runs = [run for run in sweep.runs if run.name in configs]
        self.running: list[Started] = []
        self.status = {run.name: "done" if is_done(run) else "waiting" for run in self.runs}
        self.reasons: dict[str, str] = {}
        self.stop = StopRequests(self.running)
        self.steps_done = 0  # by runs that have ended, in this call
        self.begun = self.reported = time.monotonic()
        self.stop_told = False
        self.drawn = 0  # lines of the table on the terminal
        self.terminal = sys.stdout.isatty()

    def work(self) -> dict[str, str]:
        """Run them; returns their status by name: done, failed, stopped, or waiting behind a signal. `stop.received`
        has that signal's number, `reasons` why runs failed."""
        waiting = [run for run in self.runs if self.status[run.name] == "waiting"]
        passed_over = len(self.runs) - len(waiting)
        if passed_over:
            print(f"{passed_over} of {len(self.runs)} runs are done already")
        for slot in range(self.jobs):
            devices(slot, self.sweep.processes, self.jobs)  # refuses before anything starts
        write_summary(self.sweep, self.invalid)
        with self.stop:
            while self.running or (waiting and not self.stop.received):
                while waiting and len(self.running) < self.jobs and not self.stop.received:
                    self._start(waiting.pop(0))
                for started in [s for s in self.running if s.process.poll() is not None]:
                    self._finish(started)
                self._show()
                time.sleep(POLL)
        return self.status

    def _environment(self, slot: int) -> dict[str, str]:
        """Each rank's share of the cores, and each run's of the GPUs."""
        cores = len(os.sched_getaffinity(0))
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores // (self.jobs * self.sweep.processes))),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SAVING,
        } | os.environ
        own = devices(slot, self.sweep.processes, self.jobs)
        return environment if own is None else environment | {"CUDA_VISIBLE_DEVICES": own}

    def _start(self, run: Run) -> None:
        slot = min(set(range(self.jobs)) - {started.slot for started in self.running})
        config = self.configs[run.name]
        try:
            started = start(run, config, self.launcher, self.world_size, slot, self._environment(slot))
        except (InUse, OSError) as error:
            self._settle(run, "failed", str(error))
            return
        self.running.append(started)
        if self.stop.received:  # the signal came while it was started, and has not been passed on to it
            started.process.send_signal(signal.SIGINT)
        self._settle(run, "running")

    def _finish(self, started: Started) -> None:
        status = finish(started, bool(self.stop.received))
        self.running.remove(started)
        self.steps_done += self._steps(started)
        self._settle(started.run, status, started.record.get("reason"))

    def _settle(self, run: Run, status: str, why: str | None = None) -> None:
        self.status[run.name] = status
        if why is not None:
            self.reasons[run.name] = f"{why}\n({run.folder / LOG})"
        write_summary(self.sweep, self.invalid)
        if not self.terminal:
            logged = last_logged(run)
            loss = f", step {logged['step']}, loss {shown_loss(logged)}" if status != "running" and logged else ""
            print(f"[{self._ended()}/{len(self.runs)}] {run.name}: {status}{loss}", flush=True)

    def _ended(self) -> int:
        return sum(status in ("done", "failed", "stopped") for status in self.status.values())

    @staticmethod
    def _steps(started: Started) -> int:
        """Done in this start, of those that are logged."""
        return max(0, last_logged(started.run).get("step", 0) - started.first_step)

    def progress(self) -> str:
        """The share of the sweep's steps that is done, and the time that the rest takes at this call's pace."""
        total = sum(config.training.steps for config in self.configs.values())
        at = {run.name: last_logged(run).get("step", 0) for run in self.runs}
        left = sum(
            self.configs[name].training.steps - step
            for name, step in at.items()
            if self.status[name] in ("waiting", "running")
        )
        done = self.steps_done + sum(self._steps(started) for started in self.running)
        share = 100 * sum(at.values()) / total
        text = f"{self._ended()} of {len(self.runs)} runs ended, {share:.0f} % of the steps done"
        if done and self.running:
            seconds = (time.monotonic() - self.begun) / done * left
            text += f", about {timedelta(seconds=round(seconds))} left"
        return text

    def table(self, names: Sequence[str]) -> str:
        seconds = {started.run.name: started.seconds() for started in self.running}
        rows = []
        for run in self.runs:
            if run.name in names:
                logged, steps = last_logged(run), self.configs[run.name].training.steps
                spent = seconds.get(run.name, read_record(run.folder).get("seconds", 0.0))
                step = f"{logged.get('step', 0):,}/{steps:,}"
                rows.append((self.status[run.name], run.name, step, shown_loss(logged), f"{spent / 60:.1f}"))
        return table(("state", "run", "step", "loss", "minutes"), rows)

    def _show(self) -> None:
        """On a terminal the table in its place, at most twice a second; else a report a minute."""
        now = time.monotonic()
        if self.stop.received and not self.stop_told:
            name = signal.Signals(self.stop.received).name
            print(f"{name}: the runs in progress save and stop; a second signal ends them at once", flush=True)
            self.stop_told, self.drawn = True, 0
        if now - self.reported < (0.5 if self.terminal else REPORT):
            return
        self.reported = now
        if not self.terminal:
            running = [started.run.name for started in self.running]
            print(f"{self.table(running)}\n{self.progress()}", flush=True)
            return
        columns, lines = shutil.get_terminal_size()
        fits = len(self.runs) + 3 < lines
        names = [name for name, status in self.status.items() if fits or status == "running"]
        text = [line[: columns - 1] for line in (*self.table(names).splitlines(), self.progress())]
        back = f"\x1b[{self.drawn}F\x1b[J" if self.drawn else ""
        print(back + "\n".join(text), flush=True)
        self.drawn = len(text)

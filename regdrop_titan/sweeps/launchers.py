"""Sweeps that others run: a SLURM job array, or the agents of a W&B sweep.

Both start `scripts/sweep.py SWEEP.toml --run-one NAME` for a run, which calls torchrun; so any kind of axis works, and
what a run leaves is the same as of a local sweep.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import write_whole
from .file import Run, Sweep, SweepError
from .runs import SHIELDED, TORCHRUN, local_launcher

SAVE_BEFORE = 300  # seconds before the time limit at which SLURM asks the runs to save


def run_one_command(sweep: Sweep) -> list[str]:
    """From the project's root; a run's name comes behind it."""
    return [
        sys.executable, "scripts/sweep.py", str(sweep.file), "--processes", str(sweep.processes), "--run-one",
    ]  # fmt: skip


# SLURM -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slurm:
    """What a task of the job array asks for."""

    nodes: int = 1
    gpus: int = 0  # on each node
    cpus: int | None = None  # on each node
    time: str | None = None  # as sbatch takes it
    partition: str | None = None
    array_parallelism: int | None = None  # tasks at once

    def minutes(self) -> int:
        """The time limit. Raises SweepError where `time` is not of sbatch's forms in hours."""
        match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::\d\d)?", self.time or "")
        if match is None:
            raise SweepError([f"--time {self.time}: must be HOURS:MM, HOURS:MM:SS or DAYS-HOURS:MM"])
        days, hours, minutes = (int(part or 0) for part in match.groups())
        return 60 * (24 * days + hours) + minutes


def node_launcher(processes: int) -> list[str]:
    """What stands before `train.py` on this machine: a node's part of a run over several in a SLURM job, else all."""
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    if nodes == 1:
        return local_launcher(processes)
    job = os.environ["SLURM_JOB_ID"]
    names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    head = subprocess.run(names, check=True, text=True, stdout=subprocess.PIPE).stdout.split()[0]
    return [
        *TORCHRUN, f"--nnodes={nodes}", f"--nproc_per_node={processes}", f"--rdzv_id={job}", "--rdzv_backend=c10d",
        f"--rdzv_endpoint={head}:{20000 + int(job) % 20000}",
    ]  # fmt: skip


def sbatch_script(sweep: Sweep, runs: list[Run], slurm: Slurm) -> str:
    """A job array of `runs`: saves before the time limit, and goes on in the queue."""
    at_once = f"%{slurm.array_parallelism}" if slurm.array_parallelism else ""
    options = {
        "job-name": sweep.name,
        "array": f"0-{len(runs) - 1}{at_once}",
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": slurm.gpus or None,
        "cpus-per-task": slurm.cpus,
        "time": slurm.time,
        "partition": slurm.partition,
        "signal": f"B:USR1@{SAVE_BEFORE}",
        "open-mode": "append",
        "output": sweep.folder / "slurm/%A_%a.log",
    }
    directives = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
    names = "\n".join(f"    {shlex.quote(run.name)}" for run in runs)
    return f"""\
#!/usr/bin/env bash
# Written by scripts/sweep.py from {sweep.file}. Submit it from the project's root.
{directives}
#SBATCH --requeue
set -uo pipefail
runs=(
{names}
)

# SLURM signals this shell before the time limit; it passes the signal on to the job's step, which saves and stops.
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
srun {shlex.join(run_one_command(sweep))} "${{runs[$SLURM_ARRAY_TASK_ID]}}" &
step=$!
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do # the signal ended that wait, not the step
    wait "$step"
    status=$?
done
if [ "$status" -eq 75 ]; then # stopped after saving
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def write_sbatch(sweep: Sweep, runs: list[Run], slurm: Slurm) -> Path:
    """Write the job array of `runs` into the sweep's folder; returns the file."""
    (sweep.folder / "slurm").mkdir(exist_ok=True)  # SLURM does not make it
    file = sweep.folder / "sweep.sbatch"
    write_whole(file, sbatch_script(sweep, runs, slurm))
    return file


class SlurmTask:
    """A run as submitit's task, which is pickled. Before the time limit and at a preemption submitit calls
    `checkpoint`, and puts the task in the queue again."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.process: subprocess.Popen | None = None

    def __call__(self) -> None:
        self.process = subprocess.Popen([*SHIELDED, *self.command])
        if status := self.process.wait():
            raise subprocess.CalledProcessError(status, self.command)

    def checkpoint(self):
        import submitit

        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)  # the only request to stop: SLURM's signal does not reach it
            self.process.wait()
        return submitit.helpers.DelayedSubmission(SlurmTask(self.command))


def submit(sweep: Sweep, runs: list[Run], slurm: Slurm) -> list[str]:
    """Submit `runs` as a job array by submitit; returns the ids of the jobs.

    Raises:
        SweepError: submitit is not installed, or there is no SLURM here.
    """
    try:
        import submitit
    except ImportError:
        raise SweepError(["--submit needs submitit: pip install 'regdrop-titan[slurm]'"]) from None
    minutes = slurm.minutes()
    folder = sweep.folder / "slurm"
    try:
        executor = submitit.SlurmExecutor(folder, max_num_timeout=1000)  # it is the last step that ends a run
    except RuntimeError as error:
        raise SweepError([f"--submit: {error}"]) from None
    options = {
        "gpus_per_node": slurm.gpus or None,
        "cpus_per_task": slurm.cpus,
        "partition": slurm.partition,
        "array_parallelism": slurm.array_parallelism,
    }
    executor.update_parameters(
        job_name=sweep.name, nodes=slurm.nodes, ntasks_per_node=1, time=minutes, signal_delay_s=SAVE_BEFORE,
        **{name: value for name, value in options.items() if value is not None},
    )  # fmt: skip
    command = run_one_command(sweep)
    try:
        with executor.batch():
            jobs = [executor.submit(SlurmTask([*command, run.name])) for run in runs]
    except submitit.core.utils.FailedJobError as error:
        raise SweepError([f"--submit: {error}"]) from None
    return [job.job_id for job in jobs]


# W&B -------------------------------------------------------------------------------------------------------------


def wandb_yaml(sweep: Sweep, runs: list[Run]) -> str:
    """A W&B sweep over the runs' names, its one parameter: a grid of W&B's has no linked keys and no named points."""
    words = ["${env}", "${interpreter}", "${program}", str(sweep.file), "--processes", str(sweep.processes), "${args}"]
    return "\n".join([
        f"# Written by scripts/sweep.py from {sweep.file}. From the project's root:",
        f"#   wandb sweep {shlex.quote(str(sweep.folder / 'wandb.yaml'))}    prints the sweep's id",
        "#   wandb agent ID                     on every machine that takes part",
        f"name: {json.dumps(sweep.name)}",
        "program: scripts/sweep.py",
        "method: grid",
        "metric:",
        "  name: loss_metrics/global_avg_loss",
        "  goal: minimize",
        "parameters:",
        "  run-one:",
        "    values:",
        *(f"      - {json.dumps(run.name)}" for run in runs),
        "command:",
        *(f"  - {json.dumps(word)}" for word in words),
        "",
    ])  # fmt: skip


def write_wandb(sweep: Sweep, runs: list[Run]) -> Path:
    """Write the W&B sweep of `runs` into the sweep's folder; returns the file."""
    file = sweep.folder / "wandb.yaml"
    write_whole(file, wandb_yaml(sweep, runs))
    return file

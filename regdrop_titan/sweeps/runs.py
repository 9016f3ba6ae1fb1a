"""What is known of a sweep's runs: whether their configurations can run, what they cost, how far they have come.

Every run that was started has `sweep.json` in its folder: status, command, settings, the whole configuration, times. It
is what later calls go by. The sweep's own `sweep.json` is a summary of them, for reading.
"""

import contextlib
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.safety import steps_in
from ..config import ConfigError, JobConfig, global_batch, load_config, model_args
from ..config.resume import differences
from ..files import free_name, write_json
from ..metrics import METRICS_FILE
from ..plan import GIB, data_parallel_degree, memory_bytes
from .file import Run, Sweep, SweepError

RECORD = "sweep.json"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# SLURM sends its signals to all processes of a job; USR1 and USR2 would end the launcher. Ranks take USR1 themselves.
SHIELDED = ("sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sweep")


def train_command(run: Run, launcher: Sequence[str]) -> list[str]:
    """The command of `run`, from the project's root."""
    return [*launcher, "train.py", *run.arguments()]


def local_launcher(processes: int) -> list[str]:
    return [*TORCHRUN, "--standalone", f"--nproc_per_node={processes}"]


def check(runs: list[Run], world_size: int, inputs: bool = False) -> tuple[dict[str, JobConfig], dict[str, list[str]]]:
    """The configurations of the runs that can run, and the faults of the others, by name.

    Args:
        inputs: look at tokenizer and data paths too.
    """
    configs, invalid = {}, {}
    for run in runs:
        try:
            configs[run.name] = load_config(run.arguments(), world_size, inputs=inputs)
        except ConfigError as error:
            invalid[run.name] = error.faults
    return configs, invalid


def make_folder(sweep: Sweep) -> None:
    """Raises SweepError where the sweep's folder cannot be made or written."""
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError([f"folder = {str(sweep.folder)!r}: {error.strerror}"]) from None
    if not os.access(sweep.folder, os.W_OK):
        raise SweepError([f"folder = {str(sweep.folder)!r}: not writable"])


# Records ---------------------------------------------------------------------------------------------------------


def read_record(folder: Path) -> dict[str, Any]:
    """The `sweep.json` in `folder`; empty where there is none that can be read."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def sequences(config: JobConfig, world_size: int) -> int:
    """Of a step."""
    return global_batch(config, data_parallel_degree(config, world_size))


def identity(config: JobConfig, world_size: int) -> dict[str, Any]:
    """What makes a run's results its own, as JSON gives it back."""
    return json.loads(json.dumps({"config": config.to_dict(), "sequences": sequences(config, world_size)}))


def is_done(run: Run) -> bool:
    """Whether the run has reached its last step, and its results are there."""
    return read_record(run.folder).get("status") == "done" and (run.folder / METRICS_FILE).exists()


def changes(run: Run, config: JobConfig, world_size: int) -> list[str]:
    """How `config` differs from the one whose results, or checkpoints to go on from, are in the run's folder."""
    record = read_record(run.folder)
    if "config" not in record or not (is_done(run) or steps_in(run.folder / config.checkpoint.folder)):
        return []
    now = identity(config, world_size)
    changed = differences(record["config"], now["config"])
    if record["sequences"] != now["sequences"]:
        changed.append(f"sequences of a step: {record['sequences']} -> {now['sequences']}")
    return changed


def settle_changes(runs: list[Run], configs: dict[str, JobConfig], world_size: int, restart: bool) -> None:
    """Let no result of other settings count for a run: refuse, or rename the run's folder (`restart`), so that the run
    begins anew.

    Raises:
        SweepError: naming the runs and what differs, unless `restart`.
    """
    faults = []
    for run in runs:
        if run.name not in configs or not (changed := changes(run, configs[run.name], world_size)):
            continue
        if restart:
            run.folder.rename(free_name(run.folder, run.name + ".replaced-{n}"))
        else:
            faults.append(f"{run.folder} holds a run with other settings: {'; '.join(changed)}")
    if faults:
        raise SweepError(
            [*faults, "--restart-changed renames these folders and begins anew; or set another `folder` for the sweep"]
        )


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Waits for its turn among the processes that work on one sweep."""
    with open(file, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_summary(sweep: Sweep, invalid: dict[str, list[str]] | None = None) -> None:
    """Bring the sweep's `sweep.json` up to date with its runs'.

    Args:
        invalid: faults of the runs that cannot run, where this process has checked them; else they stay as they are.
    """
    with _locked(sweep.folder / "sweep.lock"):
        if invalid is None:
            before = read_record(sweep.folder).get("runs", [])
            invalid = {run["name"]: run["faults"] for run in before if "faults" in run}
        rows = []
        for run in sweep.runs:
            row = {"name": run.name, "folder": str(run.folder), "values": run.values}
            if run.name in invalid:
                rows.append(row | {"status": "invalid", "faults": invalid[run.name]})
            else:
                rows.append(row | {"status": read_record(run.folder).get("status", "waiting")})
        write_json(sweep.folder / RECORD, {"name": sweep.name, "runs": rows})


# Tables ----------------------------------------------------------------------------------------------------------


def last_logged(run: Run) -> dict[str, Any]:
    """The newest whole record of the run's `metrics.jsonl`, read from its end; empty where there is none."""
    try:
        with open(run.folder / METRICS_FILE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**14))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                return record
    return {}


def short(number: float) -> str:
    """`1.41 M`: three digits that count."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def shown_loss(logged: dict[str, Any]) -> str:
    loss = logged.get("loss")
    return "" if loss is None else f"{loss:.4f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns in line; the first two to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def told(invalid: dict[str, list[str]]) -> str:
    """The faults of the runs that cannot run."""
    return "\n".join(
        f"{name} cannot run:\n" + "\n".join(f"  {fault}" for fault in faults) for name, faults in invalid.items()
    )


def listing(sweep: Sweep, configs: dict[str, JobConfig], world_size: int) -> str:
    """What each run is, costs and has come to, by arithmetic and from its files."""
    rows = []
    for run in sweep.runs:
        status = read_record(run.folder).get("status", "waiting")
        if run.name not in configs:
            rows.append(("invalid", run.name, *[""] * 6))
            continue
        config, logged = configs[run.name], last_logged(run)
        n_parameters = model_args(config).n_parameters()
        tokens = sequences(config, world_size) * config.training.seq_len * config.training.steps
        memory = sum(memory_bytes(config, world_size, n_parameters).values()) / GIB
        rows.append((
            status, run.name, short(n_parameters), f"{config.training.steps:,}", short(tokens),
            f"{memory:.2g}" if memory < 1 else f"{memory:.1f}", str(logged.get("step", "")), shown_loss(logged),
        ))  # fmt: skip
    return table(("state", "run", "parameters", "steps", "tokens", "GiB a rank", "at step", "loss"), rows)


def commands(sweep: Sweep, configs: dict[str, JobConfig]) -> str:
    """The command of every run that can run, as a shell takes it."""
    launcher = local_launcher(sweep.processes)
    return "\n".join(shlex.join(train_command(run, launcher)) for run in sweep.runs if run.name in configs)

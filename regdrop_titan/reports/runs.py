"""Runs as their folders tell of them: found, read, and what state they are in.

Everything comes from the folders' `config.json`, `metrics.jsonl` and `validation.jsonl`, and a sweep's `sweep.json`.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..config import JobConfig
from ..config.resume import CONFIG_FILE, flat
from ..metrics import METRICS_FILE, VALIDATION_FILE
from ..models import DecoderArgs

SWEEP_FILE = "sweep.json"
DEPTH = 2  # levels below a folder at which runs are looked for

# What does not change training, or follows from other keys: beginnings of "section.key".
NO_MATTER = (
    "job.", "profiling.", "metrics.", "comm.", "memory_estimation.", "fault_tolerance.", "checkpoint.",
    "model_args.", "tokenizer", "data.", "flops.", "versions.", "training.seed", "debug.seed", "training.gc_",
    "training.dataloader.", "validation.enable", "validation.freq", "validation.dataloader.", "validation.context_",
)  # fmt: skip
MATTER = ("checkpoint.initial_load_path", "checkpoint.initial_load_model_only")


class ReportError(Exception):
    """The arguments are no runs; `faults` has one sentence for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class Point:
    """A logged step. `loss` is NaN where a step was skipped; FLOPs are cumulative, NaN where they are not known."""

    step: int
    tokens: int
    loss: float
    flops: float = math.nan  # dense
    executed: float = math.nan


@dataclass
class Run:
    """One run as its folder tells it.

    `settings` are those of training, as "section.key"; of a run without a usable `config.json` the sweep's values.
    `status`: done, partial, failed, no config, missing, or the sweep's word: invalid, stopped, waiting, running.
    """

    name: str
    folder: Path
    status: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    known: bool = False  # whether `settings` are those of a config.json
    seed: int | None = None
    steps: int | None = None  # planned
    parameters: int | None = None
    training: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    saved: float = 0.0  # share of the layers' FLOPs
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.training[-1].tokens if self.training else 0


def is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / METRICS_FILE).is_file()


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs that `paths` name, read, each once: run folders, folders with runs up to two levels below, and sweep
    folders, whose listed runs are all given, also those without a folder.

    Raises ReportError listing every path that is none of these, and every `sweep.json` that cannot be read.
    """
    runs: dict[Path, Run] = {}
    faults = []
    for path in paths:
        folder = path.resolve()
        if not folder.is_dir():
            faults.append(f"{path}: no such folder")
            continue
        try:
            found = _runs_below(folder, DEPTH)
        except ReportError as error:
            faults += error.faults
            continue
        if not found:
            faults.append(
                f"{path}: neither a run ({CONFIG_FILE} or {METRICS_FILE}) nor a sweep ({SWEEP_FILE}), and no folder "
                f"with one up to {DEPTH} levels below"
            )
        for run in found:
            runs.setdefault(run.folder, run)
    if faults:
        raise ReportError(faults)
    return list(runs.values())


def _runs_below(folder: Path, depth: int) -> list[Run]:
    if is_run(folder):  # first: a sweep's run has a file of the sweep's name
        return [read_run(folder, folder.name)]
    if (folder / SWEEP_FILE).is_file():
        return _sweep_runs(folder)
    if depth == 0:
        return []
    below = sorted((child for child in folder.iterdir() if child.is_dir()), key=_natural)
    return [run for child in below for run in _runs_below(child, depth - 1)]


def _natural(path: Path) -> list[str | int]:
    """For sorting: run_2 before run_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]


def _sweep_runs(folder: Path) -> list[Run]:
    file = folder / SWEEP_FILE
    try:
        listed = json.loads(file.read_text())["runs"]
        return [
            read_run(
                _sweep_folder(folder, str(entry["folder"])), str(entry["name"]), entry["status"], dict(entry["values"])
            )
            for entry in listed
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError([f"{file}: not a sweep's list of runs: {type(error).__name__}: {error}"]) from None


def _sweep_folder(sweep: Path, listed: str) -> Path:
    """Where a listed run is: a sweep may have been moved since, or name its runs from the working directory."""
    places = [sweep / listed, sweep / Path(listed).name, Path(listed)]
    return next((place for place in places if place.is_dir()), places[0]).resolve()


def read_run(folder: Path, name: str, listed: str | None = None, values: dict[str, Any] | None = None) -> Run:
    """The run in `folder`. `listed` and `values` are the status and the settings that a sweep has for it."""
    run = Run(name, folder, settings=values or {})
    config = _read_config(folder / CONFIG_FILE, run.notes) if folder.is_dir() else None
    if config is not None:
        run.known = True
        run.settings = training_settings(config)
        run.parameters = _parameters(config.get("model_args"), run.notes)
    given = flat(config) if config is not None else run.settings
    run.seed, run.steps = _whole(given.get("training.seed")), _whole(given.get("training.steps"))
    _read_logs(run)
    run.status = _status(run, given, listed)
    return run


def _read_config(file: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
        return None
    if not isinstance(config, dict):
        notes.append(f"{file.name} holds no settings")
        return None
    return config


def training_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a `config.json` that change training, the seed left out, as `{"section.key": value}`.

    A key that the file lacks (another version's) has its default. Settings of a dropout that is off are left out. The
    data's identity is a hash.
    """
    settings = flat(JobConfig().to_dict()) | flat(config)
    settings = {k: v for k, v in settings.items() if k in MATTER or not k.startswith(NO_MATTER)}
    if settings["layer_dropout.p_max"] == 0:
        settings = {k: v for k, v in settings.items() if not k.startswith("layer_dropout.")}
        settings["layer_dropout.p_max"] = 0.0
    if settings["dropout.placement"] == "none" or settings["dropout.p"] == 0:
        attention_p = settings["dropout.attention_p"]  # is beside any placement
        settings = {k: v for k, v in settings.items() if not k.startswith("dropout.")}
        settings |= {"dropout.placement": "none", "dropout.attention_p": attention_p}
    identity = json.dumps(config.get("data"), sort_keys=True)
    return settings | {"data": hashlib.sha256(identity.encode()).hexdigest()[:8]}


def _parameters(model_args: Any, notes: list[str]) -> int | None:
    known = {each.name for each in fields(DecoderArgs)}
    try:
        return DecoderArgs(**{key: value for key, value in model_args.items() if key in known}).n_parameters()
    except (AttributeError, TypeError, KeyError, ZeroDivisionError) as error:
        notes.append(f"{CONFIG_FILE}: no size from model_args ({type(error).__name__}: {error})")
        return None


def number(value: Any) -> float | None:
    """`value` where it is a finite number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_log(file: Path, needed: tuple[str, ...], notes: list[str]) -> list[dict]:
    """The records of a log; lines that are none (cut short by a crash, say) are named in `notes` and left out."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    records, broken = [], []
    for at, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        whole = isinstance(record, dict) and "loss" in record
        if whole and all(_whole(record.get(key)) is not None for key in needed):
            records.append(record)
        else:
            broken.append(at)
    if broken:
        more = f" and {len(broken) - 1} more are" if len(broken) > 1 else " is"
        notes.append(f"{file.name}: line {broken[0]}{more} no record, left out")
    return records


def _loss(record: dict) -> float:
    value = number(record["loss"])
    return math.nan if value is None else float(value)


def _read_logs(run: Run) -> None:
    records = _read_log(run.folder / METRICS_FILE, ("step", "tokens"), run.notes)
    for record in records:
        dense = number(record.get("flops"))
        executed = number(record.get("flops_executed", dense))  # dense runs have no figure of their own
        flops, executed = (math.nan if value is None else float(value) for value in (dense, executed))
        run.training.append(Point(record["step"], record["tokens"], _loss(record), flops, executed))
    if records:
        run.saved = float(number(records[-1].get("flops_saved")) or 0.0)
    validated = _read_log(run.folder / VALIDATION_FILE, ("step",), run.notes)
    if run.training:
        run.validation = [_validation_point(run.training, record) for record in validated]


def _validation_point(training: list[Point], record: dict) -> Point:
    """Validation logs the step alone. Tokens and FLOPs grow evenly between two logged steps, and behind the last one
    as they did up to there."""
    step = record["step"]
    steps = [0, *(point.step for point in training)]

    def at_step(of: Callable[[Point], float]) -> float:
        known = [0.0, *(of(point) for point in training)]
        return known[-1] * step / steps[-1] if step > steps[-1] else float(np.interp(step, steps, known))

    tokens = round(at_step(lambda point: point.tokens))
    return Point(step, tokens, _loss(record), at_step(lambda point: point.flops), at_step(lambda p: p.executed))


def _status(run: Run, given: dict[str, Any], listed: str | None) -> str:
    if not run.folder.is_dir():
        run.notes.append("its folder does not exist")
        return "missing" if listed in (None, "done") else str(listed)
    if listed in ("failed", "invalid"):
        return str(listed)
    if not run.training:
        run.notes.append(f"{METRICS_FILE} holds no record")
        return "failed" if listed in (None, "done") else str(listed)
    if math.isnan(run.training[-1].loss):
        run.notes.append(f"the loss of the last logged step, {run.training[-1].step}, is not finite")
        return "failed"
    if run.steps is None:
        return "no config"
    log_freq = _whole(given.get("metrics.log_freq")) or 1
    last_due = max(run.steps - run.steps % log_freq, 1)  # logged are step 1 and the multiples
    reached = max([run.training[-1].step, *(point.step for point in run.validation)])
    # the last step is always validated
    if reached >= (run.steps if given.get("validation.enable") is True else last_due):
        return "done"
    run.notes.append(f"logged to step {reached:,} of {run.steps:,}")
    return "partial" if listed in (None, "done") else str(listed)

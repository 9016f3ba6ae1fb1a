"""What finished runs have come to: found, read, grouped over seeds, compared with the dense baseline, as a table.

Everything comes from the folders' `config.json`, `metrics.jsonl` and `validation.jsonl`, and a sweep's `sweep.json`. A
run that is partial, failed or absent stays in the table, with its status and why. `report_plots` draws the rows.
"""

import csv
import hashlib
import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from .config import JobConfig
from .config.resume import CONFIG_FILE, flat
from .files import write_whole
from .metrics import METRICS_FILE, VALIDATION_FILE
from .models import DecoderArgs

SWEEP_FILE = "sweep.json"
DEPTH = 2  # levels below a folder at which runs are looked for

# What does not change training, or follows from other keys: beginnings of "section.key".
NO_MATTER = (
    "job.", "profiling.", "metrics.", "comm.", "memory_estimation.", "fault_tolerance.", "checkpoint.",
    "model_args.", "tokenizer", "data.", "flops.", "versions.", "training.seed", "debug.seed", "training.gc_",
    "training.dataloader.", "validation.enable", "validation.freq", "validation.dataloader.", "validation.context_",
)  # fmt: skip
MATTER = ("checkpoint.initial_load_path", "checkpoint.initial_load_model_only")
# Keys that follow the length of a run.
LENGTH = (
    "training.steps", "lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "layer_dropout.total_steps",
    "dropout.total_steps",
)  # fmt: skip


class ReportError(Exception):
    """The arguments are no runs; `faults` has one sentence for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


# Runs -----------------------------------------------------------------------------------------------------------


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
    if (folder / SWEEP_FILE).is_file():
        return _sweep_runs(folder)
    if is_run(folder):
        return [read_run(folder, folder.name)]
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


# Groups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over runs; one run has no deviation."""

    mean: float
    deviation: float | None


def spread(values: Iterable[float]) -> Spread | None:
    """Of the finite `values`; None without any."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


@dataclass
class Group:
    """Runs that differ in the seed alone: a row of the table."""

    runs: list[Run]
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return self.runs[0].known

    @property
    def averaged(self) -> list[Run]:
        """The finished runs; in a group without one, those that have come furthest."""
        done = [run for run in self.runs if run.status == "done"]
        started = [run for run in self.runs if run.training]
        return done or [run for run in started if run.tokens == max(other.tokens for other in started)]

    @property
    def done(self) -> bool:
        return any(run.status == "done" for run in self.runs)

    @property
    def tokens(self) -> int:
        return round(statistics.fmean(run.tokens for run in self.averaged)) if self.averaged else 0

    @property
    def parameters(self) -> int | None:
        return self.runs[0].parameters

    @property
    def tpp(self) -> float | None:
        return self.tokens / self.parameters if self.tokens and self.parameters else None

    @property
    def p_max(self) -> float | None:
        return number(self.settings.get("layer_dropout.p_max"))

    @property
    def status(self) -> str:
        counts = Counter(run.status for run in self.runs)
        if len(self.runs) == 1:
            return self.runs[0].status
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    def best(self, last: int | None) -> Run:
        """The averaged run of the lowest validation loss, or training loss where there is no validation."""

        def loss(run: Run) -> tuple[bool, float]:
            validated = validation_loss(run)
            value = training_loss(run, last) if math.isnan(validated) else validated
            return math.isnan(value), value

        return min(self.averaged or self.runs, key=loss)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Groups in the order of their first run. A run without a usable `config.json` is one of its own."""
    groups: dict[str, Group] = {}
    for run in runs:
        key = json.dumps(run.settings, sort_keys=True) if run.known else str(run.folder)
        groups.setdefault(key, Group([], run.settings)).runs.append(run)
    for group in groups.values():
        seeds = Counter(run.seed for run in group.averaged)
        group.notes += [f"{count} averaged runs have seed {seed}" for seed, count in seeds.items() if count > 1]
        if group.done and len(group.averaged) < len(group.runs):
            group.notes.append(f"averaged are the finished runs, {len(group.averaged)} of {len(group.runs)}")
    return list(groups.values())


def window(records: int, last: int | None) -> int:
    """How many of so many logged steps the training loss is a mean of: `last`, or 5 % of them, at least 1."""
    return min(records, last) if last else max(1, records // 20)


def training_loss(run: Run, last: int | None) -> float:
    """Mean over the last logged steps (see `window`) that have a finite loss, in nats a token; NaN without one."""
    found = spread(point.loss for point in run.training[-window(len(run.training), last) :])
    return found.mean if found else math.nan


def validation_loss(run: Run) -> float:
    """Of the last round, in nats a token; NaN without one."""
    return run.validation[-1].loss if run.validation else math.nan


# The dense baseline ---------------------------------------------------------------------------------------------


def without(settings: dict[str, Any], *prefixes: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not key.startswith(prefixes)}


def dense_baseline(group: Group, groups: list[Group]) -> Group | None:
    """The group without layer dropout whose other settings equal the group's, if need be but for the length (then the
    one nearest in tokens). Without one, a note of the group says what the nearest differs in."""
    if not (group.known and group.averaged):
        return None
    dense = [other for other in groups if other.known and other.p_max == 0 and other.averaged]
    own = without(group.settings, "layer_dropout.")
    by_distance: list[tuple[int, int, Group]] = []
    for place, other in enumerate(dense):
        theirs = without(other.settings, "layer_dropout.")
        different = [key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key)]
        if not different:
            return other
        by_distance.append((len(different), place, other))
    same = [other for other in dense if without(other.settings, "layer_dropout.", *LENGTH) == without(own, *LENGTH)]
    if same:
        return min(same, key=lambda other: abs(other.tokens - group.tokens))
    if by_distance:
        nearest = min(by_distance)[2]
        theirs = without(nearest.settings, "layer_dropout.")
        keys = sorted(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))
        shown = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
        group.notes.append(f"no dense baseline: the nearest, {nearest.runs[0].name}, differs in {shown}")
    elif group.p_max:
        group.notes.append("no dense baseline: no run with layer_dropout.p_max = 0 has a log")
    return None


@dataclass(frozen=True)
class Comparison:
    """A loss against the baseline's, 100 (loss / baseline - 1), at so many tokens of both."""

    percent: float
    tokens: int


def _common_tokens(series: list[list[Point]]) -> int | None:
    """The largest number of tokens at which all of these have a finite loss."""
    common = set.intersection(*({p.tokens for p in points if math.isfinite(p.loss)} for points in series))
    return max(common, default=None)


def compare_validation(group: Group, baseline: Group) -> Comparison | None:
    """Validation loss against the baseline's at the last number of tokens where all averaged runs of both have one."""
    tokens = _common_tokens([run.validation for run in group.averaged + baseline.averaged])
    if tokens is None:
        return None
    own, dense = (
        statistics.fmean(next(p.loss for p in run.validation if p.tokens == tokens) for run in side.averaged)
        for side in (group, baseline)
    )
    return Comparison(100 * (own / dense - 1), tokens)


def compare_training(group: Group, baseline: Group, last: int | None) -> Comparison | None:
    """Training loss against the baseline's, up to the last number of tokens that all averaged runs of both logged:
    for both the mean over the same tokens, those of the group's last logged steps up to there (see `window`)."""
    tokens = _common_tokens([run.training for run in group.averaged + baseline.averaged])
    if tokens is None:
        return None
    logged = [point.tokens for point in group.averaged[0].training if point.tokens <= tokens]
    first = logged[-window(len(logged), last)]

    def mean(run: Run) -> float:
        inside = [p.loss for p in run.training if first <= p.tokens <= tokens and math.isfinite(p.loss)]
        return statistics.fmean(inside)

    own, dense = (statistics.fmean(map(mean, side.averaged)) for side in (group, baseline))
    return Comparison(100 * (own / dense - 1), tokens)


# The table ------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A group as the table shows it. None is what is not known."""

    group: Group
    settings: str  # what differs between groups, but for the columns of their own
    label: str  # all that differs
    best: Run
    train: Spread | None
    validation: Spread | None
    baseline: Group | None
    train_against: Comparison | None
    validation_against: Comparison | None
    flops: float | None
    executed: float | None
    saved_of_layers: float | None


COLUMNS = (  # of their own
    "model.name", "model.flavor", "layer_dropout.distribution", "layer_dropout.schedule", "layer_dropout.p_max",
)  # fmt: skip


def varied_keys(groups: list[Group]) -> list[str]:
    """Keys that groups have different values of, the model's first."""
    order = ("model.", "architecture.", "layer_dropout.p_max", "layer_dropout.", "dropout.", "optimizer.", "training.")
    values: dict[str, set[str]] = {}
    for group in groups:
        if group.known:
            for key, value in group.settings.items():
                values.setdefault(key, set()).add(json.dumps(value))
    varied = [key for key, found in values.items() if len(found) > 1]
    rank = {key: next((i for i, start in enumerate(order) if key.startswith(start)), len(order)) for key in varied}
    return sorted(varied, key=lambda key: (rank[key], key))


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The key without its section, where that is plain: no other key ends so, and the section is a usual one."""
    ends = Counter(key.rsplit(".", 1)[-1] for key in keys)
    plain = ("model.", "architecture.", "layer_dropout.", "optimizer.", "training.")
    names = {}
    for key in keys:
        end = key.rsplit(".", 1)[-1]
        names[key] = end if ends[end] == 1 and key.startswith(plain) else key
    return names


def describe(settings: dict[str, Any], keys: Iterable[str], names: dict[str, str]) -> str:
    """`lr 0.003, p_max 0.4`: these keys of `settings`, where it has them."""
    parts = []
    for key in keys:
        if key in settings:
            value = settings[key]
            shown = f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
            parts.append(f"{names.get(key, key)} {shown}")
    return ", ".join(parts)


def build_rows(groups: list[Group], last: int | None = None, baseline: Group | None = None) -> list[Row]:
    """The table's rows.

    Args:
        last: logged steps that the training loss is a mean of; None: 5 % of them.
        baseline: compare every group with this one instead of with its dense baseline.
    """
    varied = varied_keys(groups)
    names = short_names(varied)
    rows = []
    for group in groups:
        against = baseline if baseline is not None and group.averaged else dense_baseline(group, groups)
        train = compare_training(group, against, last) if against else None
        validation = compare_validation(group, against) if against else None
        if against and against is not group:
            _note_lengths(group, against, train, validation)
        keys = varied if group.known else [key for key in group.settings if key != "training.seed"]
        points = [run.training[-1] for run in group.averaged]
        flops, executed = spread(p.flops for p in points), spread(p.executed for p in points)
        saved = spread(run.saved for run in group.averaged)
        rows.append(
            Row(
                group=group,
                settings=describe(group.settings, [key for key in keys if key not in COLUMNS], names),
                label=describe(group.settings, keys, names) or group.runs[0].name,
                best=group.best(last),
                train=spread(training_loss(run, last) for run in group.averaged),
                validation=spread(validation_loss(run) for run in group.averaged),
                baseline=against,
                train_against=train,
                validation_against=validation,
                flops=flops.mean if flops else None,
                executed=executed.mean if executed else None,
                saved_of_layers=saved.mean if saved else None,
            )
        )
    return rows


def _note_lengths(group: Group, baseline: Group, train: Comparison | None, validation: Comparison | None) -> None:
    """Say where a comparison is not at the end of both."""
    for kind, against in (("training", train), ("validation", validation)):
        if against is None:
            if all(getattr(run, kind) for run in group.averaged + baseline.averaged):
                group.notes.append(f"{kind} loss: no number of tokens at which both this and the baseline have one")
            continue
        ends = {getattr(run, kind)[-1].tokens for run in group.averaged + baseline.averaged}
        if ends != {against.tokens}:
            group.notes.append(
                f"{kind} loss compared with {baseline.runs[0].name} at {count(against.tokens)} tokens, the last that "
                f"both have (runs of {count(group.tokens)} and {count(baseline.tokens)} tokens)"
            )


def count(quantity: float | None) -> str:
    """1.42 M of 1420000."""
    if quantity is None:
        return ""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if quantity >= 0.9995 * size:
            return f"{quantity / size:.4g} {unit}"
    return f"{quantity:.4g}"


def _loss_cell(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.4f}" + (f" ± {value.deviation:.4f}" if value.deviation is not None else "")


def _percent_cell(against: Comparison | None, row: Row) -> str:
    if against is None:
        return ""
    return "baseline" if row.baseline is row.group else f"{against.percent:+.2f} %"


def _run_cell(row: Row) -> str:
    averaged = len(row.group.averaged)
    return row.best.name + (f" (best of {averaged})" if averaged > 1 else "")


def _name(settings: dict[str, Any]) -> str:
    return " ".join(str(settings[key]) for key in ("model.name", "model.flavor") if key in settings)


def _layer_dropout(group: Group, key: str) -> str:
    return "none" if group.p_max == 0 else str(group.settings.get(f"layer_dropout.{key}", ""))


def markdown_table(rows: list[Row]) -> str:
    """The rows as Markdown; columns that no row fills are left out."""
    table: list[dict[str, str]] = []
    for n, row in enumerate(rows, 1):
        group, of_all = row.group, _saved_of_all(row)
        saved = "" if of_all is None else f"{100 * (row.saved_of_layers or 0):.1f} % ({100 * of_all:.1f} %)"
        table.append(
            {
                "#": str(n),
                "run": _run_cell(row),
                "model": _name(group.settings),
                "size": count(group.parameters),
                "tokens": count(group.tokens or None),
                "TPP": f"{group.tpp:.3g}" if group.tpp else "",
                "distribution": _layer_dropout(group, "distribution"),
                "schedule": _layer_dropout(group, "schedule"),
                "p_max": "" if group.p_max is None else f"{group.p_max:g}",
                "settings": row.settings,
                "FLOPs executed": f"{row.executed:.3e}" if row.executed else "",
                "saved, of layers (of all)": saved,
                "train loss": _loss_cell(row.train),
                "train vs baseline": _percent_cell(row.train_against, row),
                "validation loss": _loss_cell(row.validation),
                "validation vs baseline": _percent_cell(row.validation_against, row),
                "seeds": str(len(row.group.averaged)),
                "status": group.status,
            }
        )
    return _markdown(table)


def runs_table(rows: list[Row], last: int | None) -> str:
    """Every run as Markdown."""
    table = []
    for n, row in enumerate(rows, 1):
        for run in row.group.runs:
            train, validation = training_loss(run, last) if run.training else math.nan, validation_loss(run)
            table.append(
                {
                    "row": str(n),
                    "run": run.name,
                    "seed": "" if run.seed is None else str(run.seed),
                    "status": run.status,
                    "step": f"{run.training[-1].step:,}" if run.training else "",
                    "of": "" if run.steps is None else f"{run.steps:,}",
                    "train loss": "" if math.isnan(train) else f"{train:.4f}",
                    "validation loss": "" if math.isnan(validation) else f"{validation:.4f}",
                    "remarks": "; ".join(run.notes),
                }
            )
    return _markdown(table)


def _markdown(table: list[dict[str, str]]) -> str:
    kept = [name for name in table[0] if any(line[name] for line in table)]
    lines = [kept, ["---"] * len(kept), *([line[name].replace("|", "\\|") for name in kept] for line in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _saved_of_all(row: Row) -> float | None:
    return 1 - row.executed / row.flops if row.flops and row.executed is not None else None


def row_values(n: int, row: Row) -> dict[str, Any]:
    """A row as plain numbers, None where there is none: a line of `report.csv`."""
    group = row.group
    train, validation = row.train or Spread(math.nan, None), row.validation or Spread(math.nan, None)
    values: dict[str, Any] = {
        "row": n,
        "label": row.label,
        "model": group.settings.get("model.name"),
        "flavor": group.settings.get("model.flavor"),
        "parameters": group.parameters,
        "tokens": group.tokens or None,
        "tpp": group.tpp,
        "distribution": _layer_dropout(group, "distribution") or None,
        "schedule": _layer_dropout(group, "schedule") or None,
        "p_max": group.p_max,
        "settings": row.settings or None,
        "flops": row.flops,
        "flops_executed": row.executed,
        "flops_saved_of_layers": row.saved_of_layers,
        "flops_saved_of_all": _saved_of_all(row),
        "train_loss": train.mean,
        "train_loss_deviation": train.deviation,
        "train_against_percent": row.train_against.percent if row.train_against else None,
        "train_against_tokens": row.train_against.tokens if row.train_against else None,
        "validation_loss": validation.mean,
        "validation_loss_deviation": validation.deviation,
        "validation_against_percent": row.validation_against.percent if row.validation_against else None,
        "validation_against_tokens": row.validation_against.tokens if row.validation_against else None,
        "baseline": str(row.baseline.runs[0].folder) if row.baseline else None,
        "runs": len(group.runs),
        "averaged": len(group.averaged),
        "best": str(row.best.folder),
        "status": group.status,
        "notes": "; ".join(group.notes) or None,
    }
    return {key: None if value != value else value for key, value in values.items()}


def run_values(n: int, run: Run, last: int | None) -> dict[str, Any]:
    """A run as plain numbers: a line of `runs.csv`."""
    end = run.training[-1] if run.training else None
    values: dict[str, Any] = {
        "row": n,
        "name": run.name,
        "folder": str(run.folder),
        "seed": run.seed,
        "status": run.status,
        "step": end.step if end else None,
        "steps": run.steps,
        "tokens": run.tokens or None,
        "parameters": run.parameters,
        "flops": end.flops if end else None,
        "flops_executed": end.executed if end else None,
        "flops_saved_of_layers": run.saved if end else None,
        "train_loss": training_loss(run, last) if end else None,
        "train_loss_steps": window(len(run.training), last) if end else None,
        "validation_loss": validation_loss(run),
        "notes": "; ".join(run.notes) or None,
    }
    return {key: None if value != value else value for key, value in values.items()}


def remarks(rows: list[Row]) -> list[str]:
    """What must be known about rows and runs, one sentence each: what is unfinished, broken, or compared elsewhere."""
    found = []
    for n, row in enumerate(rows, 1):
        found += [f"row {n}: {note}" for note in row.group.notes]
        for run in row.group.runs:
            if run.status != "done" or run.notes:
                found.append(f"row {n}, {run.name}: {run.status}" + "".join(f"; {note}" for note in run.notes))
    return found


def explanation(last: int | None) -> str:
    """What the table's columns mean."""
    steps = f"the last {last} logged steps" if last else "the last 5 % of the logged steps, at least one"
    return (
        "Losses in nats a token, mean ± sample deviation over seeds (none for one seed). Train loss: mean over "
        f"{steps}. Validation loss: the last round. Vs baseline: 100 (loss / baseline - 1) at the same number of "
        "tokens; the baseline is the row without layer dropout whose other settings are equal, unless one was named. "
        "TPP: tokens a parameter, embeddings included. Saved: share of the layers' FLOPs, in parentheses of all. Best: "
        "the lowest validation loss, else train loss. Only finished runs are averaged; in a row without one, those "
        "that have come furthest."
    )


def default_output(runs: list[Run]) -> Path:
    """`report` in the common parent folder of the runs."""
    parents = [run.folder.parent for run in runs if run.folder.is_dir()] or [run.folder.parent for run in runs]
    return Path(os.path.commonpath(parents)) / "report"


def write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_report(
    folder: Path, rows: list[Row], last: int | None, plots: dict[str, dict], left_out: dict[str, str]
) -> None:
    """Write `report.md`, `report.csv`, `runs.csv` and `report.json`.

    Args:
        plots: the numbers of each plot that was made, by the name of its file in `folder`.
        left_out: why each other plot was not made.
    """
    lines = ["# Report", "", markdown_table(rows), "", explanation(last)]
    if notes := remarks(rows):
        lines += ["", "## Remarks", "", *(f"- {note}" for note in notes)]
    lines += ["", "## Runs", "", runs_table(rows, last), "", "## Plots", "", *(f"![{name}]({name})" for name in plots)]
    lines += ["", *(f"- {name} was not made: {why}" for name, why in left_out.items())]
    write_whole(folder / "report.md", "\n".join(lines) + "\n")
    table = [row_values(n, row) for n, row in enumerate(rows, 1)]
    runs = [run_values(n, run, last) for n, row in enumerate(rows, 1) for run in row.group.runs]
    write_csv(folder / "report.csv", table)
    write_csv(folder / "runs.csv", runs)
    numbers = {"last": last, "rows": table, "runs": runs, "plots": plots, "left_out": left_out}
    write_whole(folder / "report.json", json.dumps(numbers, allow_nan=False) + "\n")

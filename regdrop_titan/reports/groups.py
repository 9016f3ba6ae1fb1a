"""Runs that differ in the seed alone as groups, with means and deviations over them, and groups against the dense
baseline."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .runs import Point, Run, number

# Keys that follow the length of a run.
LENGTH = (
    "training.steps", "lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "layer_dropout.total_steps",
    "dropout.total_steps",
)  # fmt: skip


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


# What differs between groups ----------------------------------------------------------------------------------------


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

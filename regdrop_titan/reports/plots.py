"""The plots of a report: loss against tokens, executed FLOPs and tokens a parameter, and hyperparameter transfer.

Each function draws one PNG and returns its numbers, or raises `NoData` saying why there is nothing to draw. Rows
without a finished run are dashed in the curves, and left out where points of finished runs are compared.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .cells import count
from .groups import LENGTH, Group, describe, short_names, spread, varied_keys, without
from .runs import Point, number
from .training_table import Row

BATCH = ("training.global_batch_size", "training.local_batch_size")
MANY = 100  # logged steps from which a training curve is smoothed, over 1/50 of them
Numbers = dict[str, Any]


class NoData(Exception):
    """Why a plot cannot be made."""


@dataclass(frozen=True)
class Series:
    """Losses of a group, means over its averaged runs, where all of them have one."""

    tokens: np.ndarray
    executed: np.ndarray
    loss: np.ndarray


def mean_series(group: Group, of: Callable[[Any], list[Point]]) -> Series:
    by_tokens = [{p.tokens: p for p in of(run) if math.isfinite(p.loss)} for run in group.averaged]
    common = sorted(set.intersection(*map(set, by_tokens))) if by_tokens else []
    points = [[found[tokens] for found in by_tokens] for tokens in common]
    return Series(
        np.array(common, dtype=float),
        np.array([np.mean([p.executed for p in at]) for at in points]),
        np.array([np.mean([p.loss for p in at]) for at in points]),
    )


def smoothed(series: Series) -> tuple[Series, int]:
    """Each loss as the mean of the last w ones, and w: 1 for short curves."""
    n = len(series.loss)
    w = n // 50 if n > MANY else 1
    if w == 1:
        return series, 1
    loss = np.convolve(series.loss, np.full(w, 1 / w), mode="valid")
    return Series(series.tokens[w - 1 :], series.executed[w - 1 :], loss), w


def colors(n: int) -> list:
    """One for each of n curves: distinct ones while there are, then a ramp."""
    if n <= 10:
        return [matplotlib.colormaps["tab10"](i) for i in range(n)]
    return [matplotlib.colormaps["turbo"](0.03 + 0.94 * i / (n - 1)) for i in range(n)]


def new_figure(panels: int, labels: list[str], width: float) -> tuple[Figure, list, int]:
    """A figure with room for its legend below, the axes, and the legend's columns."""
    longest = max(map(len, labels))
    columns = max(1, min(len(labels), int(width * 15 / (longest + 10))))
    lines = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(width, 4.3 + 0.2 * lines), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0]), columns


def finish(figure: Figure, axes: list, columns: int, path: Path) -> None:
    handles: dict[str, Any] = {}
    for each in axes:
        each.grid(alpha=0.3)
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=150)


def curve_label(row: Row) -> str:
    return row.label if row.group.done else f"{row.label} ({row.group.status})"


def hide_beginning(axes: Any, curves: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Let the steep first fifth of each curve run out at the top: what runs are compared by is at the end."""
    late = [y[x >= x[-1] / 5] for x, y in curves]
    low, high = min(y.min() for y in late), max(y.max() for y in late)
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def plot_curves(rows: list[Row], path: Path, axis: str) -> Numbers:
    """Training loss, and where there is some validation loss, against `axis`: "tokens" or "executed" FLOPs."""
    drawn = []
    windows = set()
    for row in rows:
        training, w = smoothed(mean_series(row.group, lambda run: run.training))
        validation = mean_series(row.group, lambda run: run.validation)
        if len(training.loss) and np.isfinite(getattr(training, axis)).all():
            drawn.append((row, training, validation))
            windows.add(w)
    if not drawn:
        raise NoData("no run has a log with losses" + (" and FLOPs" if axis == "executed" else ""))
    labels = [curve_label(row) for row, _, _ in drawn]
    validated = any(len(validation.loss) for _, _, validation in drawn)
    figure, axes, columns = new_figure(1 + validated, labels, 9.5 if validated else 7)
    ends = [getattr(training, axis)[-1] for _, training, _ in drawn]
    numbers: Numbers = {"x": axis, "smoothed_over_steps": sorted(windows), "curves": []}
    lines: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    for (row, training, validation), label, color in zip(drawn, labels, colors(len(drawn)), strict=True):
        style = "-" if row.group.done else "--"
        marker = "o" if len(training.loss) == 1 else ""
        axes[0].plot(getattr(training, axis), training.loss, style, marker=marker, color=color, label=label, lw=1.3)
        lines[0].append((getattr(training, axis), training.loss))
        if len(validation.loss):
            axes[1].plot(getattr(validation, axis), validation.loss, style, marker="o", ms=4, color=color, label=label)
            lines[1].append((getattr(validation, axis), validation.loss))
        curve: Numbers = {"label": label, "best": str(row.best.folder)}
        for kind, series in (("training", training), ("validation", validation)):
            curve[kind] = {"x": getattr(series, axis).tolist(), "loss": series.loss.tolist()}
        numbers["curves"].append(curve)
    w = max(windows)
    titles = ["training" + (f", mean of up to {w} logged steps" if w > 1 else ""), "validation"]
    for each, title, found in zip(axes, titles, lines, strict=False):
        each.set(title=title, xlabel="tokens" if axis == "tokens" else "FLOPs executed", ylabel="loss (nats a token)")
        if max(ends) > 10 * min(ends):
            each.set_xscale("log")
        elif axis == "tokens":
            each.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: count(tokens)))
        hide_beginning(each, found)
    finish(figure, axes, columns, path)
    return numbers


@dataclass(frozen=True)
class Mark:
    """A row as a point of a plot of final losses."""

    row: Row
    x: float
    loss: float
    deviation: float | None


def marks(rows: list[Row], x: Callable[[Group], float | None]) -> tuple[list[Mark], str]:
    """The finished rows at `x`, by validation loss where all of them have one, else by train loss; and which."""
    done = [(row, x(row.group)) for row in rows if row.group.done]
    kind = "validation" if all(row.validation for row, _ in done) else "train"
    found = []
    for row, at in done:
        loss = row.validation if kind == "validation" else row.train
        if at is not None and loss is not None:
            found.append(Mark(row, at, loss.mean, loss.deviation))
    return found, kind


def draw_marks(axes: Any, curve: list[Mark], label: str, color: Any, best: bool = False) -> Numbers:
    """A curve of points with error bars where there are several seeds; `best` stars its lowest."""
    curve = sorted(curve, key=lambda mark: mark.x)
    x, loss = [mark.x for mark in curve], [mark.loss for mark in curve]
    errors = [math.nan if mark.deviation is None else mark.deviation for mark in curve]
    axes.errorbar(x, loss, errors, marker="o", ms=4, capsize=3, color=color, label=label)
    if best:
        lowest = min(curve, key=lambda mark: mark.loss)
        axes.plot([lowest.x], [lowest.loss], "*", ms=13, color=color, mec="black", mew=0.6)
    return {"label": label, "x": x, "loss": loss, "deviation": [mark.deviation for mark in curve]}


def set_scale(axes: Any, values: list[float]) -> None:
    """A logarithmic x where values span more than a factor of 3, with ticks at the values while they are few."""
    ticks = sorted(set(values))
    if ticks[0] > 0 and ticks[-1] > 3 * ticks[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.4g}" if x < 10_000 else count(x)))
    if len(ticks) <= 6:
        axes.set_xticks(ticks)


def curves_but_for(found: list[Mark], *prefixes: str) -> list[list[Mark]]:
    """The points that have the same settings apart from these keys, together."""
    curves: dict[str, list[Mark]] = {}
    for mark in found:
        curves.setdefault(json.dumps(without(mark.row.group.settings, *prefixes), sort_keys=True), []).append(mark)
    return list(curves.values())


def curve_labels(curves: list[list[Mark]], *prefixes: str) -> list[str]:
    """What differs between curves, apart from these keys; numbers of tokens tell apart those that differ in nothing."""
    groups = [curve[0].row.group for curve in curves]
    keys = [key for key in varied_keys(groups) if not key.startswith(prefixes)]
    names = short_names(keys)
    labels = [describe(group.settings, keys, names) for group in groups]
    if len(set(labels)) < len(labels):
        labels = [
            f"{label}{', ' if label else ''}{count(g.tokens)} tokens" for label, g in zip(labels, groups, strict=True)
        ]
    return [label or "all runs" for label in labels]


def plot_tpp(rows: list[Row], path: Path) -> Numbers:
    """Final validation loss against tokens a parameter, one curve for runs that differ in their length alone."""
    found, kind = marks(rows, lambda group: group.tpp)
    values = {round(mark.x, 6) for mark in found}
    if kind != "validation":
        raise NoData("not every finished run has a validation loss")
    if len(values) < 2:
        raise NoData(f"it needs finished runs at two numbers of tokens a parameter, there are {len(values)}")
    curves = curves_but_for(found, *LENGTH)
    labels = curve_labels(curves, *LENGTH)
    figure, axes, columns = new_figure(1, labels, 7)
    numbers: Numbers = {"x": "tokens a parameter", "curves": []}
    for curve, label, color in zip(curves, labels, colors(len(curves)), strict=True):
        numbers["curves"].append(draw_marks(axes[0], curve, label, color))
    axes[0].set(xlabel="tokens a parameter (TPP)", ylabel="validation loss (nats a token)")
    set_scale(axes[0], [mark.x for mark in found])
    finish(figure, axes, columns, path)
    return numbers


def tokens_a_step(group: Group) -> float | None:
    found = spread(run.training[-1].tokens / run.training[-1].step for run in group.averaged)
    return found.mean if found else None


@dataclass(frozen=True)
class Panel:
    """Curves of at least two values of a hyperparameter."""

    curves: list[list[Mark]]
    loss: str  # which
    keys: tuple[str, ...]  # in which the points of a curve differ


def transfer_panels(rows: list[Row]) -> dict[str, Panel]:
    """By hyperparameter: each varied numeric key of [optimizer], and the batch size.

    Batch sizes are compared at equal tokens (steps and warm-up follow them), or where there are no two such runs at
    equal steps.
    """
    done = [row for row in rows if row.group.done]
    varied = varied_keys([row.group for row in done])
    panels: dict[str, Panel] = {}
    for key in varied:
        if key.startswith("optimizer.") and all(number(row.group.settings.get(key)) is not None for row in done):
            points, loss = marks(done, lambda group: group.settings[key])  # noqa: B023 (called before the next key)
            if curves := several_values(curves_but_for(points, key)):
                panels[key] = Panel(curves, loss, (key,))
    if any(key in varied for key in BATCH):
        points, loss = marks(done, tokens_a_step)
        alike = [each for same in by_length(points) for each in curves_but_for(same, *BATCH, *LENGTH)]
        if curves := several_values(alike):
            panels["tokens a step"] = Panel(curves, loss, BATCH + LENGTH)
        elif curves := several_values(curves_but_for(points, *BATCH)):
            panels["tokens a step"] = Panel(curves, loss, BATCH)
    return panels


def several_values(curves: list[list[Mark]]) -> list[list[Mark]]:
    return [curve for curve in curves if len({mark.x for mark in curve}) > 1]


def by_length(points: list[Mark]) -> list[list[Mark]]:
    """Points of equal tokens, within 2 %: a whole number of steps cannot give every number of tokens."""
    found: list[list[Mark]] = []
    for mark in sorted(points, key=lambda mark: mark.row.group.tokens):
        if found and mark.row.group.tokens <= 1.02 * found[-1][0].row.group.tokens:
            found[-1].append(mark)
        else:
            found.append([mark])
    return found


def plot_transfer(rows: list[Row], path: Path) -> Numbers:
    """Final loss against each varied hyperparameter, one curve for runs that differ in it alone; a star at its best."""
    panels = transfer_panels(rows)
    if not panels:
        raise NoData(
            "it needs two finished runs that differ in one key of [optimizer], or in the batch size, and in no other"
        )
    labels = {name: curve_labels(panel.curves, *panel.keys) for name, panel in panels.items()}
    every = list(dict.fromkeys(label for found in labels.values() for label in found))
    figure, axes, columns = new_figure(len(panels), every, max(7.0, 4.8 * len(panels)))
    color = dict(zip(every, colors(len(every)), strict=True))
    numbers: Numbers = {"panels": []}
    for each, (name, panel) in zip(axes, panels.items(), strict=True):
        curves = [
            draw_marks(each, curve, label, color[label], best=True)
            for curve, label in zip(panel.curves, labels[name], strict=True)
        ]
        each.set(xlabel=name, ylabel=f"{panel.loss} loss (nats a token); star: lowest")
        set_scale(each, [mark.x for curve in panel.curves for mark in curve])
        numbers["panels"].append({"x": name, "loss": panel.loss, "curves": curves})
    finish(figure, axes, columns, path)
    return numbers


PLOTS: dict[str, Callable[[list[Row], Path], Numbers]] = {
    "loss_by_tokens.png": lambda rows, path: plot_curves(rows, path, "tokens"),
    "loss_by_flops.png": lambda rows, path: plot_curves(rows, path, "executed"),
    "loss_by_tpp.png": plot_tpp,
    "transfer.png": plot_transfer,
}


def draw(rows: list[Row], folder: Path) -> tuple[dict[str, Numbers], dict[str, str]]:
    """Make every plot that there are data for: the numbers of those made, and why the others were not, by file name.
    A plot of an earlier report that is not made now is removed."""
    made, left_out = {}, {}
    for name, plot in PLOTS.items():
        try:
            made[name] = plot(rows, folder / name)
        except NoData as reason:
            left_out[name] = str(reason)
            (folder / name).unlink(missing_ok=True)
    return made, left_out

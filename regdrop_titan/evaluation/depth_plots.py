"""The plots of early exit and layer skipping, several runs in each (after DD figs 5, 6, A.2 and A.3).

All take results as `depth.json` holds them: `label`, `full`, `families` and `model_args`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from ..reports.plots import colors, finish, new_figure

LOSS = "loss (nats a token)"
Result = dict[str, Any]


def plot_exits(results: Sequence[Result], path: Path) -> None:
    """The loss at every exit, and at the trained ones of the models that have some."""
    labels = [label for result in results for label in (result["label"], *trained_label(result))]
    figure, (axes,), columns = new_figure(1, labels, width=7)
    for result, color in zip(results, colors(len(results)), strict=True):
        draw_losses(axes, result["families"]["exits"], "n_layers", label=result["label"], color=color)
        for label in trained_label(result):
            style = {"color": color, "linestyle": "none", "marker": "*", "markersize": 11}
            draw_losses(axes, result["families"]["balcony"], "n_layers", label=label, **style)
    axes.set(xlabel="exit after so many layers", ylabel=LOSS)
    finish(figure, [axes], columns, path)


def trained_label(result: Result) -> list[str]:
    """What the trained exits of a result are called in a legend; nothing where it has none."""
    return [f"{result['label']}, trained (+ 1 layer)"] if result["families"].get("balcony") else []


def plot_alternate(results: Sequence[Result], path: Path) -> None:
    """The loss by the number of odd layers that are removed, the deepest first and the first first."""
    figure, panels, columns = new_figure(2, [result["label"] for result in results], width=9)
    titles = {"alternate_last": "odd layers, the deepest first", "alternate_first": "odd layers, the first one first"}
    for axes, (family, title) in zip(panels, titles.items(), strict=True):
        for result, color in zip(results, colors(len(results)), strict=True):
            draw_losses(axes, result["families"][family], "n_removed", label=result["label"], color=color)
        axes.set(title=title, xlabel="number of removed layers")
    panels[0].set_ylabel(LOSS)
    panels[1].sharey(panels[0])
    finish(figure, panels, columns, path)


def draw_losses(axes: Any, entries: Sequence[Result], x: str, **style) -> None:
    """Losses with their standard errors over "n_layers" or "n_removed"."""
    counts = [len(entry["removed"]) if x == "n_removed" else entry["n_layers"] for entry in entries]
    axes.errorbar(
        counts, [entry["loss"] for entry in entries], [entry["loss_error"] for entry in entries],
        **{"marker": "o", "markersize": 4, "capsize": 3} | style,
    )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_runs(results: Sequence[Result], path: Path) -> None:
    """How much the loss grows without each contiguous run of layers: a panel a model, on one scale of colours."""
    columns = min(len(results), 3)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(1.2 + 4 * columns, 0.6 + 3.6 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    increases = [increase_by_run(result) for result in results]
    # most of a run's range is of its longest runs: fine colours for small increases; a run may lower the loss
    scale = PowerNorm(
        0.4, min(0.0, *(np.nanmin(each) for each in increases)), max(np.nanmax(each) for each in increases)
    )
    for axes, result, increase in zip(grid, results, increases, strict=False):
        L = len(increase)
        image = axes.imshow(increase, origin="lower", extent=(-0.5, L - 0.5, 0.5, L + 0.5), norm=scale)
        axes.set(title=result["label"], xlabel="first removed layer", ylabel="number of removed layers")
        axes.title.set_fontsize(9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[len(results) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=figure.axes, label="growth of the loss (nats a token)")
    figure.savefig(path, dpi=150)


def increase_by_run(result: Result) -> np.ndarray:
    """The loss without a run less the whole model's, by length - 1 and first layer: (L, L), NaN where there is none."""
    L = result["model_args"]["n_layers"]
    increase = np.full((L, L), np.nan)
    for entry in result["families"]["runs"]:
        increase[len(entry["removed"]) - 1, entry["removed"][0]] = entry["loss"] - result["full"]["loss"]
    return increase


def plot_costs(results: Sequence[Result], path: Path) -> None:
    """The loss of all subsets against the memory of their weights and against their FLOPs, with the Pareto fronts; the
    trained exits, which are no subsets, as stars."""
    labels = [label for result in results for label in (result["label"], *trained_label(result))]
    figure, panels, columns = new_figure(2, labels, width=9)
    titles = {"weight_bytes": "weights in bf16 (bytes)", "flops": "forward FLOPs a token"}
    for axes, (cost, title) in zip(panels, titles.items(), strict=True):
        for result, color in zip(results, colors(len(results)), strict=True):
            entries, front = all_entries(result), pareto_front(all_entries(result), cost)
            axes.scatter([e[cost] for e in entries], [e["loss"] for e in entries], s=12, alpha=0.4, color=color)
            axes.plot([e[cost] for e in front], [e["loss"] for e in front], label=result["label"], color=color)
            for label in trained_label(result):
                trained = result["families"]["balcony"]
                costs, losses = [e[cost] for e in trained], [e["loss"] for e in trained]
                axes.scatter(costs, losses, marker="*", s=90, color=color, label=label)
        axes.set_xlabel(title)
        axes.xaxis.set_major_formatter(EngFormatter())
    panels[0].set_ylabel(f"{LOSS}; lines: Pareto fronts")
    panels[1].sharey(panels[0])
    finish(figure, panels, columns, path)


def all_entries(result: Result) -> list[Result]:
    """The different subsets of a result."""
    families = {name: family for name, family in result["families"].items() if name != "balcony"}
    entries = [result["full"], *(entry for family in families.values() for entry in family)]
    return list({tuple(entry["layers"]): entry for entry in entries}.values())


def pareto_front(entries: Sequence[Result], cost: str) -> list[Result]:
    """The entries than which none is both as cheap and as good, by rising cost."""
    front: list[Result] = []
    for entry in sorted(entries, key=lambda entry: (entry[cost], entry["loss"])):
        if not front or entry["loss"] < front[-1]["loss"]:
            front.append(entry)
    return front

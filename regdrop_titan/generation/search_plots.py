"""The plot of a draft search: what drafts cost and how often they are right, and how the search went."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .measure import speed_up_by_tokens
from .search import Trial, front_of

SPEED_UPS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # lines that are drawn, 1 thicker


def plot_search(trials: Sequence[Trial], chosen: Trial, length: int, title: str, path: Path) -> None:
    """Left: each trial by its cost and rate of acceptance, the front, and lines of equal speed-up by Leviathan's
    formula with drafts of `length` tokens. Right: the scores, trial by trial. One PNG."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_front(left, trials, chosen, length)
    draw_scores(right, trials, chosen)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.suptitle(title, fontsize=10)
    handles: dict[str, Any] = {}
    for axes in (left, right):
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.colorbar(left.collections[0], ax=left, label="score: speed-up over plain decoding")
    figure.savefig(path, dpi=150)


def draw_front(axes: Any, trials: Sequence[Trial], chosen: Trial, length: int) -> None:
    costs = [trial.worth.c for trial in trials]
    rates = [trial.worth.alpha for trial in trials]
    axes.scatter(costs, rates, c=[trial.worth.score for trial in trials], s=26, zorder=3, label="tried")
    low, high = min(costs), max(costs)
    margin = 0.06 * (high - low) or 0.05
    x = np.linspace(max(0.0, low - margin), high + margin, 100)
    y = np.linspace(0, 1, 101)
    speed_ups = [[speed_up_by_tokens(alpha, length, c) for c in x] for alpha in y]
    widths = [1.8 if level == 1 else 0.8 for level in SPEED_UPS]
    lines = axes.contour(x, y, speed_ups, levels=SPEED_UPS, colors="0.65", linewidths=widths, zorder=1)
    axes.clabel(lines, fmt="%g x", fontsize=7)
    front = front_of(trials)
    axes.step(
        [trial.worth.c for trial in front], [trial.worth.alpha for trial in front], where="post", color="tab:red",
        linewidth=1.3, zorder=2, label="front",
    )  # fmt: skip
    axes.plot([], [], color="0.65", linewidth=0.8, label=f"equal speed-up ({length} drafted tokens)")
    mark(axes, chosen.worth.c, chosen.worth.alpha)
    axes.set(
        xlim=(x[0], x[-1]), ylim=(-0.03, 1.03), xlabel="cost of a drafted token, c (passes of the model)",
        ylabel="rate of acceptance a token, alpha",
    )  # fmt: skip


def draw_scores(axes: Any, trials: Sequence[Trial], chosen: Trial) -> None:
    for warm, color, label in ((True, "tab:orange", "warm start"), (False, "tab:blue", "proposed")):
        some = [trial for trial in trials if (trial.origin == "warm start") == warm]
        if some:
            axes.scatter(
                [trial.number for trial in some], [trial.worth.score for trial in some], s=20, color=color, label=label,
                zorder=3,
            )  # fmt: skip
    best = list(accumulate((trial.worth.score for trial in trials), max))
    axes.step(range(len(trials)), best, where="post", color="black", linewidth=1.2, label="best so far")
    axes.axhline(1.0, color="0.5", linestyle=":", linewidth=1, label="plain decoding")
    mark(axes, chosen.number, chosen.worth.score)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="trial", ylabel="score")


def mark(axes: Any, x: float, y: float) -> None:
    axes.plot([x], [y], "*", ms=15, color="gold", mec="black", mew=0.8, zorder=4, label="chosen")

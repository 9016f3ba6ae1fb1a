"""The first paper's figures 1 and 4 from the runs of sweeps/length_overfit_tiny.toml: loss at multiples of the training
context while training, and position loss at its end, by setting; means over seeds with sample deviations."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regdrop_titan.evaluation.position_loss import moving_average
from regdrop_titan.files import write_json
from regdrop_titan.signals import interruptible

SETTINGS = {"wd": "WD", "no_wd": "no WD", "pre_norm": "Pre-Norm", "pre_linear": "Pre-Linear", "vpad": "VPAD"}
Curves = dict[str, dict[int, np.ndarray]]  # by setting and seed: one value a step, or a position


@dataclass
class Found:
    """What the finished runs left."""

    steps: list[int]  # of the validation rounds
    rounds: dict[int, Curves]  # their losses, by multiple of the training context
    context: int
    positions: Curves  # moving averages of the position loss over a training context, from position `context` on


def read(folder: Path) -> Found | None:
    """The runs `seed=N,SETTING` in `folder` whose position loss is there, which is measured last; None without any."""
    found = Found([], {}, 0, {setting: {} for setting in SETTINGS})
    for file in sorted(folder.glob("seed=*,*/evaluation/position_loss.json")):
        run, result = file.parent.parent, json.loads(file.read_text())
        seed, setting = int(run.name.split(",")[0].removeprefix("seed=")), run.name.split(",")[1]
        found.context = result["train_context"]
        loss = torch.tensor(result["loss"], dtype=torch.float64)
        found.positions[setting][seed] = moving_average(loss, found.context).numpy()[found.context - 1 :]
        records = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
        found.steps = [record["step"] for record in records]
        for key in (key for key in records[0] if key.startswith("loss_")):
            curves = found.rounds.setdefault(int(key[len("loss_") : -1]), {name: {} for name in SETTINGS})
            curves[setting][seed] = np.array([record[key] for record in records])
    return found if found.steps else None


def draw(axes: Any, x: Any, curves: Curves) -> None:
    for color, (setting, seeds) in enumerate(curves.items()):
        if seeds:
            values = np.stack(list(seeds.values()))
            mean, deviation = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0
            axes.plot(x, mean, color=f"C{color}", label=SETTINGS[setting], linewidth=1.3)
            axes.fill_between(x, mean - deviation, mean + deviation, color=f"C{color}", alpha=0.15, linewidth=0)
    axes.grid(alpha=0.3)


def add_legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def plot_training(found: Found, path: Path) -> None:
    """LG fig. 1: a panel for each multiple, without the round before training."""
    from matplotlib.figure import Figure

    columns = -(-len(found.rounds) // 2)
    figure = Figure(figsize=(3.7 * columns, 6.2), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False).flatten()
    for axes, (multiple, curves) in zip(panels, sorted(found.rounds.items()), strict=False):
        draw(axes, found.steps[1:], {s: {n: v[1:] for n, v in seeds.items()} for s, seeds in curves.items()})
        axes.set(title=f"{multiple}x the training context", xlabel="step", ylabel="loss (nats a token)")
    for axes in panels[len(found.rounds) :]:
        axes.remove()
    add_legend(figure, panels[0])
    figure.savefig(path, dpi=130)


def plot_positions(found: Found, path: Path) -> None:
    """LG fig. 4: the position loss, and how far it is above that of weight decay with the same seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    n_positions = next(len(values) for seeds in found.positions.values() for values in seeds.values())
    x = np.arange(found.context, found.context + n_positions)
    panels = figure.subplots(1, 2)
    shown = {"loss": found.positions, "loss above WD's of the same seed": above_wd(found.positions)}
    for axes, (label, curves) in zip(panels, shown.items(), strict=True):
        draw(axes, x, curves)
        axes.axvline(found.context, color="black", linestyle="--", linewidth=1, label="training context")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(title=f"moving average of {found.context} positions", xlabel="token position")
        axes.set_ylabel(f"{label} (nats a token)")
    add_legend(figure, panels[0])
    figure.savefig(path, dpi=130)


def above_wd(curves: Curves) -> Curves:
    """Each seed's values less those of weight decay with that seed: documents and data order are the same in both."""
    wd = curves["wd"]
    return {s: {n: values - wd[n] for n, values in seeds.items() if n in wd} for s, seeds in curves.items()}


def measures(found: Found) -> dict[str, Curves]:
    """By the table's column: each setting's and seed's number."""
    columns = {f"{m}x": each(curves, lambda v: v[-1]) for m, curves in sorted(found.rounds.items())}
    for m in (1, max(found.rounds)):
        columns[f"{m}x above its lowest round"] = each(found.rounds[m], lambda v: v[-1] - v[1:].min())
    columns["position loss within the context"] = each(found.positions, lambda v: v[0])
    columns["rise to the last positions"] = each(found.positions, lambda v: v[-1] - v[0])
    columns["position loss past the context"] = each(found.positions, lambda v: v[found.context :].mean())
    columns["the same above WD's"] = above_wd(columns["position loss past the context"])
    return columns


def each(curves: Curves, of: Any) -> Curves:
    return {setting: {seed: of(values) for seed, values in seeds.items()} for setting, seeds in curves.items()}


def table(columns: dict[str, Curves]) -> str:
    """As Markdown, mean ± sample deviation over seeds."""
    lines = ["| setting | seeds | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for setting, name in SETTINGS.items():
        cells = []
        for column in columns.values():
            values = np.array(list(column[setting].values()))
            deviation = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.3f}{deviation}" if len(values) else "-")
        n_seeds = max(len(column[setting]) for column in columns.values())
        lines.append(f"| {name} | {n_seeds} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("outputs/sweeps/length_overfit_tiny"))
    folder = parser.parse_args().folder
    found = read(folder)
    if found is None:
        print(f"error: {folder}: no run seed=N,SETTING/evaluation/position_loss.json in it", file=sys.stderr)
        return 2
    columns = measures(found)
    text = table(columns)
    (folder / "length_overfit.md").write_text(text + "\n")
    write_json(folder / "length_overfit.json", {name: each(curves, float) for name, curves in columns.items()})
    plot_training(found, folder / "length_overfit_steps.png")
    plot_positions(found, folder / "length_overfit_positions.png")
    print(f"{text}\nwrote length_overfit.md, .json, _steps.png and _positions.png to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

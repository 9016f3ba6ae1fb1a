"""The coordinate check: do activations stay alike when width, depth or layer density change (DD figs. 2 and A.1)?

Models of several sizes train for a few steps on the same batches; the mean absolute activation of the residual stream
after each layer must not follow the size. Under CompleteP with 1/rho it does not; without 1/rho it falls with density.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from ..config import JobConfig, model_args
from .short_runs import Batches, resized, train_briefly

Axis = Literal["width", "depth", "density"]
Scale = Literal["inverse_density", "none"]


@dataclass
class Curve:
    """One model's activations."""

    axis: Axis  # what varies
    value: float
    scale: Scale  # of layer dropout
    activations: list[list[float]] = field(default_factory=list)  # (steps, L), mean |x| of the residual stream
    losses: list[float] = field(default_factory=list)

    @property
    def last(self) -> list[float]:
        """After each layer, in the last step's forward."""
        return self.activations[-1]


def plan_curves(
    config: JobConfig, widths: list[int], depths: list[int], densities: list[float], scales: list[Scale]
) -> list[tuple[Curve, JobConfig]]:
    """A curve for each value of each axis, with its configuration; the other axes are those of `config`, dense.

    Raises ConfigError for sizes that cannot be.
    """
    args = model_args(config)
    found = []
    values_by_axis: dict[Axis, list] = {"width": widths, "depth": depths, "density": densities}
    for axis, values in values_by_axis.items():
        for scale in scales if axis == "density" else scales[:1]:
            for value in values:
                dim = int(value) if axis == "width" else args.dim
                sized = resized(config, dim, int(value) if axis == "depth" else args.n_layers)
                skips = sized.layer_dropout
                skips.p_max = round(1 - value, 6) if axis == "density" else 0.0
                skips.distribution, skips.schedule, skips.scale = "uniform", "constant", scale
                found.append((Curve(axis, value, scale), sized))
    return found


def measure(
    curve: Curve, config: JobConfig, data: Batches, device: torch.device, done: Callable[[], None] = lambda: None
) -> None:
    """Train the model of `curve` on `data` at a constant learning rate, and fill the curve in. `done` is called after
    each step."""
    model = data.model(config, device)
    now: dict[str, float] = {}

    def hook(name: str) -> Callable:
        def read(module, inputs, output) -> None:
            now[name] = output.detach().abs().mean().item()

        return read

    for name, block in model.layers.items():
        block.register_forward_hook(hook(name))
    for loss in train_briefly(model, config, data.batches, constant_lr=True):
        curve.activations.append([now[name] for name in model.layers])
        curve.losses.append(loss)
        done()


def spread(curves: list[Curve]) -> float:
    """How far the curves lie apart: the largest ratio of two of them at the same place of the stack, minus 1. Curves
    of other depths are compared at the end of the stack."""
    if len({len(curve.last) for curve in curves}) > 1:
        layers = [[curve.last[-1] for curve in curves]]
    else:
        layers = [list(layer) for layer in zip(*(curve.last for curve in curves), strict=True)]
    return max(max(layer) / min(layer) for layer in layers) - 1


def groups(curves: list[Curve]) -> dict[tuple[Axis, Scale], list[Curve]]:
    """The curves that are to lie together: by axis and scale."""
    found: dict[tuple[Axis, Scale], list[Curve]] = {}
    for curve in curves:
        found.setdefault((curve.axis, curve.scale), []).append(curve)
    return found


def plot_curves(curves: list[Curve], path: Path) -> None:
    """A panel for each axis and scale: activations after each layer in the last step, as a PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    panels = groups(curves)
    figure = Figure(figsize=(4.4 * len(panels), 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, ((axis, scale), members) in zip(all_axes, panels.items(), strict=True):
        for i, curve in enumerate(members):
            L = len(curve.last)
            color = colormaps["viridis"](i / max(1, len(members) - 1) * 0.9)
            places = [(layer + 1) / L for layer in range(L)]
            axes.plot(places, curve.last, "o-", markersize=3, color=color, label=f"{curve.value:g}")
        title = f"{axis}, scale {scale}" if axis == "density" else axis
        axes.set(title=f"{title}: apart by {100 * spread(members):.1f} %", xlabel="place in the stack (1: last layer)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(title=axis)
    all_axes[0].set_ylabel(f"mean |x| after {len(curves[0].activations)} steps")
    figure.savefig(path, dpi=150)

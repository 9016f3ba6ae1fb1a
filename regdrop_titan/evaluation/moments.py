"""Moments: how far dropout moves mean and variance of the pre-activations between training and evaluation (LG fig. 3;
spec sec. 7).

The pre-activations y are the outputs of each sublayer's input projections. Over tokens and masks, with sums over the
channels c of a projection:

    variance = sum_c |Var[y_train,c] - Var[y_eval,c]| / sum_c Var[y_eval,c]
    mean     = sum_c |E[y_train,c] - E[y_eval,c]| / sum_c |E[y_eval,c]|

A ratio of sums (chosen): in a mean of ratios the channels whose mean is near zero would count for most.

A finite number of masks gives a mismatch by itself. Its expected size, the noise floor, comes from the spread over
sequences, whose masks are independent: a channel's difference has the standard error `se_c`, and `E|N(0, se_c)|` is
`sqrt(2/pi) se_c`. The spread also holds how much a real mismatch differs between sequences, so the floor is rather too
high than too low.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchtitan.distributed import ParallelDims

from ..models import Decoder
from ..models.block import Residual
from ..models.initialization import canonical_name
from ..models.sharded import local
from ..seeds import derive_seed


@dataclass
class Mismatch:
    """Training against evaluation, of one projection's outputs."""

    variance: float  # sum_c |Var_train - Var_eval| / sum_c Var_eval
    variance_floor: float  # what the masks' noise alone would give; NaN of a single sequence
    variance_ratio: float  # sum_c Var_train / sum_c Var_eval
    mean: float  # sum_c |E_train - E_eval| / sum_c |E_eval|
    mean_floor: float
    mean_ratio: float  # sum_c E_train E_eval / sum_c E_eval^2


Placement = Literal["none", "pre_norm", "pre_linear", "vpad"]
Moments = dict[str, Mismatch]  # by projection, as "layers.3.attention.wq"


@dataclass
class Run:
    """The moments of one model under one placement."""

    label: str
    moments: Moments


def input_projections(parts: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The linear layers that read the sublayers' inputs, of a model or of its pipeline stages, by name. Mamba2's
    in_proj is four of them."""
    found: dict[str, nn.Module] = {}
    for part in parts:
        for path, residual in part.named_modules():
            if isinstance(residual, Residual):
                for projection in residual.inner.input_projections:
                    module = residual.inner.get_submodule(projection)
                    name = f"{canonical_name(path)}.{projection}"
                    linears = {f"{name}.{child}": linear for child, linear in module.named_children()}
                    found |= linears or {name: module}
    return found


def layer_and_projection(name: str) -> tuple[int, str]:
    """3 and "attention.wq" of "layers.3.attention.wq"."""
    _, layer, projection = name.split(".", 2)
    return int(layer), projection


class Recorder:
    """While open, keeps mean and variance over the tokens of each sequence of each projection's outputs, in fp64."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.projections = input_projections(parts)
        self.seen: dict[str, list[Tensor]] = {name: [] for name in self.projections}

    def __enter__(self) -> "Recorder":
        self.hooks = [
            module.register_forward_hook(functools.partial(self.record, name))
            for name, module in self.projections.items()
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def record(self, name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        variance, mean = torch.var_mean(local(output).double(), dim=1, correction=0)  # of (B, S, C)
        self.seen[name].append(torch.stack([mean, variance], dim=1))

    def take(self, n: int) -> dict[str, Tensor]:
        """Mean and variance of the last `n` sequences, (n, 2, C). There may be others: before its first micro-batch a
        pipeline may run a forward of its own, on whatever is in memory, by which its stages learn their shapes."""
        taken = {name: torch.cat(seen)[-n:] for name, seen in self.seen.items()}
        for seen in self.seen.values():
            seen.clear()
        return taken


class PairedSums:
    """Sums over sequences of one projection's moments in evaluation and training, fp64. A sequence counts once for
    each mask draw.

    A row is [a, s, da, ds]: the means over a sequence's tokens of y - shift and of its square in evaluation, and what
    training adds to them. `shift` (C,) is near each channel's mean, so that nothing cancels; the differences are
    exactly zero where dropout does nothing.
    """

    def __init__(self, shift: Tensor) -> None:
        C = len(shift)
        self.shift = shift
        self.count = shift.new_zeros(())
        self.total = shift.new_zeros(4, C)
        self.outer = shift.new_zeros(4, 4, C)  # of rows with themselves

    def add(self, evaluation: Tensor, training: Tensor) -> None:
        """Sequences as `Recorder` takes them, both (n, 2, C)."""
        before, after = (self.about_shift(moments) for moments in (evaluation, training))
        rows = torch.cat([before, after - before], dim=1)  # (n, 4, C)
        self.count += len(rows)
        self.total += rows.sum(0)
        self.outer += torch.einsum("nic,njc->ijc", rows, rows)

    def about_shift(self, moments: Tensor) -> Tensor:
        mean, variance = moments.unbind(1)
        a = mean - self.shift
        return torch.stack([a, variance + a.square()], dim=1)

    def all_reduce(self, group: dist.ProcessGroup) -> None:
        """Add the sums of all ranks, which must have the same shift."""
        for sums in (self.count, self.total, self.outer):
            dist.all_reduce(sums, group=group)

    def evaluation(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each channel in evaluation, (C,)."""
        a, s = self.total[:2] / self.count
        return self.shift + a, s - a.square()

    def differences(self) -> tuple[Tensor, Tensor]:
        """What training adds to mean and variance of each channel, (C,)."""
        a, _, da, ds = self.total / self.count
        return da, ds - da * (2 * a + da)

    def errors(self) -> tuple[Tensor, Tensor]:
        """Standard errors of `differences`, (C,): of the mean of da, and by the delta method. NaN of one sequence."""
        mean = self.total / self.count
        a, _, da, _ = mean
        # clamped: rounding may take what should be zero below it
        spread = self.outer / self.count - mean[:, None] * mean[None]  # (4, 4, C), covariances of rows
        of_mean = spread[2, 2].clamp(min=0)
        gradient = torch.stack([-2 * da, torch.zeros_like(a), -2 * (a + da), torch.ones_like(a)])  # of the variance's
        of_variance = torch.einsum("ic,ijc,jc->c", gradient, spread, gradient).clamp(min=0)
        return (of_mean / (self.count - 1)).sqrt(), (of_variance / (self.count - 1)).sqrt()

    def channel_sums(self) -> Tensor:
        """What a `Mismatch` is made of, (9,); those of different channels add up."""
        mean, variance = self.evaluation()
        d_mean, d_variance = self.differences()
        mean_error, variance_error = self.errors()
        noise = (2 / torch.pi) ** 0.5  # E|N(0, 1)|
        return torch.stack([
            d_variance.abs().sum(), noise * variance_error.sum(), d_variance.sum(), variance.sum(),
            d_mean.abs().sum(), noise * mean_error.sum(), mean.abs().sum(),
            (d_mean * mean).sum(), mean.square().sum(),
        ])  # fmt: skip


def mismatch(channel_sums: Tensor) -> Mismatch:
    """Of the sums over a projection's channels, (9,). NaN where evaluation gives nothing to divide by."""
    d_variance, variance_floor, signed, variance, d_mean, mean_floor, mean, product, square = channel_sums
    return Mismatch(
        variance=(d_variance / variance).item(), variance_floor=(variance_floor / variance).item(),
        variance_ratio=(1 + signed / variance).item(), mean=(d_mean / mean).item(),
        mean_floor=(mean_floor / mean).item(), mean_ratio=(1 + product / square).item(),
    )  # fmt: skip


def set_dropout(model: Decoder, placement: Placement, p: float) -> None:
    """Measure `model` under another placement or rate than it was trained with."""
    for module in model.modules():
        if isinstance(module, Residual):
            module.placement, module.p = placement, p
    model.set_dropout_rate(p)


@torch.no_grad()
def measure_moments(
    model: Decoder,
    batches: Sequence[Tensor],
    *,
    draws: int = 1,
    seed: int = 0,
    progress: Callable[[int], object] = lambda done: None,
) -> Moments:
    """The mismatch of every input projection of `model` under its own dropout, with every layer kept. Leaves the model
    in evaluation mode, and torch's generators re-seeded.

    Args:
        batches: tokens (B, S) on the model's device, all of one S.
        draws: masks drawn for each sequence; those of draw r of batch i are a function of (seed, i, r).
        progress: called after each draw with the number of its sequences.
    """
    sums: dict[str, PairedSums] = {}
    with Recorder([model]) as recorder:
        for i, tokens in enumerate(batches):
            model.eval()(tokens)
            evaluation = recorder.take(len(tokens))
            if i == 0:
                sums = {name: PairedSums(moments[:, 0].mean(0)) for name, moments in evaluation.items()}
            model.train()
            for draw in range(draws):
                torch.manual_seed(derive_seed("moments", seed, i, draw))
                model(tokens, scale=model.args.eval_scale)  # r_eval: layer dropout's scale is no matter of this
                for name, training in recorder.take(len(tokens)).items():
                    sums[name].add(evaluation[name], training)
                progress(len(tokens))
    model.eval()
    return {name: mismatch(paired.channel_sums()) for name, paired in sums.items()}


@contextlib.contextmanager
def uncompiled(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled blocks as they were before torch.compile, whose code does not call hooks that came after it.
    FlexAttention, compiled by itself, stays so: its eager form holds all scores."""
    blocks = [module for part in parts for module in part.modules() if isinstance(module, OptimizedModule)]
    compiled = [block.forward for block in blocks]
    for block in blocks:
        block.forward = block._orig_mod.__call__
    try:
        yield
    finally:
        for block, forward in zip(blocks, compiled, strict=True):
            block.forward = forward


@torch.no_grad()
def measure_in_training(
    parts: Sequence[nn.Module], forward: Callable[[], None], n: int, dims: ParallelDims, everyone: dist.ProcessGroup
) -> Moments:
    """The moments of one micro-batch of every data-parallel rank; each rank gets those of all layers. Leaves the model
    in training mode.

    Args:
        parts: this rank's model, or its pipeline stages.
        forward: runs the micro-batch through the model, in training mode under masks that it seeds.
        n: sequences of the micro-batch.
        everyone: all ranks, on the CPU.
    """
    with Recorder(parts) as recorder, uncompiled(parts):
        taken = []
        for training in (False, True):
            for part in parts:
                part.train(training)
            forward()
            taken.append(recorder.take(n))
    batch_mesh, tp_mesh = dims.get_optional_mesh("batch"), dims.get_optional_mesh("tp")
    own: Moments = {}
    for name, evaluation in taken[0].items():
        shift = evaluation[:, 0].mean(0)
        if batch_mesh is not None:
            dist.all_reduce(shift, group=batch_mesh.get_group())
            shift /= batch_mesh.size()
        paired = PairedSums(shift)
        paired.add(evaluation, taken[1][name])
        if batch_mesh is not None:
            paired.all_reduce(batch_mesh.get_group())
        sums = paired.channel_sums()
        if tp_mesh is not None:
            # other channels, or (Mamba2's bc) all of them on each rank, which leaves the ratios as they are
            dist.all_reduce(sums, group=tp_mesh.get_group())
        own[name] = mismatch(sums)
    by_rank: list[Moments] = [{}] * dist.get_world_size(everyone)
    dist.all_gather_object(by_rank, own, group=everyone)  # pipeline stages have other layers
    found = {name: value for moments in by_rank for name, value in moments.items()}
    return dict(sorted(found.items(), key=lambda item: layer_and_projection(item[0])[0]))


def mean_over_layers(moments: Moments) -> Moments:
    """Of each kind of projection, as "attention.wq", the mean of each number."""
    by_projection: dict[str, list[Mismatch]] = {}
    for name, value in moments.items():
        by_projection.setdefault(layer_and_projection(name)[1], []).append(value)
    return {
        projection: Mismatch(**{
            field.name: sum(getattr(value, field.name) for value in values) / len(values) for field in fields(Mismatch)
        })
        for projection, values in by_projection.items()
    }  # fmt: skip


def as_metrics(moments: Moments) -> dict[str, float]:
    """For the logs of a run: both mismatches of every projection, and their means over layers with the floors'."""
    layers = {
        f"moments/{kind}/{name}": getattr(value, kind)
        for name, value in moments.items()
        for kind in ("variance", "mean")
    }  # fmt: skip
    means = {
        f"moments/{kind}/{projection}": getattr(value, kind)
        for projection, value in mean_over_layers(moments).items()
        for kind in ("variance", "variance_floor", "mean", "mean_floor")
    }
    return layers | means


def plot_moments(runs: Sequence[Run], path: Path) -> None:
    """Both mismatches by layer as a PNG: a column a run, a line a projection, its noise floor dotted."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    projections = list(dict.fromkeys(layer_and_projection(name)[1] for run in runs for name in run.moments))
    colors = {projection: f"C{i}" for i, projection in enumerate(projections)}
    figure = Figure(figsize=(2.6 + 3.4 * len(runs), 6.2), layout="constrained")
    axes = figure.subplots(2, len(runs), sharex="col", sharey="row", squeeze=False)
    for column, run in enumerate(runs):
        for row, kind in enumerate(("mean", "variance")):
            draw_mismatch(axes[row, column], run.moments, kind, colors)
        axes[0, column].set_title(run.label, fontsize=9)
        axes[1, column].set_xlabel("layer")
    axes[0, 0].set_ylabel("mean: |train - eval| / |eval|")
    axes[1, 0].set_ylabel("variance: |train - eval| / eval")
    handles = [Line2D([], [], color=colors[p], marker="o", markersize=3.5, label=p) for p in projections]
    handles.append(Line2D([], [], color="gray", linestyle=":", label="noise floor"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=150)


def draw_mismatch(axes: Any, moments: Moments, kind: str, colors: dict[str, str]) -> None:
    """The "mean" or "variance" of each projection by layer, on a log scale, and its floor. What is exactly zero, before
    the first mask, is left out."""
    for projection, color in colors.items():
        by_layer = {
            layer: value
            for name, value in moments.items()
            for layer, of in [layer_and_projection(name)]
            if of == projection
        }  # fmt: skip
        layers = sorted(by_layer)
        for key, style in ((kind, "o-"), (f"{kind}_floor", ":")):
            values = [getattr(by_layer[layer], key) or math.nan for layer in layers]
            axes.plot(layers, values, style, color=color, markersize=3.5, linewidth=1.2)
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)

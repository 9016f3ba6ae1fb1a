"""Layer dropout: how often each layer drops a sequence, and which (DD secs 4, 6, 7).

`H_{l+1} = H_l + r M_l f_l(H_l)`, with `M_l` in {0, 1}^B: a layer skips whole sequences of the batch. Rates are
functions of depth and time (`layer_rates`), masks pure functions of (seed, step, global sequence index, layer)
(`keep_mask`). The trainer draws the mask of the whole global batch and passes each rank its rows; no module draws or
stores one.
"""

import hashlib
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..opaque import opaque

DISTRIBUTIONS = ("uniform", "increasing", "alternating")
SCHEDULES = ("constant", "increasing", "decreasing")


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def time_factor(schedule: str, step: int, total_steps: int) -> float:
    """The share of a rate that holds at `step`: 1, `t/(T-1)` (ITS) or `1 - t/(T-1)` (DTS).

    Args:
        step: 0-based; from `T-1` on the last value holds. `T = 1` gives the schedule's first value.
    """
    _check("schedule", schedule, SCHEDULES)
    if schedule == "constant":
        return 1.0
    progress = min(step, total_steps - 1) / (total_steps - 1) if total_steps > 1 else 0.0
    return progress if schedule == "increasing" else 1.0 - progress


def layer_rates(distribution: str, schedule: str, p_max: float, n_layers: int, step: int, total_steps: int) -> Tensor:
    """Drop rate of every layer at a step: (L,) fp64 (DD secs 4 and 6).

    Args:
        distribution: over depth, "uniform" `p_max`, "increasing" (ILD) `p_max l/(L-1)`, "alternating" (ALD) `p_max` in
            odd layers and 0 in even ones. One layer under ILD has rate 0.
        schedule: over time, "constant", "increasing" (ITS), "decreasing" (DTS), see `time_factor`.
        p_max: in [0, 1).
        step: 0-based.
        total_steps: T.

    Raises:
        ValueError: an unknown name, or a value out of range.
    """
    _check("distribution", distribution, DISTRIBUTIONS)
    if not 0.0 <= p_max < 1.0:
        raise ValueError(f"p_max must be in [0, 1), got {p_max}")
    if n_layers < 1 or total_steps < 1 or step < 0:
        raise ValueError(
            f"n_layers {n_layers} and total_steps {total_steps} must be at least 1, step {step} at least 0"
        )
    layer = torch.arange(n_layers, dtype=torch.float64)
    depth = {
        "uniform": torch.ones_like(layer),
        "increasing": layer / max(n_layers - 1, 1),
        "alternating": layer % 2,
    }[distribution]
    return p_max * time_factor(schedule, step, total_steps) * depth


def mean_rate(distribution: str, schedule: str, p_max: float, n_layers: int, total_steps: int) -> float:
    """`P_bar`, the mean rate over depth and time: the share of non-embedding training FLOPs saved (DD sec. 6)."""
    depth = layer_rates(distribution, "constant", p_max, n_layers, 0, total_steps).mean().item()
    time = 0.5 * (time_factor(schedule, 0, total_steps) + time_factor(schedule, total_steps - 1, total_steps))
    return depth * time


def _uniforms(seed: int, step: int, rows: int, columns: int) -> np.ndarray:
    """One uniform for each (sequence, column): (rows, columns) fp64, row i the same however many rows there are.

    A counter-based generator (Philox) whose 128-bit key is a hash of seed and step. Not its counter: streams whose
    counters are one apart overlap.
    """
    key = hashlib.blake2b(repr(("layer dropout", seed, step)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))
    return generator.random((rows, columns))


def keep_mask(
    rates: Tensor,
    sequences: int,
    *,
    seed: int,
    step: int,
    granularity: str = "sequence",
    sampling: str = "bernoulli",
    group: int | None = None,
) -> Tensor:
    """Which sequences each layer keeps, for the whole global batch: bool, True = kept.

    One uniform a sequence and layer is compared with the rate, so runs of different rates share their randomness.

    Args:
        rates: (L,), or (L, 2) for independent attention and feed-forward masks (`unit = "sublayer"`).
        sequences: the global batch; row = global sequence index.
        granularity: "sequence", or "batch": one draw for all sequences.
        sampling: "bernoulli": independent draws. "balanced": the same marginal probabilities, but every group drops the
            same number of a layer's sequences, `floor(pB)` or `ceil(pB)`. Which of the two is one systematic rounding
            a step, so that the total over layers is within one of its expectation; which ones, each group draws freely.
        group: B, rows of a micro-batch of a rank; needed by "balanced", must divide `sequences`.

    Returns:
        (sequences, L) or (sequences, L, 2).

    Raises:
        ValueError: rates outside [0, 1), unknown names, or a combination that cannot be.
    """
    _check("granularity", granularity, ("sequence", "batch"))
    _check("sampling", sampling, ("bernoulli", "balanced"))
    p = np.asarray(rates, dtype=np.float64)
    if not ((p >= 0) & (p < 1)).all():
        raise ValueError(f"rates must be in [0, 1), got {p.tolist()}")
    columns = p.reshape(-1)
    if sampling == "bernoulli":
        rows = 1 if granularity == "batch" else sequences
        keep = _uniforms(seed, step, rows, len(columns)) >= columns
        keep = np.broadcast_to(keep, (sequences, len(columns)))
    else:
        if granularity == "batch":
            raise ValueError("granularity 'batch' drops all sequences alike: sampling must be 'bernoulli'")
        if group is None or group < 1 or sequences % group:
            raise ValueError(f"balanced sampling needs a group that divides the {sequences} sequences, got {group}")
        keep = _balanced(columns, sequences, group, seed, step)
    return torch.from_numpy(np.array(keep)).reshape(sequences, *p.shape)


def _balanced(p: np.ndarray, sequences: int, group: int, seed: int, step: int) -> np.ndarray:
    uniforms = _uniforms(seed, step, sequences, len(p))
    rounding = _uniforms(seed, -1 - step, 1, 1).item()  # a stream of its own: no step is negative
    whole = np.floor(p * group)
    cumulative = np.cumsum(p * group - whole) + rounding
    up = np.diff(np.floor(cumulative), prepend=np.floor(rounding))
    dropped = (whole + up).astype(np.int64)  # of every group, by column
    # within a group and column, drop the sequences with the smallest uniforms
    ranks = uniforms.reshape(sequences // group, group, len(p)).argsort(axis=1).argsort(axis=1)
    return (ranks >= dropped).reshape(sequences, len(p))


# Skipping -------------------------------------------------------------------------------------------------------


@opaque
class Kept:
    """What one layer of one forward keeps."""

    rows: Tensor | None = None  # indices of the kept sequences (n,) int64 on the device; None: all
    keep: Tensor | None = None  # (B,) bool on the device: compute every sequence and mask the update instead
    scale: Tensor | None = None  # r, 0-d fp32 (fp64 in an fp64 model); None: 1


def kept_rows(keep: Tensor) -> tuple[tuple[int, ...], ...]:
    """The kept sequences of each column of a CPU mask (B, columns), as plain ints, which FSDP2 does not move."""
    return tuple(tuple(column.nonzero().flatten().tolist()) for column in keep.T)


def scaled(update: Tensor, scale: Tensor | None) -> Tensor:
    """`r update` in fp32 at least, in the dtype of `update`."""
    return update if scale is None else (update.to(scale.dtype) * scale).to(update.dtype)


def skip(
    update: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, kept: Kept, parameters: Iterable[Tensor]
) -> Tensor:
    """`x` plus the update of its kept rows; dropped rows pass bit for bit, at no cost, forward or backward.

    Args:
        update: maps rows of `x` (n, S, d) and their indices (None: all) to what is added to them, scale included.
        x: (B, S, d).
        parameters: those of `update`. With no row kept they are touched without being read: each then gets a zero
            gradient, not None, and a rank that keeps nothing still takes part in every collective of FSDP and DDP.
    """
    if kept.keep is not None:
        return x + kept.keep[:, None, None].to(x.dtype) * update(x, None)
    rows = kept.rows
    if rows is None:
        return x + update(x, None)
    if rows.shape[0] == 0:
        empty = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
        return x + sum(p.flatten()[:0].sum() for p in empty).to(x.dtype)
    # index_add, out of place, was the fastest exact way back; FSDP2 loses a hook when an output is changed in place
    return x.index_add(0, rows, update(x.index_select(0, rows), rows).to(x.dtype))


def lock_step_time(rates: Tensor, group: int, ranks: int, sampling: str) -> float:
    """Expected time of the layers of a step, as a share of the dense one, when `ranks` wait for each other at each.

    A layer then lasts as long as on the rank that kept most of its `group` sequences: with independent draws
    `E[max over ranks of Binomial(B, 1-p)] / B`, with balanced ones `1-p`.
    """
    _check("sampling", sampling, ("bernoulli", "balanced"))
    p = np.asarray(rates, dtype=np.float64)[:, None]  # (L, 1)
    if sampling == "balanced":
        return float(1.0 - p.mean())
    k = np.arange(group + 1)
    ways = np.array([math.comb(group, int(i)) for i in k], dtype=np.float64)
    probability = ways * (1.0 - p) ** k * p ** (group - k)  # (L, B+1), of k kept
    all_at_most = np.minimum(probability.cumsum(axis=1), 1.0) ** ranks
    return float((1.0 - all_at_most[:, :-1]).sum(axis=1).mean() / group)  # E[max] = sum of P(max > k)

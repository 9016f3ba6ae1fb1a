"""How long steps take with layer dropout where ranks wait for each other: a simulation of masks that are really drawn.

Under FSDP2 the ranks meet at every layer, to gather its weights and to scatter their gradients. So a layer lasts as
long as on the rank that kept most of its sequences, and what others save is lost. A layer of a rank takes `fixed`
seconds if it keeps any sequence, `sequence` more for each, forward and backward; the meeting itself takes `meeting`
seconds that no computation hides.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..regularization import keep_mask


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer, forward and backward."""

    fixed: float
    sequence: float  # more for each sequence that is kept
    meeting: float = 0.0

    @classmethod
    def fit(cls, kept: list[int], seconds: list[float]) -> "LayerTime":
        """The line through measured times of layers that keep so many sequences, at least one; neither part is
        negative."""
        slope, intercept = np.polyfit(kept, seconds, 1)
        if intercept < 0:
            return cls(0.0, float(np.dot(kept, seconds) / np.dot(kept, kept)))
        return cls(float(intercept), max(float(slope), 0.0))


def step_seconds(kept: np.ndarray, time: LayerTime, devices: int | None = None) -> float:
    """Seconds of a step.

    Args:
        kept: (ranks, L), sequences that each rank keeps of each layer.
        devices: that compute for all ranks, as the cores of one machine do for processes: a layer then takes no less
            than its work on all of them. None: a rank has its own.
    """
    compute = np.where(kept > 0, time.fixed + time.sequence * kept, 0.0)
    slowest = compute.max(0)
    if devices is not None:
        slowest = np.maximum(slowest, compute.sum(0) / devices)
    return float(slowest.sum() + time.meeting * kept.shape[1])


def masks(rates: Tensor, ranks: int, batch: int, sampling: str, steps: int, seed: int = 0) -> Iterator[np.ndarray]:
    """(ranks, L) of each of `steps` steps: what `batch` sequences of each rank keep, `rates` being (L,)."""
    for step in range(steps):
        keep = keep_mask(rates, ranks * batch, seed=seed, step=step, sampling=sampling, group=batch)
        yield keep.view(ranks, batch, -1).sum(1).numpy()


@dataclass(frozen=True)
class Outcome:
    """Shares of the dense step."""

    computed: float  # of its layers' sequences
    time: float
    time_saved_of_compute_saved: float


def simulate(
    rates: Tensor, ranks: int, batch: int, sampling: str, time: LayerTime, steps: int, devices: int | None = None
) -> Outcome:
    """The mean over `steps` steps, masks drawn as in training."""
    dense = step_seconds(np.full((ranks, len(rates)), batch), time, devices)
    kept = list(masks(rates, ranks, batch, sampling, steps))
    share = float(np.mean([step_seconds(each, time, devices) for each in kept])) / dense
    computed = float(np.mean(kept)) / batch
    return Outcome(computed, share, (1 - share) / (1 - computed) if computed < 1 else float("nan"))

"""Rows of the table: what a check or a timing has found, and on what machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

PASSED, FAILED, MEASURED, OUT_OF_TIME = "passed", "FAILED", "measured", "not run: out of time"
NEEDS_CUDA, NEEDS_FLA = "needs CUDA", "needs fla-core"


@dataclass(frozen=True)
class Machine:
    """Where parts run, and at which sizes."""

    device: torch.device
    output: Path  # folder of logs and runs
    small: bool  # a rehearsal's sizes, for a CPU
    backend: str = "inductor"  # of torch.compile in checks

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


@dataclass(frozen=True)
class Row:
    """One line of the table. `status` is one of the names above; anything that ran is passed, FAILED or measured."""

    name: str
    status: str
    error: float | None = None
    bound: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    message: str = ""


def relative_error(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """`|got - expected| / |expected|` in fp64, with `least` in place of a smaller norm; NaN stays NaN."""
    if got.shape != expected.shape:
        raise ValueError(f"shape {tuple(got.shape)} in place of {tuple(expected.shape)}")
    expected = expected.detach().double()
    difference = got.detach().to(expected.device, torch.float64) - expected
    scale = max(expected.norm().item(), least)
    return difference.norm().item() / scale if scale else difference.norm().item()


def bounded(name: str, error: float, bound: float, message: str = "") -> Row:
    """Passed where `error` is at most `bound`, which NaN is not."""
    finite = math.isfinite(error)
    return Row(
        name,
        PASSED if error <= bound else FAILED,
        error=error if finite else None,
        bound=bound,
        message=message if finite else f"the error is {error}",
    )


def compared(name: str, got: Sequence[Tensor], expected: Sequence[Tensor], bound: float, share: float = 0.0) -> Row:
    """The largest relative error of tensors. `share`: of the largest norm among them, below which none counts, for
    gradients that are next to nothing."""
    least = share * max(tensor.detach().double().norm().item() for tensor in expected)
    errors = [relative_error(a, b, least) for a, b in zip(got, expected, strict=True)]
    return bounded(name, math.nan if any(map(math.isnan, errors)) else max(errors), bound)


def agreed(name: str, held: bool, message: str) -> Row:
    """A check with nothing to measure; `message` says what is wrong."""
    return Row(name, PASSED if held else FAILED, message="" if held else message)

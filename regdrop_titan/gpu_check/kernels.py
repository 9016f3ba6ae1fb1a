"""Checks of single operations: FlexAttention, Mamba2's scan, the loss in pieces, dropout."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ..models.attention import AttentionContext, entmax15_attention, flex_attention_with_slopes, sdpa_attention
from ..models.head import Head
from ..models.positions import (
    Window,
    attention_bias,
    causal_block_mask,
    document_block_mask,
    document_ids,
    head_slopes,
    head_windows,
    slope_tensor,
)
from ..models.scan import chunked_scan, kernel_scan
from ..regularization import inverted_dropout, vpad
from .rows import NEEDS_CUDA, NEEDS_FLA, Machine, Row, agreed, bounded, compared

SIGMAS = 6.0  # of a mean over random draws, among some dozens of them


def has_fla() -> bool:
    return importlib.util.find_spec("fla") is not None


# FlexAttention against SDPA -----------------------------------------------------------------------------------------

# fp32: kernels may multiply in TF32. bf16: its rounding, 2^-9, of inputs, weights and outputs
FLEX_BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class FlexCase:
    """What FlexAttention computes. `window`: keys, or ("cut", nats) for NAPE's local heads."""

    S: int
    window: int | tuple[str, float] | None = None
    dtype: torch.dtype = torch.float32
    slopes: bool = True
    grouped: bool = False  # three query heads a key head
    documents: bool = False
    head_dim: int = 64
    scale: float | None = None

    @property
    def name(self) -> str:
        parts = [f"FlexAttention S {self.S}"]
        if isinstance(self.window, tuple):
            parts.append(f"heads cut at {self.window[1]:g} nats")
        elif self.window is not None:
            parts.append(f"window {self.window}")
        parts += [] if self.slopes else ["no slopes"]
        parts += ["grouped queries"] if self.grouped else []
        parts += ["documents"] if self.documents else []
        parts += [f"head dimension {self.head_dim}"] if self.head_dim != 64 else []
        parts += ["1/d"] if self.scale is not None else []
        return ", ".join([*parts, str(self.dtype).removeprefix("torch.")])


# 1025 is no multiple of a block
FLEX_CASES = (
    *(FlexCase(S) for S in (256, 1025, 2048)),
    *(FlexCase(S, 200) for S in (256, 1025)),
    *(FlexCase(S, ("cut", 10.0)) for S in (256, 1025, 2048)),
    FlexCase(2048, ("cut", 40.0)),
    FlexCase(2048, ("cut", 40.0), torch.bfloat16),
    FlexCase(2048, dtype=torch.bfloat16, scale=1 / 64),
    FlexCase(2048, ("cut", 40.0), torch.bfloat16, grouped=True, head_dim=128),
    FlexCase(1025, 200, slopes=False),
    FlexCase(1025, documents=True),
    FlexCase(1025, ("cut", 10.0), documents=True),
)
SMALL_FLEX_CASES = (
    FlexCase(64, head_dim=16),
    FlexCase(129, 20, head_dim=16),
    FlexCase(129, ("cut", 10.0), head_dim=16),
    FlexCase(129, ("cut", 10.0), grouped=True, head_dim=16, scale=1 / 16),
    FlexCase(129, 20, slopes=False, head_dim=16),
    FlexCase(129, ("cut", 10.0), documents=True, head_dim=16),
)


def flex_attention_against_sdpa(machine: Machine) -> list[Row]:
    """Forward and backward, compiled, against SDPA with the bias in fp64. A CPU has the forward only, and here one case
    of it compiled."""
    cases = SMALL_FLEX_CASES if machine.small else FLEX_CASES
    rows = []
    for number, case in enumerate(cases):
        torch._dynamo.reset()  # beyond 8 graphs torch would go on uncompiled
        rows += _flex_rows(machine, case, compiled=machine.cuda or (number == 0 and machine.backend == "inductor"))
    return rows


def _flex_rows(machine: Machine, case: FlexCase, compiled: bool) -> list[Row]:
    device, generator = machine.device, machine.generator()
    B, H, S = 2, 12, case.S
    slopes = head_slopes("nape", "inverse", H) if case.slopes else None
    window: Window = head_windows(slopes, case.window[1], None, S) if isinstance(case.window, tuple) else case.window
    q, k, v, d_out = (
        torch.randn(B, heads, S, case.head_dim, device=device, generator=generator).to(case.dtype)
        for heads in (H, *(H // 3 if case.grouped else H,) * 2, H)
    )
    bias = attention_bias(slopes, window, S, device)
    context = AttentionContext(slopes=None if slopes is None else slope_tensor(slopes, device), window=window)
    if case.documents:
        context.documents = document_ids(torch.randint(0, 60, (B, S), device=device, generator=generator), 0)
        context.block_mask = document_block_mask(context.documents, window)
        bias = bias.masked_fill(context.documents[:, None, :, None] != context.documents[:, None, None, :], -torch.inf)
    else:
        context.block_mask = causal_block_mask(window, S, device)
    exact = exact_q, exact_k, exact_v = [t.double().requires_grad_() for t in (q, k, v)]
    expected = sdpa_attention(exact_q, exact_k, exact_v, AttentionContext(bias=bias), case.scale)

    def flex(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        if compiled:
            return flex_attention_with_slopes(q, k, v, context, case.scale)
        return flex_attention_with_slopes(q, k, v, context, case.scale, flex_attention)

    bound, name = FLEX_BOUNDS[case.dtype], case.name + ("" if compiled else ", eager")
    if not machine.cuda:
        with torch.no_grad():
            out = flex(q, k, v, context)
        rows = [compared(f"{name}: forward", [out], [expected], bound), Row(f"{name}: backward", NEEDS_CUDA)]
    else:
        for t in (q, k, v):
            t.requires_grad_()
        out = flex(q, k, v, context)
        gradients = torch.autograd.grad(out, (q, k, v), d_out)
        expected_gradients = torch.autograd.grad(expected, exact, d_out.double())
        rows = [
            compared(f"{name}: forward", [out], [expected], bound),
            compared(f"{name}: backward", gradients, expected_gradients, bound),
        ]
    if case.documents:  # the kept rows of layer dropout take their own blocks and documents along
        kept = torch.tensor([1], device=device)
        with torch.no_grad():
            out = flex(q[kept], k[kept], v[kept], context.of_rows(kept))
        rows.append(compared(f"{name}: one row of the batch", [out], [expected[kept]], bound))
    return rows


# Mamba2's scan ------------------------------------------------------------------------------------------------------


def scan_against_fp64(machine: Machine) -> list[Row]:
    """fla-core's kernels, and the plain scan on this device, against the plain scan in fp64."""
    rows = []
    # the kernels multiply fp32 in TF32
    bounds = {
        "plain": {torch.float32: 1e-4, torch.bfloat16: 3e-2},
        "kernels": {torch.float32: 1e-2, torch.bfloat16: 5e-2},
    }
    scans: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {"plain": (chunked_scan, (64,))}
    if machine.cuda and has_fla():
        scans["kernels"] = (kernel_scan, ())
    else:
        rows.append(Row("scan, kernels", NEEDS_FLA if machine.cuda else NEEDS_CUDA))
    sizes = [(65, 4, 16, 2, 32)] if machine.small else [(S, 24, 64, 1, 128) for S in (1, 65, 1024)]
    sizes += [] if machine.small else [(200, 16, 64, 2, 128)]
    for dtype in (torch.float32, torch.bfloat16):
        for S, H, P, G, N in sizes:
            expected = _scanned(machine, chunked_scan, (64,), dtype, torch.float64, S, H, P, G, N)
            for label, (scan, chunk) in scans.items():
                got = _scanned(machine, scan, chunk, dtype, dtype, S, H, P, G, N)
                name = f"scan, {label}, S {S}, {G} groups, {str(dtype).removeprefix('torch.')}"
                rows.append(compared(name, got, expected, bounds[label][dtype]))
    return rows


def _scanned(machine: Machine, scan, chunk, rounded, dtype, S: int, H: int, P: int, G: int, N: int) -> list[Tensor]:
    """Outputs, final state and gradients, of the same inputs rounded to one dtype and computed in another; steps,
    decays and states are fp32 at least."""
    n, device, generator = 2, machine.device, machine.generator()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    x, B, C, d_y = draw(n, S, H, P), draw(n, S, G, N), draw(n, S, G, N), draw(n, S, H, P)
    dt = F.softplus(draw(n, S, H) - 3)
    A, state = -15 * torch.rand(H, device=device, generator=generator) - 1, draw(n, H, P, N)
    starts = torch.rand(n, S, device=device, generator=generator) < 0.01
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [t.to(rounded).to(dtype) for t in (x, B, C)] + [t.to(wide) for t in (dt, A, state)]
    inputs = [t.clone().requires_grad_() for t in inputs]
    x, B, C, dt, A, state = inputs
    y, final = scan(x, dt, A, B, C, *chunk, state, starts)
    return [y, final, *torch.autograd.grad((y * d_y.to(y.dtype)).sum() + final.sum(), inputs)]


# The loss in pieces -------------------------------------------------------------------------------------------------


def loss_in_pieces(machine: Machine) -> list[Row]:
    """Value and gradients against the whole loss in fp64."""
    T, d, V = (60, 16, 100) if machine.small else (4096, 768, 32000)
    device, generator = machine.device, machine.generator()
    h = torch.randn(2, T // 2, d, device=device, generator=generator)
    weight = torch.randn(V, d, device=device, generator=generator) * d**-0.5
    labels = torch.randint(0, V, (2, T // 2), device=device, generator=generator)
    labels[0, : T // 8] = -100
    rows = []
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        exact_h, exact_weight = (t.to(dtype).double().requires_grad_() for t in (h, weight))
        logits = (exact_h @ exact_weight.T).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        expected = [loss, *torch.autograd.grad(loss, (exact_h, exact_weight))]
        for pieces in (1, 7):
            head = Head(d, V).to(device, dtype)
            with torch.no_grad():
                head.weight.copy_(weight)
            own = h.to(dtype, copy=True).requires_grad_()
            got = head(own, labels=labels, pieces=pieces)
            gradients = torch.autograd.grad(got, (own, head.weight))
            name = f"loss in {pieces} pieces, {str(dtype).removeprefix('torch.')}"
            rows.append(compared(name, [got, *gradients], expected, bound))
    return rows


# Dropout ------------------------------------------------------------------------------------------------------------


def deviation(draws: Tensor, expected: Tensor) -> float:
    """How far the mean over `draws` (M, ...) lies from `expected` (...), in its own standard errors, at most."""
    error = draws.std(0) / len(draws) ** 0.5
    return ((draws.mean(0) - expected).abs() / error.clamp_min(1e-12)).max().item()


def dropout_statistics(machine: Machine) -> list[Row]:
    """Mean and variance of each token over masks and channels, eager and compiled; masks that differ from draw to draw
    and are the same for the same seed."""
    tokens, d, M, p = (6, 256, 200, 0.3) if machine.small else (16, 768, 1000, 0.3)
    x = torch.randn(tokens, d, device=machine.device, generator=machine.generator())
    x = x + torch.linspace(-1, 1, tokens, device=machine.device)[:, None]  # means other than 0
    mean, square = x.double().mean(-1), x.double().square().mean(-1)
    var = square - mean**2
    rows = []
    for label, drop, expected_var in (
        ("VPAD", vpad, var),
        ("inverted dropout", inverted_dropout, square / (1 - p) - mean**2),
    ):
        for mode in ("eager", "compiled"):
            torch._dynamo.reset()
            function = drop if mode == "eager" else torch.compile(drop, backend=machine.backend)
            torch.manual_seed(1)
            drawn = [function(x, p) for _ in range(M)]
            z = torch.stack(drawn).double()  # (M, tokens, d)
            name = f"{label}, {mode}"
            rows.append(bounded(f"{name}: mean, in standard errors", deviation(z.mean(-1), mean), SIGMAS))
            spread = (z - mean[:, None]).square().mean(-1)
            rows.append(bounded(f"{name}: variance, in standard errors", deviation(spread, expected_var), SIGMAS))
            rows.append(agreed(f"{name}: another mask each time", not torch.equal(z[0], z[1]), "two draws are equal"))
            torch.manual_seed(1)
            again = torch.equal(function(x, p), drawn[0])
            rows.append(agreed(f"{name}: the same mask of the same seed", again, "the same seed gave another mask"))
    return rows + _attention_dropout(machine, p)


def _attention_dropout(machine: Machine, p: float) -> list[Row]:
    """The mean over draws of attention with dropout is attention without."""
    S, M = (48, 200) if machine.small else (256, 1000)
    q, k, v = (torch.randn(1, 4, S, 16, device=machine.device, generator=machine.generator(n)) for n in range(3))
    slopes = head_slopes("nape", "inverse", 4)
    rows = []
    for label, attend, bias in (
        ("SDPA, plain causal", sdpa_attention, None),
        ("SDPA with a bias", sdpa_attention, attention_bias(slopes, None, S, machine.device)),
        ("entmax15", entmax15_attention, None),
    ):
        context = AttentionContext(bias=bias)
        draws = torch.stack([attend(q, k, v, context, dropout_p=p).double() for _ in range(M)])
        expected = attend(q, k, v, context).double()
        # the first positions have few keys, and their means are no normal variables
        z = deviation(draws[..., S // 2 :, :].mean((-1, -2)), expected[..., S // 2 :, :].mean((-1, -2)))
        rows.append(bounded(f"attention dropout, {label}: mean, in standard errors", z, SIGMAS))
        differs = not torch.equal(draws[0], draws[1])
        rows.append(agreed(f"attention dropout, {label}: another mask each time", differs, "two draws are equal"))
    return rows

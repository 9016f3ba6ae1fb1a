"""Mamba2's scan against the recurrence written out step by step, and the whole model against transformers'."""

import pytest
import torch
import torch.nn.functional as F

from regdrop_titan.models import ssd_scan
from regdrop_titan.models.mamba2 import CausalConv

LENGTHS = (1, 63, 64, 65, 200, 1000)


def recurrence(x, dt, A, B, C, D=None, initial_state=None, starts=None):
    """h = exp(dt A) h + dt x (outer) B, y = C h + D x, token by token."""
    n, S, H, P = x.shape
    G = B.shape[2]
    h = x.new_zeros(n, H, P, B.shape[3]) if initial_state is None else initial_state
    outputs = []
    for t in range(S):
        if starts is not None:
            h = torch.where(starts[:, t, None, None, None], torch.zeros_like(h), h)
        Bt, Ct = (m[:, t].repeat_interleave(H // G, dim=1) for m in (B, C))  # (B, H, N)
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        h = decay * h + (dt[:, t, :, None] * x[:, t])[..., None] * Bt[:, :, None]
        y = (h * Ct[:, :, None]).sum(-1)
        outputs.append(y if D is None else y + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1), h


def inputs(S, *, G=1, dtype=torch.float64, resets=0.0, state=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    n, H, P, N = 2, 4, 8, 16

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    arguments = {
        "x": randn(n, S, H, P), "dt": F.softplus(randn(n, S, H)).detach().requires_grad_(),
        "A": (-torch.rand(H, generator=g, dtype=torch.float64) * 15 - 1).to(dtype).requires_grad_(),
        "B": randn(n, S, G, N), "C": randn(n, S, G, N), "D": randn(H),
    }  # fmt: skip
    if state:
        arguments["initial_state"] = randn(n, H, P, N)
    if resets:
        arguments["starts"] = torch.rand(n, S, generator=g) < resets
    return arguments


CASES = {
    "plain": {}, "groups": {"G": 2}, "state": {"state": True}, "resets": {"resets": 0.1, "state": True},
    "reset_everywhere": {"resets": 1.0, "state": True},
}  # fmt: skip


@pytest.mark.parametrize(("S", "case"), [(S, case) for S in LENGTHS[:-1] for case in CASES] + [(LENGTHS[-1], "resets")])
def test_scan_is_the_recurrence(S, case):
    """fp64 to 1e-10, outputs, final state and all gradients, for every chunk size."""
    arguments = inputs(S, **CASES[case])
    leaves = [t for t in arguments.values() if t.dtype.is_floating_point]
    y, state = recurrence(**arguments)
    cotangents = torch.randn_like(y), torch.randn_like(state)
    expected = torch.autograd.grad((y, state), leaves, cotangents)
    for chunk in (16, 100, 256):
        z, end = ssd_scan(**arguments, chunk_size=chunk)
        torch.testing.assert_close(z, y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(end, state, rtol=1e-10, atol=1e-10)
        for a, b in zip(torch.autograd.grad((z, end), leaves, cotangents), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("S", LENGTHS)
def test_scan_in_fp32(S):
    """To 1e-4 of the fp64 recurrence, gradients as well, with resets and an initial state."""
    arguments = inputs(S, resets=0.02, state=True)
    single = {k: t.detach().float().requires_grad_() if t.is_floating_point() else t for k, t in arguments.items()}
    y, state = recurrence(**arguments)
    z, end = ssd_scan(**single)
    assert z.dtype == end.dtype == torch.float32
    torch.testing.assert_close(z.double(), y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end.double(), state, rtol=1e-4, atol=1e-4)
    both = [[t for t in a.values() if t.is_floating_point()] for a in (single, arguments)]
    grads = [torch.autograd.grad(out.sum(), leaves) for out, leaves in zip((z, y), both, strict=True)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def test_large_decays_stay_finite():
    """Report M3: exp of a difference of cumulative sums overflows above the diagonal."""
    arguments = inputs(256)
    arguments["dt"] = (arguments["dt"] * 50).detach().requires_grad_()
    single = {k: t.detach().float().requires_grad_() for k, t in arguments.items()}
    y, _ = ssd_scan(**single)
    grads = torch.autograd.grad(y.sum(), list(single.values()))
    assert y.isfinite().all() and all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(y.double(), recurrence(**arguments)[0], rtol=1e-4, atol=1e-3)


def test_states_are_handed_on():
    """Two halves, the second from the first's final state, are the whole; in any cut."""
    arguments = inputs(150, resets=0.03)
    y, state = ssd_scan(**arguments)
    for cut in (1, 64, 149):
        parts = [{k: t[:, part] if k in ("x", "dt", "B", "C", "starts") else t for k, t in arguments.items()}
                 for part in (slice(cut), slice(cut, None))]  # fmt: skip
        first, between = ssd_scan(**parts[0], chunk_size=32)
        second, end = ssd_scan(**parts[1], initial_state=between, chunk_size=32)
        torch.testing.assert_close(torch.cat([first, second], 1), y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(end, state, rtol=1e-10, atol=1e-10)


def test_an_empty_batch_and_wrong_arguments():
    arguments = {k: t[:0] if k in ("x", "dt", "B", "C") else t for k, t in inputs(70).items()}
    y, state = ssd_scan(**arguments)
    assert y.shape == (0, 70, 4, 8) and state.shape == (0, 4, 8, 16)
    with pytest.raises(ValueError, match="4 heads: must be a multiple of the 3 groups"):
        ssd_scan(**inputs(8, G=3))
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        ssd_scan(**inputs(8), chunk_size=0)


@pytest.mark.parametrize("S", [1, 2, 3, 9])
def test_convolution(S):
    """Against the sum written out; nothing is read across a document's beginning, what came before is the state."""
    conv = CausalConv(5, 4).double()
    torch.nn.init.normal_(conv.weight), torch.nn.init.normal_(conv.bias)
    g = torch.Generator().manual_seed(S)
    x, state = (
        torch.randn(3, S, 5, generator=g, dtype=torch.double),
        torch.randn(3, 3, 5, generator=g, dtype=torch.double),
    )
    starts = torch.rand(3, S, generator=g) < 0.3
    for cuts in (starts, torch.zeros_like(starts), None):
        expected = torch.zeros_like(x)
        for b in range(3):
            for t in range(S):
                total = conv.bias.detach().clone()
                for lag in range(4):
                    crossed = cuts is not None and cuts[b, max(t - lag + 1, 0) : t + 1].any()
                    if not crossed:
                        total += conv.weight[:, 3 - lag].detach() * (x[b, t - lag] if t >= lag else state[b, t - lag])
                expected[b, t] = F.silu(total)
        torch.testing.assert_close(conv(x, cuts, state), expected, rtol=1e-12, atol=1e-12)

"""Mamba2's scan against the recurrence written out step by step; the model's sizes, masks, documents and dropout."""

import re

import pytest
import torch
import torch.nn.functional as F

from regdrop_titan.models import Decoder, build_model, flavor_args, ssd_scan
from regdrop_titan.models.mamba2 import CausalConv, Passed

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


# The model ---------------------------------------------------------------------------------------------------


SMALL = {"dim": 32, "n_layers": 3, "vocab_size": 64, "ssm_head_dim": 16, "state_size": 8, "chunk_size": 8}


@pytest.mark.parametrize(("flavor", "millions"), [("45M", 45.2), ("85M", 83.8), ("1.3B", 1344.0)])
def test_parameter_counts(flavor, millions):
    args = flavor_args("mamba2", flavor)
    with torch.device("meta"):
        counted = sum(p.numel() for p in Decoder(args).parameters())
    assert counted == args.n_parameters() == pytest.approx(millions * 1e6, rel=5e-4)
    assert flavor_args("mamba2", "debug").n_parameters() < 2e6


def test_initial_weights():
    """Reports M3 and M4: decays and time steps as specified, also from the meta device; the same for any layout."""
    model = build_model("mamba2", "debug")
    with torch.device("meta"):
        meta = Decoder(model.args)
    meta.to_empty(device="cpu").init_weights()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), meta.parameters(), strict=True))
    inner = model.layers["1"].mamba.inner
    A, dt = inner.ssm.A_log.exp(), F.softplus(inner.ssm.dt_bias)
    assert A.min() >= 1 and A.max() <= 16 and (inner.ssm.D == 1).all() and (inner.norm.weight == 1).all()
    assert dt.min() > 0.9e-3 and dt.max() < 0.11 and A.std() > 2 and dt.log().std() > 0.5
    d, L = 128, 4
    for weight, bound in ((inner.in_proj.x.weight, d**-0.5), (inner.conv_x.weight, 0.5), (inner.conv_bc.bias, 0.5),
                          (inner.out_proj.weight, (2 * d * L) ** -0.5)):  # fmt: skip
        assert 0.9 * bound < weight.abs().max() <= bound
    assert model.tok_embeddings.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.output.weight is model.tok_embeddings.weight


def test_documents_do_not_leak():
    """Report M2: with document masks, the logits behind an end-of-text do not depend on what came before it; nor, in
    the dense model, do any on what comes after."""
    model = build_model("mamba2", "debug", **SMALL, document_mask=True, eos_id=0).eval()
    tokens = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    tokens[0, 17] = 0
    other = tokens.clone()
    other[0, :17] = torch.randint(1, 64, (17,))
    with torch.no_grad():
        a, b = model(tokens), model(other)
        alone = model(tokens[:, 18:])
    assert torch.equal(a[:, 18:], b[:, 18:]) and not torch.allclose(a[:, :17], b[:, :17])
    torch.testing.assert_close(a[:, 18:], alone, rtol=1e-5, atol=1e-6)
    model = build_model("mamba2", "debug", **SMALL).eval()
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :18], model(torch.cat([tokens[:, :18], other[:, :22]], 1))[:, :18])
        assert not torch.equal(model(tokens)[:, 18:], model(other)[:, 18:])


def test_states_passed_on_are_one_long_sequence():
    """A sequence in three pieces, one of them shorter than the convolution, each from the states before: the logits of
    the whole. No gradient goes back over a border."""
    model = build_model("mamba2", "debug", **SMALL)
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(3))
    whole, states, pieces = model(tokens), {}, []
    for start, stop in ((0, 17), (17, 19), (19, 40)):
        passed = Passed(initial=states)
        pieces.append(model(tokens[:, start:stop], passed=passed))
        states = passed.final
        assert sorted(states) == ["0", "1", "2"] and not states["0"].scan.requires_grad
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-6)
    used = torch.zeros(64).index_fill(0, tokens[:, 19:].unique(), 1).bool()
    untied = build_model("mamba2", "debug", **SMALL, tied_embeddings=False)
    passed = Passed(initial={})
    untied(tokens[:, :19], passed=passed)
    untied(tokens[:, 19:], passed=Passed(initial=passed.final)).square().mean().backward()
    assert torch.equal(untied.tok_embeddings.weight.grad.abs().sum(1) > 0, used)


@pytest.mark.parametrize("layers", ["mamba", "mamba,attention", "attention,mamba,mamba"])
def test_kept_rows_are_those_of_the_dense_model(layers):
    """Layer dropout in every kind of stack, masks that keep all, some and none of a layer; gradients are never None."""
    overrides = SMALL | {"layers": layers, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "document_mask": True}
    model = build_model("mamba2", "debug", **overrides)
    tokens = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    keep = torch.tensor([[True, True, False], [True, False, False], [True, True, False]])
    skipped = model(tokens, keep=keep, scale=[1.0, 2.0, 1.0])
    skipped.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    masked = build_model("mamba2", "debug", **overrides, skip_compute=False)
    masked(tokens, keep=keep, scale=[1.0, 2.0, 1.0]).square().mean().backward()
    for gradient, p in zip(gradients, masked.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-7)
    # a dropped layer's parameters have zero gradients
    assert all((p.grad == 0).all() for p in model.layers["2"].parameters())
    torch.testing.assert_close(model(tokens, layers=[0]), model(tokens, keep=keep & torch.tensor([True, False, False])))


def test_placements_stand_before_in_proj():
    """Pre-Linear and VPAD mask what in_proj reads; in evaluation, and at p = 0, bit for bit the dense model."""
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    dense = build_model("mamba2", "debug", **SMALL)
    for placement in ("pre_norm", "pre_linear", "vpad"):
        model = build_model("mamba2", "debug", **SMALL, placement=placement, p=0.3)
        seen = []
        model.layers["0"].mamba.inner.in_proj.register_forward_hook(lambda m, i, o, seen=seen: seen.append(i[0]))
        torch.manual_seed(0)
        out = model(tokens)
        zeros = (seen[0] == 0).double().mean().item()
        assert (abs(zeros - 0.3) < 0.1) == (placement == "pre_linear") and not torch.equal(out, dense(tokens))
        assert torch.equal(model.eval()(tokens), dense.eval()(tokens))
        dense.train()
        assert torch.equal(build_model("mamba2", "debug", **SMALL, placement=placement)(tokens), dense(tokens))


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ({"dim": 770}, "dim = 770: d_inner = 2 x 770 = 1540 must be a multiple of ssm_head_dim = 64"),
        ({"n_groups": 3}, "n_groups = 3: must divide the 2 x 128 = 256 / 64 = 4 heads"),
        ({"layers": "mamba,lstm"}, "layers = 'mamba,lstm': 'lstm' is none of attention, nope, mamba"),
        ({"state_size": 0}, "state_size = 0: must be at least 1"),
        ({"embedding_std": 0.0}, "embedding_std = 0.0: must be above 0"),
    ],
)
def test_impossible_sizes_are_refused(overrides, fault):
    """Report M6: with the arithmetic shown."""
    with pytest.raises(ValueError, match=re.escape(fault)):
        build_model("mamba2", "debug", **overrides)


def test_flops_of_a_layer():
    """By hand: 6 a weight and 12 d_inner N for the state; hybrids add up layer by layer."""
    args = flavor_args("mamba2", "85M")
    d, inner, N, H = 768, 1536, 128, 24
    weights = d * (2 * inner + 2 * N + H) + inner * d + 5 * (inner + 2 * N) + 3 * H + inner + d
    assert args.sublayer_flops(1024)[0] == (6 * weights + 12 * inner * N, 0)
    hybrid = flavor_args("mamba2", "85M", layers="mamba,attention")
    assert [second > 0 for _, second in hybrid.sublayer_flops(1024)] == [False, True] * 6
    assert sum(hybrid.layer_flops_shares(1024)) + 6 * (50288 * d + d) / hybrid.flops_per_token(1024) == pytest.approx(1)

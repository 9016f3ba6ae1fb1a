"""Where each dropout placement stands in a model, what it leaves alone, and how it behaves under compile and AC."""

import pytest
import torch
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from regdrop_titan.models import build_model
from regdrop_titan.models.block import Residual
from regdrop_titan.regularization import dropout, inverted_dropout, vpad

PLACEMENTS = ["pre_norm", "pre_linear", "vpad"]
SMALL = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}
TOKENS = torch.arange(40).view(2, 20)


def model(**overrides):
    return build_model("nape_llama3", "debug", **{**SMALL, **overrides})


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_evaluation_and_p_zero_are_bit_for_bit_the_dense_model(placement, p):
    dense, dropped = model(), model(placement=placement, p=p)
    before = torch.get_rng_state()
    expected = dense(TOKENS)
    assert torch.equal(dropped.eval()(TOKENS), expected)
    assert torch.equal(dropped.eval()(TOKENS), expected)
    if p == 0.0:
        assert torch.equal(dropped.train()(TOKENS), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_equals_the_formula_of_its_placement(placement):
    """Each sublayer, recomputed from the table of LG secs 3-4 with the masks drawn in the same order."""
    net, p = model(placement=placement, p=0.3), 0.3
    torch.manual_seed(0)
    got = net(TOKENS)
    torch.manual_seed(0)
    x = net.tok_embeddings(TOKENS)
    for block in net.layers.values():
        context = {"context": block.context(20, x.device, None)}
        for residual, kwargs in ((block.attention, context), (block.feed_forward, {})):
            h = residual.norm(x)
            if placement == "pre_norm":
                x = x + inverted_dropout(residual.inner(h, **kwargs), p)
            elif placement == "pre_linear":
                x = x + residual.inner(inverted_dropout(h, p), **kwargs)
            else:
                x = x + residual.inner(vpad(h, p), **kwargs)
    assert torch.equal(got, net.output(net.norm(x)))


@pytest.mark.parametrize(("mask", "draws"), [("per_sublayer", [1, 1]), ("per_linear", [3, 2])])
@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
def test_masks_a_sublayer(placement, mask, draws, monkeypatch):
    """One mask on the norm's output, or one for each of q, k, v and gate, up; none before embedding or head."""
    net = model(placement=placement, p=0.5, mask=mask)
    keeps, inputs = [], {}
    draw = dropout._draw_keep
    monkeypatch.setattr(dropout, "_draw_keep", lambda x, p: keeps.append(draw(x, p)) or keeps[-1])
    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, args, name=name: inputs.__setitem__(name, args[0]))
    net(TOKENS)
    assert len(keeps) == 3 * sum(draws)
    assert all(keep.shape == (2, 20, 32) for keep in keeps)
    for sublayer, projections, n in (
        ("attention", ("wq", "wk", "wv"), draws[0]),
        ("feed_forward", ("w1", "w3"), draws[1]),
    ):
        seen = [inputs[f"layers.1.{sublayer}.inner.{name}"] for name in projections]
        assert sum(not torch.equal(seen[0], other) for other in seen[1:]) == n - 1
    assert (inputs["output"] == 0).sum() == 0  # the final norm's output is whole


def test_pre_norm_drops_the_update_not_the_stream():
    net = model(placement="pre_norm", p=0.5)
    residual = net.layers["0"].feed_forward
    x = torch.randn(2, 20, 32)
    dropped = (residual(x) == 0).double().mean().item()
    assert 0.4 < dropped < 0.6


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recomputation_draws_the_same_masks(placement):
    """Gradients with activation checkpointing equal those without, bit for bit (report D1)."""
    net = model(placement=placement, p=0.5)
    x = torch.randn(2, 20, 32)
    block, context = net.layers["0"], net.layers["0"].context(20, x.device, None)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        out = checkpoint(block, x, context, use_reentrant=False) if recompute else block(x, context)
        gradients.append(torch.autograd.grad(out.square().sum(), list(block.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("schedule", ["constant", "decreasing"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recomputation_inside_of_a_compiled_block(placement, schedule):
    """As training wraps it; the masks are those of the eager model of the same seed, and so are the gradients."""
    torch._dynamo.reset()
    x = torch.randn(2, 20, 32)
    gradients = []
    for compiled in (False, True):
        residual = model(placement=placement, p=0.5, dropout_schedule=schedule).layers["0"].feed_forward
        run = torch.compile(checkpoint_wrapper(residual), fullgraph=True) if compiled else residual
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(run(x).square().sum(), list(residual.parameters())))
    for got, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_scheduled_rate_changes_without_a_recompile(placement):
    """One graph for the whole schedule (report D6), each rate at once, and p = 0 bit for bit the dense model."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    net = model(placement=placement, p=0.5, dropout_schedule="decreasing")
    fixed = model(placement=placement, p=0.25)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(net.layers["0"].feed_forward, backend=counter, fullgraph=True)
    x = torch.randn(8, 64, 32)
    for p in (0.5, 0.4, 0.3, 0.25, 0.1):
        net.set_dropout_rate(p)
        torch.manual_seed(3)
        out = compiled(x)
        if placement == "pre_norm":
            assert ((out == 0).double().mean() - p).abs() < 4 * (p * (1 - p) / out.numel()) ** 0.5
    assert counter.frame_count == 1
    net.set_dropout_rate(0.25)
    outs = []
    for one in (net, fixed):
        torch.manual_seed(4)
        outs.append(one(TOKENS))
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
    net.set_dropout_rate(0.0)
    assert torch.equal(net(TOKENS), model()(TOKENS))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_compiled_dropout_follows_p_and_mode(placement):
    """Compiled and recomputed as in training: right in distribution, a new p and evaluation take effect at once
    (reports D2, D3, D5)."""
    net = model(placement=placement, p=0.5)
    residual: Residual = net.layers["0"].feed_forward
    compiled = torch.compile(residual, fullgraph=True)
    x = torch.randn(8, 64, 32)

    def mean_update(rows: int = 64):
        outs = [checkpoint(compiled, x, use_reentrant=False) for _ in range(rows)]
        return torch.stack(outs).mean(0), torch.stack(outs)

    dense = residual.eval()(x)
    assert torch.equal(compiled(x), compiled(x))
    torch.testing.assert_close(compiled(x), dense, rtol=1e-4, atol=1e-5)
    residual.train()
    mean, outs = mean_update()
    assert not torch.equal(outs[0], outs[1])
    if placement == "pre_norm":  # the only one whose mean is the dense update exactly
        standard_error = outs.std(0) / 8
        z = ((mean - dense) / standard_error.clamp(min=1e-6)).double()
        assert abs(z.mean()) < 4 / z.numel() ** 0.5 * 2
        assert ((outs == 0).double().mean() - 0.5).abs() < 0.01
        residual.p = 0.1
        assert ((mean_update(8)[1] == 0).double().mean() - 0.1).abs() < 0.01
    residual.p = 0.0
    torch.testing.assert_close(compiled(x), dense, rtol=1e-4, atol=1e-5)


def saved_bytes(module, x):
    """What a forward keeps for its backward beside the parameters and its input."""
    own = {p.untyped_storage().data_ptr() for p in [*module.parameters(), x]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(x)
    return out, sum(kept.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vpad_costs_a_compiled_model_no_kernel_and_one_byte_a_channel(device, monkeypatch):
    """Norm, affine and, drawn as on a GPU, the mask are the norm's own kernel, forward and backward; of the dropout the
    mask is kept, and two numbers a token."""
    if device == "cuda":
        monkeypatch.setattr(dropout, "_draw_keep", lambda x, p: torch.rand(x.shape, dtype=torch.float32) >= p)
    x = torch.randn(2, 64, 32, requires_grad=True)
    kernels, kept = {}, {}
    for placement in ("none", "vpad"):
        torch._dynamo.reset()
        residual = torch.compile(model(placement=placement, p=0.1).layers["0"].feed_forward, fullgraph=True)

        def forward(residual=residual, placement=placement):
            out, kept[placement] = saved_bytes(residual, x)
            return out

        with torch._inductor.config.patch(fallback_random=False, fx_graph_cache=False):
            _, code = run_fw_bw_and_get_code(forward)
        kernels[placement] = [part.count("async_compile.cpp_pybinding") for part in code]
    assert kernels["vpad"] == kernels["none"] == [2, 2]  # the norm's, and that of the product of gate and up
    assert kept["vpad"] - kept["none"] == x.numel() + 2 * 4 * 2 * 64


def test_vpad_keeps_its_input_and_mask_in_an_eager_model():
    x = torch.randn(2, 64, 32, requires_grad=True)
    kept = {p: saved_bytes(model(placement=p, p=0.1).layers["0"].feed_forward, x)[1] for p in ("none", "vpad")}
    assert kept["vpad"] - kept["none"] == x.numel() + 4 * x.numel() + 2 * 4 * 2 * 64

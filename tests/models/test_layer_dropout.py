"""Skipping in the model: exact, free for dropped rows, right in the mean, and one shape of graph under compile."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from regdrop_titan.models import build_model
from regdrop_titan.regularization import keep_mask, layer_rates
from regdrop_titan.regularization.layer_dropout import Kept

SMALL = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}
TOKENS = torch.randint(0, 64, (6, 20), generator=torch.Generator().manual_seed(0))


def model(**overrides):
    return build_model("nape_llama3", "debug", **{**SMALL, **overrides})


def masks(unit: str, rate: float = 0.5) -> tuple[torch.Tensor, list[float]]:
    """Layer 1 keeps everything, layer 2 nothing, layer 3 one sequence."""
    rates = layer_rates("uniform", "constant", rate, 4, 0, 1)
    keep = keep_mask(rates if unit == "layer" else rates[:, None].expand(-1, 2), 6, seed=1, step=3)
    keep[:, 1], keep[:, 2], keep[:, 3] = True, False, False
    keep[4, 3] = True
    return keep, (1 / (1 - rates)).tolist()


def gradients(net, **kwargs):
    loss = net(TOKENS, **kwargs).square().sum()
    return loss, torch.autograd.grad(loss, list(net.parameters()))


OPTIONS = [{}, {"document_mask": True}, {"position": "rope"}, {"scale_placement": "block"}, {"unit": "sublayer"},
           {"unit": "sublayer", "document_mask": True}]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_skipping_equals_computing_everything_and_masking(options):
    """In fp64 to 1e-12, for kept counts 0, 1, some and all."""
    keep, scale = masks(options.get("unit", "layer"))
    assert {0, 1, 6} <= set(keep.flatten(1).sum(0).tolist())
    skipped, masked = (model(**options, skip_compute=skip).double() for skip in (True, False))
    (loss, grads), (expected_loss, expected) = (gradients(net, keep=keep, scale=scale) for net in (skipped, masked))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * b.abs().max().item() + 1e-300)


@pytest.mark.parametrize("unit", ["layer", "sublayer"])
def test_an_oracle_by_sequence(unit):
    """Each sequence alone, through the sublayers it keeps, written from DD eq. 6."""
    keep, scale = masks(unit)
    net = model(unit=unit).double()
    got = net(TOKENS, keep=keep, scale=scale)
    for b in range(6):
        x = net.tok_embeddings(TOKENS[b : b + 1])
        for layer, block in enumerate(net.layers.values()):
            own = keep[b, layer] if unit == "sublayer" else keep[b, layer].expand(2)
            context = block.context(20, x.device, None)
            if own[0]:
                x = x + scale[layer] * block.attention(x, context=context)
            if own[1]:
                x = x + scale[layer] * block.feed_forward(x)
        torch.testing.assert_close(got[b : b + 1], net.output(net.norm(x)), rtol=1e-10, atol=1e-10)


def test_dropped_rows_pass_bit_for_bit():
    net = model(placement="vpad", p=0.3)
    x = torch.randn(6, 20, 32)
    block = net.layers["0"]
    context = block.context(20, x.device, None)
    for kept in ([], [2], [0, 3, 4]):
        out = block(x, context, (Kept(rows=torch.tensor(kept, dtype=torch.int64)),))
        dropped = [row for row in range(6) if row not in kept]
        assert torch.equal(out[dropped], x[dropped])
        assert all(not torch.equal(out[row], x[row]) for row in kept)


@pytest.mark.parametrize("unit", ["layer", "sublayer"])
def test_nothing_kept_gives_zero_gradients_not_none(unit):
    """Report S4, S5: an all-dropped layer still takes part in every collective."""
    net = model(unit=unit)
    keep = torch.zeros((6, 4) if unit == "layer" else (6, 4, 2), dtype=torch.bool)
    net(TOKENS, keep=keep).sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith("layers"):
            assert parameter.grad.abs().max() == 0, name


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("dim", [20, 32])
def test_small_batches_and_odd_widths(B, dim):
    """Report S4: batch 1 and 2, rate 0.9, a width that is no multiple of 8; also a batch as long as it is wide."""
    net = model(dim=dim)
    for step in range(20):
        keep = keep_mask(torch.full((4,), 0.9), B, seed=0, step=step)
        loss = net(TOKENS[:B], keep=keep, scale=[10.0] * 4).square().mean()
        loss.backward()
        assert math.isfinite(loss.item())


def test_masks_through_accumulation_are_arguments():
    """Interleaved micro-batches with recomputation: no module remembers a mask."""
    from torch.utils.checkpoint import checkpoint

    net = model().double()
    first, second = (keep_mask(torch.full((4,), 0.5), 6, seed=0, step=t) for t in (1, 2))
    outs = [checkpoint(lambda k: net(TOKENS, keep=k), keep, use_reentrant=False) for keep in (first, second)]
    got = torch.autograd.grad(sum(out.square().sum() for out in outs), list(net.parameters()))
    expected = torch.autograd.grad(
        sum(net(TOKENS, keep=keep).square().sum() for keep in (first, second)), list(net.parameters())
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale_placement", ["block", "per_sublayer"])
def test_the_mean_over_masks(scale_placement):
    """Training output averaged over 20,000 masks: with "block" it is the evaluation output within 4 standard errors;
    with "per_sublayer" it exceeds it by f_ffn(X + r f_attn) - f_ffn(X + f_attn), and by nothing else."""
    net = model(n_layers=1, scale_placement=scale_placement).double()
    with torch.no_grad():
        for parameter in net.layers["0"].parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5, generator=torch.Generator().manual_seed(1))
        block, p, n = net.layers["0"], 0.4, 20_000
        r = torch.tensor(1 / (1 - p), dtype=torch.float64)
        x = torch.randn(1, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        context = block.context(4, x.device, None)
        kept = keep_mask(torch.tensor([p]), n, seed=5, step=0)[:, 0]
        update = block(x, context, (Kept(rows=torch.tensor([0]), scale=r),)) - x  # every kept copy's is the same
        mean = x + update * kept.double().mean()
        error = 4 * update.abs() * math.sqrt(p * (1 - p) / n)
        evaluation = block(x, context)
        z = block.attention(x, context=context)
        excess = block.feed_forward(x + r * z) - block.feed_forward(x + z)
        if scale_placement == "block":
            excess = torch.zeros_like(excess)
        else:
            assert (excess.abs() > error).double().mean() > 0.5
        assert ((mean - evaluation - excess).abs() <= error + 1e-12).all()


def test_the_scale_is_exact_in_bf16():
    """1/0.9 in bf16 would be 1.109."""
    from regdrop_titan.regularization.layer_dropout import scaled

    update = torch.ones(1, dtype=torch.bfloat16) * 256
    assert scaled(update, torch.tensor(1 / 0.9)).item() == torch.tensor(256 / 0.9, dtype=torch.bfloat16).item()


def test_eval_density():
    """r_eval multiplies every update in evaluation, and training has no scale of its own."""
    net = model(eval_scale=[1.0, 0.9, 0.8, 0.5]).double()
    training = net(TOKENS)
    assert torch.equal(training, model().double()(TOKENS))
    expected = net(TOKENS, scale=[1.0, 0.9, 0.8, 0.5])
    assert torch.equal(net.eval()(TOKENS), expected) and not torch.allclose(expected, training)


def test_layers_chooses_a_subset():
    """Early exit and skipping: range(L) is the whole model bit for bit (report S8)."""
    net = model().eval()
    assert torch.equal(net(TOKENS, layers=range(4)), net(TOKENS))
    h = net.tok_embeddings(TOKENS)
    for layer in (2, 0):
        h = net.layers[str(layer)](h, net.layers["0"].context(20, h.device, None))
    assert torch.equal(net(TOKENS, layers=[2, 0]), net.output(net.norm(h)))
    assert torch.equal(net(TOKENS, layers=[]), net.output(net.norm(net.tok_embeddings(TOKENS))))
    for wrong in ([4], [-1], [0, 9]):
        with pytest.raises(ValueError, match="no layer"):
            net(TOKENS, layers=wrong)


@pytest.mark.parametrize("placement", ["none", "vpad"])
def test_compile_makes_at_most_4_graphs(placement):
    """For every kept count and every scale, over a schedule (report D6), and with the eager values."""
    torch._dynamo.reset()
    net = model(n_layers=2, placement=placement, p=0.2 if placement == "vpad" else 0.0)
    eager = model(n_layers=2)
    counter = CompileCounterWithBackend("inductor")
    for name, block in net.layers.named_children():
        net.layers.register_module(name, torch.compile(block, backend=counter, fullgraph=True))
    counts = set()
    for step in range(24):
        rates = layer_rates("uniform", "decreasing", 0.95, 2, step, 24)
        keep = keep_mask(rates, 6, seed=4, step=step)
        counts |= set(keep.sum(0).tolist())
        scale = (1 / (1 - rates)).tolist()
        out = net(TOKENS, keep=keep, scale=scale)
        out.square().sum().backward()
        if placement == "none":
            torch.testing.assert_close(out, eager(TOKENS, keep=keep, scale=scale), rtol=1e-4, atol=1e-4)
    assert counts == set(range(7))
    assert counter.frame_count <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"keep": torch.ones(6, 3, dtype=torch.bool)},
            r"keep must be bool of shape \(B, 4\), got torch.bool of \(6, 3\)",
        ),
        ({"keep": torch.ones(6, 4, 2, dtype=torch.bool)}, r"shape \(B, 4\)"),
        ({"keep": torch.ones(6, 4)}, "got torch.float32"),
        ({"keep": torch.ones(5, 4, dtype=torch.bool)}, "keep has 5 rows, the batch 6"),
        ({"keep": torch.ones(6, 4, dtype=torch.bool, device="meta")}, "keep must be on the CPU"),
        ({"scale": [1.0] * 3}, "one factor for each of the 4 layers, got 3"),
    ],
)
def test_bad_masks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        model()(TOKENS, **arguments)

"""The Celerity family: sizes, and the model against the formulas written out in fp64; CompleteP's multipliers."""

import dataclasses
import math

import pytest
import torch

from regdrop_titan.models import Decoder, alibi_slopes, build_model, flavor_args
from regdrop_titan.models.initialization import initial_value

SIZES = {"271M": 270.8e6, "503M": 503.1e6, "906M": 906.4e6, "1.8B": 1.810e9, "3.9B": 3.882e9, "8.2B": 8.206e9}
TINY = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 256, "vocab_size": 50}


@pytest.mark.parametrize("flavor", SIZES)
def test_parameter_counts(flavor):
    args = flavor_args("celerity", flavor)
    assert args.n_parameters() == pytest.approx(SIZES[flavor], rel=2.5e-4)
    assert args.ffn_dim == 8 * args.dim and args.vocab_size == 128256 and not args.tied_embeddings


@pytest.mark.parametrize("name", ["celerity", "nape_llama3"])
def test_counts_are_those_of_the_model(name):
    for overrides in ({}, {"bias": True}, {"norm": "layernorm"}, {"ffn": "relu2", "n_kv_heads": 2}):
        args = flavor_args(name, "debug", **overrides)
        with torch.device("meta"):
            model = Decoder(args)
        assert sum(p.numel() for p in model.parameters()) == args.n_parameters()
    assert flavor_args("celerity", "debug").n_parameters() < 2e6


def reference(model: Decoder, tokens: torch.Tensor, train_scale: list[float] | None = None) -> torch.Tensor:
    """Logits in fp64, from the formulas (spec sec. 6) and the parameters by their names."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    a = model.args
    completep = a.parametrization == "completep"
    m_d = a.dim / a.base_dim if a.parametrization != "standard" else 1
    m_L = a.n_layers / a.base_layers if completep else 1
    B, S, head = *tokens.shape, a.dim // a.n_heads
    slopes = alibi_slopes(a.n_heads).double()
    distance = torch.arange(S)[:, None] - torch.arange(S)[None]
    bias = torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)

    def norm(x, name):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + a.norm_eps) * w[name + ".weight"] + w[name + ".bias"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    x = w["tok_embeddings.weight"][tokens]
    for layer in range(a.n_layers):
        r = 1.0 if train_scale is None else train_scale[layer]
        at = f"layers.{layer}.attention"
        h = norm(x, at + ".norm")
        q, k, v = (linear(h, f"{at}.inner.w{n}").view(B, S, a.n_heads, head).transpose(1, 2) for n in "qkv")
        scores = q @ k.mT * (1 / head if a.parametrization != "standard" else head**-0.5)
        mixed = ((scores + bias).softmax(-1) @ v).transpose(1, 2).reshape(B, S, a.dim)
        x = x + r / m_L * linear(mixed, at + ".inner.wo")
        ff = f"layers.{layer}.feed_forward"
        h = norm(x, ff + ".norm")
        x = x + r / m_L * linear(linear(h, ff + ".inner.w1").relu() ** 2, ff + ".inner.w2")
    return norm(x, "norm") @ w["output.weight"].T / m_d


@pytest.mark.parametrize("kind", ["standard", "mup", "completep"])
def test_the_model_is_the_formula(kind):
    """With biases and norms away from their initial values; in evaluation, and in training with 1/rho."""
    bases = {} if kind == "standard" else {"base_dim": 8, "base_layers": 2}
    model = build_model("celerity", "debug", parametrization=kind, **bases, **TINY).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=generator, dtype=torch.float64) * (0.3 if p.ndim == 1 else 0.1)
    tokens = torch.randint(50, (2, 17), generator=generator)
    torch.testing.assert_close(model.eval()(tokens), reference(model, tokens), rtol=1e-9, atol=1e-9)
    scale = [1.0, 1.25, 2.5]
    kept = torch.ones(2, 3, dtype=torch.bool)
    logits = model.train()(tokens, keep=kept, scale=scale)
    torch.testing.assert_close(logits, reference(model, tokens, scale), rtol=1e-6, atol=1e-6)


def test_initial_weights():
    """sigma^2 at base, sigma^2 / m_d inside of the blocks, no depth scaling, biases zero."""
    args = flavor_args("celerity", "debug", dim=128, n_heads=4, parametrization="completep", base_dim=32,
                       base_layers=1, init_std=0.05)  # fmt: skip
    shapes = {"tok_embeddings.weight": 0.05, "output.weight": 0.05}
    shapes |= {f"layers.3.{name}.weight": 0.05 / 2 for name in ("attention.inner.wq", "attention.inner.wo",
                                                                "feed_forward.inner.w2")}  # fmt: skip
    for name, std in shapes.items():
        value = initial_value(name, torch.Size([500, 200]), args)
        # the standard error of a standard deviation of n normal numbers: std / sqrt(2 n)
        assert value.std().item() == pytest.approx(std, abs=5 * std / math.sqrt(2 * value.numel()))
    assert not initial_value("layers.0.attention.inner.wq.bias", torch.Size([8]), args).any()
    assert not initial_value("layers.0.attention.norm.bias", torch.Size([8]), args).any()


def test_completep_at_base_size_is_standard_bit_for_bit():
    """Where the definitions coincide: the same attention scale; for Mamba2 too."""
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    for family, sizes in (("celerity", TINY), ("nape_llama3", TINY), ("mamba2", {"dim": 32, "vocab_size": 50})):
        plain = build_model(family, "debug", **sizes, init_std=0.02, attention_scale="inverse")
        completep = build_model(
            family, "debug", **sizes, init_std=0.02, attention_scale="inverse",
            parametrization="completep", base_dim=32, base_layers=plain.args.n_layers,
        )  # fmt: skip
        for (name, a), b in zip(plain.named_parameters(), completep.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert torch.equal(plain(tokens), completep(tokens))


def test_mamba2_under_completep():
    """Twice the width, four times the depth: variances over the width, and out_proj's as at the base's depth."""
    wide = flavor_args(
        "mamba2", "debug", dim=256, n_layers=16, parametrization="completep", base_dim=128, base_layers=4
    )
    base = dataclasses.replace(wide, dim=128, n_layers=4)
    for name in ("in_proj.x.weight", "out_proj.weight"):
        stds = [
            initial_value(f"layers.0.mamba.inner.{name}", torch.Size([400, 250]), args).std() for args in (wide, base)
        ]
        assert (stds[0] / stds[1]).item() == pytest.approx(0.5**0.5, rel=0.01)


def test_impossible_arguments():
    args = flavor_args("celerity", "debug", parametrization="completep", init_std=-1.0)
    assert args.faults() == [
        "init_std = -1.0: must be above 0",
        "base_dim = 0: completep needs the base model's",
        "base_layers = 0: completep needs the base model's",
    ]

"""SmolLM3's layers against `transformers`; scaled queries, 1.5-entmax and attention dropout against their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from regdrop_titan.models import Decoder, build_model, flavor_args
from regdrop_titan.models.attention import (
    Attention,
    AttentionContext,
    engine,
    entmax15_attention,
    sdpa_attention,
)
from regdrop_titan.models.positions import attention_bias

TINY = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 50}


def tokens(B: int, S: int) -> torch.Tensor:
    return torch.randint(50, (B, S), generator=torch.Generator().manual_seed(0))


# SmolLM3 ---------------------------------------------------------------------------------------------------------


def test_smollm3_3b():
    args = flavor_args("smollm3", "3B")
    assert args.n_parameters() == pytest.approx(3.075e9, rel=2e-4)
    assert [layer for layer, kind in enumerate(args.layer_kinds) if kind == "nope"] == list(range(3, 36, 4))
    with torch.device("meta"):
        model = Decoder(flavor_args("smollm3", "debug", sliding_window=8))
    assert sum(p.numel() for p in model.parameters()) == flavor_args("smollm3", "debug").n_parameters() < 2e6
    windows = [model.layers[str(layer)].attention.inner.window for layer in range(4)]
    assert windows == [8, 8, 8, None]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("pattern", ["1110", "1111", "0000", "0110"])
def test_logits_are_those_of_transformers(pattern, window):
    """`no_rope_layers` has 1 where RoPE is used; the window is on those layers."""
    rope = [int(c) for c in pattern]
    theirs = SmolLM3ForCausalLM(SmolLM3Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=50_000.0, no_rope_layers=rope, use_sliding_window=window is not None,
        sliding_window=window, layer_types=["sliding_attention" if r and window else "full_attention" for r in rope],
        tie_word_embeddings=True, rms_norm_eps=1e-6, pad_token_id=None, attn_implementation="eager",
    )).eval()  # fmt: skip
    layers = ",".join("attention" if r else "nope" for r in rope)
    ours = build_model("smollm3", "debug", **TINY, layers=layers, sliding_window=window).eval()
    names = {"self_attn.q_proj": "attention.inner.wq", "self_attn.k_proj": "attention.inner.wk",
             "self_attn.v_proj": "attention.inner.wv", "self_attn.o_proj": "attention.inner.wo",
             "mlp.gate_proj": "feed_forward.inner.w1", "mlp.down_proj": "feed_forward.inner.w2",
             "mlp.up_proj": "feed_forward.inner.w3", "input_layernorm": "attention.norm",
             "post_attention_layernorm": "feed_forward.norm"}  # fmt: skip
    state = {"tok_embeddings.weight": theirs.model.embed_tokens.weight, "norm.weight": theirs.model.norm.weight}
    state["output.weight"] = state["tok_embeddings.weight"]
    for layer in range(4):
        for their_name, name in names.items():
            weight = theirs.model.layers[layer].get_submodule(their_name).weight
            with torch.no_grad():
                weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
            state[f"layers.{layer}.{name}.weight"] = weight
    ours.load_state_dict(state)
    ids = tokens(2, 23)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["rope", "nape"])
def test_a_window_over_the_whole_sequence_is_none(position):
    """Bit for bit; one key less is not."""
    windows = [
        build_model("nape_llama3", "debug", **TINY, position=position, sliding_window=window)(tokens(2, 17))
        for window in (None, 17, 16)
    ]
    assert torch.equal(windows[0], windows[1]) and not torch.equal(windows[0], windows[2])


def test_nope_layers_have_neither_positions_nor_a_window():
    """Their keys are a set: the last query's output does not change when earlier tokens are permuted."""
    attention = Attention(flavor_args("smollm3", "debug", **TINY, sliding_window=2), "nope").double()
    for p in attention.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3, generator=torch.Generator().manual_seed(p.numel()))
    h = torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    permuted = torch.cat([h[:, torch.randperm(8)], h[:, 8:]], dim=1)
    context = attention.context(9, torch.device("cpu"), None)
    a, b = attention(h, context=context), attention(permuted, context=context)
    torch.testing.assert_close(a[:, -1], b[:, -1])


# Scaled queries --------------------------------------------------------------------------------------------------


def attention_of(**overrides) -> Attention:
    """An fp64 attention layer with drawn parameters."""
    args = flavor_args("nape_llama3", "debug", **{**TINY, "n_kv_heads": 4, **overrides})
    attention = Attention(args, "attention").double()
    generator = torch.Generator().manual_seed(0)
    for p in attention.parameters():
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return attention


@pytest.mark.parametrize(("scaling", "heads"), [("adaptive", "nope"), ("adaptive", "all"), ("ssmax", "nope")])
def test_scores_are_scaled_by_the_formula(scaling, heads):
    attention = attention_of(scaling=scaling, scaled_heads=heads)
    S, H, head = 11, 4, 8
    h = torch.randn(2, S, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (F.linear(h, getattr(attention, name).weight).view(2, S, H, head) for name in ("wq", "wk", "wv"))
    n = torch.arange(S, dtype=torch.float32).double()[:, None] + 2
    if scaling == "adaptive":
        beta = F.softplus(attention.scaling.beta(h))
        gamma = 2 * torch.tanh(attention.scaling.gamma(h))
        factor = 1 + beta * n.float().log().double() ** gamma
    else:
        factor = (attention.scaling.s * n.float().log().double()).expand(2, S, H)
    if heads == "nope":  # NAPE: the first half of the heads has positions
        factor = torch.cat([torch.ones(2, S, 2, dtype=torch.float64), factor[..., 2:]], dim=-1)
    scores = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(head) * factor.transpose(1, 2)[..., None]
    weights = (scores + attention_bias((1.0, 0.5, 0.0, 0.0), None, S, h.device)).softmax(-1)
    wanted = torch.einsum("bhij,bjhc->bihc", weights, v).reshape(2, S, 32) @ attention.wo.weight.T
    out = attention(h, context=attention.context(S, h.device, None))
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_leaves_logits_bit_for_bit(dtype):
    """And it learns from there: all of its parameters get a gradient."""
    plain = build_model("smollm3", "debug", **TINY).to(dtype)
    scaled = build_model("smollm3", "debug", **TINY, scaling="adaptive", scaling_init="identity").to(dtype)
    ids = tokens(2, 17)
    assert torch.equal(plain(ids), scaled(ids))
    scaled(ids).float().square().sum().backward()
    found = {name: p.grad.abs().max() for name, p in scaled.named_parameters() if ".scaling." in name}
    assert {name.split(".")[1] for name in found} == {"3"}  # of the one layer without positions
    assert all(grad > 0 for grad in found.values()) and len(found) == 4


def test_which_layers_are_scaled():
    def scaled(**overrides):
        model = build_model("smollm3", "debug", **TINY, scaling="ssmax", **overrides)
        assert sum(p.numel() for p in model.parameters()) == model.args.n_parameters()
        return [layer.attention.inner.scaling is not None for layer in model.layers.values()]

    assert scaled() == [False, False, False, True]
    assert scaled(scaled_layers="all") == [True] * 4
    assert scaled(layers="attention") == [True] * 4
    assert flavor_args("smollm3", "debug", scaling="ssmax", scaling_init="identity").faults() == [
        "scaling_init = 'identity': ssmax's factor s ln(n) cannot be 1 at every position"
    ]


# 1.5-entmax ------------------------------------------------------------------------------------------------------


def qkv(S: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, S, 8, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]


def bisection(z: torch.Tensor) -> torch.Tensor:
    """`p = [z/2 - tau]_+^2` with the tau for which it sums to 1, by halving an interval."""
    half = z / 2
    low, high = half.amax(-1, keepdim=True) - 1, half.amax(-1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        above = (half - middle).clamp_min(0).square().sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (half - low).clamp_min(0).square()


@pytest.mark.parametrize("slopes", [None, (1.0, 0.5, 0.0, 0.0)])
@pytest.mark.parametrize("window", [None, 3])
def test_entmax_agrees_with_bisection(slopes, window):
    q, k, _ = qkv(13)
    bias = attention_bias(slopes, window, 13, q.device).double()
    context = AttentionContext(bias=None if slopes is None and window is None else bias)
    eye = torch.eye(13, dtype=torch.float64).expand(2, 4, 13, 13)
    weights = entmax15_attention(q, k, eye, context)
    torch.testing.assert_close(weights, bisection(q @ k.mT / math.sqrt(8) + bias), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 13, dtype=torch.float64))
    assert not weights.masked_select(bias.expand_as(weights) == -torch.inf).any()
    assert (weights == 0).double().mean() > 0.5  # exact zeros, beyond the hidden half


def test_entmax_gradients():
    q, k, v = (t.detach()[:1, :2, :6].requires_grad_() for t in qkv(6))
    assert torch.autograd.gradcheck(lambda *t: entmax15_attention(*t, AttentionContext()), (q, k, v))


def test_entmax_trains_nape_with_every_placement():
    for placement in ("none", "pre_norm", "pre_linear", "vpad"):
        model = build_model("nape_llama3", "debug", **TINY, attention="entmax15", scaling="adaptive",
                            placement=placement, p=0.1)  # fmt: skip
        loss = F.cross_entropy(model(tokens(2, 16)).flatten(0, 1), tokens(2, 16).flatten())
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# Attention dropout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [sdpa_attention, entmax15_attention])
def test_attention_dropout_drops_weights(engine):
    """Each weight becomes 0 or 1/(1-p) of itself; at the rate p, within 4 standard errors."""
    q, k, _ = (t.detach() for t in qkv(12, torch.float32))
    eye = torch.eye(12).expand(2, 4, 12, 12)
    dense = engine(q, k, eye, AttentionContext())
    torch.manual_seed(0)
    p, kept, seen = 0.3, 0, 0
    for _ in range(4):
        dropped = engine(q, k, eye, AttentionContext(), None, p)
        ratio = (dropped / dense)[dense > 1e-6]
        assert torch.allclose(ratio[ratio > 0], torch.tensor(1 / (1 - p)), rtol=1e-4)
        kept, seen = kept + (ratio > 0).sum().item(), seen + ratio.numel()
    assert abs(kept / seen - (1 - p)) < 4 * math.sqrt(p * (1 - p) / seen)


@pytest.mark.parametrize("attention", ["softmax", "entmax15"])
def test_attention_dropout_is_off_in_evaluation(attention):
    dense = build_model("nape_llama3", "debug", **TINY, attention=attention)
    model = build_model("nape_llama3", "debug", **TINY, attention=attention, attention_p=0.4)
    ids = tokens(2, 12)
    assert not torch.equal(model(ids), dense(ids))
    assert torch.equal(model.eval()(ids), dense.eval()(ids))


def test_the_engine_is_told():
    """What FlexAttention cannot do, it is not used for; the run's log says which engine it has."""

    def of(device_type, **overrides):
        return engine(flavor_args("nape_llama3", "debug", **overrides), device_type)

    assert of("cuda") == "FlexAttention (SDPA for heads without a slope), ALiBi cut at 40 nats"
    assert of("cuda", position="alibi") == "FlexAttention, ALiBi cut at 40 nats"
    assert of("cpu") == "SDPA by groups of heads, ALiBi cut at 40 nats"
    assert of("cuda", alibi_cutoff=0) == "FlexAttention"
    assert of("cpu", alibi_cutoff=0) == "SDPA with a bias of (heads, S, S)"
    assert of("cuda", attention_p=0.1, alibi_cutoff=0) == (
        "SDPA with a bias of (heads, S, S) (FlexAttention has no dropout)"
    )
    assert of("cuda", attention="entmax15") == "1.5-entmax by sorting, which holds all scores"
    assert of("cuda", position="rope", attention_p=0.1) == "SDPA, plain causal"
    assert of("cuda", position="rope", sliding_window=8) == "FlexAttention"

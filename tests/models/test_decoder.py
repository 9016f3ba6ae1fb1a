"""The decoder against a dense float64 oracle written from the formulas, without any of its code."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from regdrop_titan.models import Decoder, attention, build_model, flavor_args
from regdrop_titan.models.attention import AttentionContext, flex_attention_with_slopes, sdpa_attention
from regdrop_titan.models.positions import (
    attention_bias,
    causal_block_mask,
    document_block_mask,
    document_ids,
    nape_slopes,
)

SMALL = {"dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "ffn_dim": 64, "vocab_size": 64}


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def oracle_attention(model, prefix, h, weights, documents):
    """Scores one by one: head by head, query by query."""
    args = model.args
    B, S, d = h.shape
    hd = d // args.n_heads
    q = (h @ weights[prefix + "wq.weight"].T).view(B, S, args.n_heads, hd)
    k = (h @ weights[prefix + "wk.weight"].T).view(B, S, args.n_kv_heads, hd)
    v = (h @ weights[prefix + "wv.weight"].T).view(B, S, args.n_kv_heads, hd)
    if args.position == "rope":
        c = torch.arange(hd // 2, dtype=torch.float64)
        angles = torch.arange(S, dtype=torch.float64)[:, None] * args.rope_theta ** (-2 * c / hd)

        def rotate(x):
            a, b = x[..., : hd // 2], x[..., hd // 2 :]
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        q, k = rotate(q), rotate(k)
    half = args.n_heads // 2
    slopes = {
        "nape": [1 / (n + 1) if n < half else 0.0 for n in range(args.n_heads)],
        "alibi": [1 / (n + 1) for n in range(args.n_heads)],
    }.get(args.position, [0.0] * args.n_heads)
    window = args.sliding_window or S
    out = torch.zeros(B, S, args.n_heads, hd, dtype=torch.float64)
    for b in range(B):
        for n in range(args.n_heads):
            kv = n // (args.n_heads // args.n_kv_heads)
            for i in range(S):
                keys = [j for j in range(max(0, i - window + 1), i + 1) if documents[b, j] == documents[b, i]]
                if args.alibi_cutoff > 0:
                    keys = [j for j in keys if slopes[n] * (i - j) <= args.alibi_cutoff]
                scores = torch.stack([q[b, i, n] @ k[b, j, kv] / math.sqrt(hd) - slopes[n] * (i - j) for j in keys])
                out[b, i, n] = torch.softmax(scores, 0) @ v[b, keys, kv]
    return out.reshape(B, S, d) @ weights[prefix + "wo.weight"].T


@torch.no_grad()
def oracle_logits(model, tokens):
    args = model.args
    weights = {name: value.double() for name, value in model.state_dict().items()}
    documents = torch.zeros_like(tokens)
    if args.document_mask:
        for b in range(tokens.shape[0]):
            for i in range(1, tokens.shape[1]):
                documents[b, i] = documents[b, i - 1] + (tokens[b, i - 1] == args.eos_id)
    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(args.n_layers):
        prefix = f"layers.{layer}.attention."
        h = rms_norm(x, weights[prefix + "norm.weight"], args.norm_eps)
        x = x + oracle_attention(model, prefix + "inner.", h, weights, documents)
        prefix = f"layers.{layer}.feed_forward."
        h = rms_norm(x, weights[prefix + "norm.weight"], args.norm_eps)
        gate, up = h @ weights[prefix + "inner.w1.weight"].T, h @ weights[prefix + "inner.w3.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[prefix + "inner.w2.weight"].T
    return rms_norm(x, weights["norm.weight"], args.norm_eps) @ weights["output.weight"].T


CASES = {
    "nape": {},
    "alibi": {"position": "alibi"},
    "rope": {"position": "rope"},
    "nope": {"position": "nope"},
    "window": {"sliding_window": 5},
    "rope_window": {"position": "rope", "sliding_window": 3},
    "documents": {"document_mask": True},
    "cut": {"alibi_cutoff": 1.25},  # of 6 heads on 3 key heads the third has a key head with one that is not cut
    "alibi_cut": {"position": "alibi", "alibi_cutoff": 0.75, "n_kv_heads": 6},
    "cut_documents": {"alibi_cutoff": 1.25, "document_mask": True, "sliding_window": 6, "n_kv_heads": 6},
    "nope_documents": {"position": "nope", "document_mask": True},
    "multi_head": {"n_kv_heads": 6},
    "tied": {"tied_embeddings": True},
}


def spread(model):
    """Weights of order 1 in every matrix, norms included: at initialisation the sublayers hardly matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.startswith("layers"):
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5, generator=generator)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_float64_oracle(case):
    model = spread(build_model("nape_llama3", "debug", **{**SMALL, **CASES[case]}))
    tokens = torch.randint(0, 8, (2, 19), generator=torch.Generator().manual_seed(1))  # with end-of-text among them
    torch.testing.assert_close(model(tokens).double(), oracle_logits(model, tokens), rtol=1e-5, atol=1e-5)
    double = model.double()
    torch.testing.assert_close(double(tokens), oracle_logits(double, tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["nape", "cut", "alibi_cut", "cut_documents"])
def test_heads_in_bands_equal_the_oracle(case, monkeypatch):
    """Values and gradients of blocks of 2 queries, for the whole batch and for the kept rows of layer dropout."""
    options = {**SMALL, "alibi_cutoff": 3.0, **CASES[case]}
    tokens = torch.randint(0, 8, (3, 29), generator=torch.Generator().manual_seed(1))
    keep = torch.tensor([[True, False], [True, True], [False, True]])
    found = []
    for block in (2, 128):
        monkeypatch.setattr("regdrop_titan.models.bands.BLOCK", block)
        model = spread(build_model("nape_llama3", "debug", **options)).double()
        documents = document_ids(tokens, 0) if options.get("document_mask") else None
        groups = model.layers["0"].context(29, tokens.device, documents).groups
        assert any(group.context.band is not None for group in groups) == (block == 2)
        torch.testing.assert_close(model(tokens), oracle_logits(model, tokens), rtol=1e-6, atol=1e-6)
        logits = model(tokens, keep=keep)
        logits.square().sum().backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_no_cut_is_the_whole_bias():
    """`alibi_cutoff = 0` turns groups and bands off, and one that no distance reaches changes no logit."""
    tokens = torch.randint(0, 64, (1, 420), generator=torch.Generator().manual_seed(1))
    plain, far, near = (
        spread(build_model("nape_llama3", "debug", **SMALL, alibi_cutoff=cutoff)) for cutoff in (0.0, 1e6, 40.0)
    )
    context = plain.layers["0"].context(420, tokens.device, None)
    slopes = (1.0, 1 / 2, 1 / 3, 0.0, 0.0, 0.0)
    assert context.groups == () and torch.equal(context.bias, attention_bias(slopes, None, 420, tokens.device))
    torch.testing.assert_close(far(tokens), plain(tokens), rtol=1e-5, atol=1e-5)
    assert near.layers["0"].context(420, tokens.device, None).groups[0].context.band is not None
    torch.testing.assert_close(near(tokens), plain(tokens), rtol=1e-5, atol=1e-5)


def test_layers_in_bands_share_a_graph(monkeypatch):
    """Documents and groups of heads go into compiled blocks without a graph a layer or a break, kept rows too."""
    monkeypatch.setattr("regdrop_titan.models.bands.BLOCK", 2)
    torch._dynamo.reset()
    options = {**SMALL, "n_layers": 4, "alibi_cutoff": 1.25, "document_mask": True}
    eager, net = (spread(build_model("nape_llama3", "debug", **options)) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    for name, block in net.layers.named_children():
        net.layers.register_module(name, torch.compile(block, backend=counter, fullgraph=True))
    tokens = torch.randint(0, 8, (4, 29), generator=torch.Generator().manual_seed(1))
    for keep, graphs in ((None, 1), (torch.arange(16).view(4, 4) % 3 > 0, 2), (torch.arange(16).view(4, 4) % 5 > 1, 2)):
        torch.testing.assert_close(net(tokens, keep=keep), eager(tokens, keep=keep))
        assert counter.frame_count == graphs
    torch._dynamo.reset()


def test_the_debug_flavor_equals_the_oracle():
    model = build_model("nape_llama3", "debug")
    tokens = torch.randint(0, 2048, (1, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens).double(), oracle_logits(model, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("nape", "tied", "multi_head")])
def test_every_option_changes_the_logits(case):
    """ALiBi's bias, positions, windows and document masks are not silently ignored (reports A2, S2)."""
    tokens = torch.randint(0, 8, (2, 19), generator=torch.Generator().manual_seed(1))
    plain = spread(build_model("nape_llama3", "debug", **SMALL))(tokens)
    other = spread(build_model("nape_llama3", "debug", **{**SMALL, **CASES[case]}))(tokens)
    assert (plain - other).abs().max() > 1e-2


def test_a_window_of_the_whole_sequence_changes_nothing():
    tokens = torch.randint(0, 64, (2, 19), generator=torch.Generator().manual_seed(1))
    plain = spread(build_model("nape_llama3", "debug", **SMALL))(tokens)
    wide = spread(build_model("nape_llama3", "debug", **SMALL, sliding_window=19))(tokens)
    assert torch.equal(plain, wide)


def test_the_nearest_key_has_most_weight():
    """Scores all zero: ALiBi alone decides, and decays with distance (report A3)."""
    S = 9
    v = torch.eye(S).expand(1, 2, S, S)
    zeros = torch.zeros(1, 2, S, 4)
    out = sdpa_attention(
        zeros, zeros, v, AttentionContext(bias=attention_bias((1.0, 0.0), None, S, torch.device("cpu")))
    )
    last = out[0, 0, -1]
    assert last.argmax() == S - 1
    torch.testing.assert_close(last[1:] / last[:-1], torch.full((S - 1,), math.e))
    torch.testing.assert_close(out[0, 1, -1], torch.full((S,), 1 / S))


@pytest.mark.parametrize("S", [64, 128, 257])
@pytest.mark.parametrize("window", [None, 32, (9, 40, None, None)])
@pytest.mark.parametrize("packed", [False, True])
def test_flex_attention_agrees_with_sdpa(S, window, packed):
    """The CUDA path's oracle test; FlexAttention's forward runs on CPU too."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, S, 16, generator=generator)
    k, v = (torch.randn(2, 2, S, 16, generator=generator) for _ in range(2))
    cpu = torch.device("cpu")
    slopes = nape_slopes(4)
    bias = attention_bias(tuple(slopes.tolist()), window, S, cpu)
    mask = causal_block_mask(window, S, cpu)
    if packed:
        documents = document_ids(torch.randint(0, 20, (2, S), generator=generator), 0)
        bias = bias.masked_fill(documents[:, None, :, None] != documents[:, None, None, :], -torch.inf)
        mask = document_block_mask(documents, window)
    expected = sdpa_attention(q, k, v, AttentionContext(bias=bias))
    got = flex_attention_with_slopes(q, k, v, AttentionContext(slopes=slopes, block_mask=mask), flex=flex_attention)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    if packed:  # the kept rows of layer dropout take their own blocks and documents along
        rows = torch.tensor([1])
        context = AttentionContext(slopes=slopes, block_mask=mask, window=window, documents=documents).of_rows(rows)
        got = flex_attention_with_slopes(q[rows], k[rows], v[rows], context, flex=flex_attention)
        torch.testing.assert_close(got, expected[rows], rtol=1e-4, atol=1e-5)


GPU_WAYS = {  # options, calls of FlexAttention and of SDPA a layer
    "cut": ({"alibi_cutoff": 2.0}, 1, 1),
    "no cut": ({"alibi_cutoff": 0.0}, 1, 0),
    "window": ({"sliding_window": 9}, 2, 0),
    "documents": ({"alibi_cutoff": 4.0, "document_mask": True, "eos_id": 3}, 2, 0),
    "ALiBi in all heads": ({"position": "alibi", "slopes": "press"}, 1, 0),
    "no positions": ({"position": "nope"}, 0, 1),
}


@pytest.mark.parametrize("name", GPU_WAYS)
def test_the_ways_of_a_gpu(name, monkeypatch):
    """A model that takes them on a CPU, FlexAttention uncompiled, has the logits and gradients of the CPU's way; with
    dropped sequences too. Heads without a slope need no bias."""
    options, n_flex, n_sdpa = GPU_WAYS[name]
    model = build_model("nape_llama3", "debug", **{**SMALL, "n_layers": 1, **options})
    tokens = torch.randint(0, 64, (3, 150), generator=torch.Generator().manual_seed(0))
    keep = torch.tensor([[True], [False], [True]])

    def results():
        found = []
        for kept in (None, keep):
            out = model(tokens, keep=kept)
            found += [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]
        return found

    expected = results()
    calls = {"flex": 0, "sdpa": 0}

    def count(kind, function):
        def counted(q, k, v, *rest):
            calls[kind] += 1
            return function(q, k, v, *rest)

        return counted

    def flex(q, k, v, context, scale):
        return flex_attention_with_slopes(q, k, v, context, scale, flex_attention)

    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)  # of the backward
    monkeypatch.setattr(attention, "uses_flex_attention", lambda *_: True)
    monkeypatch.setattr(attention, "flex_attention_with_slopes", count("flex", flex))
    monkeypatch.setattr(attention, "sdpa_attention", count("sdpa", sdpa_attention))
    for got, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4 * wanted.abs().max().item())
    assert calls == {"flex": 2 * n_flex, "sdpa": 2 * n_sdpa}


def test_bf16_autocast_keeps_the_bias_exact():
    """Past 256 tokens a bf16 bias rounds distances; the fp32 one does not."""
    S = 700
    q, k = torch.zeros(1, 1, S, 8), torch.zeros(1, 1, S, 8)
    v = torch.arange(S, dtype=torch.float32).view(1, 1, S, 1).expand(1, 1, S, 8)
    context = AttentionContext(bias=attention_bias((0.01,), None, S, torch.device("cpu")))
    exact = sdpa_attention(q, k, v, context)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = sdpa_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), context).float()
    torch.testing.assert_close(half, exact, rtol=1e-2, atol=1.0)
    # distances of 512 ... 699 would collapse to multiples of 4 in bf16: differences of weights tell
    assert context.bias[0, 0, -1, 100] - context.bias[0, 0, -1, 99] == pytest.approx(0.01, rel=1e-3)


def test_packed_documents_do_not_see_each_other():
    model = spread(build_model("nape_llama3", "debug", **SMALL, document_mask=True))
    tokens = torch.tensor([[5, 6, 7, 0, 9, 10, 11]])
    changed = tokens.clone()
    changed[0, 1] = 20
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, 4:], b[:, 4:]) and not torch.equal(a[:, 1:4], b[:, 1:4])


def test_attention_is_causal():
    model = spread(build_model("nape_llama3", "debug", **SMALL))
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[:, 8:] = 1
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("flavor", "total", "without_embeddings"),
    [("400M", 423.5e6, 226.5e6), ("150M", 156.5e6, None), ("1B", 998e6, None), ("3B", 2.96e9, None)],
)
def test_parameter_counts(flavor, total, without_embeddings):
    args = flavor_args("nape_llama3", flavor)
    with torch.device("meta"):
        model = Decoder(args)
    n = sum(p.numel() for p in model.parameters())
    assert n == args.n_parameters() == pytest.approx(total, rel=2e-3)
    if without_embeddings:
        assert n - 2 * args.vocab_size * args.dim == pytest.approx(without_embeddings, rel=1e-3)


def test_the_debug_flavor_is_small():
    assert flavor_args("nape_llama3", "debug").n_parameters() < 2e6


def test_flops_count_a_tied_head_once():
    """Dense FLOPs by hand: 6 a weight of every matrix product, 12 d S a layer of attention."""
    for tied in (False, True):
        args = flavor_args("nape_llama3", "debug", **SMALL, tied_embeddings=tied)
        model = Decoder(args)
        products = sum(p.numel() for n, p in model.named_parameters() if n.startswith("layers") and p.dim() == 2)
        _, flops = args.get_nparams_and_flops(model, 100)
        norms = (2 * args.n_layers + 1) * args.dim
        assert flops == 6 * (products + args.vocab_size * args.dim + norms) + 12 * 2 * 48 * 100


@pytest.mark.parametrize(
    ("name", "flavor", "overrides", "message"),
    [
        ("llama", "debug", {}, "there are nape_llama3"),
        ("nape_llama3", "7B", {}, "there are debug"),
        ("nape_llama3", "debug", {"widht": 3}, "unknown model argument widht"),
        ("nape_llama3", "debug", {"n_heads": 3, "dim": 96, "n_kv_heads": 3}, "even number of heads"),
        ("nape_llama3", "debug", {"n_kv_heads": 3}, "must divide n_heads"),
        ("nape_llama3", "debug", {"dim": 100, "n_heads": 8}, "multiple of n_heads"),
        ("nape_llama3", "debug", {"sliding_window": 0}, "sliding_window = 0"),
        ("nape_llama3", "debug", {"alibi_cutoff": -1.0}, "alibi_cutoff = -1.0: must be a number of nats of at least 0"),
        ("nape_llama3", "debug", {"alibi_cutoff": math.nan}, "alibi_cutoff = nan"),
        ("nape_llama3", "debug", {"p": 1.0}, r"p = 1.0: must be in \[0, 1\)"),
    ],
)
def test_impossible_models_are_refused(name, flavor, overrides, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, flavor, **overrides)


def test_tensor_parallel_ranks_have_the_slopes_of_their_own_heads():
    """Rank 1 of 2 holds global heads 2 and 3 (report A7)."""
    for position, expected in (("alibi", (1 / 3, 1 / 4)), ("nape", (0.0, 0.0))):
        attention = build_model("nape_llama3", "debug", position=position).layers["0"].attention.inner
        attention.shard_heads(rank=1, size=2)
        assert attention.slopes == expected
        assert (attention.n_heads, attention.n_kv_heads) == (2, 2)

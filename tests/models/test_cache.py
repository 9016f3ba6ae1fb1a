"""Reading with a cache against reading all at once, for every kind of layer and position."""

import pytest
import torch

from regdrop_titan.models import build_model
from regdrop_titan.models.cache import Cache

SMALL = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}
MAMBA = {"dim": 32, "n_layers": 3, "vocab_size": 64, "ssm_head_dim": 16, "state_size": 8, "chunk_size": 5}
MODELS = {
    "nape": ("nape_llama3", SMALL),
    "rope": ("nape_llama3", {**SMALL, "position": "rope"}),
    "nope": ("nape_llama3", {**SMALL, "position": "nope"}),
    "alibi window": ("nape_llama3", {**SMALL, "position": "alibi", "slopes": "press", "sliding_window": 5}),
    "yarn": ("nape_llama3", {**SMALL, "position": "rope", "rope_scaling": "yarn", "rope_factor": 4.0,
                             "rope_original_context": 16}),
    "rope window": ("nape_llama3", {**SMALL, "position": "rope", "sliding_window": 1}),
    "nape documents": ("nape_llama3", {**SMALL, "document_mask": True, "eos_id": 3}),
    "adaptive": ("nape_llama3", {**SMALL, "scaling": "adaptive", "scaled_heads": "nope"}),
    "ssmax entmax": ("nape_llama3", {**SMALL, "scaling": "ssmax", "attention": "entmax15"}),
    "smollm3 window": ("smollm3", {**SMALL, "n_layers": 5, "sliding_window": 7}),
    "celerity": ("celerity", {**SMALL, "n_kv_heads": 4, "parametrization": "completep", "base_dim": 16,
                              "base_layers": 2}),
    "nape cut": ("nape_llama3", {**SMALL, "alibi_cutoff": 2.0}),  # windows of 3 and 5 keys
    "nape cut documents": ("nape_llama3", {**SMALL, "alibi_cutoff": 4.0, "document_mask": True, "eos_id": 3,
                                           "sliding_window": 6, "attention": "entmax15"}),
    "celerity cut": ("celerity", {**SMALL, "n_kv_heads": 4, "alibi_cutoff": 1.0}),  # of 5, 17, 65 and 257
    "mamba2": ("mamba2", MAMBA),
    "mamba2 documents": ("mamba2", {**MAMBA, "document_mask": True, "eos_id": 3}),
    "hybrid": ("mamba2", {**MAMBA, "layers": "mamba,attention", "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 48,
                          "sliding_window": 6}),
}  # fmt: skip


def model_and_tokens(name, rows, length):
    family, overrides = MODELS[name]
    model = build_model(family, "debug", **overrides).eval()
    with torch.no_grad():  # no parameter at a value where its effect vanishes
        for i, parameter in enumerate(model.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    tokens = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(7))
    tokens[0, 4] = tokens[1, 9] = tokens[1, 10] = 3  # ends of documents, one of them empty
    return model, tokens


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_pieces_equal_the_whole(name):
    """Pieces of many lengths, single tokens among them, across documents, windows and the scan's chunks."""
    model, tokens = model_and_tokens(name, 2, 40)
    cache = Cache(2, 40, chunk=13)
    pieces, start = [], 0
    for n in (13, 1, 1, 7, 3, 13, 1, 1):
        pieces.append(model(tokens[:, start : start + n], cache=cache))
        start += n
    assert start == 40 and cache.lengths == [40, 40]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_first_piece_is_read_as_without_a_cache(name):
    """The same operations, so bit for bit, and again after a rewind to nothing; bands and plain causal heads too."""
    model, tokens = model_and_tokens(name, 2, 40)
    cache = Cache(2, 60, chunk=40)
    empty = cache.mark()
    for n in (40, 13):
        assert torch.equal(model(tokens[:, :n], cache=cache), model(tokens[:, :n]))
        cache.rewind(empty)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_different_lengths(name):
    """Sequences of 3, 17 and 26 tokens, padded on the right in pieces, then each goes on by single tokens: as alone."""
    model, tokens = model_and_tokens(name, 3, 34)
    prompts = [3, 17, 26]
    cache = Cache(3, 34, chunk=10)
    got = [[] for _ in prompts]
    for start in range(0, 26, 10):
        piece = torch.full((3, min(10, 26 - start)), 5)
        counts = [max(0, min(piece.shape[1], prompt - start)) for prompt in prompts]
        for row, count in enumerate(counts):
            piece[row, :count] = tokens[row, start : start + count]
        logits = model(piece, cache=cache, counts=counts)
        for row, count in enumerate(counts):
            got[row].append(logits[row, :count])
    assert cache.lengths == prompts
    for step in range(8):
        logits = model(torch.stack([tokens[row, [n + step]] for row, n in enumerate(prompts)]), cache=cache)
        for row in range(3):
            got[row].append(logits[row])
    for row, n in enumerate(prompts):
        alone = model(tokens[row : row + 1, : n + 8])[0]
        torch.testing.assert_close(torch.cat(got[row]), alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("cutoff", "kept"), [(0.0, [45, 45]), (2.0, [10, 45])])
def test_heads_that_are_cut_keep_few_keys(cutoff, kept):
    """Their 5 keys and a piece of 5, of 40 and a piece."""
    model = build_model("nape_llama3", "debug", **{**SMALL, "n_kv_heads": 2, "alibi_cutoff": cutoff}).eval()
    cache = Cache(1, 40, chunk=5)
    model(torch.ones(1, 5, dtype=torch.int64), cache=cache)
    heads = [layer.keys.shape[2] for layer in cache.layers.values() for _ in range(layer.keys.shape[1])]
    assert heads == 3 * kept


@torch.no_grad()
def test_logits_at_positions_and_of_some_layers():
    model, tokens = model_and_tokens("nape", 2, 20)
    at = torch.tensor([[3, 19], [0, 7]])
    whole = model(tokens, layers=[0, 2])
    expected = torch.stack([whole[0, at[0]], whole[1, at[1]]])
    assert torch.equal(model(tokens, layers=[0, 2], at=at), expected)
    cache = Cache(2, 20, chunk=20)
    model(tokens[:, :12], layers=[0, 2], cache=cache)
    after = model(tokens[:, 12:], layers=[0, 2], cache=cache)
    torch.testing.assert_close(after, whole[:, 12:], rtol=1e-5, atol=1e-5)


def test_what_does_not_fit():
    model, tokens = model_and_tokens("nape", 2, 20)
    with pytest.raises(ValueError, match="15 tokens at once: this cache takes 10"):
        model(tokens[:, :15], cache=Cache(2, 20, chunk=10))
    with pytest.raises(ValueError, match="a sequence of 10 tokens: this cache has room for 9"):
        model(tokens[:, :10], cache=Cache(2, 9, chunk=10))
    with pytest.raises(ValueError, match=r"counts \[3, 11\]"):
        model(tokens[:, :10], cache=Cache(2, 20, chunk=10), counts=[3, 11])
    with pytest.raises(ValueError, match="chunk 0"):
        Cache(1, 10, chunk=0)

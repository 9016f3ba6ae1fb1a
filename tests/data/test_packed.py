"""Packed sets: windows, shuffling, the loader's global order, and the corpus of standard-library sources."""

import json

import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from regdrop_titan.data import DataError, PackedDataset
from regdrop_titan.data.loader import PackedLoader, PackedValidationLoader
from regdrop_titan.data.packed import PackedTokens, Permutation, write_packed


@pytest.fixture
def counting(tmp_path):
    """A set whose token i is i, in documents of 7 tokens: 140 tokens with end-of-text at 6, 13, ..."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    write_packed(tmp_path / "set", [list(range(i, i + 6)) for i in range(0, 140, 7)], tokenizer, 1000, eos_id=999)
    return tmp_path / "set"


def stream(path):
    return torch.from_numpy(np.fromfile(path / "shard-00000.tokens", dtype="uint16").astype(np.int64))


def test_samples_are_windows_of_the_stream(counting):
    dataset = PackedDataset(counting, 10, seed=0, shuffle=False)
    tokens = stream(counting)
    assert len(dataset) == 13  # 130 inputs and the label of the last
    for i in range(13):
        sample = dataset[i]
        assert torch.equal(sample["input"], tokens[10 * i : 10 * i + 10])
        assert torch.equal(sample["labels"], tokens[10 * i + 1 : 10 * i + 11])
        assert sample["input"].dtype == torch.int64
    with pytest.raises(IndexError):
        dataset[13]


def test_windows_cross_shards(counting, tmp_path):
    """The same stream cut into three shards, one of them empty, gives the same samples and documents."""
    manifest = json.loads((counting / "manifest.json").read_text())
    tokens, ends = stream(counting), np.fromfile(counting / "shard-00000.documents", dtype=np.int64)
    split = tmp_path / "split"
    split.mkdir()
    shards = []
    for number, (start, stop) in enumerate([(0, 49), (49, 49), (49, 140)]):
        tokens[start:stop].numpy().astype("uint16").tofile(split / f"{number}.tokens")
        inside = ends[(ends > start) & (ends <= stop)] - start
        inside.tofile(split / f"{number}.documents")
        shards.append({"file": f"{number}.tokens", "tokens": stop - start, "documents_file": f"{number}.documents",
                       "documents": len(inside)})  # fmt: skip
    (split / "manifest.json").write_text(json.dumps(manifest | {"shards": shards}))
    a, b = PackedDataset(counting, 16, seed=3), PackedDataset(split, 16, seed=3)
    assert all(torch.equal(a[i]["input"], b[i]["input"]) for i in range(len(a)))
    documents = [list(map(torch.Tensor.tolist, PackedTokens(path).documents(5))) for path in (counting, split)]
    assert documents[0] == documents[1] and len(documents[0]) == 20
    assert documents[0][1] == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("n", [1, 2, 3, 13, 64, 1000])
def test_permutation_is_a_bijection(n):
    permutation = Permutation(n, key=5)
    assert sorted(permutation(i) for i in range(n)) == list(range(n))


def test_permutation_is_o1_and_looks_random():
    """A trillion samples cost no memory, and places are spread evenly: mean of n uniform draws, 4 standard errors."""
    n = 10**12
    permutation = Permutation(n, key=1)
    places = np.array([permutation(i) / n for i in range(4000)])
    assert abs(places.mean() - 0.5) < 4 / (12 * 4000) ** 0.5
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 4 / 4000**0.5


def test_epochs_and_seeds_reshuffle(counting):
    def order(seed, epoch):
        dataset = PackedDataset(counting, 10, seed=seed, epoch=epoch)
        return [dataset[i]["input"][0].item() for i in range(len(dataset))]

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len({tuple(o) for o in orders.values()}) == 6
    assert all(sorted(o) == sorted(orders[0, 0]) for o in orders.values())
    assert order(0, 1) == orders[0, 1]


def global_batches(path, world_size, local, n_steps, start=0, accumulate=1):
    """The global batch of each step as all ranks together see it, in order of rows."""
    loaders = [PackedLoader(PackedDataset(path, 10, seed=0), local, rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        loader.load_state_dict({"samples_consumed": start})
    iterators = [iter(loader) for loader in loaders]
    steps = []
    for _ in range(n_steps):
        rows = [row for _ in range(accumulate) for it in iterators for row in next(it)[0]["input"].tolist()]
        steps.append(rows)
    return steps, loaders[0].state_dict()


def test_every_world_size_sees_the_same_global_batches(counting):
    """Over an epoch's end too: 13 samples an epoch, 10 steps of 4."""
    reference, state = global_batches(counting, 1, 4, 10)
    assert state == {"samples_consumed": 40}
    for world_size, local, accumulate in [(2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2)]:
        assert global_batches(counting, world_size, local, 10, accumulate=accumulate)[0] == reference
    # stopped after 3 steps of one process, resumed by four
    rest, state = global_batches(counting, 4, 1, 7, start=12)
    assert rest == reference[3:] and state == {"samples_consumed": 40}


def test_the_state_of_a_loader_is_a_number(counting):
    loader = PackedLoader(PackedDataset(counting, 10, seed=0), 2, 0, 2)
    iterator = iter(loader)
    first = next(iterator)[1]
    assert loader.state_dict() == {"samples_consumed": 4}
    next(iterator)
    loader.load_state_dict({"samples_consumed": 0})
    assert torch.equal(next(iter(loader))[1], first)


def test_validation_batches_are_the_same_and_equal_in_number(counting):
    """13 samples over 2 ranks of 2: 4 batches each, the 3 rows past the end without labels."""
    loaders = [PackedValidationLoader(PackedDataset(counting, 10, seed=0, shuffle=False), 2, r, 2) for r in (0, 1)]
    rounds = [[list(loader) for loader in loaders] for _ in range(2)]
    assert [len(batches) for batches in rounds[0]] == [4, 4]
    labels = torch.cat([labels for batches in rounds[0] for _, labels in batches])
    assert (labels == IGNORE_INDEX).all(1).sum() == 3
    assert sorted(labels[(labels != IGNORE_INDEX).all(1)][:, 0].tolist()) == sorted(stream(counting)[1:131:10].tolist())
    for (a, _), (b, _) in zip(rounds[0][0], rounds[1][0], strict=True):
        assert torch.equal(a["input"], b["input"])
    assert len(list(PackedValidationLoader(PackedDataset(counting, 10, seed=0), 2, 0, 2, steps=3))) == 3


def test_an_empty_corpus_is_refused(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    with pytest.raises(DataError, match="no documents"):
        write_packed(tmp_path / "empty", [], tokenizer, 10, 0)
    assert not (tmp_path / "empty").exists()


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    write_packed(tmp_path / "set", [[128255] * 5], tokenizer, 128256, 0)
    assert PackedDataset(tmp_path / "set", 4, seed=0)[0]["input"].tolist() == [128255] * 4


def test_stdlib_corpus(tmp_path):
    """Built once, deterministic, complete, and the tokenizer reads its own text back."""
    from tokenizers import Tokenizer

    from regdrop_titan.data.stdlib_corpus import SETS, VOCAB_SIZE, build_stdlib_corpus, stdlib_sources

    sources = tmp_path / "sources"
    sources.mkdir()
    for i, text in enumerate(stdlib_sources()[:60]):
        (sources / f"module_{i:02}.py").write_text(text[:40_000])
    (sources / "empty.py").write_text("")
    (sources / "latin.py").write_bytes(b"# \xe9\xff")
    build_stdlib_corpus(tmp_path / "a", sources)
    before = (tmp_path / "a/train/shard-00000.tokens").stat().st_mtime_ns
    build_stdlib_corpus(tmp_path / "a", sources)
    assert (tmp_path / "a/train/shard-00000.tokens").stat().st_mtime_ns == before
    build_stdlib_corpus(tmp_path / "b", sources)
    tokenizer = Tokenizer.from_file(str(tmp_path / "a/tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    decoded = []
    for name in SETS:
        assert (tmp_path / "a" / name / "shard-00000.tokens").read_bytes() == (
            tmp_path / "b" / name / "shard-00000.tokens"
        ).read_bytes()
        tokens = PackedTokens(tmp_path / "a" / name)
        start = 0
        for end in tokens.document_ends.tolist():
            decoded.append(tokenizer.decode(tokens.slice(start, end - 1).tolist(), skip_special_tokens=False))
            start = end
    texts = [file.read_text() for file in sorted(sources.glob("module_*.py"))]
    assert sorted(decoded) == sorted(texts)
    assert all(len(d) == 2049 for d in PackedTokens(tmp_path / "a/long").documents(2049))

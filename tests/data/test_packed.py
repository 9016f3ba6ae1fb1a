"""Packed sets: windows, shuffling, the loader's global order, and the corpus of standard-library sources."""

import json

import numpy as np
import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from regdrop_titan.data import DataError, PackedDataset
from regdrop_titan.data.loader import TrainingLoader, ValidationLoader
from regdrop_titan.data.mixture import Mixture
from regdrop_titan.data.packed import PackedTokens, Permutation, verify

from ..packed_sets import write_packed


@pytest.fixture
def counting(tmp_path):
    """A set whose token i is i, in documents of 7 tokens: 140 tokens with end-of-text at 6, 13, ..."""
    write_packed(tmp_path / "set", [list(range(i, i + 6)) for i in range(0, 140, 7)], 1000, eos_id=999)
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
    """The global batch of each step as all ranks together see it, in order of rows, and the loaders' state."""
    loaders = [TrainingLoader(Mixture(path, 10, seed=0), local, rank, world_size) for rank in range(world_size)]
    for loader in loaders:
        loader.load_state_dict({"samples_consumed": start})
    iterators = [iter(loader) for loader in loaders]
    steps = []
    for _ in range(n_steps):
        rows = [next(iterator)[0]["input"].tolist() for _ in range(accumulate) for iterator in iterators]
        steps.append([row for batch in rows for row in batch])
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return steps, states[0]


LAYOUTS = [(world, 8 // world // accumulate, accumulate) for world in (1, 2, 4) for accumulate in (1, 2, 4)
           if world * accumulate <= 8]  # fmt: skip


@pytest.mark.parametrize(("world", "local", "accumulate"), LAYOUTS)
def test_every_layout_sees_the_same_global_batches(counting, world, local, accumulate):
    """Over an epoch's end too, at every step of a stop: 13 samples an epoch, 5 steps of 8, resumed elsewhere."""
    reference, state = global_batches(str(counting), 1, 8, 5)
    assert state == {"samples_consumed": 40}
    assert global_batches(str(counting), world, local, 5, accumulate=accumulate)[0] == reference
    for stopped in range(6):
        first, state = global_batches(str(counting), world, local, stopped, accumulate=accumulate)
        assert state == {"samples_consumed": 8 * stopped}
        for other_world, other_local, other_accumulate in LAYOUTS[::3]:
            rest, _ = global_batches(
                str(counting), other_world, other_local, 5 - stopped, 8 * stopped, other_accumulate
            )
            assert first + rest == reference
    flat = [tuple(row) for step in reference for row in step]
    assert len(set(flat[:13])) == len(set(flat[13:26])) == 13 and flat[:13] != flat[13:26]


def test_the_state_of_a_loader_is_a_number(counting):
    loader = TrainingLoader(Mixture(str(counting), 10, seed=0), 2, 0, 2)
    iterator = iter(loader)
    first = next(iterator)[1]
    assert loader.state_dict() == {"samples_consumed": 4}
    next(iterator)
    loader.load_state_dict({"samples_consumed": 0})
    assert torch.equal(next(iter(loader))[1], first)
    loader.load_state_dict({"samples_consumed": 0})
    assert torch.equal(next(iterator)[1], first)  # also one that was begun before loading (report T2)


def test_validation_batches_are_the_same_and_equal_in_number(counting):
    """13 samples over 2 ranks of 2: 4 batches each, the 3 rows past the end without labels."""
    dataset = PackedDataset(counting, 10, seed=0, shuffle=False)
    loaders = [ValidationLoader(dataset, 13, 2, rank, 2) for rank in (0, 1)]
    rounds = [[list(loader) for loader in loaders] for _ in range(2)]
    assert [len(batches) for batches in rounds[0]] == [4, 4]
    labels = torch.cat([labels for batches in rounds[0] for _, labels in batches])
    assert (labels == IGNORE_INDEX).all(1).sum() == 3
    assert sorted(labels[(labels != IGNORE_INDEX).all(1)][:, 0].tolist()) == sorted(stream(counting)[1:131:10].tolist())
    for (a, _), (b, _) in zip(rounds[0][0], rounds[1][0], strict=True):
        assert torch.equal(a["input"], b["input"])
    assert len(list(ValidationLoader(dataset, 12, 2, 0, 2))) == 3


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    write_packed(tmp_path / "set", [[128255] * 5], 128256)
    assert PackedDataset(tmp_path / "set", 4, seed=0)[0]["input"].tolist() == [128255] * 4


def test_verify_finds_every_altered_file(counting):
    assert verify(counting)["tokens"] == 140
    for name in ("shard-00000.tokens", "shard-00000.documents"):
        data = bytearray((counting / name).read_bytes())
        data[20] ^= 1
        (counting / name).write_bytes(data)
    with pytest.raises(DataError) as error:
        verify(counting)
    assert str(error.value).count("altered") == 2
    (counting / "shard-00000.tokens").write_bytes(b"")
    (counting / "shard-00000.documents").unlink()
    with pytest.raises(DataError, match=r"tokens: 0 bytes, manifest.json says 280\n.*documents: missing"):
        verify(counting)


def test_a_token_outside_of_the_vocabulary_is_named(counting):
    data = np.fromfile(counting / "shard-00000.tokens", dtype="uint16")
    data[25] = 60000
    data.tofile(counting / "shard-00000.tokens")
    dataset = PackedDataset(counting, 10, seed=0, shuffle=False)
    dataset[1]
    with pytest.raises(DataError, match=r"token 60000 between tokens 20 and 31.*vocabulary has 1000.*--verify"):
        dataset[2]


def test_two_trillion_tokens_open_at_once(tmp_path):
    """A sparse set of 500 shards: resuming at sample 10^9 takes under a second, the state under 1 KB, and no file
    stays open."""
    import os
    import time

    size = 4 * 10**9
    shards = []
    for i in range(500):
        name = f"shard-{i:05}.tokens"
        with open(tmp_path / name, "wb") as file:
            file.truncate(4 * size)
        (tmp_path / f"shard-{i:05}.documents").touch()
        shards.append({"file": name, "tokens": size, "documents_file": f"shard-{i:05}.documents", "documents": 0})
    manifest = {"format": 1, "dtype": "uint32", "vocab_size": 128256, "eos_id": 0, "tokens": 500 * size,
                "documents": 0, "tokenizer": {}, "shards": shards}  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for shard, value in ((0, 1), (499, 2)):
        with open(tmp_path / f"shard-{shard:05}.tokens", "r+b") as file:
            file.write(np.full(2049, value, dtype="uint32").tobytes())
    open_files = len(os.listdir("/proc/self/fd"))
    began = time.perf_counter()
    loader = TrainingLoader(Mixture(str(tmp_path), 2048, seed=0), 8, 0, 8)
    loader.load_state_dict({"samples_consumed": 10**9})
    batch, _ = next(iter(loader))
    assert time.perf_counter() - began < 1
    assert batch["input"].shape == (8, 2048) and len(json.dumps(loader.state_dict())) < 1024
    for i in range(20):
        loader.samples[i]
    assert len(os.listdir("/proc/self/fd")) <= open_files
    tokens = PackedTokens(tmp_path)
    assert tokens.slice(0, 2048).tolist() == [1] * 2048
    assert tokens.slice(499 * size - 1, 499 * size + 2048).tolist() == [0] + [2] * 2048


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

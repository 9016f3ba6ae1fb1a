"""Preparation against a plain loop over documents: every format, any number of workers, stops, kills, bad input."""

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regdrop_titan.data import DataError
from regdrop_titan.data import preparation as preparation_module
from regdrop_titan.data import sources as sources_module
from regdrop_titan.data.packed import PackedTokens, read_manifest, verify
from regdrop_titan.data.preparation import Preparation, PreparationStopped, Signalled, prepare
from regdrop_titan.data.records import Recipe, documents
from regdrop_titan.data.tokenizers import load_tokenizer, train_tokenizer
from regdrop_titan.data.writer import ShardWriter

from ..distributed.harness import ROOT, environment


def some_documents(n: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["one", "two ", "drei", "四", "\n", "🙂", "x = f(y)"]
    return [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(n)]


DOCUMENTS = some_documents(400)


def lines(documents, **more) -> bytes:
    return b"".join(json.dumps({"text": text, **more}).encode() + b"\n" for text in documents)


def texts_of(folder, tokenizer="bytes") -> list[str]:
    """The documents of a packed set, read back."""
    tokens, start, found = PackedTokens(folder), 0, []
    reader = load_tokenizer(tokenizer)
    for end in tokens.document_ends.tolist():
        ids = tokens.slice(start, end).tolist()
        assert ids[-1] == reader.eos_id and reader.eos_id not in ids[:-1]
        found.append(reader.decode(ids[:-1]))
        start = end
    assert start == len(tokens) == tokens.manifest["tokens"]
    return found


def content(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(lines(DOCUMENTS))
    return tmp_path


# Formats ------------------------------------------------------------------------------------------------------


def write_parquet(path, documents, **columns):
    pq.write_table(pa.table({"text": documents, **columns}), path, row_group_size=37)


def write_text_folder(path, documents):
    path.mkdir()
    for i, text in enumerate(documents):
        (path / f"{i:04}.txt").write_bytes(text.encode())


FORMATS = {
    "a.jsonl": lambda path: path.write_bytes(lines(DOCUMENTS)),
    "no_newline_at_the_end.jsonl": lambda path: path.write_bytes(lines(DOCUMENTS)[:-1]),
    "blank_lines.jsonl": lambda path: path.write_bytes(b"\n" + lines(DOCUMENTS) + b" \r\n\n"),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(DOCUMENTS))),
    "two_members.json.gz": lambda path: path.write_bytes(
        gzip.compress(lines(DOCUMENTS[:9])) + gzip.compress(lines(DOCUMENTS[9:]))
    ),
    "a.jsonl.zst": lambda path: path.write_bytes(pa.compress(lines(DOCUMENTS), codec="zstd", asbytes=True)),
    "a.parquet": lambda path: write_parquet(path, DOCUMENTS),
    "binary.parquet": lambda path: write_parquet(path, [text.encode() for text in DOCUMENTS]),
    "texts": lambda path: write_text_folder(path, DOCUMENTS),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, name, monkeypatch):
    """Also in blocks that are smaller than a record, and from any unit on, as a stopped preparation reads it."""
    FORMATS[name](tmp_path / name)
    prepare([str(tmp_path / name)], "bytes", tmp_path / "out")
    assert texts_of(tmp_path / "out") == DOCUMENTS
    if name == "texts":
        return
    monkeypatch.setattr(sources_module, "BLOCK", 50)
    (file,) = sources_module.find_inputs([str(tmp_path / name)])
    blocks = list(sources_module.read_blocks(file, ["text"]))
    n_units = sum(block.n_units for block in blocks)
    recipe = Recipe("bytes", None, "text", (), 0.0)

    def read(skip):
        return [text for b in sources_module.read_blocks(file, ["text"], skip) for _, text in documents(b, recipe)]

    assert read(0) == DOCUMENTS
    for skip in (1, 2, 36, 37, 38, 200, n_units - 1):
        expected = DOCUMENTS[max(0, skip - 1) :] if name == "blank_lines.jsonl" else DOCUMENTS[skip:]
        assert read(skip) == expected


def test_workers_and_shards_do_not_change_the_stream(corpus):
    contents = []
    for workers in (1, 3):
        manifest = prepare([str(corpus / "in")], "bytes", corpus / f"{workers}", workers=workers, shard_tokens=2000)
        contents.append(content(corpus / f"{workers}"))
        verify(corpus / f"{workers}")
    assert contents[0] == contents[1]
    shards = manifest["shards"]
    assert len(shards) > 5 and all(shard["tokens"] >= 2000 for shard in shards[:-1])
    assert texts_of(corpus / "1") == DOCUMENTS
    for shard in shards:  # no document is divided
        tokens = np.fromfile(corpus / "1" / shard["file"], dtype="uint16")
        assert tokens[-1] == 256 and (tokens == 256).sum() == shard["documents"]
    assert manifest["documents"] == 400 and manifest["sources"][0]["documents"] == 400
    assert manifest["tokenizer"]["name"] == "bytes" and manifest["special_ids"] == {"<|end_of_text|>": 256}


def test_a_tokenizers_files_travel_with_the_set(corpus):
    (corpus / "tok").mkdir()
    tokenizer = train_tokenizer(DOCUMENTS, 280)
    tokenizer.save(str(corpus / "tok/tokenizer.json"))
    (corpus / "tok/tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    manifest = prepare([str(corpus / "in")], corpus / "tok", corpus / "out", workers=2)
    assert manifest["tokenizer"]["sha256"] == load_tokenizer(corpus / "out").sha256
    assert manifest["vocab_size"] == 280
    assert texts_of(corpus / "out", corpus / "out") == DOCUMENTS
    expected = np.concatenate([[*tokenizer.encode(text).ids, 0] for text in DOCUMENTS])
    assert np.array_equal(np.fromfile(corpus / "out/shard-00000.tokens", dtype="uint16"), expected)


def test_validation_share(corpus):
    """Both sides together are the corpus; copies fall on one side; the share is right to 4 standard errors."""
    documents = [f"{i} {text}" for i, text in enumerate(some_documents(2000))]
    (corpus / "in/a.jsonl").write_bytes(lines(documents + documents[:500]))
    prepare([str(corpus / "in")], "bytes", corpus / "out", validation_share=0.2, shard_tokens=5000)
    train, held_out = texts_of(corpus / "out"), texts_of(corpus / "out/validation")
    assert sorted(train + held_out) == sorted(documents + documents[:500])
    assert not set(train) & set(held_out)
    order = {text: i for i, text in enumerate(documents)}
    assert train[:1000] == sorted(set(train[:1000]), key=order.__getitem__)
    assert abs(len(set(held_out)) / 2000 - 0.2) < 4 * (0.2 * 0.8 / 2000) ** 0.5
    verify(corpus / "out/validation")
    (corpus / "in/b.jsonl").write_bytes(lines(DOCUMENTS))
    with pytest.raises(DataError, match="none of 400 documents was held out by --validation-share 1e-12"):
        prepare([str(corpus / "in/b.jsonl")], "bytes", corpus / "x", validation_share=1e-12)


@pytest.mark.parametrize("place", ["top", "metadata", "dotted"])
def test_filters_and_keys(tmp_path, place):
    scores = [i % 6 for i in range(400)]
    if place == "top":
        table, key = {"edu_int_score": scores}, "edu_int_score"
        records = [{"text": text, "edu_int_score": s} for text, s in zip(DOCUMENTS, scores, strict=True)]
    else:
        outer = "metadata" if place == "metadata" else "info"
        table, key = {outer: [{"edu_int_score": s, "x": "y"} for s in scores]}, "edu_int_score"
        key = key if place == "metadata" else f"{outer}.{key}"
        records = [{"text": t, outer: {"edu_int_score": s}} for t, s in zip(DOCUMENTS, scores, strict=True)]
    write_parquet(tmp_path / "a.parquet", DOCUMENTS, **table)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    kept = [text for text, score in zip(DOCUMENTS, scores, strict=True) if score >= 3 and score != 5]
    for name in ("a.parquet", "a.jsonl"):
        out = tmp_path / f"out_{name}"
        manifest = prepare([str(tmp_path / name)], "bytes", out, filters=[f"{key}>=3", f"{key} != 5"])
        assert texts_of(out) == kept and manifest["filtered"] == 400 - len(kept)


def test_nested_text_and_null_scores(tmp_path):
    records = [{"doc": {"body": "a"}, "s": 3}, {"doc": {"body": "b"}, "s": None}, {"doc": {"body": "c"}, "s": 4}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "out", text_key="doc.body", filters=["s>=3"])
    assert texts_of(tmp_path / "out") == ["a", "c"]


def test_hub_layout_from_a_local_folder(tmp_path):
    """`hf:NAME:config` reads the train files that the card's configuration names, and no others."""
    repository = tmp_path / "repo"
    (repository / "high").mkdir(parents=True)
    write_parquet(repository / "high/train-0.parquet", DOCUMENTS[:50])
    write_parquet(repository / "high/test-0.parquet", ["test"])
    write_parquet(repository / "other.parquet", ["other"])
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: high\n  data_files:\n  - split: train\n    path: high/train*\n"
        "  - split: test\n    path: high/test*\n- config_name: testonly\n  data_files:\n  - split: test\n"
        "    path: high/test*\n---\n"
    )
    prepare([f"hf:{repository}:high"], "bytes", tmp_path / "out")
    assert texts_of(tmp_path / "out") == DOCUMENTS[:50]
    with pytest.raises(DataError, match="has no train split"):
        prepare([f"hf:{repository}:testonly"], "bytes", tmp_path / "x")
    with pytest.raises(DataError, match="cannot be opened"):
        prepare([f"hf:{tmp_path}/nowhere"], "bytes", tmp_path / "x")
    with pytest.raises(DataError, match=r"nosuch://a.jsonl: ValueError: Protocol not known"):
        prepare(["nosuch://a.jsonl"], "bytes", tmp_path / "x")
    with pytest.raises(DataError, match=r"memory://nowhere.jsonl: FileNotFoundError"):
        prepare(["memory://nowhere.jsonl"], "bytes", tmp_path / "x")


def test_a_remote_file_that_hiccups(tmp_path, monkeypatch):
    """A stream that breaks off in the middle is read on from there; one that stays broken is a bad file."""
    monkeypatch.setattr(sources_module, "BLOCK", 500)
    monkeypatch.setattr(sources_module.time, "sleep", lambda seconds: None)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/hiccup/a.jsonl", lines(DOCUMENTS))
    original, breaks = sources_module._open, {"left": 3}

    class Flaky:
        def __init__(self, file):
            self.file, self.reads = file, 0

        def read(self, size):
            self.reads += 1
            if self.reads > 4 and breaks["left"]:
                breaks["left"] -= 1
                raise RuntimeError("connection reset")  # as httpx does: not an OSError
            return self.file.read(size)

    monkeypatch.setattr(sources_module, "_open", lambda file: (lambda raw, s: (raw, Flaky(s)))(*original(file)))
    prepare(["memory://hiccup/a.jsonl"], "bytes", tmp_path / "out")
    assert texts_of(tmp_path / "out") == DOCUMENTS and breaks["left"] == 0
    breaks["left"] = 100
    with pytest.raises(DataError, match=r"memory://hiccup/a.jsonl, behind line .*connection reset"):
        prepare(["memory://hiccup/a.jsonl"], "bytes", tmp_path / "out2")


def test_one_document_of_50_mb(tmp_path):
    """As a JSON line and as a text file, which is read in pieces."""
    text = "".join(some_documents(1000, seed=3))
    text = text * (50_000_000 // len(text.encode()) + 1)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(lines(["before", text, "after"]))
    (tmp_path / "in/b.txt").write_text(text)
    manifest = prepare([str(tmp_path / "in")], "bytes", tmp_path / "out")
    size = len(text.encode())
    assert manifest["documents"] == 4 and size > 50_000_000
    assert PackedTokens(tmp_path / "out").document_ends.tolist() == [7, size + 8, size + 14, 2 * size + 15]
    tokens = np.fromfile(tmp_path / "out/shard-00000.tokens", dtype="uint16")
    for start in (7, size + 14):
        assert tokens[start : start + size].astype("uint8").tobytes() == text.encode()


# Bad input ----------------------------------------------------------------------------------------------------


def half(path, data):
    path.write_bytes(data[: len(data) // 2])


def whole_parquet(tmp_path):
    write_parquet(tmp_path / "whole", DOCUMENTS)
    return (tmp_path / "whole").read_bytes()


GOOD = lines(["good"])
BAD_RECORDS = [
    # name, content, message, where, what is left with skip
    ("cut.jsonl", GOOD + b'{"text": "cut', "not valid JSON", "line 2", ["good"]),
    ("utf8.jsonl", GOOD + b'{"text": "\xff\xfe"}\n' + GOOD, "not UTF-8: invalid", "line 2", ["good", "good"]),
    ("null.jsonl", GOOD + b'{"text": null}\n', "text is null, not text", "line 2", ["good"]),
    ("number.jsonl", GOOD + b'{"text": 5}\n', "text is int, not text", "line 2", ["good"]),
    ("key.jsonl", GOOD + b'{"txt": "a", "id": 1}\n', "no key 'text'; it has 'txt', 'id'", "line 2", ["good"]),
    ("list.jsonl", b'[{"text": "a"}]\n' + GOOD, "is list, not an object", "line 1", ["good"]),
    ("empty.jsonl", GOOD + b'\n{"text": ""}\n', "empty text", "line 3", ["good"]),
    ("surrogate.jsonl", GOOD + b'{"text": "a\\ud800"}\n', "a lone surrogate at character 1", "line 2", ["good"]),
    ("deep.jsonl", GOOD + b'{"text": ' + b"[" * 200_000 + b"\n" + GOOD, "not valid JSON", "line 2", ["good", "good"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "message", "where", "left"), BAD_RECORDS, ids=[r[0] for r in BAD_RECORDS])
def test_bad_records(tmp_path, name, data, message, where, left):
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(DataError) as error:
        prepare([str(file)], "bytes", tmp_path / "out")
    assert str(error.value).startswith(f"{file}, {where}: ") and message in str(error.value)
    manifest = prepare([str(file)], "bytes", tmp_path / "out", on_bad_record="skip")  # goes on from there
    assert texts_of(tmp_path / "out") == left
    (skipped,) = manifest["skipped"]["records"]
    assert manifest["skipped"]["count"] == 1 and message in skipped["reason"]
    assert skipped["file"] == str(file) and f"line {skipped['record']}" == where


@pytest.mark.parametrize(
    ("name", "write", "message", "n_left"),
    [
        ("zero.jsonl", lambda path, t: path.touch(), "empty", 0),
        ("zero.parquet", lambda path, t: path.touch(), "empty", 0),
        ("zero.txt", lambda path, t: path.touch(), "empty", 0),
        ("zero.jsonl.gz", lambda path, t: path.write_bytes(gzip.compress(b"")), "empty", 0),
        ("no_rows.parquet", lambda path, t: write_parquet(path, pa.array([], pa.string())), "empty", 0),
        ("half.parquet", lambda path, t: half(path, whole_parquet(t)), "magic bytes not found", 0),
        ("column.parquet", lambda path, t: pq.write_table(pa.table({"body": ["a"]}), path), "no column 'text'", 0),
        ("half.jsonl.gz", lambda path, t: half(path, gzip.compress(lines(some_documents(20_000)))), "Truncated", None),
        ("half.jsonl.zst", lambda path, t: half(path, pa.compress(lines(some_documents(20_000)), "zstd", True)),
         "Truncated", None),
        ("utf8.txt", lambda path, t: path.write_bytes(b"good \xff\xfe"), "not UTF-8: invalid start byte, byte 0xff", 0),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, name, write, message, n_left):
    """Named with the error policy; with skip listed, and what stands before the damage is kept."""
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / name, tmp_path)
    (folder / "zz.jsonl").write_bytes(GOOD)
    with pytest.raises(DataError) as error:
        prepare([str(folder)], "bytes", tmp_path / "out")
    assert str(error.value).startswith(str(folder / name)) and message in str(error.value)
    manifest = prepare([str(folder)], "bytes", tmp_path / "out", on_bad_record="skip")
    found = texts_of(tmp_path / "out")
    assert found[-1] == "good"
    before = len(found) - 1
    assert before == n_left if n_left is not None else found[:-1] == some_documents(20_000)[:before] and before > 1000
    assert manifest["skipped"]["count"] == 1 and message in manifest["skipped"]["records"][0]["reason"]


def test_invalid_utf8_in_parquet(tmp_path):
    good = pa.array(["a", "b", "c"]).buffers()[2].to_pybytes()
    broken = pa.StringArray.from_buffers(
        3, pa.py_buffer(np.array([0, 1, 2, 3], dtype="int32")), pa.py_buffer(good.replace(b"b", b"\xff"))
    )
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 2: not UTF-8"):
        prepare([str(tmp_path / "a.parquet")], "bytes", tmp_path / "out")
    prepare([str(tmp_path / "a.parquet")], "bytes", tmp_path / "out", on_bad_record="skip")
    assert texts_of(tmp_path / "out") == ["a", "c"]


def test_faults_are_listed_together(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError) as error:
        prepare(
            [str(tmp_path / "nowhere"), str(tmp_path / "folder"), str(tmp_path / "*.zst")], tmp_path / "no", "out",
            filters=["score"], workers=0, validation_share=1.0, shard_tokens=0, on_bad_record="maybe",
        )  # fmt: skip
    for fault in ("nowhere: no such file", "no file ends in", "no file matches", "--filter 'score'", "workers = 0",
                  "validation_share = 1.0", "shard_tokens = 0", "on_bad_record = 'maybe'", "tokenizer"):  # fmt: skip
        assert fault in str(error.value)
    (tmp_path / "a.jsonl").write_bytes(lines(["a"], score="high"))
    with pytest.raises(DataError, match="line 1: score = 'high' cannot be compared"):
        prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "out", filters=["score>=3"])
    with pytest.raises(DataError, match="no document was left for it; 1 were filtered out"):
        prepare([str(tmp_path / "a.jsonl")], "bytes", tmp_path / "out2", filters=['score=="low"'])


# Stops --------------------------------------------------------------------------------------------------------


def test_a_finished_output_is_left_alone(corpus):
    inputs = [str(corpus / "in")]
    first = prepare(inputs, "bytes", corpus / "out")
    before = {path: path.stat().st_mtime_ns for path in (corpus / "out").iterdir() if not path.name.startswith(".")}
    assert prepare(inputs, "bytes", corpus / "out", workers=2) == first
    assert before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(DataError, match=r"prepared, or begun, from something else.*\n.*text_key was 'text', is 'body'"):
        prepare(inputs, "bytes", corpus / "out", text_key="body")
    train_tokenizer(DOCUMENTS, 280).save(str(corpus / "tokenizer.json"))
    with pytest.raises(DataError, match="tokenizer_sha256 was"):
        prepare(inputs, corpus / "tokenizer.json", corpus / "out")
    (corpus / "in/b.jsonl").write_bytes(GOOD)
    with pytest.raises(DataError, match=r"b.jsonl: was not among the inputs"):
        prepare(inputs, "bytes", corpus / "out")
    (corpus / "in/a.jsonl").write_bytes(GOOD)
    with pytest.raises(DataError, match=r"a.jsonl: had [\d,]+ bytes, has 17"):
        prepare(inputs, "bytes", corpus / "out")
    (corpus / "mine").mkdir()
    (corpus / "mine/thesis.tex").touch()
    with pytest.raises(DataError, match="is not empty"):
        prepare(inputs, "bytes", corpus / "mine")
    assert (corpus / "mine/thesis.tex").exists()


def test_two_at_once_into_one_folder(corpus):
    from filelock import FileLock

    (corpus / "out").mkdir()
    with (
        FileLock(corpus / "out" / preparation_module.LOCK),
        pytest.raises(DataError, match="another preparation is writing"),
    ):
        prepare([str(corpus / "in")], "bytes", corpus / "out")


class Crash(Exception):
    pass


def many_inputs(folder):
    """Files of every kind, one of them a text of many pieces, for preparations that are interrupted."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(DOCUMENTS[:150]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS[150:250])) + b"not gzip")
    write_parquet(folder / "c.parquet", DOCUMENTS[250:400])
    (folder / "d.txt").write_text(" ".join(some_documents(300, seed=5)))
    (folder / "e.jsonl").touch()
    return [str(folder)]


OPTIONS = {"shard_tokens": 3000, "validation_share": 0.1, "on_bad_record": "skip", "commit_seconds": 0.0}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources_module, "BLOCK", 700)
    monkeypatch.setattr(preparation_module, "BLOCK", 700)
    monkeypatch.setattr(preparation_module, "PIECE", 300)


def test_interrupted_anywhere_gives_the_same_bytes(tmp_path, small_blocks, monkeypatch):
    """Crashes at random writes and commits, at the worst with half a write done, until it is through."""
    inputs = many_inputs(tmp_path / "in")
    prepare(inputs, "bytes", tmp_path / "undisturbed", **OPTIONS)
    rng = random.Random(7)
    write, commit = ShardWriter._write, Preparation.commit
    countdown = [0]

    def tick():
        countdown[0] -= 1
        if countdown[0] == 0:
            raise Crash

    def crashing_write(self, which, data):
        try:
            tick()
        except Crash:
            self.files[which].write(data[: len(data) // 2])
            self.files[which].flush()
            raise
        write(self, which, data)

    def crashing_commit(self):
        tick()
        commit(self)

    monkeypatch.setattr(ShardWriter, "_write", crashing_write)
    monkeypatch.setattr(Preparation, "commit", crashing_commit)
    crashes = 0
    for _ in range(40):
        countdown[0] = rng.randrange(2, 120)
        try:
            prepare(inputs, "bytes", tmp_path / "out", workers=2, **OPTIONS)
            break
        except Crash:
            crashes += 1
    assert crashes >= 5
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_a_full_disk(corpus, small_blocks, monkeypatch):
    """Said with what to do, nothing lost: the same call goes on to the same bytes."""
    write, room = ShardWriter._write, [8000]

    def full(self, which, data):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.folder))
        write(self, which, data)

    options = {"commit_seconds": 0.0, "shard_tokens": 2000}
    monkeypatch.setattr(ShardWriter, "_write", full)
    with pytest.raises(PreparationStopped, match=r"No space left on device.*the same command goes on"):
        prepare([str(corpus / "in")], "bytes", corpus / "out", **options)
    state = json.loads((corpus / "out/preparation.json").read_text())
    assert 0 < state["tokens"] <= 4000
    with pytest.raises(DataError, match=r"no manifest.json"):
        read_manifest(corpus / "out")
    room[0] = 10**9
    prepare([str(corpus / "in")], "bytes", corpus / "out", **options)
    prepare([str(corpus / "in")], "bytes", corpus / "undisturbed", **options)
    assert content(corpus / "out") == content(corpus / "undisturbed")


def test_a_shard_that_lost_bytes_is_not_continued(corpus, small_blocks, monkeypatch):
    monkeypatch.setattr(Preparation, "finish", lambda self: (_ for _ in ()).throw(Crash))
    with pytest.raises(Crash):
        prepare([str(corpus / "in")], "bytes", corpus / "out", commit_seconds=0.0)
    monkeypatch.undo()
    (corpus / "out/shard-00000.tokens").write_bytes(b"")
    with pytest.raises(DataError, match="0 bytes, the preparation had written"):
        prepare([str(corpus / "in")], "bytes", corpus / "out")


DRIVER = """
import sys
from tests.data.test_preparation import KILLED
from regdrop_titan.data.preparation import prepare
if __name__ == "__main__":
    prepare([sys.argv[1]], *sys.argv[2:], **KILLED)
"""
KILLED = {"workers": 2, "shard_tokens": 100_000, "commit_seconds": 0.05}


@pytest.mark.slow
def test_killed_five_times(tmp_path):
    """kill -9 at random moments of a real process, each further on than the last; its workers go with it."""
    (tmp_path / "a.jsonl").write_bytes(lines(some_documents(60_000)))
    train_tokenizer(DOCUMENTS, 280).save(str(tmp_path / "tokenizer.json"))
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "tokenizer.json")]
    (tmp_path / "driver.py").write_text(DRIVER)
    state, rng, reached = tmp_path / "out/preparation.json", random.Random(1), 0
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "driver.py"), *inputs, str(tmp_path / "out")], env=environment(), cwd=ROOT
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if state.exists() and json.loads(state.read_text())["tokens"] > reached:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL, "it was through before it was killed"
        reached = json.loads(state.read_text())["tokens"]
    assert reached > 0
    for name in ("out", "undisturbed"):
        prepare([inputs[0]], inputs[1], tmp_path / name, **KILLED)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


@pytest.mark.slow
def test_ctrl_c_of_the_command_line(tmp_path, script):
    """The whole process group gets SIGINT, as from a terminal: status 75, and the same command goes on."""
    (tmp_path / "a.jsonl").write_bytes(lines(some_documents(40_000)))
    train_tokenizer(DOCUMENTS, 280).save(str(tmp_path / "tokenizer.json"))
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json"),
                 "--output", str(tmp_path / "out"), "--workers", "2"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "scripts/prepare_data.py", *arguments], env=environment(), cwd=ROOT, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    while not (tmp_path / "out/preparation.json").exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "the same command goes on" in stderr and "Traceback" not in stderr
    assert script("prepare_data", *arguments) == 0
    assert read_manifest(tmp_path / "out")["documents"] == 40_000


def test_exit_statuses(corpus, script, capsys):
    out = str(corpus / "out")
    command = ["--input", str(corpus / "in"), "--tokenizer", "bytes", "--output", out, "--workers", "1"]
    assert script("prepare_data", *command) == 0
    assert script("prepare_data", "--verify", out) == 0
    assert "all as written" in capsys.readouterr().out
    with open(corpus / "out/shard-00000.tokens", "r+b") as file:
        file.write(b"\x01\x02")
    assert script("prepare_data", "--verify", out) == 2
    assert "shard-00000.tokens: altered" in capsys.readouterr().err
    assert script("prepare_data", command[0], "nowhere", *command[2:]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err
    assert script("prepare_data", "--input", "x") == 2
    assert "needed: --tokenizer, --output" in capsys.readouterr().err


def test_a_signal_stops_at_a_batch(corpus, small_blocks, monkeypatch):
    write = Preparation.write

    def signalling_write(self, *args):
        write(self, *args)
        if self.state.documents > 100:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(Signalled, match=r"stopped behind 1[0-9]{2} documents"):
        patch.setattr(Preparation, "write", signalling_write)
        prepare([str(corpus / "in")], "bytes", corpus / "out")
    assert signal.getsignal(signal.SIGTERM) == before
    prepare([str(corpus / "in")], "bytes", corpus / "out")
    assert texts_of(corpus / "out") == DOCUMENTS

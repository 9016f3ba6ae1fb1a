"""Tokenizers: round trips, special-token text, long documents in pieces, and what a broken one says."""

import base64
import json
import random
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors

from regdrop_titan.data import DataError
from regdrop_titan.data.tokenizers import (
    LLAMA3_SPECIAL_TOKENS,
    PIECE,
    Tokenizer,
    load_tokenizer,
    pieces,
    same_tokenizer,
    train_tokenizer,
)

TEXTS = [
    "plain text",
    " leading and trailing \n",
    "naïve Çelik ŝanĝo",
    "日本語のテキスト。",
    "שלום عليكم",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "\x00\x01\x1b[0m\x7f\u200b\ufeff",
    " " * 5000 + "x" + "\t" * 300,
    "\r\n\n\r \n",
    "1234567 3.14",
    "it's WE'LL",
    "a" * 3000,
    "<|end_of_text|><|begin_of_text|>",
    "\U0010ffff\ue000",
]


def words(n: int, seed: int = 0) -> str:
    vocabulary = ["the", "Model", "x1", "12", "...", "naïve", "日本", "\n\n", "  ", "def f():"]
    return " ".join(random.Random(seed).choices(vocabulary, k=n))


def write_tiktoken(folder, merges=(b"th", b"the", b"12", b"123", b"1234", b"  ", b" t", b" the")):
    folder.mkdir(exist_ok=True)
    ranks = [bytes([i]) for i in range(256)] + list(merges)
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "tokenizer.model").write_bytes(lines)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one tokenizer of each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    (root / "hf").mkdir()
    train_tokenizer([words(3000), *TEXTS], 400).save(str(root / "hf/tokenizer.json"))
    write_tiktoken(root / "llama3")
    return root


@pytest.fixture(params=["hf", "llama3", "bytes"])
def tokenizer(request, folder) -> Tokenizer:
    return load_tokenizer("bytes" if request.param == "bytes" else folder / request.param)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert ids.max() < tokenizer.vocab_size


def test_special_token_text_stays_text(tokenizer):
    specials = list(tokenizer.special_ids.values())
    assert tokenizer.eos_id in specials
    for name in tokenizer.special_ids:
        text = f"a{name}b {name}"
        ids = tokenizer.encode(text)
        assert not np.isin(ids, specials).any()
        assert tokenizer.decode(ids.tolist()) == text


def test_long_documents_have_the_tokens_of_the_whole(tokenizer):
    text = words(120_000)
    assert len(text) > 4 * PIECE and tokenizer.splits_at_spaces
    assert np.array_equal(tokenizer.encode(text), tokenizer.encode_piece(text))


def test_a_run_without_spaces_is_cut_and_read_back(tokenizer):
    text = "é" * (2 * PIECE + 17)
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_time_is_linear(tokenizer):
    """8 times the text takes 8 times as long: under 20 times, the better of 3."""

    def seconds(text):
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            tokenizer.encode(text)
            best = min(best, time.perf_counter() - began)
        return best

    for unit in ("the Model 12 ", "a"):
        short = unit * (200_000 // len(unit))
        assert seconds(short * 8) < 20 * seconds(short) + 0.01


def test_pieces_do_not_depend_on_the_blocks():
    text = words(3000) + "y" * 500 + words(100, seed=1)
    whole = list(pieces([text], 200))
    assert "".join(whole) == text and max(map(len, whole)) <= 200
    for size in (1, 7, 199, 200, 201, 5000):
        assert list(pieces([text[i : i + size] for i in range(0, len(text), size)], 200)) == whole
    assert list(pieces(["", "", ""])) == []


def test_llama3_layout(folder):
    """Names and places of the 256 special tokens, and a split that numbers longer than 3 digits show."""
    tokenizer = load_tokenizer(folder / "llama3")
    base = 256 + 8
    assert tokenizer.vocab_size == base + 256 and len(set(LLAMA3_SPECIAL_TOKENS)) == 256
    places = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6, "<|end_header_id|>": 7,
              "<|eot_id|>": 9, "<|reserved_special_token_0|>": 2, "<|reserved_special_token_250|>": 255}  # fmt: skip
    assert all(tokenizer.special_ids[name] == base + place for name, place in places.items())
    assert tokenizer.eos_id == base + 1
    ranks = {b"123": 259, b" the": 263}
    # "1234" is a token, but numbers are split after 3 digits
    assert tokenizer.encode("1234 the").tolist() == [ranks[b"123"], ord("4"), ranks[b" the"]]


def test_a_tokenizer_that_does_not_split_at_spaces_gets_whole_documents(tmp_path):
    tokenizer = train_tokenizer([words(2000)], 300)
    tokenizer.normalizer = normalizers.Prepend("_")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert not loaded.splits_at_spaces
    text = words(60_000)
    assert len(text) > PIECE
    assert loaded.decode(loaded.encode(text).tolist()) == "_" + text


def test_what_a_file_adds_to_text_is_left_out(tmp_path):
    """A maximum length, padding, and a beginning-of-text from a post-processor."""
    tokenizer = train_tokenizer([words(2000)], 300)
    plain = tokenizer.encode(words(500)).ids
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=2000)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 300)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(words(500)).tolist() == plain


@pytest.mark.parametrize(
    ("files", "option", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, None, "</s>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, None, "</s>"),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, None, "</s>"),
        ({}, None, "<|end_of_text|>"),
        ({}, "</s>", "</s>"),
    ],
)
def test_end_of_text(tmp_path, files, option, expected):
    tokenizer = train_tokenizer([words(2000)], 300)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path, option).eos_id == tokenizer.token_to_id(expected)


def test_faults(tmp_path, folder):
    with pytest.raises(DataError, match="no such file or folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no tokenizer in it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="not a tokenizer of the tokenizers library"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00")  # as SentencePiece begins
    with pytest.raises(DataError, match="SentencePiece"):
        load_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(DataError, match="'<nope>' is not in it; give one of its tokens by --eos-token"):
        load_tokenizer(folder / "hf", "<nope>")
    nameless = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    nameless.pre_tokenizer = pre_tokenizers.Whitespace()
    nameless.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="name no end-of-text token"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="must be above 256"):
        train_tokenizer(["ab ab"], 256)
    with pytest.raises(DataError, match="the text only gives 259 tokens"):
        train_tokenizer(["ab ab"], 5000)


def test_an_edited_file_gives_its_new_tokens(tmp_path):
    """tiktoken's own reader would keep a copy by path."""
    write_tiktoken(tmp_path, [b"ab"])
    before = load_tokenizer(tmp_path)
    write_tiktoken(tmp_path, [b"bc"])
    after = load_tokenizer(tmp_path)
    assert before.encode("abc").tolist() == [256, ord("c")] and after.encode("abc").tolist() == [ord("a"), 256]
    manifests = {p: {"tokenizer": {"name": p, "sha256": h}} for p, h in (("a", "1" * 64), ("b", "2" * 64))}
    assert "b was tokenized by b" in same_tokenizer(manifests)[0] and not same_tokenizer({"a": manifests["a"]})

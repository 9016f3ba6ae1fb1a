"""Our tokenizers through transformers' `AutoTokenizer`, beside the configuration of every class of our exports."""

import json

import pytest
from tokenizers import processors

from regdrop_titan.checkpoints.hf_tokenizer import write_tokenizer
from regdrop_titan.data.tokenizers import PIECE, load_tokenizer, train_tokenizer

from ..data.test_tokenizers import TEXTS, words, write_tiktoken

MERGES = [b"th", b"the", b"12", b"123", b"1234", b"  ", b" t", b" the", b"\xe6\x97", b"\xe6\x97\xa5", b"ab", b"bc"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """AutoTokenizer's of one of our tokenizers, in a folder with the model_type of an export."""
    import transformers

    def load(tokenizer, model_type="regdrop"):
        folder = tmp_path_factory.mktemp("hf")
        write_tokenizer(tokenizer, folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    return load


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """One tokenizer of each kind. The tokenizer.json adds a token before each text, cuts it and pads it."""
    root = tmp_path_factory.mktemp("tokenizers")
    trained = train_tokenizer([words(3000), *TEXTS], 400)
    trained.add_special_tokens(["<bos>"])
    trained.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 400)])
    trained.enable_truncation(16)
    trained.enable_padding(length=2000, pad_token="<bos>", pad_id=400)
    (root / "hf").mkdir()
    trained.save(str(root / "hf/tokenizer.json"))
    return {
        "hf": load_tokenizer(root / "hf"),
        "llama3": load_tokenizer(write_tiktoken(root / "llama3", MERGES)),
        "bytes": load_tokenizer("bytes"),
    }


@pytest.mark.parametrize("kind", ["hf", "llama3", "bytes"])
def test_ids_and_text_are_ours(ours, theirs, kind):
    """Of all kinds of text, names of special tokens among it, which stay text; and back."""
    tokenizer = ours[kind]
    loaded = theirs(tokenizer)
    names = [f"a{name}b {name}" for name in tokenizer.special_ids]
    for text in [*TEXTS, *names, words(500), words(PIECE // 3), "日本ab abc 12345 the"]:
        ids = tokenizer.encode(text).tolist()
        assert loaded(text).input_ids == ids
        assert loaded.decode(ids) == text
        assert loaded.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == text
    assert loaded.eos_token_id == loaded.pad_token_id == tokenizer.eos_id and len(loaded) == tokenizer.vocab_size
    batch = loaded(["a", "the Model"], padding=True, padding_side="left")
    assert batch.attention_mask[0] == [0] * (len(batch.input_ids[1]) - 1) + [1]


@pytest.mark.parametrize("model_type", ["llama", "smollm3", "mamba2"])
def test_beside_classes_of_transformers(ours, theirs, model_type):
    """Which have tokenizers of their own that are not taken: Llama's begins with a token, GPT-NeoX's splits digits."""
    loaded = theirs(ours["llama3"], model_type)
    for text in TEXTS:
        assert loaded(text).input_ids == ours["llama3"].encode(text).tolist()


def test_what_stays_and_what_is_read_again(ours, tmp_path):
    """A tokenizer.json that adds nothing keeps its sha256, by which packed sets know it; the end-of-text token that was
    chosen by name is written down; a tiktoken file that has changed gives its new tokens."""
    train_tokenizer([words(2000)], 300).save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(plain, out)
    assert load_tokenizer(out).sha256 == plain.sha256
    write_tokenizer(ours["hf"], out)
    assert load_tokenizer(out).sha256 != ours["hf"].sha256
    write_tokenizer(load_tokenizer(ours["hf"].file, "<bos>"), out)
    assert load_tokenizer(out).eos_id == 400 != ours["hf"].eos_id
    for merge in (b"ab", b"bc"):
        write_tiktoken(tmp_path, [merge])
        write_tokenizer(load_tokenizer(tmp_path / "tokenizer.model"), out)
    assert load_tokenizer(out).encode("abc").tolist() == [ord("a"), 256]

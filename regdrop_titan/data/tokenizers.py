"""Tokenizers behind one interface: Llama-3's `tokenizer.model`, any Hugging Face `tokenizer.json`, and bytes.

What all of them keep:

- Text is only ever text. A document that contains `<|end_of_text|>` gives the tokens of those characters, never the
  special token: a corpus must not be able to end its own documents.
- Time is linear and memory bounded in a document's length: long texts are encoded in pieces of at most `PIECE`
  characters, cut before a space between two letters or digits. Every tokenizer that splits text at spaces before it
  merges gives the same tokens for the pieces as for the whole; one that does not is asked (`splits_at_spaces`), and
  gets whole documents. Only a text without such a space in `PIECE` characters is cut elsewhere.
"""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers

from .packed import DataError

PIECE = 100_000  # characters
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")

# Llama-3's split pattern and special tokens, as its model card publishes them
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
]
# tried in this order where a tokenizer's files name no end-of-text token
END_OF_TEXT_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eot_id|>")


def pieces(blocks: Iterable[str], limit: int = PIECE) -> Iterator[str]:
    """The text of `blocks`, one after another, in pieces of at most `limit` characters: the same however the text
    is divided into blocks."""
    rest = ""
    for block in blocks:
        text, start = rest + block, 0
        while len(text) - start > limit:
            end = text.rfind(" ", start + 1, start + limit)
            while end > 0 and not (text[end - 1].isalnum() and text[end + 1].isalnum()):
                end = text.rfind(" ", start + 1, end)
            end = end if end > 0 else start + limit
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


class Tokenizer(ABC):
    """Text to ids and back. `file` is None for bytes.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: end-of-text, which preparation puts after each document.
        special_ids: every special token with its id.
    """

    kind: str
    file: Path | None = None
    vocab_size: int
    eos_id: int
    special_ids: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.file.resolve().parent.name}" if self.file else self.kind

    @property
    def dtype(self) -> np.dtype:
        """The smallest that packed sets have for this vocabulary."""
        return np.dtype("uint16" if self.vocab_size <= 2**16 else "uint32")

    @property
    def sha256(self) -> str:
        """Of the tokenizer's file: two sets with the same hash have the same tokens."""
        return hashlib.sha256(self.file.read_bytes() if self.file else self.kind.encode()).hexdigest()

    @cached_property
    def splits_at_spaces(self) -> bool:
        """Whether a text can be cut before a space without a change of its tokens."""
        probes = [("aa", " bb"), ("The 12", " 34 x"), ("naïve", " Éa b"), ("日本", " 本 c"), ("x", " aa aa aa")]
        return all(
            np.array_equal(
                self.encode_piece(left + right), np.concatenate([self.encode_piece(left), self.encode_piece(right)])
            )
            for left, right in probes
        )

    @abstractmethod
    def encode_piece(self, text: str) -> np.ndarray:
        """The ids of `text` at once: (n,) unsigned."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, of any length, without special tokens: (n,) unsigned."""
        if len(text) <= PIECE or not self.splits_at_spaces:
            return self.encode_piece(text)
        return np.concatenate([self.encode_piece(piece) for piece in pieces([text])])

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; of special tokens, their names where the library gives them."""


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8, and 256 for end-of-text."""

    kind = "bytes"
    vocab_size = 257
    eos_id = 256
    special_ids = {"<|end_of_text|>": 256}  # noqa: RUF012

    def encode_piece(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class TiktokenTokenizer(Tokenizer):
    """Llama-3's `tokenizer.model`: a file of `base64-token rank` lines."""

    kind = "tiktoken"

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            # tiktoken's own reader keeps a copy by path, and would give the old tokens of a file that has changed
            self.ranks = {
                base64.b64decode(token, validate=True): int(rank)
                for token, rank in (line.split() for line in file.read_bytes().splitlines() if line)
            }
            if len(self.ranks) < 256:
                raise ValueError(f"{len(self.ranks)} tokens")
        except ValueError as error:
            raise DataError(
                f"{file}: not a tiktoken file ({error}); a SentencePiece model must be converted to a tokenizer.json"
            ) from None
        self.special_ids = {name: len(self.ranks) + i for i, name in enumerate(LLAMA3_SPECIAL_TOKENS)}
        self.eos_id = self.special_ids["<|end_of_text|>"]
        self.vocab_size = len(self.ranks) + len(self.special_ids)
        self.encoding = tiktoken.Encoding(
            name="llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=self.ranks, special_tokens=self.special_ids
        )

    def encode_piece(self, text: str) -> np.ndarray:
        # with nothing disallowed and nothing allowed, special-token text is ordinary text
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode(list(ids))


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, with `tokenizer_config.json` beside it where there is one."""

    kind = "huggingface"

    def __init__(self, file: Path, eos_token: str | None = None) -> None:
        self.file = file
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{file}: not a tokenizer of the tokenizers library: {error}") from None
        self.tokenizer.encode_special_tokens = True  # special-token text is ordinary text
        self.tokenizer.no_truncation()  # some files carry a maximum length, which would cut documents silently
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: i for i, token in sorted(added.items()) if token.special}
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        name = eos_token or self._configured_eos() or next((n for n in END_OF_TEXT_NAMES if n in vocabulary), None)
        if name is None or name not in vocabulary:
            named = f"its end-of-text token {name!r} is not in it" if name else "its files name no end-of-text token"
            raise DataError(f"{file}: {named}; give one of its tokens by --eos-token")
        self.eos_id = vocabulary[name]

    def _configured_eos(self) -> str | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            config = self.file.with_name(name)  # type: ignore[union-attr]
            if config.is_file():
                try:
                    token = json.loads(config.read_text()).get("eos_token")
                except (ValueError, AttributeError) as error:
                    raise DataError(f"{config}: unreadable: {error}") from None
                if token:
                    return token["content"] if isinstance(token, dict) else token
        return None

    def encode_piece(self, text: str) -> np.ndarray:
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(path: str | Path, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer of a folder, of one of its files, or `bytes`.

    In a folder, `tokenizer.json` comes before `tokenizer.model` and `original/tokenizer.model`.

    Raises:
        DataError: there is none, it cannot be read, or it has no end-of-text token.
    """
    if str(path) == "bytes":
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        found = next((file / name for name in TOKENIZER_FILES if (file / name).is_file()), None)
        if found is None:
            raise DataError(f"{file}: no tokenizer in it (expected one of {', '.join(TOKENIZER_FILES)})")
        file = found
    if not file.is_file():
        raise DataError(f"tokenizer {str(path)!r}: no such file or folder (and not 'bytes')")
    if file.suffix == ".json":
        return HuggingFaceTokenizer(file, eos_token)
    return TiktokenTokenizer(file)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries, id 0 being `<|end_of_text|>`.

    Raises DataError where the texts hold too few different strings for so many, or `vocab_size` has no room for the
    256 bytes.
    """
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(f"vocab_size {vocab_size}: must be above {len(alphabet)}, the bytes and end-of-text")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT_NAMES[0]],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"vocab_size {vocab_size}: the text only gives {tokenizer.get_vocab_size()} tokens; give more text, or a "
            "smaller vocabulary"
        )
    return tokenizer


def tokenizer_hashes(folder: str | Path) -> set[str]:
    """The sha256 of each tokenizer file in `folder`."""
    files = [Path(folder) / name for name in TOKENIZER_FILES]
    return {hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def same_tokenizer(manifests: dict[str, dict]) -> list[str]:
    """A sentence for each packed set whose tokenizer is another than the first's. `manifests` by path."""
    (first_path, first), *others = manifests.items()
    return [
        f"{path} was tokenized by {manifest['tokenizer']['name']} (sha256 {manifest['tokenizer']['sha256'][:12]}), "
        f"{first_path} by {first['tokenizer']['name']} (sha256 {first['tokenizer']['sha256'][:12]})"
        for path, manifest in others
        if manifest["tokenizer"]["sha256"] != first["tokenizer"]["sha256"]
    ]

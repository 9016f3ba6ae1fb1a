"""Prompts from text: the beginnings of documents, cut to one length."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..data.packed import MANIFEST, DataError
from ..data.records import BadRecord, Recipe, documents
from ..data.sources import UNITS, InputFile, UnreadableFile, find_inputs, read_blocks
from ..evaluation.subjects import InputError, Subject


def read_prompts(subject: Subject, data: str, text_key: str, n: int, length: int) -> list[Tensor]:
    """n prompts of `length` tokens each, (length,) int64: the first tokens of the first texts that have as many. Where
    there are fewer texts, those that follow in each text too, in turns.

    Args:
        data: JSONL, Parquet or plain text (each file a text), as preparation reads it, or a packed set.
        text_key: key or column of the text, of JSONL and Parquet.

    Raises:
        InputError, DataError: not readable, of another tokenizer, or with too few tokens.
    """
    texts: list[Tensor] = []
    for text in token_texts(subject, data, text_key, n * length):
        texts += [text[: n * length]] if len(text) >= length else []
        if len(texts) == n:
            break
    found = [text[k * length : (k + 1) * length] for k in range(n) for text in texts if len(text) >= (k + 1) * length]
    if len(found) < n:
        raise InputError(
            f"--data {data}: has {len(found)} separate prompts of {length} tokens, {n} are needed (as many to test "
            "as to search with); lower --prompts or --prompt-tokens"
        )
    return found[:n]


def token_texts(subject: Subject, data: str, text_key: str, most: int) -> Iterator[Tensor]:
    """The tokens of each text, at least the first `most` of one that has as many."""
    if (Path(data) / MANIFEST).is_file():
        packed, start = subject.packed_tokens(data), 0
        for end in packed.document_ends.tolist():
            if end - 1 > start:  # without its end-of-text
                yield packed.slice(start, min(end - 1, start + most))
            start = end
        return
    recipe = Recipe("", None, text_key, (), 0.0)
    for file in find_inputs([data]):
        for text in texts_of(file, recipe):
            parts: list[int] = []
            for piece in text:
                parts += subject.tokenizer.encode(piece).tolist()
                if len(parts) >= most:
                    break
            yield torch.tensor(parts, dtype=torch.int64)


def texts_of(file: InputFile, recipe: Recipe) -> Iterator[Iterator[str]]:
    """The pieces of each text. Raises DataError for what is none."""
    if file.kind == "text":
        yield (piece for block in blocks_of(file, recipe) for piece, _, _ in block.payload)
        return
    unit = 1
    for block in blocks_of(file, recipe):
        for i, text in documents(block, recipe):
            if isinstance(text, BadRecord):
                raise DataError(f"{file.path}, {UNITS[file.kind]} {unit + i}: {text} (--text-key names the text)")
            if text is not None:
                yield iter((text,))
        unit += block.n_units


def blocks_of(file: InputFile, recipe: Recipe) -> Iterator:
    try:
        yield from read_blocks(file, recipe.columns)
    except UnreadableFile as error:
        raise DataError(f"{file.path}: {error}") from None


def tokens_sha256(prompts: Sequence[Tensor]) -> str:
    """Of the prompts, in their order."""
    return hashlib.sha256(repr([prompt.tolist() for prompt in prompts]).encode()).hexdigest()

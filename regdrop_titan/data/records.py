"""From records to tokens: what a worker process does with a block.

A record is one line of JSON or one row; a filter may leave it out, and its text becomes a document: its tokens and
end-of-text. A plain text file is one document, in pieces.
"""

import json
import multiprocessing
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import pyarrow as pa

from ..seeds import derive_seed
from .packed import DataError
from .sources import Block
from .tokenizers import Tokenizer, load_tokenizer

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


class BadRecord(Exception):
    """A record that cannot become a document; the message says why."""


def lookup(record: dict[str, Any], key: str) -> Any:
    """`record[key]`, where it is at the top, at a dotted path, or in the record's `metadata`."""
    if key in record:
        return record[key]
    value: Any = record
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            break
        value = value[name]
    else:
        return value
    metadata = record.get("metadata")
    if isinstance(metadata, dict) and key in metadata:
        return metadata[key]
    raise BadRecord(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")


@dataclass(frozen=True)
class Filter:
    """A condition on a column, as `edu_int_score>=3`. A null never fulfils it."""

    column: str
    comparison: str
    value: float | str | bool

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Raises DataError for what is not `column OP value`, OP one of >=, <=, ==, !=, >, <."""
        match = re.fullmatch(r"\s*([^<>=!]+?)\s*(>=|<=|==|!=|>|<)\s*(.+?)\s*", text)
        if not match:
            raise DataError(f"--filter {text!r}: must be 'column OP value', OP one of {', '.join(_OPERATORS)}")
        try:
            value = json.loads(match[3])
        except ValueError:
            value = match[3]
        if not isinstance(value, (int, float, str, bool)):
            raise DataError(f"--filter {text!r}: the value must be a number, true, false or text")
        return cls(match[1], match[2], value)

    def __str__(self) -> str:
        return f"{self.column}{self.comparison}{json.dumps(self.value)}"

    def keeps(self, record: dict[str, Any]) -> bool:
        value = lookup(record, self.column)
        if value is None:
            return False
        try:
            if isinstance(value, str) != isinstance(self.value, str):
                raise TypeError
            return _OPERATORS[self.comparison](value, self.value)
        except TypeError:
            raise BadRecord(f"{self.column} = {value!r} cannot be compared by {self}") from None


@dataclass(frozen=True)
class Recipe:
    """What the workers need to make tokens of blocks."""

    tokenizer: str
    eos_token: str | None
    text_key: str
    filters: tuple[Filter, ...]
    validation_share: float

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([self.text_key, *(f.column for f in self.filters)]))

    def text(self, record: Any) -> str | None:
        """The record's text; None where a filter leaves it out. Raises BadRecord."""
        if isinstance(record, BadRecord):
            raise record
        if not isinstance(record, dict):
            raise BadRecord(f"is {type(record).__name__}, not an object with a key {self.text_key!r}")
        if not all(f.keeps(record) for f in self.filters):
            return None
        text = lookup(record, self.text_key)
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise BadRecord(f"{self.text_key} is not UTF-8: {error.reason} at byte {error.start}") from None
        if not isinstance(text, str):
            raise BadRecord(f"{self.text_key} is {'null' if text is None else type(text).__name__}, not text")
        if not text:
            raise BadRecord("empty text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"a lone surrogate at character {error.start}, not Unicode text") from None
        return text


def _lines(payload: bytes) -> Iterator[tuple[int, Any]]:
    """The value of each line that is not blank, or a BadRecord, by the line's place in the block."""
    for i, line in enumerate(payload.split(b"\n")):
        if line.strip():
            try:
                yield i, json.loads(line.decode())
            except UnicodeDecodeError as error:
                yield i, BadRecord(f"not UTF-8: {error.reason} at byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                yield i, BadRecord(f"not valid JSON: {error}")


def _rows(payload: bytes) -> Iterator[tuple[int, Any]]:
    """Each row as a dict, or a BadRecord, by its place in the block."""
    first = 0
    for batch in pa.ipc.open_stream(payload):
        try:
            yield from enumerate(batch.to_pylist(), first)
        except UnicodeDecodeError:  # in one value: find out which
            for j in range(batch.num_rows):
                try:
                    yield first + j, batch.slice(j, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield first + j, BadRecord(f"not UTF-8: {error.reason} at byte {error.start} of the value")
        first += batch.num_rows


def documents(block: Block, recipe: Recipe) -> Iterator[tuple[int, str | BadRecord | None]]:
    """The text of each record of a block of lines or rows, by its place in the block; None for one that a filter
    leaves out."""
    for i, record in _lines(block.payload) if block.kind == "jsonl" else _rows(block.payload):
        try:
            yield i, recipe.text(record)
        except BadRecord as error:
            yield i, error


# Workers ------------------------------------------------------------------------------------------------------


@dataclass
class Tokenized:
    """The documents of one block. Runs are its documents and parts of one: the last may go on in the next block."""

    tokens: np.ndarray  # (n,) of the set's dtype
    lengths: np.ndarray  # (runs,), with end-of-text where the run ends its document
    is_end: np.ndarray  # (runs,) bool
    held_out: np.ndarray  # (runs,) int8: 1 validation, 0 training, -1 as the document that the block before left open
    bad: list[tuple[int, str]]  # unit of the block, reason
    filtered: int


_worker: tuple[Recipe, Tokenizer] | None = None


def start_worker(recipe: Recipe) -> None:
    """Load the tokenizer once a process. A worker does not outlive a killed parent."""
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()
    _worker = recipe, load_tokenizer(recipe.tokenizer, recipe.eos_token)


def _is_held_out(text: str, share: float) -> bool:
    """By a hash of the beginning, so that copies of a document fall on one side."""
    return share > 0 and derive_seed("validation document", text[:4096]) < share * 2**63


def tokenize(blocks: list[Block]) -> list[Tokenized]:
    assert _worker is not None
    return [_tokenize_block(block, *_worker) for block in blocks]


def _tokenize_block(block: Block, recipe: Recipe, tokenizer: Tokenizer) -> Tokenized:
    parts: list[np.ndarray] = [np.zeros(0, tokenizer.dtype)]
    lengths: list[int] = []
    is_end: list[bool] = []
    held_out: list[int] = []
    bad: list[tuple[int, str]] = []
    filtered = 0
    eos = np.asarray([tokenizer.eos_id], dtype=tokenizer.dtype)

    def add(text: str, first: bool, last: bool) -> None:
        ids = tokenizer.encode(text)
        parts.extend((ids, eos) if last else (ids,))
        lengths.append(len(ids) + last)
        is_end.append(last)
        if first:
            held_out.append(int(_is_held_out(text, recipe.validation_share)))
        else:
            held_out.append(held_out[-1] if held_out else -1)

    if block.kind == "text":
        for text, first, last in block.payload:
            add(text, first, last)
    else:
        for i, text in documents(block, recipe):
            if isinstance(text, BadRecord):
                bad.append((i, str(text)))
            elif text is None:
                filtered += 1
            else:
                add(text, True, True)
    return Tokenized(
        np.concatenate(parts, dtype=tokenizer.dtype, casting="unsafe"),
        np.asarray(lengths, dtype=np.int64),
        np.asarray(is_end, dtype=bool),
        np.asarray(held_out, dtype=np.int8),
        bad,
        filtered,
    )

"""What preparation reads: JSONL (plain, gz, zst), Parquet, plain text, and data sets of the Hugging Face hub.

A file is read as a sequence of blocks of about half a megabyte that workers turn into records: whole lines, batches of
rows, or pieces of text. Nothing here holds more than one block, or one record where that is longer. Every block says
how many units (lines, rows, pieces) it holds, so that a stopped preparation goes on behind the last one.
"""

import codecs
import glob
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from torchtitan.tools.logging import logger

from .packed import DataError
from .tokenizers import PIECE, pieces

BLOCK = 1 << 19  # bytes
LONGEST_RECORD = 1 << 30  # bytes of a JSON line
ROWS = 16  # of a Parquet batch: few, since each may be a long document
RETRIES = 5  # of a remote file that fails

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
# what a record's position in its file is called
UNITS = {"jsonl": "line", "parquet": "row", "text": "piece"}


class UnreadableFile(Exception):
    """A file, or the rest of one, that cannot be read; the message says why."""


@dataclass(frozen=True)
class InputFile:
    path: str  # local, or a URL that fsspec opens
    kind: str  # jsonl, parquet or text
    compression: str | None
    size: int  # bytes

    @property
    def is_remote(self) -> bool:
        return "://" in self.path


@dataclass
class Block:
    """Consecutive units of one file.

    `payload` is the bytes of whole lines, an Arrow stream of rows, or [(text, is_first, is_last)] of one document.
    """

    kind: str
    payload: Any
    n_units: int
    n_bytes: int  # of memory, about
    position: int  # bytes of the file read so far, about


def _describe(path: str | Path) -> tuple[str | None, str | None]:
    """Kind and compression by the name's endings; no kind where they are not known."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes = suffixes[:-1]
    return KINDS.get(suffixes[-1]) if suffixes else None, compression


def _hub_files(name: str) -> list[str]:
    """The train files of `NAME[:config]` on the hub, or of a local folder laid out like one."""
    from datasets import load_dataset_builder

    repository, _, config = name.partition(":")
    try:
        builder = load_dataset_builder(repository, config or None)
    except Exception as error:  # of many kinds: network, names, configurations
        raise DataError(f"hf:{name}: cannot be opened: {error}") from None
    splits = builder.config.data_files or {}
    if "train" not in splits:
        raise DataError(f"hf:{name}: has no train split (its splits: {', '.join(splits) or 'none'})")
    return [str(file) for file in splits["train"]]


def find_inputs(inputs: list[str]) -> list[InputFile]:
    """The files that `inputs` name: a file, a folder, a glob, a URL or `hf:NAME[:config]` each. Sorted by path
    within each input.

    Of a folder, files with a known ending are taken, hidden ones are not. Of a glob or a file, any; one without a
    known ending is plain text.

    Raises:
        DataError: listing every input that names no file.
    """
    paths: list[str] = []
    faults = []
    for name in inputs:
        if name.startswith("hf:"):
            paths += _hub_files(name.removeprefix("hf:"))
            continue
        if "://" in name:
            paths.append(name)
            continue
        folder = Path(name)
        if folder.is_dir():
            everything = sorted(path for path in folder.rglob("*") if path.is_file())
            visible = [p for p in everything if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
            found = [str(path) for path in visible if _describe(path)[0]]
            if len(found) < len(visible):
                logger.info(f"{name}: {len(visible) - len(found)} files of other kinds are not read")
            if not found:
                faults.append(f"{name}: no file ends in one of {', '.join(KINDS)}, with or without .gz or .zst")
        elif folder.is_file():
            found = [name]
        else:
            found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
            if not found:
                faults.append(f"{name}: no such file or folder, and no file matches it")
        paths += found
    if faults:
        raise DataError("\n".join(faults))
    files = []
    for path in dict.fromkeys(paths):
        kind, compression = _describe(path)
        try:
            filesystem, inner = fsspec.core.url_to_fs(path)
            size = filesystem.size(inner)
        except Exception as error:  # the file systems' drivers raise all kinds, and may be missing
            faults.append(f"{path}: {type(error).__name__}: {error}")
            continue
        if size is None:
            faults.append(f"{path}: its size is not known, download it first")
        else:
            files.append(InputFile(path, kind or "text", compression, size))
    if faults:
        raise DataError("\n".join(faults))
    return files


# Reading ------------------------------------------------------------------------------------------------------


def _open(file: InputFile) -> tuple[IO[bytes], Any]:
    """The raw file, and the stream of its decompressed bytes."""
    raw = fsspec.open(file.path, "rb").open() if file.is_remote else open(file.path, "rb")  # noqa: SIM115
    if file.compression is None:
        return raw, raw
    return raw, pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), file.compression)


def _line_blocks(file: InputFile) -> Iterator[Block]:
    raw, stream = _open(file)
    with raw:
        pending: list[bytes] = []  # of a line that is longer than a block
        pending_size = 0
        while True:
            block = stream.read(BLOCK)
            cut = len(block) if not block else block.rfind(b"\n") + 1
            if not block or cut:
                lines = b"".join([*pending, block[:cut]])
                pending, pending_size = [], 0
                if lines:
                    n_lines = lines.count(b"\n") + (not lines.endswith(b"\n"))
                    yield Block("jsonl", lines, n_lines, len(lines), raw.tell())
            if not block:
                return
            pending.append(block[cut:])
            pending_size += len(block) - cut
            if pending_size > LONGEST_RECORD:
                raise UnreadableFile(f"a line is longer than {LONGEST_RECORD:,} bytes")


def _skip_lines(blocks: Iterator[Block], skip: int) -> Iterator[Block]:
    for block in blocks:
        if block.n_units > skip:
            rest = block.payload.split(b"\n", skip)[-1] if skip else block.payload
            yield Block("jsonl", rest, block.n_units - skip, len(rest), block.position)
        skip = max(0, skip - block.n_units)


def resolve_column(schema: pa.Schema, key: str) -> str:
    """Where `key` is in a Parquet schema: a column, a `struct.field`, or a field of the struct `metadata`."""
    for path in (key, f"metadata.{key}"):
        if path in schema.names:
            return path
        outer, _, inner = path.partition(".")
        column = schema.field(outer).type if outer in schema.names else None
        if inner and column is not None and pa.types.is_struct(column) and column.get_field_index(inner) >= 0:
            return path
    raise UnreadableFile(f"no column {key!r}; it has {', '.join(schema.names)}")


def _row_blocks(file: InputFile, columns: list[str], skip: int) -> Iterator[Block]:
    raw, _ = _open(file)
    with raw:
        if file.size == 0:
            return
        # pages are read as they are needed: a row group can be larger than memory
        parquet = pq.ParquetFile(raw, pre_buffer=False, buffer_size=BLOCK)
        n_rows = parquet.metadata.num_rows
        paths = [resolve_column(parquet.schema_arrow, column) for column in columns]
        done = 0
        for group in range(parquet.num_row_groups):
            group_rows = parquet.metadata.row_group(group).num_rows
            if done + group_rows <= skip:
                done += group_rows
                continue
            batches: list[pa.RecordBatch] = []
            for batch in parquet.iter_batches(ROWS, row_groups=[group], columns=paths, use_threads=False):
                start = done
                done += batch.num_rows
                if done <= skip:
                    continue
                batches.append(batch.slice(max(0, skip - start)))
                if sum(b.nbytes for b in batches) >= BLOCK:
                    yield _arrow_block(batches, file.size * done // n_rows)
                    batches = []
            if batches:
                yield _arrow_block(batches, file.size * done // n_rows)


def _arrow_block(batches: list[pa.RecordBatch], position: int) -> Block:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    payload = sink.getvalue()
    return Block("parquet", payload, sum(batch.num_rows for batch in batches), len(payload), position)


def _decoded(stream: Any) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while data := stream.read(BLOCK):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


def _text_blocks(file: InputFile, skip: int, piece: int) -> Iterator[Block]:
    """One document, in pieces. It is read twice: a document that turns out not to be UTF-8 must not be half
    written."""
    raw, stream = _open(file)
    with raw:
        for _ in _decoded(stream):
            pass
    raw, stream = _open(file)
    with raw:
        chosen: list[tuple[str, bool, bool]] = []
        texts = chain(pieces(_decoded(stream), piece), [""])
        for index, (text, following) in enumerate(pairwise(texts)):
            if index >= skip:
                chosen.append((text, index == 0, not following))
            n_characters = sum(len(t) for t, _, _ in chosen)
            if chosen and (not following or n_characters >= BLOCK):
                yield Block("text", chosen, len(chosen), n_characters, raw.tell())
                chosen = []


def read_blocks(file: InputFile, columns: list[str], skip: int = 0, piece: int = PIECE) -> Iterator[Block]:
    """The blocks of `file` after its first `skip` units.

    Args:
        columns: of Parquet, those to read.
        piece: of plain text, the longest piece in characters.

    Raises:
        UnreadableFile: empty, truncated, not what its name says, or without the columns; also after some blocks.
    """
    readers: dict[str, Callable[[int], Iterator[Block]]] = {
        "jsonl": lambda skip: _skip_lines(_line_blocks(file), skip),
        "parquet": lambda skip: _row_blocks(file, columns, skip),
        "text": lambda skip: _text_blocks(file, skip, piece),
    }
    failures = 0
    while True:
        try:
            for block in readers[file.kind](skip):
                yield block
                skip += block.n_units
                failures = 0
            if skip == 0:
                raise UnreadableFile("empty, nothing to read in it")
            return
        except UnreadableFile:
            raise
        except UnicodeDecodeError as error:
            raise UnreadableFile(f"not UTF-8: {error.reason}, byte {error.object[error.start]:#04x}") from None
        except Exception as error:
            # a network's hiccup, of whatever kind, may pass; a damaged local file stays damaged
            if not file.is_remote and not isinstance(error, (OSError, pa.ArrowException)):
                raise
            if not file.is_remote or failures == RETRIES:
                raise UnreadableFile(f"{type(error).__name__}: {error}") from None
            failures += 1
            logger.warning(f"{file.path}: {error}; retry {failures} of {RETRIES}")
            time.sleep(2**failures / 2)

"""Text to a packed set: many worker processes, one writer, and the same bytes whatever interrupts it.

    files ── blocks of lines, rows or text ──> workers: parse, filter, tokenize ──> in order ──> shards

The main process reads and decompresses; workers do everything that costs time; results are written in the order of
the input. So the output is a function of the input alone, not of the number of workers. Every few seconds the shards
are made durable and `preparation.json` says how far they reach; a preparation that was stopped, killed or ran out of
disk cuts the shards back to that point and goes on. The manifest is written last: a folder that has one is whole.
"""

import contextlib
import fcntl
import json
import multiprocessing
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from torchtitan.tools.logging import logger
from tqdm import tqdm

from ..files import write_json
from ..signals import StopSignals
from .packed import FORMAT, MANIFEST, DataError, read_manifest
from .records import Filter, Recipe, Tokenized, start_worker, tokenize
from .sources import BLOCK, UNITS, Block, InputFile, UnreadableFile, find_inputs, read_blocks
from .tokenizers import PIECE, Tokenizer, load_tokenizer
from .writer import ShardWriter

STATE = "preparation.json"
LOCK = ".preparation.lock"
LISTED = 10_000  # bad records in a manifest; more are counted only
VALIDATION = "validation"  # folder of the held-out documents, inside of the set's


class PreparationStopped(Exception):
    """Stopped by a signal, a full disk or a lost worker; the same call goes on from the last commit."""


class Signalled(PreparationStopped):
    """Stopped by SIGINT, SIGTERM or SIGUSR1."""


@dataclass
class State:
    """How far the shards reach; JSON in `preparation.json`."""

    request: dict[str, Any]
    file: int = 0  # index of the input file that is being read
    unit: int = 0  # units of it that are written
    open_held_out: int = 0  # the side of the document that the last run left open
    filtered: int = 0
    tokens: int = 0
    sources: list[dict[str, Any]] = field(default_factory=list)
    bad_count: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    writers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def documents(self) -> int:
        return sum(source["documents"] for source in self.sources)


def _difference(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What another preparation into the same folder was asked for, one line a difference."""
    lines = [
        f"{key} was {then.get(key)!r}, is {now[key]!r}" for key in now if key != "files" and then.get(key) != now[key]
    ]
    before = {file["file"]: file["bytes"] for file in then.get("files", [])}
    after = {file["file"]: file["bytes"] for file in now["files"]}
    lines += [f"{name}: was not among the inputs" for name in after.keys() - before.keys()]
    lines += [f"{name}: was among the inputs" for name in before.keys() - after.keys()]
    lines += [
        f"{name}: had {before[name]:,} bytes, has {after[name]:,}"
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    ]
    if not lines and then != now:
        lines = ["the inputs' order differs"]
    return lines[:10] + ([f"and {len(lines) - 10} more"] if len(lines) > 10 else [])


def _refuse_other_request(path: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    if then != now:
        lines = "\n".join(f"  {line}" for line in _difference(then, now))
        raise DataError(
            f"{path}: this folder was prepared, or begun, from something else; choose another --output, or remove "
            f"it:\n{lines}"
        )


def _start_pool(workers: int, recipe: Recipe) -> ProcessPoolExecutor:
    """Workers that a signal to the whole process group, as Ctrl-C is, does not reach: the main process stops them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([start_worker.__module__])  # import torch once, not in every worker
    resource_tracker.ensure_running()  # it lifts the mask when it is started
    ours = set(StopSignals.NUMBERS)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # a child keeps the mask; ours waits until it is lifted
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pool = ProcessPoolExecutor(workers, context, start_worker, (recipe,))
    _widen_pipes(pool)
    return pool


def _widen_pipes(pool: ProcessPoolExecutor) -> None:
    """Let a block wait in the pipe for its worker: at the usual 64 KiB the worker waits for it to be written, which
    costs 7 % of tiktoken's speed. The names are private to the standard library, so do without where they are not."""
    with contextlib.suppress(AttributeError, OSError):
        for queue in (pool._call_queue, pool._result_queue):  # type: ignore[attr-defined]
            fcntl.fcntl(queue._writer.fileno(), fcntl.F_SETPIPE_SZ, 2 * BLOCK)


class Preparation:
    """One call of `prepare`, once the folder is known to be its own."""

    def __init__(
        self,
        folder: Path,
        files: list[InputFile],
        recipe: Recipe,
        tokenizer: Tokenizer,
        request: dict,
        error_on_bad: bool,
    ) -> None:
        self.folder, self.files, self.recipe, self.tokenizer = folder, files, recipe, tokenizer
        self.error_on_bad = error_on_bad
        self.state_file = folder / STATE
        self.state = State(request)
        if self.state_file.exists():
            saved = json.loads(self.state_file.read_text())
            _refuse_other_request(folder, saved["request"], request)
            self.state = State(**saved)
            logger.info(f"{folder}: goes on behind {self.state.documents:,} documents, {self.state.tokens:,} tokens")
        folders = [folder, folder / VALIDATION] if recipe.validation_share else [folder]
        states: list[dict | None] = list(self.state.writers) or [None] * len(folders)
        self.writers = [
            ShardWriter(path, tokenizer.dtype, request["shard_tokens"], state)
            for path, state in zip(folders, states, strict=True)
        ]
        self.commit()

    def commit(self) -> None:
        self.state.writers = [writer.commit() for writer in self.writers]
        write_json(self.state_file, vars(self.state), indent=1)

    def reject(self, file: InputFile, record: int | None, reason: str) -> None:
        """Stop at a bad record, or count and list it. `record` counts from 1; None is the file, or the rest of it."""
        unit = UNITS[file.kind]
        where = f"{file.path}, {unit} {record}"
        if record is None:
            where = f"{file.path}, behind {unit} {self.state.unit}" if self.state.unit else file.path
        if self.error_on_bad:
            raise DataError(
                f"{where}: {reason}\n(--on-bad-record skip leaves such records out, and lists them in {MANIFEST})"
            )
        self.state.bad_count += 1
        if len(self.state.bad) < LISTED:
            place = record or f"behind {self.state.unit}"
            self.state.bad.append({"file": file.path, "record": place, "reason": reason})

    def units(self) -> Iterator[tuple[int, Block | str]]:
        """What is left to read: (index of the file, a block, or the reason why there is no more of that file)."""
        piece = PIECE if self.tokenizer.splits_at_spaces else sys.maxsize
        for index in range(self.state.file, len(self.files)):
            skip = self.state.unit if index == self.state.file else 0
            try:
                for block in read_blocks(self.files[index], self.recipe.columns, skip, piece):
                    yield index, block
            except UnreadableFile as error:
                yield index, str(error)

    def write(self, index: int, block: Block, result: Tokenized) -> None:
        file = self.files[index]
        for i, reason in result.bad:
            self.reject(file, self.state.unit + i + 1, reason)
        held_out = np.where(result.held_out == -1, self.state.open_held_out, result.held_out)
        for side, writer in enumerate(self.writers):
            chosen = held_out == side
            lengths = result.lengths[chosen]
            tokens = result.tokens if chosen.all() else result.tokens[np.repeat(chosen, result.lengths)]
            writer.append(tokens, np.cumsum(lengths)[result.is_end[chosen]])
        if len(held_out):
            self.state.open_held_out = int(held_out[-1])
        self.state.filtered += result.filtered
        self.state.tokens += len(result.tokens)
        self.state.unit += block.n_units
        self.state.sources[index]["documents"] += int(result.is_end.sum())

    def enter(self, index: int) -> None:
        """Make `index` the file that is being read; the number of files when there is no more."""
        if index != self.state.file:
            self.state.file, self.state.unit = index, 0
        for file in self.files[len(self.state.sources) : index + 1]:
            self.state.sources.append({"file": file.path, "bytes": file.size, "documents": 0})

    def batches(self) -> Iterator[list[tuple[int, Block | str]]]:
        """`units`, so many at once that sending them to a worker is worth it."""
        batch: list[tuple[int, Block | str]] = []
        size = 0
        for index, unit in self.units():
            batch.append((index, unit))
            size += unit.n_bytes if isinstance(unit, Block) else 0
            if size >= BLOCK:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def results(self, pool: ProcessPoolExecutor, depth: int) -> Iterator[tuple[list, list[Tokenized]]]:
        """Batches and what workers made of them, in order; at most `depth` are on their way."""
        pending: deque = deque()
        for batch in self.batches():
            pending.append((batch, pool.submit(tokenize, [unit for _, unit in batch if isinstance(unit, Block)])))
            if len(pending) > depth:
                batch, future = pending.popleft()
                yield batch, future.result()
        for batch, future in pending:
            yield batch, future.result()

    def run(self, workers: int, commit_seconds: float) -> None:
        """Read, tokenize and write all that is left."""
        pool = _start_pool(workers, self.recipe)
        ends = np.cumsum([file.size for file in self.files]).tolist()
        bar = tqdm(
            total=ends[-1], initial=sum(file.size for file in self.files[: self.state.file]), unit="B",
            unit_scale=True, desc="prepare", mininterval=0.5 if sys.stderr.isatty() else 10,
        )  # fmt: skip
        begun, tokens_before, committed = time.monotonic(), self.state.tokens, time.monotonic()
        try:
            with bar, StopSignals("stopping behind this batch") as signals:
                for batch, results in self.results(pool, 2 * workers + 2):
                    tokenized = iter(results)
                    for index, unit in batch:
                        self.enter(index)
                        if isinstance(unit, Block):
                            self.write(index, unit, next(tokenized))
                            bar.update(max(0, ends[index] - self.files[index].size + unit.position - bar.n))
                        else:
                            self.reject(self.files[index], None, unit)
                            self.enter(index + 1)  # or resuming would find the fault once more
                    now = time.monotonic()
                    rate = (self.state.tokens - tokens_before) / max(now - begun, 1e-9)
                    bar.set_postfix_str(
                        f"{self.state.documents:,} documents, {self.state.tokens:,} tokens, {rate:,.0f} tokens/s",
                        refresh=False,
                    )
                    if signals.received:
                        self.commit()
                        done = f"{self.state.documents:,} documents"
                        raise Signalled(f"{self.folder}: stopped behind {done}; the same command goes on")
                    if now - committed > commit_seconds:
                        self.commit()
                        committed = now
                self.enter(len(self.files))
                bar.update(bar.total - bar.n)
        except BrokenProcessPool:
            raise PreparationStopped(
                f"{self.folder}: a worker process was killed (out of memory?); the same command goes on, with fewer "
                "--workers if it was memory"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def finish(self) -> dict[str, Any]:
        """Write the manifests, the training set's last: it marks the whole as complete."""
        state = self.state
        counts = f"{state.filtered:,} were filtered out, {state.bad_count:,} were bad"
        shards = [writer.finish() for writer in self.writers]
        if not shards[0]:
            raise DataError(f"{self.folder}: no document was left for it; {counts}")
        if not all(shards):
            raise DataError(
                f"{self.folder}: none of {state.documents:,} documents was held out by --validation-share "
                f"{self.recipe.validation_share}; give a larger one"
            )
        manifest: dict[str, Any] = {}
        for writer, written in reversed(list(zip(self.writers, shards, strict=True))):
            manifest = {
                "format": FORMAT,
                "dtype": writer.dtype.name,
                "vocab_size": self.tokenizer.vocab_size,
                "eos_id": self.tokenizer.eos_id,
                "special_ids": self.tokenizer.special_ids,
                "tokens": sum(shard["tokens"] for shard in written),
                "documents": sum(shard["documents"] for shard in written),
                "tokenizer": self.keep_tokenizer(writer.folder),
                "preparation": state.request,
                "sources": state.sources,
                "filtered": state.filtered,
                "skipped": {"count": state.bad_count, "records": state.bad},
                "shards": written,
            }
            write_json(writer.folder / MANIFEST, manifest, indent=1)
        self.state_file.unlink()
        logger.info(
            f"{self.folder}: {state.documents:,} documents, {state.tokens:,} tokens in {sum(map(len, shards))} shards; "
            + counts
        )
        return manifest

    def keep_tokenizer(self, folder: Path) -> dict[str, Any]:
        """Copy the tokenizer's files into `folder`; returns what the manifest says of it."""
        file = self.tokenizer.file
        if file is not None:
            shutil.copyfile(file, folder / file.name)
            config = file.with_name("tokenizer_config.json")
            if config.is_file():
                shutil.copyfile(config, folder / config.name)
        return {
            "name": self.tokenizer.name,
            "kind": self.tokenizer.kind,
            "file": file.name if file else None,
            "sha256": self.tokenizer.sha256,
        }

    def close(self) -> None:
        for writer in self.writers:
            with contextlib.suppress(OSError):  # a full disk refuses once more what it refused before
                writer.close()


def prepare(
    inputs: Sequence[str],
    tokenizer: str | Path,
    output: str | Path,
    *,
    text_key: str = "text",
    filters: Sequence[str] = (),
    workers: int = 1,
    shard_tokens: int = 2**28,
    validation_share: float = 0.0,
    on_bad_record: str = "error",
    eos_token: str | None = None,
    commit_seconds: float = 5.0,
) -> dict[str, Any]:
    """Tokenize text into a packed set. Returns the manifest of the training set, at once if it is there already.

    Args:
        inputs: files, folders, globs, URLs or `hf:NAME[:config]`.
        tokenizer: a folder, a file of one, or `bytes`.
        output: folder of the set; held-out documents make a second one, `output/validation`.
        text_key: JSON key or Parquet column of the text; dotted for a nested one.
        filters: conditions `column OP value`, all of which a record must fulfil.
        workers: tokenizing processes, at least 1. The result does not depend on it.
        shard_tokens: a shard is closed behind the document that fills it so far.
        validation_share: share of documents to hold out, in [0, 1).
        on_bad_record: `error`, or `skip`: count and list bad records in the manifest.
        eos_token: end-of-text, where the tokenizer's files do not say.
        commit_seconds: how much work a kill may cost.

    Raises:
        DataError: inputs, tokenizer or output that cannot be used; with `error`, the first bad record.
        PreparationStopped: stopped by a signal, a full disk or a lost worker; the same call goes on.
    """
    faults = []
    if not inputs:
        faults.append("inputs: none given")
    if workers < 1:
        faults.append(f"workers = {workers}: must be at least 1")
    if shard_tokens < 1:
        faults.append(f"shard_tokens = {shard_tokens}: must be at least 1")
    if not 0 <= validation_share < 1:
        faults.append(f"validation_share = {validation_share}: must be in [0, 1)")
    if on_bad_record not in ("error", "skip"):
        faults.append(f"on_bad_record = {on_bad_record!r}: must be 'error' or 'skip'")

    def attempt(function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except DataError as error:
            faults.append(str(error))

    conditions = tuple(attempt(Filter.parse, text) for text in filters)
    files = attempt(find_inputs, list(inputs))
    loaded = attempt(load_tokenizer, tokenizer, eos_token)
    if faults:
        raise DataError("\n".join(faults))
    folder = Path(output)
    recipe = Recipe(str(tokenizer), eos_token, text_key, conditions, validation_share)
    request = {
        "tokenizer": loaded.name,
        "tokenizer_sha256": loaded.sha256,
        "eos_id": loaded.eos_id,
        "text_key": text_key,
        "filters": [str(f) for f in conditions],
        "shard_tokens": shard_tokens,
        "validation_share": validation_share,
        "files": [{"file": file.path, "bytes": file.size} for file in files],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error}") from None
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        with lock:
            if (folder / MANIFEST).exists():
                manifest = read_manifest(folder)
                _refuse_other_request(folder, manifest.get("preparation", {}), request)
                (folder / STATE).unlink(missing_ok=True)
                logger.info(f"{folder}: complete already, {manifest['tokens']:,} tokens")
                return manifest
            foreign = [path.name for path in folder.iterdir() if path.name != LOCK]
            if foreign and not (folder / STATE).exists():
                raise DataError(f"{folder}: is not empty ({foreign[0]}, ...) and was not begun by a preparation")
            preparation = Preparation(folder, files, recipe, loaded, request, on_bad_record == "error")
            try:
                preparation.run(workers, commit_seconds)
                return preparation.finish()
            finally:
                preparation.close()
    except Timeout:
        raise DataError(f"{folder}: another preparation is writing into it") from None
    except OSError as error:  # reading turns its own into bad files: this is the output's
        raise PreparationStopped(
            f"{folder}: cannot be written: {error}; what was committed is safe, the same command goes on from there"
        ) from error

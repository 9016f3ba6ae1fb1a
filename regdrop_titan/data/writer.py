"""Writing the shards of a packed set, so that it can be stopped at any byte and go on from the last commit."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from .packed import DataError


def shard_files(index: int) -> tuple[str, str]:
    return f"shard-{index:05}.tokens", f"shard-{index:05}.documents"


class ShardWriter:
    """Appends documents to numbered shards in `folder`.

    A shard is closed behind the document that brings it to `shard_tokens` tokens or more; no document is divided.
    `commit()` makes all that was appended durable and returns the state from which `ShardWriter(..., state)` goes on:
    what was written later is cut off again.
    """

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int, state: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.shards: list[dict[str, Any]] = [] if state is None else list(state["shards"])
        self._open(tokens=0 if state is None else state["tokens"], documents=0 if state is None else state["documents"])

    def _open(self, tokens: int = 0, documents: int = 0) -> None:
        """Open the current shard at so many tokens and documents; what is behind them is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        current = len(self.shards)
        for path in self.folder.glob("shard-*"):
            match = re.fullmatch(r"shard-(\d+)\.(tokens|documents)", path.name)
            if match and int(match[1]) > current:
                path.unlink()
        self.tokens, self.documents = tokens, documents
        self.files, self.digests = [], []
        for name, size in zip(shard_files(current), (tokens * self.dtype.itemsize, documents * 8), strict=True):
            path = self.folder / name
            file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
            digest = hashlib.sha256()
            left = size
            while left and (data := file.read(min(left, 1 << 24))):
                digest.update(data)
                left -= len(data)
            if left:
                file.close()
                raise DataError(f"{path}: {size - left} bytes, the preparation had written {size}; start over")
            file.seek(size)
            file.truncate()
            self.files.append(file)
            self.digests.append(digest)

    def append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Append `tokens` (n,). `ends`: where in them documents end, ascending, 1 ... n; tokens behind the last end
        are of a document that the next call goes on with."""
        while len(tokens):
            closing = int(np.searchsorted(ends, self.shard_tokens - self.tokens))
            cut = int(ends[closing]) if closing < len(ends) else len(tokens)
            inside = ends[: closing + 1]
            self._write(0, tokens[:cut].astype(self.dtype, copy=False).tobytes())
            self._write(1, (inside + self.tokens).astype(np.int64).tobytes())
            self.tokens += cut
            self.documents += len(inside)
            if closing < len(ends):
                self._close_shard()
            tokens, ends = tokens[cut:], ends[closing + 1 :] - cut

    def _write(self, which: int, data: bytes) -> None:
        self.files[which].write(data)
        self.digests[which].update(data)

    def _close_shard(self) -> None:
        self.sync()
        self.close()
        tokens_file, documents_file = shard_files(len(self.shards))
        self.shards.append(
            {
                "file": tokens_file,
                "tokens": self.tokens,
                "sha256": self.digests[0].hexdigest(),
                "documents_file": documents_file,
                "documents": self.documents,
                "documents_sha256": self.digests[1].hexdigest(),
            }
        )
        self._open()

    def sync(self) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> dict[str, Any]:
        self.sync()
        return {"shards": list(self.shards), "tokens": self.tokens, "documents": self.documents}

    def finish(self) -> list[dict[str, Any]]:
        """Close the last shard; returns all of them as a manifest lists them."""
        if self.tokens:
            self._close_shard()
        self.close()
        for name in shard_files(len(self.shards)):
            (self.folder / name).unlink()
        return self.shards

    def close(self) -> None:
        for file in self.files:
            file.close()

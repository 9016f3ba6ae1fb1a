"""Packed token shards: one stream of tokens, cut into samples of any length at training time.

A packed set is a folder:

    manifest.json           format, dtype, vocabulary, end-of-text id, tokenizer, sources, shards, counts and hashes
    shard-00000.tokens      the documents' tokens one after another, each closed by end-of-text (uint16 or uint32)
    shard-00000.documents   where each document ends in the shard, int64
    tokenizer.json          the tokenizer that wrote it (or tokenizer.model; none for bytes)

`preparation` writes it.

Sample `i` of an epoch is window `permutation(i)` of the stream: `seq_len` inputs and, shifted by one, as many
labels. The permutation is a keyed bijection computed per index (a Feistel network), so any sample of any epoch is
found in O(1) with no array of indices, and the global order is a function of (seed, epoch) alone. Rank,
accumulation step and row then pick from that order, so every world size sees the same global batches.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ..seeds import derive_seed

FORMAT = 1
MANIFEST = "manifest.json"
_KEYS = ("dtype", "vocab_size", "eos_id", "tokens", "documents", "tokenizer", "shards")


class DataError(Exception):
    """Data that cannot be used; the message names the file and what to do."""


class Permutation:
    """A keyed bijection of 0 ... n-1, computed index by index: a 4-round Feistel network over the next even
    power of two, walked until it lands below n."""

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self.half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self.half_mask = (1 << self.half_bits) - 1
        self.round_keys = [derive_seed("permutation", key, i) for i in range(4)]

    def __call__(self, i: int) -> int:
        while True:
            left, right = i >> self.half_bits, i & self.half_mask
            for key in self.round_keys:
                # one multiply-xorshift round of a 64-bit mixer
                mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
                mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & 0xFFFFFFFFFFFFFFFF
                left, right = right, left ^ ((mixed ^ (mixed >> 32)) & self.half_mask)
            i = (left << self.half_bits) | right
            if i < self.n:
                return i


def read_manifest(path: str | Path) -> dict:
    """The manifest of the packed set at `path`.

    Raises DataError naming the files when the folder, its manifest or shards are missing, unreadable, of another
    format, or of another size than the manifest says.
    """
    folder = Path(path)
    file = folder / MANIFEST
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder (expected a packed set: a folder with {MANIFEST})")
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError:
        raise DataError(f"{folder}: not a packed set, it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: unreadable: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{file}: not a packed-set manifest of format {FORMAT}")
    if missing := [key for key in _KEYS if key not in manifest]:
        raise DataError(f"{file}: lacks {', '.join(missing)}")
    itemsize = np.dtype(manifest["dtype"]).itemsize
    faults = []
    for shard in manifest["shards"]:
        for name, size in (
            (shard["file"], shard["tokens"] * itemsize),
            (shard["documents_file"], shard["documents"] * 8),
        ):
            if not (folder / name).is_file():
                faults.append(f"{folder / name}: missing, {MANIFEST} lists it")
            elif (actual := (folder / name).stat().st_size) != size:
                faults.append(f"{folder / name}: {actual} bytes, {MANIFEST} says {size}")
    if faults:
        more = f"\nand {len(faults) - 20} more" if len(faults) > 20 else ""
        raise DataError("\n".join(faults[:20]) + more)
    return manifest


def verify(path: str | Path) -> dict:
    """The manifest of the packed set at `path`, once every shard has the hash that was taken when it was written.

    Raises DataError listing the files that are missing or cut; if there are none, every one that is altered.
    """
    manifest = read_manifest(path)
    files = [
        (Path(path) / shard[file], shard[digest])
        for shard in manifest["shards"]
        for file, digest in (("file", "sha256"), ("documents_file", "documents_sha256"))
    ]
    altered = []
    with tqdm(total=sum(f.stat().st_size for f, _ in files), desc="verify", unit="B", unit_scale=True) as bar:
        for file, expected in files:
            digest = hashlib.sha256()
            with open(file, "rb") as stream:
                while data := stream.read(1 << 24):
                    digest.update(data)
                    bar.update(len(data))
            if digest.hexdigest() != expected:
                altered.append(f"{file}: altered, its sha256 is not the one in {MANIFEST}")
    if altered:
        raise DataError("\n".join(altered))
    return manifest


class PackedTokens:
    """The token stream of a packed set, memory-mapped, addressed by global token index."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(path)
        self.shards = [shard for shard in self.manifest["shards"] if shard["tokens"]]
        self.starts = np.cumsum([0] + [shard["tokens"] for shard in self.shards])
        self.mapped: dict[int, torch.Tensor] = {}  # on first use: a large set has thousands of shards

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shard(self, index: int) -> torch.Tensor:
        """The tokens of one shard. Mapped by torch, which keeps no file open: numpy would keep one a shard."""
        if index not in self.mapped:
            shard = self.shards[index]
            self.mapped[index] = torch.from_file(
                str(self.path / shard["file"]),
                shared=False,
                size=shard["tokens"],
                dtype=getattr(torch, self.manifest["dtype"]),
            )
        return self.mapped[index]

    def slice(self, start: int, stop: int) -> torch.Tensor:
        """Tokens start ... stop-1, int64, across shard borders.

        Raises DataError for a token outside of the vocabulary: the shard was altered, and a GPU would only say so
        by a failed assertion.
        """
        parts = []
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        at = start
        while at < stop:
            inside = at - int(self.starts[index])
            parts.append(self.shard(index)[inside : inside + stop - at].to(torch.int64))
            at += len(parts[-1])
            index += 1
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        if int(tokens.max()) >= self.manifest["vocab_size"]:
            raise DataError(
                f"{self.path}: token {int(tokens.max())} between tokens {start:,} and {stop:,}, its vocabulary has "
                f"{self.manifest['vocab_size']}; check it: python scripts/prepare_data.py --verify {self.path}"
            )
        return tokens

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Global index one past each document's last token, int64."""
        return np.concatenate(
            [
                np.fromfile(self.path / shard["documents_file"], dtype=np.int64) + start
                for shard, start in zip(self.shards, self.starts, strict=False)
            ]
        )

    def documents(self, min_tokens: int) -> Iterator[torch.Tensor]:
        """The first `min_tokens` tokens of every document that has as many, in order."""
        start = 0
        for end in self.document_ends.tolist():
            if end - start >= min_tokens:
                yield self.slice(start, start + min_tokens)
            start = end


class PackedDataset:
    """Samples of a packed set in the shuffled order of one epoch (map-style).

    `dataset[i]` is `{"input": (S,), "labels": (S,)}`, int64, `labels` the input shifted by one. `len()` is the
    number of whole samples an epoch has; the rest, shorter than a sample, is left out.

    Raises DataError for an unusable set, or one with fewer tokens than one sample needs.
    """

    def __init__(self, path: str | Path, seq_len: int, *, seed: int, epoch: int = 0, shuffle: bool = True) -> None:
        self.tokens = PackedTokens(path)
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.n_samples = (len(self.tokens) - 1) // seq_len
        if self.n_samples < 1:
            raise DataError(
                f"{path}: {len(self.tokens)} tokens, but one sample of seq_len {seq_len} needs {seq_len + 1}"
            )
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle for `epoch` (0-based)."""
        self.epoch = epoch
        self.order = Permutation(self.n_samples, derive_seed("data order", self.seed, epoch))

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if not 0 <= i < self.n_samples:
            raise IndexError(f"sample {i} of {self.n_samples}")
        window = self.order(i) if self.shuffle else i
        start = window * self.seq_len
        tokens = self.tokens.slice(start, start + self.seq_len + 1)
        return {"input": tokens[:-1], "labels": tokens[1:]}

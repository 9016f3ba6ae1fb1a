"""Small packed sets for tests, written by the package's own shard writer."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from regdrop_titan.data.packed import FORMAT, MANIFEST
from regdrop_titan.data.writer import ShardWriter


def write_packed(
    path: Path,
    documents: Sequence[Sequence[int]],
    vocab_size: int,
    eos_id: int = 0,
    shard_tokens: int = 2**28,
    tokenizer: str = "stand-in",
) -> None:
    """A packed set of `documents`, each closed by `eos_id`."""
    dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
    writer = ShardWriter(path, dtype, shard_tokens)
    for document in documents:
        writer.append(np.asarray([*document, eos_id]), np.asarray([len(document) + 1]))
    shards = writer.finish()
    manifest = {
        "format": FORMAT,
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": len(documents),
        "tokenizer": {"name": tokenizer, "sha256": hashlib.sha256(tokenizer.encode()).hexdigest()},
        "shards": shards,
    }
    (path / MANIFEST).write_text(json.dumps(manifest))


def markov_documents(n_documents: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Documents with structure that a model can learn: each token is one of 3 followers of the one before."""
    rng = np.random.default_rng(seed)
    followers = np.random.default_rng(0).integers(1, vocab_size, (vocab_size, 3))
    documents = []
    for _ in range(n_documents):
        tokens = [int(rng.integers(1, vocab_size))]
        while len(tokens) < length:
            tokens.append(int(followers[tokens[-1], rng.integers(3)]))
        documents.append(tokens)
    return documents

"""Fixtures shared by the suite. `regdrop_titan` comes first: it fixes TorchTitan's device."""

import json
from pathlib import Path

import pytest

import regdrop_titan  # noqa: F401
from regdrop_titan.data.packed import write_packed

ROOT = Path(__file__).parent.parent


def markov_documents(n_documents: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Documents with structure that a model can learn: each token is one of 3 followers of the one before."""
    import numpy as np

    rng = np.random.default_rng(seed)
    followers = np.random.default_rng(0).integers(1, vocab_size, (vocab_size, 3))
    documents = []
    for _ in range(n_documents):
        tokens = [int(rng.integers(1, vocab_size))]
        while len(tokens) < length:
            tokens.append(int(followers[tokens[-1], rng.integers(3)]))
        documents.append(tokens)
    return documents


@pytest.fixture(scope="session")
def packed(tmp_path_factory) -> Path:
    """A folder with small packed sets `train` and `validation`: vocabulary 256, documents of 100 tokens."""
    folder = tmp_path_factory.mktemp("packed")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(json.dumps({"stand-in": True}))
    write_packed(folder / "train", markov_documents(120, 100, 256, seed=1), tokenizer, 256, eos_id=0)
    write_packed(folder / "validation", markov_documents(7, 100, 256, seed=2), tokenizer, 256, eos_id=0)
    return folder

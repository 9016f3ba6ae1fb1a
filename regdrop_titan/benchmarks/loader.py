"""`benchmark.py loader`: reading a packed set beside TorchTitan's loader, which tokenizes as it reads."""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from datasets import load_dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader

from ..data.loader import TrainingLoader
from ..data.mixture import Mixture
from ..data.preparation import prepare
from ..data.tokenizers import train_tokenizer
from .data import write_text
from .timing import Step, add_sizes, row, time_rounds

NAME = "loader"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, seq_len=2048, batch_size=8, batches=8, vocab_size=2048, rounds=9, warmup=1)
    parser.add_argument("--megabytes", type=float, default=8, help="of text, the standard library over and over")


def measure(arguments: argparse.Namespace) -> dict:
    """TorchTitan's loader of a local text (the `datasets` library, tokens made while reading, no workers, as it comes)
    beside ours over the packed set of the same text by the same tokenizer: a step is `batches` batches of equal size.
    Preparing the set, once, is told apart."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    B, S = arguments.batch_size, arguments.seq_len
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = write_text(folder / "text.jsonl", arguments.megabytes)
        train_tokenizer(texts, arguments.vocab_size).save(str(folder / "tokenizer.json"))
        began = time.perf_counter()
        tokens = prepare([str(folder / "text.jsonl")], folder / "tokenizer.json", folder / "set")["tokens"]
        prepared = time.perf_counter() - began

        DATASETS["benchmark"] = DatasetConfig(
            path=str(folder / "text.jsonl"),
            loader=lambda path: load_dataset("json", data_files=path, split="train", streaming=True),
            sample_processor=lambda sample: sample["text"],
        )
        config = JobConfig()
        config.training.dataset, config.training.dataset_path = "benchmark", None
        config.training.local_batch_size, config.training.seq_len = B, S
        loaders = {
            "torchtitan": iter(build_text_dataloader(1, 0, HuggingFaceTokenizer(str(folder)), config)),
            "ours": iter(TrainingLoader(Mixture(str(folder / "set"), S, seed=0), B, 0, 1)),
        }
        for name, loader in loaders.items():
            inputs, labels = next(loader)
            assert inputs["input"].shape == labels.shape == (B, S), name
        steps = {name: reading(loader, arguments.batches) for name, loader in loaders.items()}
        seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {name: row(seconds, name, "torchtitan") for name in steps}
    for found in rows.values():
        found["tokens_per_second"] = arguments.batches * B * S / found["seconds"]
    notes = [f"preparing the packed set, once, one worker: {prepared:.1f} s, {tokens / prepared:,.0f} tokens/s"]
    return {"rows": rows, "seconds": seconds, "notes": notes}


def reading(loader: Iterator, batches: int) -> Step:
    """The next `batches` of a loader."""
    return lambda: list(islice(loader, batches))

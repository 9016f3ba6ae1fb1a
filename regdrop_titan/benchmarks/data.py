"""`benchmark.py data`: preparation beside the bare tokenizer, and the training loader."""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from ..data.loader import TrainingLoader
from ..data.mixture import Mixture
from ..data.preparation import prepare
from ..data.stdlib_corpus import stdlib_sources
from ..data.tokenizers import HuggingFaceTokenizer, TiktokenTokenizer, load_tokenizer, train_tokenizer
from .timing import Step, row, time_rounds

NAME = "data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", help="folder or file; without it one is trained on the text")
    parser.add_argument("--vocab-size", type=int, default=32000, help="of the trained tokenizer")
    parser.add_argument("--megabytes", type=float, default=40, help="of text, the standard library over and over")
    parser.add_argument("--samples", type=int, default=1_000_000, help="that the loader reads")
    parser.add_argument("--rounds", type=int, default=5, help=" ")


def measure(arguments: argparse.Namespace) -> dict:
    """Time preparation with one and two workers against the bare tokenizer, and the training loader."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = write_text(folder / "text.jsonl", arguments.megabytes)
        tokenizer = arguments.tokenizer
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            train_tokenizer(stdlib_sources(), arguments.vocab_size).save(str(tokenizer))

        def prepared(workers: int) -> None:
            shutil.rmtree(folder / "set", ignore_errors=True)
            prepare([str(folder / "text.jsonl")], tokenizer, folder / "set", workers=workers)

        prepared(1)  # starts the process that workers are forked from
        tokens = bare_tokenizer(tokenizer, texts)
        measures: dict[str, Step] = {
            "bare tokenizer": lambda: bare_tokenizer(tokenizer, texts),
            "1 worker": lambda: prepared(1),
            "2 workers": lambda: prepared(2),
        }
        seconds = time_rounds(measures, arguments.rounds, warmup=0)
        rows = {}
        for name, base in (("1 worker", "bare tokenizer"), ("2 workers", "1 worker")):
            rows[f"{name} / {base}"] = row(seconds, name, base)
            rows[f"{name} / {base}"]["tokens_per_second"] = tokens / rows[f"{name} / {base}"]["seconds"]

        loader = iter(TrainingLoader(Mixture(str(folder / "set"), 2048, seed=0), 8, 0, 1))
        for _ in range(1000):
            next(loader)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        for _ in tqdm(range(arguments.samples // 8), desc="loader", unit="batch"):
            next(loader)
        rate = arguments.samples // 8 * 8 * 2048 / (time.perf_counter() - began)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    notes = [
        f"bare tokenizer: {tokens / statistics.median(seconds['bare tokenizer']):,.0f} tokens/s",
        f"loader, 8 sequences of 2048: {rate:,.0f} tokens/s; {grown:.1f} MiB more after {arguments.samples:,} samples",
    ]
    loaded = {"tokens_per_second": rate, "grown_mib": grown, "samples": arguments.samples}
    return {"rows": rows, "seconds": seconds, "loader": loaded, "notes": notes}


def write_text(file: Path, megabytes: float) -> list[str]:
    """The standard library's sources, over and over to so many million characters; in `file` as JSONL."""
    texts, size = [], 0
    for text in itertools.cycle(stdlib_sources()):
        texts.append(text)
        size += len(text)
        if size > megabytes * 1e6:
            break
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def bare_tokenizer(path: Path | str, texts: list[str]) -> int:
    """The tokens of `texts`, by the tokenizer library's plain call, one text after another in one thread."""
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, TiktokenTokenizer):
        return sum(len(tokenizer.encoding.encode_ordinary(text)) for text in texts)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return sum(len(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    return sum(len(text.encode()) for text in texts)

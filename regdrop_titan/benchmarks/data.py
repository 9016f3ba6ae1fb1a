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
from .timing import ratio

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
        texts, size = [], 0
        for text in itertools.cycle(stdlib_sources()):
            texts.append(text)
            size += len(text)
            if size > arguments.megabytes * 1e6:
                break
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer = arguments.tokenizer
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            train_tokenizer(stdlib_sources(), arguments.vocab_size).save(str(tokenizer))

        def prepared(workers: int) -> int:
            shutil.rmtree(folder / "set", ignore_errors=True)
            return prepare([str(folder / "text.jsonl")], tokenizer, folder / "set", workers=workers)["tokens"]

        prepared(1)  # starts the process that workers are forked from
        measures = {
            "bare tokenizer": lambda: bare_tokenizer(tokenizer, texts),
            "1 worker": lambda: prepared(1),
            "2 workers": lambda: prepared(2),
        }
        rates: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(arguments.rounds):
            for name, measure in measures.items():
                began = time.perf_counter()
                rates[name].append(measure() / (time.perf_counter() - began))
        rows = {}
        for name, base in (("1 worker", "bare tokenizer"), ("2 workers", "1 worker")):
            middle, low, high = ratio(rates, name, base)
            rows[f"{name} / {base}"] = {"ratio": middle, "quartiles": [low, high]}
            print(f"{name} / {base}: {middle:.3f} [{low:.3f}, {high:.3f}]")
        for name in rates:
            print(f"{name}: {statistics.median(rates[name]):,.0f} tokens/s")

        loader = iter(TrainingLoader(Mixture(str(folder / "set"), 2048, seed=0), 8, 0, 1))
        for _ in range(1000):
            next(loader)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        for _ in tqdm(range(arguments.samples // 8), desc="loader", unit="batch"):
            next(loader)
        rate = arguments.samples // 8 * 8 * 2048 / (time.perf_counter() - began)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"loader, 8 sequences of 2048: {rate:,.0f} tokens/s; {grown:.1f} MiB more after {arguments.samples:,}")
    loaded = {"tokens_per_second": rate, "grown_mib": grown, "samples": arguments.samples}
    return {"rows": rows, "tokens_per_second": rates, "loader": loaded}


def bare_tokenizer(path: Path | str, texts: list[str]) -> int:
    """The tokens of `texts`, by the tokenizer library's plain call, one text after another in one thread."""
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, TiktokenTokenizer):
        return sum(len(tokenizer.encoding.encode_ordinary(text)) for text in texts)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return sum(len(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    return sum(len(text.encode()) for text in texts)

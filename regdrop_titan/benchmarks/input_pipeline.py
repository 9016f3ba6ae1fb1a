"""`benchmark.py input-pipeline`: how long a trainer waits for its data at a given rate."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from ..data.loader import TrainingLoader
from ..data.mixture import Mixture
from ..data.preparation import prepare
from ..data.stdlib_corpus import stdlib_sources
from .timing import add_sizes, row

NAME = "input-pipeline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, seq_len=2048, batch_size=8, accumulation=4, steps=40, rounds=5)
    parser.add_argument("--tokens-per-second", type=float, default=1e6, help="that the steps alone would take")
    parser.add_argument("--data", type=Path, help="packed set; without it one is made of Python's standard library")


def measure(arguments: argparse.Namespace) -> dict:
    """The share of the time that a trainer waits for its data, with micro-batches built when asked for
    (`training.prefetch = 0`) and a step ahead (1), while the device computes or Python starts operations all the time.
    One process takes what a node's ranks do together, 1 M tokens/s."""
    step_seconds = arguments.accumulation * arguments.batch_size * arguments.seq_len / arguments.tokens_per_second
    seconds: dict[str, list[float]] = {}  # of a step, waiting included
    waits: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        data = arguments.data or bytes_of_the_standard_library(Path(temporary))
        for _ in tqdm(range(arguments.rounds), desc="rounds", unit="round"):
            for kind, step in {"device computes": time.sleep, "Python launches": launch}.items():
                for prefetch in (0, 1):
                    samples = Mixture(str(data), arguments.seq_len, seed=0)
                    ahead = prefetch * arguments.accumulation
                    loader = TrainingLoader(samples, arguments.batch_size, 0, 1, ahead)
                    found = waiting(loader, arguments.accumulation, arguments.steps, step, step_seconds)
                    name = f"{kind}, prefetch {prefetch}"
                    seconds.setdefault(name, []).append(step_seconds + statistics.fmean(found))
                    waits.setdefault(name, []).extend(found)
    rows = {}
    for name, of_steps in seconds.items():
        share = statistics.median(1 - step_seconds / step for step in of_steps)
        base = name.replace("prefetch 1", "prefetch 0")
        rows[name] = row(seconds, name, base, waiting=share, longest_wait=max(waits[name]))
    return {"rows": rows, "seconds": seconds, "step_seconds": step_seconds}


def bytes_of_the_standard_library(folder: Path) -> Path:
    """A packed set of the standard library's sources, a token a byte."""
    (folder / "text.txt").write_text("\n".join(stdlib_sources()))
    prepare([str(folder / "text.txt")], "bytes", folder / "set")
    return folder / "set"


def launch(seconds: float) -> None:
    """Start small operations from Python for so long, as a trainer does whose device is faster than Python."""
    x, end = torch.zeros(64), time.perf_counter() + seconds
    while time.perf_counter() < end:
        x.add_(1)


def waiting(
    loader: TrainingLoader, accumulation: int, steps: int, step: Callable[[float], None], seconds: float
) -> list[float]:
    """Seconds that each of `steps` steps waited for its micro-batches, behind a step that computed for `seconds`."""
    batches = iter(loader)
    list(islice(batches, accumulation))  # nothing computes while the first ones are built
    waits = []
    for _ in range(steps):
        step(seconds)
        began = time.perf_counter()
        list(islice(batches, accumulation))
        waits.append(time.perf_counter() - began)
    return waits

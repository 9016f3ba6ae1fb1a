"""Variants that take turns, and the ratios of their times."""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from tqdm import tqdm

Step = Callable[[], object]
GRAPHS = 64  # of all variants' blocks, whose code is one: dynamo refuses a ninth by itself


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compile_blocks(model: nn.Module) -> None:
    """Each block by itself, as training does it."""
    torch._dynamo.config.recompile_limit = GRAPHS
    for name, block in model.get_submodule("layers").named_children():
        model.get_submodule("layers").register_module(name, cast(nn.Module, torch.compile(block, fullgraph=True)))


def synchronize() -> None:
    """Wait for the device, so that a time is that of the work and not of its start."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def add_sizes(parser: argparse.ArgumentParser, **sizes: int) -> None:
    """Whole-number options with their defaults; `--rounds` and `--warmup` are among them."""
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=" ")


def time_rounds(steps: dict[str, Step], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each variant's step, by round.

    Each round has an order of its own: what one leaves in memory and caches is another's burden, and would always be
    the same one's. Ranks have the same orders.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in tqdm(range(warmup + rounds), desc="rounds", unit="round", disable=os.environ.get("RANK", "0") != "0"):
        for name in random.Random(round_).sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def row(seconds: dict[str, list[float]], name: str, base: str, **extras: float | bool) -> dict:
    """A row of a result: the median seconds of variant `name`'s step; the median over rounds of the ratio of its time
    to `base`'s, with lower and upper quartile; and what else is known of it."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "seconds": statistics.median(seconds[name]),
        "ratio": middle,
        "quartiles": [low, high],
        "base": base,
        **extras,
    }

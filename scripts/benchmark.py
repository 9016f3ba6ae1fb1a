"""Paired step timings, as ratios.

    python scripts/benchmark.py dense [--compile]
    python scripts/benchmark.py layer-dropout [--compile]
    torchrun --nproc_per_node=2 scripts/benchmark.py layer-dropout
    python scripts/benchmark.py stragglers [--against outputs/benchmark_layer-dropout.json]
    python scripts/benchmark.py mamba2 [--compile]
    python scripts/benchmark.py generation
    python scripts/benchmark.py loss
    python scripts/benchmark.py attention [--checkpoint DIR --data SET --lengths 2048 65536]
    python scripts/benchmark.py data [--tokenizer DIR]
    python scripts/benchmark.py all

Variants take turns, one step each a round, so that a drift of the machine's speed meets all of them alike; a ratio is
the median over rounds of the pairwise ratios. A dense step is forward, loss, backward and a fused AdamW update; a
layer-dropout or mamba2 step is forward and backward of a stack of blocks; a generation step reads prompts and writes
greedy answers with a cache; a loss step is forward and backward of head and loss, an attention step of one attention
layer. The data benchmark sets preparation beside the bare tokenizer, and reads a packed set as training does. `all`
runs those whose ratios have a bound, and ends with status 1 where one is above its own.
"""

import argparse
import json
import os
import platform
import sys
from datetime import date
from pathlib import Path

import torch

from regdrop_titan.benchmarks import (
    attention,
    bounds,
    data,
    dense,
    generation,
    layer_dropout,
    loss,
    mamba2,
    stragglers,
)
from regdrop_titan.signals import interruptible

VERBS = (dense, layer_dropout, stragglers, mamba2, generation, loss, attention, data, bounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for verb in VERBS:
        command = commands.add_parser(
            verb.NAME, help=verb.measure.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        verb.add_arguments(command)
        output = Path(f"outputs/benchmark_{verb.NAME}.json")
        command.add_argument("--output", type=Path, default=output, help="result file")
        command.set_defaults(measure=verb.measure)
    arguments = parser.parse_args()
    faults = []
    if getattr(arguments, "rounds", 2) < 2:
        faults.append(f"--rounds {arguments.rounds}: quartiles need at least 2")
    if getattr(arguments, "dim", 128) % 128:
        faults.append(f"--dim {arguments.dim}: must be a multiple of 128 (an even number of heads of 64)")
    if not all(0 <= rate < 1 for rate in getattr(arguments, "rates", [])):
        faults.append(f"--rates {arguments.rates}: must be in [0, 1)")
    if faults:
        parser.error("; ".join(faults))
    result = arguments.measure(arguments)
    if os.environ.get("RANK", "0") != "0":
        return 0
    result |= {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {arguments.output}")
    return 0 if result.get("held", True) else 1


if __name__ == "__main__":
    sys.exit(interruptible(main))

"""Paired step timings, as ratios.

    python scripts/benchmark.py dense [--compile] [--attention]
    python scripts/benchmark.py layer-dropout [--compile]
    torchrun --nproc_per_node=2 scripts/benchmark.py layer-dropout
    python scripts/benchmark.py stragglers [--against outputs/benchmark_layer-dropout.json]
    python scripts/benchmark.py mamba2 [--compile]
    python scripts/benchmark.py generation
    python scripts/benchmark.py loss
    python scripts/benchmark.py attention [--checkpoint DIR --data SET --lengths 2048 65536]
    python scripts/benchmark.py loader
    python scripts/benchmark.py input-pipeline
    python scripts/benchmark.py data [--tokenizer DIR]
    python scripts/benchmark.py all [--only VERB ...] [--report docs/benchmarks.md]

Variants take turns, one step each a round in an order of its own, so that a drift of the machine's speed meets all of
them alike; a ratio is the median over rounds of the pairwise ratios. A dense step is forward, loss, backward and a
fused AdamW update; a layer-dropout or mamba2 step is forward and backward of a stack of blocks; a generation step
reads prompts and writes greedy answers with a cache; a loss step is forward and backward of head and loss, an
attention step of one attention layer; a loader step is some batches; input-pipeline times a trainer that waits for its
data. The data benchmark sets preparation beside the bare tokenizer, and reads a packed set as training does. `all`
runs what is set beside something else, writes a report, and ends with status 1 where a figure is above its bound.
"""

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

from regdrop_titan.benchmarks import (
    attention,
    bounds,
    data,
    dense,
    generation,
    input_pipeline,
    layer_dropout,
    loader,
    loss,
    mamba2,
    stragglers,
)
from regdrop_titan.benchmarks.results import machine, print_table, table
from regdrop_titan.benchmarks.sizes import size_faults
from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data import DataError
from regdrop_titan.evaluation.subjects import InputError, tell
from regdrop_titan.signals import interruptible

VERBS = (dense, layer_dropout, stragglers, mamba2, generation, loss, attention, loader, input_pipeline, data, bounds)


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
    if faults := size_faults(arguments):
        parser.error("; ".join(faults))
    try:
        result = arguments.measure(arguments)
    except (InputError, CheckpointError, DataError) as error:
        return tell(error)
    if os.environ.get("RANK", "0") != "0":
        return 0
    if "rows" in result:
        print_table(table(result["rows"]))
    for note in result.get("notes", []):
        print(note)
    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "measure", "output")}
    result |= {
        "command": command_line(sys.argv[1:]),
        "date": date.today().isoformat(),
        "arguments": {name: value for name, value in options.items() if not isinstance(value, Path)},
        **machine(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {arguments.output}")
    return 0 if result.get("held", True) else 1


def command_line(words: list[str]) -> str:
    """How to repeat the measurement, without the result's place."""
    if "--output" in words:
        place = words.index("--output")
        words = words[:place] + words[place + 2 :]
    ranks = os.environ.get("WORLD_SIZE", "1")
    return " ".join(
        ["python" if ranks == "1" else f"torchrun --nproc_per_node={ranks}", "scripts/benchmark.py", *words]
    )


if __name__ == "__main__":
    sys.exit(interruptible(main))

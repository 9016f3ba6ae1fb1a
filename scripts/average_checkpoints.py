"""The mean of K checkpoints of one run, in fp32: by name, the last K, or those of the last share of training.

    python scripts/average_checkpoints.py --checkpoints outputs/RUN/checkpoint --share 0.25 --output outputs/MEAN
    python scripts/average_checkpoints.py --checkpoints assets/revision-1 assets/revision-2 --output assets/mean

Of checkpoints of this package, OUTPUT/checkpoint/step-0 is what checkpoint.initial_load_path names and what every
script takes as --checkpoint. Hugging Face folders (config.json, safetensors) give a Hugging Face folder.
"""

import argparse
import sys
from fractions import Fraction
from pathlib import Path

import torch
from tqdm import tqdm

from regdrop_titan.checkpoints.averaging import average_checkpoints, select
from regdrop_titan.checkpoints.safety import CheckpointError
from regdrop_titan.signals import interruptible


def share(text: str) -> Fraction:
    """Of training, exact."""
    value = Fraction(str(float(text)))
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return value


def number(text: str) -> int:
    """Of checkpoints."""
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 2")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoints", type=Path, nargs="+", required=True, metavar="DIR",
        help="…/checkpoint/step-N, two or more; or Hugging Face folders; or with --last or --share one …/checkpoint",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=number, metavar="K", help="the newest K whole checkpoints")
    which.add_argument("--share", type=share, metavar="S", help="those of the last share of training, 0.25: a quarter")
    parser.add_argument(
        "--count", type=number, metavar="K", help="so many of --share, evenly spread, the last included"
    )
    parser.add_argument("--format", choices=["dcp", "hf"], help="of the output; default: that of the checkpoints")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the output; default: that of the checkpoints"
    )
    arguments = parser.parse_args()
    if arguments.count is not None and arguments.share is None:
        parser.error("--count needs --share")
    by_rule = arguments.last is not None or arguments.share is not None
    if by_rule and len(arguments.checkpoints) > 1:
        parser.error("--last and --share choose in one …/checkpoint: name that alone")
    try:
        chosen = arguments.checkpoints
        if by_rule:
            chosen, passed_over = select(chosen[0], arguments.last, arguments.share, arguments.count)
            for reason in passed_over.values():
                print(f"passed over: {reason}", file=sys.stderr)
        with tqdm(desc=f"mean of {len(chosen)}", unit="B", unit_scale=True, delay=0.5) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
            average_checkpoints(chosen, arguments.output, arguments.format, dtype, show)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.output}, the mean of {', '.join(folder.name for folder in chosen)}")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

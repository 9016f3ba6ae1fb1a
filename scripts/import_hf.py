"""Weights of a Hugging Face folder as a checkpoint: Mamba2, SmolLM3, Llama, or the original state-spaces format.

The output is what checkpoint.initial_load_path names (OUTPUT/checkpoint/step-0) and what every script takes as
--checkpoint.
"""

import argparse
import sys
from pathlib import Path

from regdrop_titan.checkpoints.huggingface import import_huggingface
from regdrop_titan.checkpoints.safety import CheckpointError
from regdrop_titan.signals import interruptible


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, required=True, metavar="DIR", help="config.json and weights")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty")
    arguments = parser.parse_args()
    try:
        args = import_huggingface(arguments.input, arguments.output)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.output / 'checkpoint/step-0'}: {args.n_parameters() / 1e6:,.1f} M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

"""A checkpoint as a Hugging Face folder that transformers loads: Mamba2, SmolLM3, Llama, or with a modelling file."""

import argparse
import shutil
import sys
from pathlib import Path

import torch

from regdrop_titan.checkpoints import CheckpointError, load_model
from regdrop_titan.checkpoints.huggingface import (
    CHECK_TOLERANCE,
    check_export,
    check_transformers,
    export_huggingface,
)
from regdrop_titan.signals import interruptible

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="…/checkpoint/step-N, or …/checkpoint for the newest")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the weights")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="copy its files beside the weights")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"load the folder with transformers and compare its fp32 logits with ours: status 1 beyond "
        f"{CHECK_TOLERANCE:g}",
    )
    arguments = parser.parse_args()
    try:
        files = (
            [] if arguments.tokenizer is None else [f for f in TOKENIZER_FILES if (arguments.tokenizer / f).exists()]
        )
        if arguments.tokenizer is not None and not files:
            raise CheckpointError(f"--tokenizer {arguments.tokenizer}: has none of {', '.join(TOKENIZER_FILES)}")
        if arguments.check:
            check_transformers()
        model = load_model(arguments.checkpoint)
        dtype = getattr(torch, arguments.dtype)
        export_huggingface(model, arguments.output, dtype)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in files:
        shutil.copy(arguments.tokenizer / name, arguments.output / name)
    print(f"wrote {arguments.output}: {model.args.n_parameters() / 1e6:,.1f} M parameters, {arguments.dtype}")
    if not arguments.check:
        return 0
    difference = check_export(model, arguments.output, dtype)
    said = f"largest difference of logits {difference:.3g}, allowed {CHECK_TOLERANCE:g}"
    if not difference <= CHECK_TOLERANCE:  # NaN too
        print(f"error: {arguments.output}: not the model: {said}", file=sys.stderr)
        return 1
    print(f"checked with transformers: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

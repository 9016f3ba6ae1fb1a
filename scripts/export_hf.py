"""A checkpoint as a Hugging Face folder that transformers loads: Mamba2, SmolLM3, or Llama (nape_llama3 with RoPE)."""

import argparse
import shutil
import sys
from pathlib import Path

import torch

from regdrop_titan.checkpoints import CheckpointError, load_model
from regdrop_titan.checkpoints.huggingface import export_huggingface
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
    arguments = parser.parse_args()
    try:
        files = (
            [] if arguments.tokenizer is None else [f for f in TOKENIZER_FILES if (arguments.tokenizer / f).exists()]
        )
        if arguments.tokenizer is not None and not files:
            raise CheckpointError(f"--tokenizer {arguments.tokenizer}: has none of {', '.join(TOKENIZER_FILES)}")
        model = load_model(arguments.checkpoint)
        export_huggingface(model, arguments.output, getattr(torch, arguments.dtype))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in files:
        shutil.copy(arguments.tokenizer / name, arguments.output / name)
    print(f"wrote {arguments.output}: {model.args.n_parameters() / 1e6:,.1f} M parameters, {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

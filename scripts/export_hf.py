"""A checkpoint as a Hugging Face folder that transformers loads: Mamba2, SmolLM3, Llama, or with a modelling file."""

import argparse
import shutil
import sys
from pathlib import Path

import torch

from regdrop_titan.checkpoints import CheckpointError, load_model, resolve_checkpoint, run_config
from regdrop_titan.checkpoints.hf_tokenizer import write_tokenizer
from regdrop_titan.checkpoints.huggingface import (
    CHECK_TOLERANCE,
    check_export,
    check_transformers,
    export_huggingface,
)
from regdrop_titan.data.packed import DataError
from regdrop_titan.data.tokenizers import TiktokenTokenizer, Tokenizer, load_tokenizer
from regdrop_titan.models import DecoderArgs
from regdrop_titan.signals import interruptible

# of a tokenizer that is copied as it is
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# in a path, HELMET takes them for the name of a model behind an API
API_NAMES = ("gpt", "claude", "gemini", "togetherapi")


def has_configuration(tokenizer: Path) -> bool:
    return (tokenizer / "tokenizer.json").is_file() and (tokenizer / "tokenizer_config.json").is_file()


def put_tokenizer(name: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Lay a tokenizer's files beside the weights: a folder's own, or those that give our ids."""
    if not has_configuration(Path(name)):
        write_tokenizer(tokenizer, folder)
        return
    for file in TOKENIZER_FILES:
        if (Path(name) / file).exists():
            shutil.copy(Path(name) / file, folder / file)


def trained_exits(checkpoint: str, args: DecoderArgs) -> list[int]:
    """The depths that a model may stop at without training for it: all, if its layers were dropped in training and its
    export can stop."""
    p_max = run_config(resolve_checkpoint(checkpoint)).get("layer_dropout", {}).get("p_max", 0.0)
    return list(range(1, args.n_layers)) if p_max > 0 and set(args.layer_kinds) != {"mamba"} else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="…/checkpoint/step-N, or …/checkpoint for the newest")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the weights")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="put beside the weights: a folder that has a tokenizer_config.json as it is; another folder, a file or "
        "'bytes' as files for AutoTokenizer that give the ids of our data",
    )
    parser.add_argument(
        "--exit-layers", type=int, nargs="*", metavar="N",
        help="depths for config.json at which transformers' assistant_early_exit may stop; default: all, of a run with "
        "layer dropout",
    )  # fmt: skip
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"load the folder with transformers and compare its fp32 logits with ours: status 1 beyond "
        f"{CHECK_TOLERANCE:g}",
    )
    arguments = parser.parse_args()
    try:
        tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
        if arguments.check:
            check_transformers("--check")
        if isinstance(tokenizer, TiktokenTokenizer):
            check_transformers(f"--tokenizer {arguments.tokenizer}, a tiktoken file,")
        model = load_model(arguments.checkpoint)
        if tokenizer is not None and tokenizer.vocab_size > model.args.vocab_size:
            raise CheckpointError(
                f"--tokenizer {arguments.tokenizer}: has {tokenizer.vocab_size} tokens, the model's vocabulary "
                f"{model.args.vocab_size}"
            )
        dtype = getattr(torch, arguments.dtype)
        exit_layers = arguments.exit_layers
        if exit_layers is None:
            exit_layers = trained_exits(arguments.checkpoint, model.args)
        export_huggingface(model, arguments.output, dtype, exit_layers=exit_layers)
    except (CheckpointError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if tokenizer is not None:
        put_tokenizer(arguments.tokenizer, tokenizer, arguments.output)
    if named := [name for name in API_NAMES if name in str(arguments.output.absolute())]:
        print(
            f"warning: {arguments.output.absolute()} has {named[0]!r} in it: HELMET would take it for a model behind "
            "an API (docs/helmet.md)",
            file=sys.stderr,
        )
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

"""Evaluate a checkpoint.

    python scripts/evaluate.py position-loss --checkpoint outputs/RUN/checkpoint --data data/stdlib/long

Results are JSON and PNG files in --output (default: `evaluation` in the run's folder).
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from regdrop_titan.checkpoints import CheckpointError, load_model, resolve_checkpoint, run_config
from regdrop_titan.data.packed import DataError, PackedTokens
from regdrop_titan.evaluation.position_loss import plot_position_loss, position_loss


class InputError(Exception):
    """Arguments that do not fit together."""


def evaluate_position_loss(arguments: argparse.Namespace) -> None:
    checkpoint = resolve_checkpoint(arguments.checkpoint)
    config = run_config(checkpoint)
    context = config["training"]["seq_len"]
    length = arguments.multiple * context
    tokens = PackedTokens(arguments.data)
    if tokens.manifest["vocab_size"] > config["model_args"]["vocab_size"]:
        raise InputError(
            f"{arguments.data} was written by a tokenizer of {tokens.manifest['vocab_size']} tokens, the model's "
            f"vocabulary has {config['model_args']['vocab_size']}"
        )
    documents = []
    for document in tokens.documents(length + 1):
        documents.append(document)
        if len(documents) == arguments.documents:
            break
    if not documents:
        raise InputError(f"{arguments.data}: no document has the {length + 1} tokens that {length} positions need")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(checkpoint).to(device)
    with tqdm(total=len(documents), desc=f"position loss to {length}", unit="doc") as bar:
        result = position_loss(model, documents, length, arguments.batch_size, lambda done: bar.update(done - bar.n))
    folder = Path(arguments.output) if arguments.output else checkpoint.parent.parent / "evaluation"
    folder.mkdir(parents=True, exist_ok=True)
    multiples = [m for m in (1, 2, 4, 8, 16, 32, 64) if m <= arguments.multiple]
    window = min(arguments.window, context)
    summary = {
        "checkpoint": str(checkpoint),
        "data": str(arguments.data),
        "documents": result.n_documents,
        "train_context": context,
        "window": window,
        # mean over the last training-context positions of each length: flat means that length generalizes
        "loss_at": {f"{m}x": result.loss[(m - 1) * context : m * context].mean().item() for m in multiples},
        "loss": result.loss.tolist(),
    }
    (folder / "position_loss.json").write_text(json.dumps(summary) + "\n")
    plot_position_loss({checkpoint.name: result}, context, window, folder / "position_loss.png")
    for multiple, loss in summary["loss_at"].items():
        print(f"  {multiple:>3} of the training context: {loss:.4f} nats")
    print(f"wrote {folder / 'position_loss.json'} and {folder / 'position_loss.png'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    position = commands.add_parser(
        "position-loss", help="mean loss at each token position of long documents",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    position.add_argument("--checkpoint", required=True, help="…/checkpoint/step-N, or …/checkpoint for the newest")
    position.add_argument("--data", required=True, help="packed set with long documents")
    position.add_argument("--multiple", type=int, default=8, help="length, in training contexts")
    position.add_argument("--documents", type=int, default=2000, help="at most so many documents")
    position.add_argument("--batch-size", type=int, default=1, help="documents a forward")
    position.add_argument("--window", type=int, default=512, help="positions of the moving average")
    position.add_argument("--output", help="folder for the results; default: evaluation in the run's folder")
    arguments = parser.parse_args()
    try:
        for name in ("multiple", "documents", "batch_size", "window"):
            if getattr(arguments, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
        evaluate_position_loss(arguments)
    except (InputError, CheckpointError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

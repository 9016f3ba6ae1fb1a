"""Evaluate a checkpoint.

    python scripts/evaluate.py position-loss --checkpoint outputs/RUN/checkpoint --data data/stdlib/long
    python scripts/evaluate.py copying --checkpoint outputs/RUN/checkpoint

Results are JSON and PNG files in --output (default: `evaluation` in the run's folder).
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from regdrop_titan.checkpoints import CheckpointError, load_model, resolve_checkpoint, run_config
from regdrop_titan.data.packed import DataError, PackedTokens
from regdrop_titan.evaluation.copying import evaluate_copying, plot_copying
from regdrop_titan.evaluation.position_loss import plot_position_loss, position_loss
from regdrop_titan.models import Decoder
from regdrop_titan.signals import interruptible


class InputError(Exception):
    """Arguments that do not fit together."""


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raise InputError naming the first of these arguments that is, or holds, a number below 1."""
    for name in names:
        value = getattr(arguments, name)
        for number in value if isinstance(value, list) else [value]:
            if number < 1:
                raise InputError(f"--{name.replace('_', '-')} {number}: must be at least 1")


def load_on_device(checkpoint: Path) -> Decoder:
    return load_model(checkpoint).to("cuda" if torch.cuda.is_available() else "cpu")


def output_folder(arguments: argparse.Namespace, checkpoint: Path) -> Path:
    """The folder for results, made where missing."""
    folder = Path(arguments.output) if arguments.output else checkpoint.parent.parent / "evaluation"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def evaluate_position_loss(arguments: argparse.Namespace) -> None:
    check_positive(arguments, "multiple", "documents", "batch_size", "window")
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
    trained_on, used = config.get("tokenizer"), tokens.manifest["tokenizer"]
    if trained_on is not None and trained_on["sha256"] != used["sha256"]:
        raise InputError(
            f"{arguments.data} was tokenized by {used['name']}, the model was trained on tokens of "
            f"{trained_on['name']}: the same ids mean other text"
        )
    documents = []
    for document in tokens.documents(length + 1):
        documents.append(document)
        if len(documents) == arguments.documents:
            break
    if not documents:
        raise InputError(f"{arguments.data}: no document has the {length + 1} tokens that {length} positions need")
    model = load_on_device(checkpoint)
    with tqdm(total=len(documents), desc=f"position loss to {length}", unit="doc") as bar:
        result = position_loss(model, documents, length, arguments.batch_size, lambda done: bar.update(done - bar.n))
    folder = output_folder(arguments, checkpoint)
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


def evaluate_copying_task(arguments: argparse.Namespace) -> None:
    check_positive(arguments, "lengths", "samples", "batch_size")
    checkpoint = resolve_checkpoint(arguments.checkpoint)
    training = run_config(checkpoint)["training"]
    if training["dataset"] != "copying":
        raise InputError(
            f"{checkpoint}: its run has training.dataset = {training['dataset']!r}; copying needs a model that was "
            "trained on 'copying', since its tokens are that data set's"
        )
    lengths = sorted(set(arguments.lengths))
    model = load_on_device(checkpoint)
    mode = "free-running" if arguments.free_running else "teacher-forced"
    with tqdm(total=len(lengths) * arguments.samples, desc=f"copying, {mode}", unit="example") as bar:
        scores = [
            evaluate_copying(
                model, length, arguments.samples, seed=arguments.seed, batch_size=arguments.batch_size,
                free_running=arguments.free_running, progress=bar.update,
            )
            for length in lengths
        ]  # fmt: skip
    folder = output_folder(arguments, checkpoint)
    summary = {
        "checkpoint": str(checkpoint),
        "train_lengths": training["copying_lengths"],
        "free_running": arguments.free_running,
        "seed": arguments.seed,
        "scores": [asdict(score) for score in scores],
    }
    (folder / "copying.json").write_text(json.dumps(summary) + "\n")
    plot_copying({f"{checkpoint.name}, {mode}": scores}, training["copying_lengths"], folder / "copying.png")
    print("  length   EMA (standard error)   CLA (standard error)")
    for score in scores:
        print(
            f"  {score.length:>6}       {score.ema:.4f} ({score.ema_error:.4f})        {score.cla:.4f} "
            f"({score.cla_error:.4f})"
        )
    print(f"wrote {folder / 'copying.json'} and {folder / 'copying.png'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def add_command(
        name: str, evaluate: Callable[[argparse.Namespace], None], description: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(evaluate=evaluate)
        command.add_argument("--checkpoint", required=True, help="…/checkpoint/step-N, or …/checkpoint for the newest")
        command.add_argument("--output", help="folder for the results; default: evaluation in the run's folder")
        return command

    position = add_command(
        "position-loss", evaluate_position_loss, "mean loss at each token position of long documents"
    )
    position.add_argument("--data", required=True, help="packed set with long documents")
    position.add_argument("--multiple", type=int, default=8, help="length, in training contexts")
    position.add_argument("--documents", type=int, default=2000, help="at most so many documents")
    position.add_argument("--batch-size", type=int, default=1, help="documents a forward")
    position.add_argument("--window", type=int, default=512, help="positions of the moving average")
    copying = add_command("copying", evaluate_copying_task, "share of right copies by source length")
    copying.add_argument("--lengths", type=int, nargs="+", default=[50, 100, 150, 300], help="letters of a source")
    copying.add_argument("--samples", type=int, default=1000, help="examples of each length")
    copying.add_argument(
        "--free-running", action="store_true",
        help="the model reads its own answer, not the right one; length + 1 forwards a batch instead of one",
    )  # fmt: skip
    copying.add_argument("--batch-size", type=int, default=50, help="examples a forward")
    copying.add_argument("--seed", type=int, default=0, help="of the examples")
    arguments = parser.parse_args()
    try:
        arguments.evaluate(arguments)
    except (InputError, CheckpointError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

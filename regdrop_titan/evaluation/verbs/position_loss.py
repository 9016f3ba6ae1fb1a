"""`evaluate.py position-loss`: the mean loss at each token position of long documents."""

import argparse
from collections.abc import Sequence
from itertools import islice

from tqdm import tqdm

from ..position_loss import plot_position_loss, position_loss
from ..results import describe, result_folder, write_result
from ..subjects import InputError, Subject
from . import check_positive

NAME = "position-loss"
SUMMARY = "mean loss at each token position of long documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="packed set with long documents")
    parser.add_argument("--multiple", type=int, default=8, help="length, in training contexts")
    parser.add_argument("--documents", type=int, default=2000, help="at most so many documents")
    parser.add_argument("--batch-size", type=int, default=1, help="documents a forward")
    parser.add_argument("--window", type=int, default=512, help="positions of the moving average")


def evaluate(subjects: Sequence[Subject], arguments: argparse.Namespace) -> None:
    check_positive(arguments, "multiple", "documents", "batch_size", "window")
    for subject in subjects:
        evaluate_one(subject, arguments, several=len(subjects) > 1)


def evaluate_one(subject: Subject, arguments: argparse.Namespace, several: bool) -> None:
    context = subject.context
    length = arguments.multiple * context
    tokens = subject.packed_tokens(arguments.data)
    documents = list(islice(tokens.documents(length + 1), arguments.documents))
    if not documents:
        raise InputError(f"{arguments.data}: no document has the {length + 1} tokens that {length} positions need")
    model = subject.load()
    with tqdm(total=len(documents), desc=f"position loss to {length}", unit="doc") as bar:
        result = position_loss(model, documents, length, arguments.batch_size, lambda done: bar.update(done - bar.n))
    folder = result_folder(subject, arguments.output, several)
    multiples = [m for m in (1, 2, 4, 8, 16, 32, 64) if m <= arguments.multiple]
    window = min(arguments.window, context)
    summary = {
        **describe(NAME, subject, model, {"data": str(arguments.data), "window": window}),
        "documents": result.n_documents,
        # mean over the last training-context positions of each length: flat means that length generalizes
        "loss_at": {f"{m}x": result.loss[(m - 1) * context : m * context].mean().item() for m in multiples},
        "loss": result.loss.tolist(),
    }
    file = write_result(folder, NAME, summary)
    plot_position_loss({subject.label: result}, context, window, folder / "position_loss.png")
    for multiple, loss in summary["loss_at"].items():
        print(f"  {multiple:>3} of the training context: {loss:.4f} nats")
    print(f"wrote {file} and {folder / 'position_loss.png'}")

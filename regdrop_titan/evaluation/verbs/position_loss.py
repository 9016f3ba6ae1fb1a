"""`evaluate.py position-loss`: the mean loss at each token position of long documents."""

import argparse
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from ..position_loss import PositionLoss, plot_position_loss, position_loss
from ..results import describe, read_result, result_folder, write_result
from ..subjects import InputError, Subject
from . import check_positive

NAME = "position-loss"
SUMMARY = "mean loss at each token position of long documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="packed set with long documents")
    parser.add_argument("--multiple", type=int, default=8, help="length, in training contexts")
    parser.add_argument("--length", type=int, help="length in tokens, instead of --multiple")
    parser.add_argument("--documents", type=int, default=2000, help="at most so many documents")
    parser.add_argument("--batch-size", type=int, default=1, help="documents side by side")
    parser.add_argument("--window", type=int, default=512, help="positions of the moving average, at most a context")
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="FILE", help="position_loss.json to draw too"
    )


def evaluate(subjects: Sequence[Subject], arguments: argparse.Namespace) -> None:
    check_positive(arguments, "multiple", "length", "documents", "batch_size", "window")
    curves = {}
    for file in arguments.compare:
        earlier = read_result(file, NAME)
        curves[f"{earlier['label']} ({file.parent.name})" if earlier["label"] in curves else earlier["label"]] = (
            stored(earlier), earlier["train_context"],
        )  # fmt: skip
    faults = []
    for subject in subjects:  # before any of them is evaluated
        length = length_for(subject, arguments)
        if not any(True for _ in subject.packed_tokens(arguments.data).documents(length + 1)):
            faults.append(f"{arguments.data}: no document has the {length + 1} tokens that {length} positions need")
    if faults:
        raise InputError("\n".join(dict.fromkeys(faults)))
    for subject in subjects:
        result, folder = evaluate_one(subject, arguments, several=len(subjects) > 1)
        curves[subject.label] = result, subject.context
    plot = (arguments.output if arguments.output and len(subjects) > 1 else folder) / "position_loss.png"
    plot_position_loss(
        {label: result for label, (result, _) in curves.items()},
        {label: context for label, (_, context) in curves.items()},
        plot,
    )
    print(f"wrote {plot}")


def length_for(subject: Subject, arguments: argparse.Namespace) -> int:
    return arguments.length or arguments.multiple * subject.context


def evaluate_one(subject: Subject, arguments: argparse.Namespace, several: bool) -> tuple[PositionLoss, Path]:
    context, length = subject.context, length_for(subject, arguments)
    tokens = subject.packed_tokens(arguments.data)
    documents = islice(tokens.documents(length + 1), arguments.documents)
    n_documents = sum(1 for _ in islice(tokens.documents(length + 1), arguments.documents))
    model = subject.load()
    window = min(arguments.window, context)
    with tqdm(
        total=n_documents * length, desc=f"{subject.label}: loss to {length}", unit="tok", unit_scale=True
    ) as bar:
        result = position_loss(model, documents, length, arguments.batch_size, bar.update, window)
    folder = result_folder(subject, arguments.output, several)
    settings = {"data": str(arguments.data), "length": length, "window": window}
    # mean over the last training-context positions of each length: flat means that length generalizes
    ends = {f"{m}x": m * context for m in (1, 2, 4, 8, 16, 32, 64) if m * context <= length}
    loss_at = {name: result.loss[end - context : end].mean().item() for name, end in ends.items()}
    file = write_result(folder, NAME, {
        **describe(NAME, subject, model, settings),
        "documents": result.n_documents,
        "loss_at": loss_at,
        "loss": result.loss.tolist(),
        "standard_error": without_nan(result.error),
        "average": result.average.tolist(),
        "average_standard_error": without_nan(result.average_error),
    })  # fmt: skip
    for multiple, loss in loss_at.items():
        print(f"  {multiple:>3} of the training context: {loss:.4f} nats")
    print(f"wrote {file}")
    return result, folder


def without_nan(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def stored(result: dict) -> PositionLoss:
    """What an earlier call has written."""

    def tensor(name: str) -> torch.Tensor:
        return torch.tensor([math.nan if value is None else value for value in result[name]], dtype=torch.float64)

    return PositionLoss(
        tensor("loss"), tensor("standard_error"), tensor("average"), tensor("average_standard_error"),
        result["settings"]["window"], result["documents"],
    )  # fmt: skip

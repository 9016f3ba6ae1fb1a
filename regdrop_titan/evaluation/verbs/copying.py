"""`evaluate.py copying`: the share of right copies by source length."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from tqdm import tqdm

from ..copying import evaluate_copying, greedy_answer, plot_copying
from ..results import describe, result_folder, write_result
from ..subjects import InputError, Subject
from . import check_positive

NAME = "copying"
SUMMARY = "share of right copies by source length"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 100, 150, 300], help="letters of a source")
    parser.add_argument("--samples", type=int, default=1000, help="examples of each length")
    parser.add_argument(
        "--free-running", action="store_true",
        help="the model reads its own answer, not the right one",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=50, help="examples a forward")
    parser.add_argument("--seed", type=int, default=0, help="of the examples")


def evaluate(subjects: Sequence[Subject], arguments: argparse.Namespace) -> None:
    check_positive(arguments, "lengths", "samples", "batch_size")
    if faults := [fault for subject in subjects if (fault := not_trained_on_it(subject))]:
        raise InputError("\n".join(faults))
    for subject in subjects:
        evaluate_one(subject, arguments, several=len(subjects) > 1)


def not_trained_on_it(subject: Subject) -> str | None:
    dataset = subject.config.get("training", {}).get("dataset")
    if dataset == "copying":
        return None
    return (
        f"{subject.source}: its run has training.dataset = {dataset!r}; copying needs a model that was trained on "
        "'copying', since its tokens are that data set's"
    )


def evaluate_one(subject: Subject, arguments: argparse.Namespace, several: bool) -> None:
    lengths = sorted(set(arguments.lengths))
    model = subject.load()
    mode = "free-running" if arguments.free_running else "teacher-forced"
    with tqdm(total=len(lengths) * arguments.samples, desc=f"copying, {mode}", unit="example") as bar:
        scores = [
            evaluate_copying(
                model, length, arguments.samples, seed=arguments.seed, batch_size=arguments.batch_size,
                write=partial(greedy_answer, model) if arguments.free_running else None, progress=bar.update,
            )
            for length in lengths
        ]  # fmt: skip
    folder = result_folder(subject, arguments.output, several)
    train_lengths = subject.config["training"]["copying_lengths"]
    settings = {"samples": arguments.samples, "seed": arguments.seed, "free_running": arguments.free_running}
    file = write_result(folder, NAME, {
        **describe(NAME, subject, model, settings),
        "train_lengths": train_lengths,
        "scores": [asdict(score) for score in scores],
    })  # fmt: skip
    plot_copying({f"{subject.label}, {mode}": scores}, train_lengths, folder / "copying.png")
    print("  length   EMA (standard error)   CLA (standard error)")
    for score in scores:
        print(
            f"  {score.length:>6}       {score.ema:.4f} ({score.ema_error:.4f})        {score.cla:.4f} "
            f"({score.cla_error:.4f})"
        )
    print(f"wrote {file} and {folder / 'copying.png'}")

"""`evaluate.py moments`: how far dropout moves mean and variance of the input projections' outputs, layer by layer."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ...data.packed import PackedDataset
from ..moments import Mismatch, Placement, Run, mean_over_layers, measure_moments, plot_moments, set_dropout
from ..results import describe, read_result, result_folder, write_result
from ..subjects import InputError, Subject
from . import check_positive

NAME = "moments"
SUMMARY = "mean and variance of the input projections' outputs, in training against evaluation"

DATA_SEED = 0  # of the order of the samples, the same for every model

Setting = tuple[Placement, float]  # and p


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="packed set; its first samples in one fixed shuffled order")
    parser.add_argument("--samples", type=int, default=256, help="at most so many sequences, at least 2")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence; default: the training context")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences a forward")
    parser.add_argument("--draws", type=int, default=1, help="dropout masks drawn for each sequence")
    parser.add_argument("--seed", type=int, default=0, help="of the dropout masks")
    parser.add_argument(
        "--placement", nargs="+", choices=("pre_norm", "pre_linear", "vpad"),
        help="measure under each of these placements instead of the model's own",
    )  # fmt: skip
    parser.add_argument("--p", type=float, help="measure at this drop probability instead of the model's own")
    parser.add_argument(
        "--compare", nargs="+", type=Path, default=[], metavar="FILE", help="earlier moments.json, drawn beside"
    )


def evaluate(subjects: Sequence[Subject], arguments: argparse.Namespace) -> None:
    check_positive(arguments, "seq_len", "batch_size", "draws")
    faults = []
    if arguments.samples < 2:
        faults.append(f"--samples {arguments.samples}: must be at least 2, the noise floor is their spread")
    if arguments.p is not None and not 0 < arguments.p < 1:
        faults.append(f"--p {arguments.p}: must be above 0 and below 1")
    faults += [fault for subject in subjects for fault in subject_faults(subject, arguments)]
    if faults:
        raise InputError("\n".join(faults))
    earlier = [run for file in arguments.compare for run in read_runs(file)]
    sequences = [read_sequences(subject, arguments) for subject in subjects]
    folders = [result_folder(subject, arguments.output, several=len(subjects) > 1) for subject in subjects]
    runs: list[Run] = []
    for subject, tokens, folder in zip(subjects, sequences, folders, strict=True):
        runs += evaluate_one(subject, tokens, folder, arguments)
    for folder in folders:
        plot_moments(runs + earlier, folder / "moments.png")
        print(f"wrote {folder / 'moments.json'} and {folder / 'moments.png'}")


def subject_faults(subject: Subject, arguments: argparse.Namespace) -> list[str]:
    faults = []
    if arguments.seq_len is None and subject.context < 1:
        faults.append(f"{subject.label}: its training context is not known; say --seq-len")
    overridden = arguments.placement is not None or arguments.p is not None
    attention_only = subject.args.attention_p > 0 and not overridden
    if not attention_only and not all(drops(setting) for setting in settings(subject, arguments)):
        faults.append(
            f"{subject.label}: nothing to measure without dropout, the model has placement {subject.args.placement} "
            f"and p {subject.args.p}; say --placement and --p"
        )
    return faults


def settings(subject: Subject, arguments: argparse.Namespace) -> list[Setting]:
    """What the model is measured under."""
    p = subject.args.p if arguments.p is None else arguments.p
    return [(placement, p) for placement in arguments.placement or [subject.args.placement]]


def drops(setting: Setting) -> bool:
    placement, p = setting
    return placement != "none" and p > 0


def read_sequences(subject: Subject, arguments: argparse.Namespace) -> Tensor:
    """The first samples of the data in the order of `DATA_SEED`: (n, S)."""
    seq_len = arguments.seq_len or subject.context
    subject.packed_tokens(arguments.data)  # whether its tokens are the model's
    dataset = PackedDataset(arguments.data, seq_len, seed=DATA_SEED)
    n = min(arguments.samples, len(dataset))
    if n < 2:
        raise InputError(f"{arguments.data}: has one sequence of {seq_len} tokens, the noise floor needs two")
    return torch.stack([dataset[i]["input"] for i in range(n)])


def evaluate_one(subject: Subject, sequences: Tensor, folder: Path, arguments: argparse.Namespace) -> list[Run]:
    """Measure a model on `sequences` (n, S) and leave its results in `folder`."""
    n, seq_len = sequences.shape
    model = subject.load()
    batches = sequences.to(next(model.parameters()).device).split(arguments.batch_size)
    args, runs, results = subject.args, [], []
    for placement, p in settings(subject, arguments):
        set_dropout(model, placement, p)
        shown = f"{placement}, p = {p:g}" if drops((placement, p)) else f"attention_p = {args.attention_p:g}"
        with tqdm(total=n * arguments.draws, desc=f"moments, {shown}", unit="sequence") as bar:
            moments = measure_moments(model, batches, draws=arguments.draws, seed=arguments.seed, progress=bar.update)
        run = Run(f"{subject.label}\n{shown}", moments)
        runs.append(run)
        results.append({
            "label": run.label, "placement": placement, "p": p, "attention_p": args.attention_p, "mask": args.mask,
            "mean_over_layers": {name: asdict(value) for name, value in mean_over_layers(moments).items()},
            "projections": {name: asdict(value) for name, value in moments.items()},
        })  # fmt: skip
        print_means(run)
    said = {
        "data": str(arguments.data), "data_seed": DATA_SEED, "samples": n, "seq_len": seq_len,
        "batch_size": arguments.batch_size, "draws": arguments.draws, "seed": arguments.seed,
    }  # fmt: skip
    write_result(folder, NAME, {**describe(NAME, subject, model, said), "runs": results})
    return runs


def print_means(run: Run) -> None:
    print(f"{run.label.replace(chr(10), ', ')}: means over layers, noise floors in brackets")
    print(f"  {'projection':<18}{'mean':>9}{'':>11}{'variance':>9}{'':>11}{'mean ratio':>12}{'variance ratio':>16}")
    for projection, value in mean_over_layers(run.moments).items():
        print(
            f"  {projection:<18}{value.mean:>9.4f} ({value.mean_floor:.4f}) {value.variance:>10.4f} "
            f"({value.variance_floor:.4f}){value.mean_ratio:>14.4f}{value.variance_ratio:>16.4f}"
        )


def read_runs(file: Path) -> list[Run]:
    """What an earlier call has left in `file`. Raises InputError."""
    try:
        return [
            Run(run["label"], {name: Mismatch(**value) for name, value in run["projections"].items()})
            for run in read_result(file, NAME)["runs"]
        ]
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{file}: holds no runs that can be drawn") from None

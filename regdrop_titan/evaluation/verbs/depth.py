"""`evaluate.py depth`: the loss of early exits and of models without some of their layers, and what these cost."""

import argparse
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...adapters.balcony import Exits, exits_record, load_exits
from ...checkpoints import CheckpointError
from ...data.loader import Sample
from ...data.packed import DataError, PackedDataset
from ...models import Decoder
from ..depth import (
    Entry,
    Layers,
    entry,
    families,
    subset_losses,
    trained_exit_entry,
    trained_exit_losses,
    without,
)
from ..depth_plots import plot_alternate, plot_costs, plot_exits, plot_runs
from ..results import describe, read_result, result_folder, write_result
from ..subjects import InputError, Subject
from . import check_positive

NAME = "depth"
SUMMARY = "loss of early exits and of models without some layers"
ANALYSES = ("exits", "alternate", "runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="packed set of the run's tokenizer")
    parser.add_argument("--samples", type=int, default=100, help="at most so many samples, the first of the set")
    parser.add_argument("--seq-len", type=int, help="tokens of a sample; default: the training context")
    parser.add_argument("--batch-size", type=int, default=1, help="samples a forward")
    parser.add_argument(
        "--analyses", nargs="*", choices=ANALYSES, default=list(ANALYSES),
        help="exits: after every number of layers; alternate: without odd layers; runs: without each contiguous run, "
        "L(L+1)/2 forwards; none named: only --layers and --skip-layers",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, nargs="+", action="append", metavar="N", help="only these; repeatable")
    parser.add_argument(
        "--skip-layers", type=int, nargs="+", action="append", metavar="N", help="all but these; repeatable"
    )
    parser.add_argument(
        "--exits", nargs="+", metavar="DIR",
        help="trained exits of the models, in their order; default: those in `exits` in a model's run, if they fit",
    )  # fmt: skip
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="FILE", help="depth.json to plot as well"
    )


def evaluate(subjects: Sequence[Subject], arguments: argparse.Namespace) -> None:
    samples, comparisons = check(subjects, arguments)
    results, folders = [], []
    for subject, exits in zip(subjects, arguments.exits or [None] * len(subjects), strict=True):
        folders.append(result_folder(subject, arguments.output, several=len(subjects) > 1))
        results.append(evaluate_one(subject, arguments, samples, folders[-1], exits))
    draw([*results, *comparisons], arguments.output or folders[0])


@contextlib.contextmanager
def noted(faults: list[str]) -> Iterator[None]:
    """Add what is wrong in this block to `faults` and go on after it."""
    try:
        yield
    except (InputError, DataError) as error:
        faults += str(error).splitlines()


def check(subjects: Sequence[Subject], arguments: argparse.Namespace) -> tuple[list[Sample], list[dict[str, Any]]]:
    """The samples and the results of --compare. Raises InputError with a line for every fault of the arguments."""
    faults: list[str] = []
    samples: list[Sample] = []
    comparisons: list[dict[str, Any]] = []
    with noted(faults):
        check_positive(arguments, "samples", "seq_len", "batch_size")
    for subject in subjects:
        with noted(faults):
            subject.packed_tokens(arguments.data)
        with noted(faults):
            listed_subsets(arguments, subject)
    if not (arguments.analyses or arguments.layers or arguments.skip_layers):
        faults.append("--analyses: names none, and neither --layers nor --skip-layers is given")
    for file in arguments.compare:
        with noted(faults):
            comparisons.append(read_result(file, NAME))
    if arguments.exits is not None and len(arguments.exits) != len(subjects):
        faults.append(f"--exits: {len(arguments.exits)} for {len(subjects)} models")
    for folder in arguments.exits or []:
        try:
            exits_record(folder)
        except CheckpointError as error:
            faults.append(f"--exits: {error}")
    labels = [subject.label for subject in subjects] + [result["label"] for result in comparisons]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        faults.append(f"--compare: several results are called {label!r}; name the models by --labels")
    with noted(faults):
        arguments.seq_len = arguments.seq_len or common_context(subjects)
    if not faults:
        with noted(faults):
            samples = first_samples(arguments)
        for file, result in zip(arguments.compare, comparisons, strict=True):
            if samples and result["settings"]["tokens_sha256"] != tokens_sha256(samples):
                settings = result["settings"]
                faults.append(
                    f"--compare {file}: its loss is of other tokens: {settings['samples']} samples of "
                    f"{settings['seq_len']} from {settings['data']}"
                )
    if faults:
        raise InputError("\n".join(dict.fromkeys(faults)))
    return samples, comparisons


def common_context(subjects: Sequence[Subject]) -> int:
    """The training context of all models. Raises InputError."""
    contexts = sorted({subject.context for subject in subjects})
    if contexts[0] < 1:
        raise InputError("--seq-len: say how long a sample is; the training context is not known")
    if len(contexts) > 1:
        raise InputError(
            f"--seq-len: say how long a sample is; the models were trained on {', '.join(map(str, contexts))} tokens"
        )
    return contexts[0]


def first_samples(arguments: argparse.Namespace) -> list[Sample]:
    """Raises DataError, InputError."""
    data = PackedDataset(arguments.data, arguments.seq_len, seed=0, shuffle=False)
    n_samples = min(arguments.samples, len(data))
    if n_samples < 2:
        raise InputError(
            f"--samples {arguments.samples}: a standard error needs at least 2; {arguments.data} has {len(data)} of "
            f"{arguments.seq_len} tokens"
        )
    return [data[i] for i in range(n_samples)]


def tokens_sha256(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample["input"].numpy().data)
        digest.update(sample["labels"].numpy().data)
    return digest.hexdigest()


def listed_subsets(arguments: argparse.Namespace, subject: Subject) -> list[Layers]:
    """What --layers and --skip-layers leave of a model. Raises InputError with a line for each list that is wrong."""
    L = subject.args.n_layers
    found: list[Layers] = []
    faults = []
    lists = [("--layers", numbers) for numbers in arguments.layers or []]
    lists += [("--skip-layers", numbers) for numbers in arguments.skip_layers or []]
    for option, numbers in lists:
        text = f"{option} {' '.join(map(str, numbers))}"
        if any(not 0 <= number < L for number in numbers):
            faults.append(f"{text}: {subject.label} has the layers 0 ... {L - 1}")
            continue
        if len(set(numbers)) < len(numbers):
            faults.append(f"{text}: names a layer twice")
            continue
        subset = tuple(sorted(numbers)) if option == "--layers" else without(L, numbers)
        if not subset:
            faults.append(f"{text}: leaves {subject.label} no layer; that is the exit 0 of --analyses exits")
        if subset in found:
            faults.append(f"{text}: leaves {subject.label} the same layers as another list")
        found.append(subset)
    if faults:
        raise InputError("\n".join(faults))
    return found


def trained_exits(subject: Subject, model: Decoder, named: str | None) -> tuple[Path, Exits] | None:
    """The exits that the user `named`, else those that lie in the model's run and were trained on these weights, and
    where they are. Raises InputError for named ones that cannot be used."""
    beside = None if subject.folder is None else subject.folder.parent / "exits"
    if named is None and (beside is None or not beside.is_dir()):
        return None
    try:
        exits = load_exits(named or beside, model)  # type: ignore[arg-type]
        return exits_record(named or beside)[0], exits  # type: ignore[arg-type]
    except CheckpointError as error:
        if named is not None:
            raise InputError(f"--exits: {error}") from None
        print(f"{subject.label}: {error}; passed over")
        return None


def evaluate_one(
    subject: Subject, arguments: argparse.Namespace, samples: Sequence[Sample], folder: Path, named_exits: str | None
) -> dict[str, Any]:
    """Write and print the result of one model; returns it."""
    args = subject.args
    subsets = families(args.n_layers, arguments.analyses)
    if listed := listed_subsets(arguments, subject):
        subsets["listed"] = listed
    whole = tuple(range(args.n_layers))
    different = {whole, *(layers for family in subsets.values() for layers in family)}
    model = subject.load()
    trained = None
    if named_exits is not None or "exits" in arguments.analyses:
        trained = trained_exits(subject, model, named_exits)
    n_subsets = len(different) + (0 if trained is None else len(trained[1]))
    description = f"depth, {n_subsets} subsets of {len(samples)} samples"
    by_exit = {}
    with tqdm(total=n_subsets * len(samples), desc=description, unit="forward") as bar:
        losses = subset_losses(model, samples, different, arguments.batch_size, bar.update)
        if trained is not None:
            by_exit = trained_exit_losses(model, trained[1], samples, arguments.batch_size, bar.update)

    def entry_of(layers: Layers) -> Entry:
        return entry(args, arguments.seq_len, layers, losses[layers])

    full = entry_of(whole)
    entries = {name: [entry_of(layers) for layers in family] for name, family in subsets.items()}
    if trained is not None:
        entries["balcony"] = [
            trained_exit_entry(args, arguments.seq_len, k, of_samples) for k, of_samples in by_exit.items()
        ]
    settings = {
        "data": str(arguments.data),
        "tokens_sha256": tokens_sha256(samples),
        "samples": len(samples),
        "seq_len": arguments.seq_len,
        **({} if trained is None else {"exits": str(trained[0])}),
    }
    result = {
        **describe(NAME, subject, model, settings),
        "full": asdict(full),
        "families": {name: [asdict(each) for each in family] for name, family in entries.items()},
    }
    file = write_result(folder, NAME, result)
    print_table(subject, full, entries)
    print(f"wrote {file}")
    return result


def print_table(subject: Subject, full: Entry, entries: dict[str, list[Entry]]) -> None:
    """All entries but for runs, of which the best of each length stands."""
    rows = [("whole model", full)]
    rows += [(f"exit {each.n_layers}", each) for each in entries.get("exits", [])]
    rows += [(f"trained exit {each.n_layers}", each) for each in entries.get("balcony", [])]
    for order in ("last", "first"):
        for each in entries.get(f"alternate_{order}", [])[1:]:
            rows.append((f"without odd layers, the {order} {len(each.removed)}", each))
    by_length: dict[int, list[Entry]] = {}
    for each in entries.get("runs", []):
        by_length.setdefault(len(each.removed), []).append(each)
    for length, family in sorted(by_length.items()):
        best = min(family, key=lambda each: each.loss)
        rows.append((f"best run of {length}: without {best.removed[0]} ... {best.removed[-1]}", best))
    rows += [(f"layers {' '.join(map(str, each.layers))}", each) for each in entries.get("listed", [])]
    width = max(len(name) for name, _ in rows)
    print(f"{subject.label}\n  {'':{width}}   loss (error)       memory  FLOPs")
    for name, each in rows:
        loss = f"{each.loss:7.4f} ({each.loss_error:.4f})"
        print(f"  {name:{width}}  {loss}  {each.weight_share:6.1%} {each.flops_share:6.1%}")


def draw(results: Sequence[dict[str, Any]], folder: Path) -> None:
    """A plot of each family that any result has, and of the costs."""
    plots: dict[str, tuple[str, Callable[[Sequence[dict[str, Any]], Path], None]]] = {
        "exits": ("depth_exits.png", plot_exits),
        "alternate_last": ("depth_alternate.png", plot_alternate),
        "runs": ("depth_runs.png", plot_runs),
    }
    for family, (name, plot) in plots.items():
        if having := [result for result in results if family in result["families"]]:
            plot(having, folder / name)
            print(f"wrote {folder / name}")
    plot_costs(results, folder / "depth_costs.png")
    print(f"wrote {folder / 'depth_costs.png'}")

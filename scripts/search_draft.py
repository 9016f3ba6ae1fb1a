"""Search the layers of a model that draft best for all of it (self-speculative decoding).

    python scripts/search_draft.py --checkpoint outputs/RUN/checkpoint --data data/stdlib/validation
    python scripts/search_draft.py --checkpoint outputs/RUN/checkpoint --data xsum.parquet --text-key document \\
        --method nsga2 --sublayers --trials 200 --objective measured

Leaves search.json, draft.json (the draft, for generate.py --speculative), front.png and study.journal in --output. The
same command goes on with a search that was stopped; with more --trials, with one that was done. See
docs/draft_search.md.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from torch import Tensor
from tqdm import tqdm

from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data.packed import DataError
from regdrop_titan.evaluation.results import describe
from regdrop_titan.evaluation.subjects import InputError, Subject, checkpoint_subject, tell
from regdrop_titan.evaluation.verbs import check_positive
from regdrop_titan.files import write_json
from regdrop_titan.generation.drafts import Draft, DraftExit, part_text, write_draft
from regdrop_titan.generation.measure import Comparison, compare
from regdrop_titan.generation.prompts import read_prompts, tokens_sha256
from regdrop_titan.models import Decoder
from regdrop_titan.signals import STOPPED, StopSignals, interruptible

if TYPE_CHECKING:
    from regdrop_titan.generation.search import Search, Trial

FINALISTS = 3
# what scores depend on, beside the model, the prompts, the method and the seed
SETTINGS = ("objective", "draft_length", "draft_exit", "prompts", "prompt_tokens", "new_tokens")


class Stopped(Exception):
    """By a signal, with the study as it was behind the last trial."""


def draft_exit(text: str) -> float | str | None:
    """`none`, `adaptive` or a number."""
    if text in ("none", "adaptive"):
        return None if text == "none" else text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be none, adaptive or a number in [0, 1]") from None


def check(arguments: argparse.Namespace) -> tuple[Subject, list[Tensor]]:
    """The model and the prompts. Raises InputError with a line for every fault."""
    faults: list[str] = []
    subject = None
    try:
        check_positive(arguments, "trials", "draft_length", "prompts", "prompt_tokens", "new_tokens")
    except InputError as error:
        faults += str(error).splitlines()
    if arguments.final_rounds < 2:
        faults.append(f"--final-rounds {arguments.final_rounds}: must be at least 2")
    faults += [f"--{fault.replace('_', '-')}" for fault in DraftExit.faults(arguments.draft_exit)]
    try:
        subject = checkpoint_subject(arguments.checkpoint, tokenizer=arguments.tokenizer)
    except (CheckpointError, InputError) as error:
        faults += str(error).splitlines()
    prompts: list[Tensor] = []
    if subject is not None and min(arguments.prompts, arguments.prompt_tokens) > 0:
        try:
            prompts = read_prompts(
                subject, arguments.data, arguments.text_key, 2 * arguments.prompts, arguments.prompt_tokens
            )
        except (DataError, InputError) as error:
            faults += str(error).splitlines()
    if faults or subject is None:
        raise InputError("\n".join(faults))
    return subject, prompts


def run(arguments: argparse.Namespace) -> int:
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("the search needs optuna: pip install 'regdrop-titan[search]'") from None
    subject, prompts = check(arguments)
    folder = arguments.output or Path(subject.source).absolute().parent.parent / "drafts" / arguments.method
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            return search_in(folder, subject, prompts, arguments)
    except Timeout:
        raise InputError(f"{folder}: another search is running in it") from None


def search_in(folder: Path, subject: Subject, prompts: list[Tensor], arguments: argparse.Namespace) -> int:
    from regdrop_titan.generation.search import Search, best_of, units_of

    model = subject.load()
    settings = {name: getattr(arguments, name) for name in SETTINGS} | {"prompts_sha256": tokens_sha256(prompts)}
    about = describe("draft-search", subject, model, settings)
    units = units_of(subject.args, arguments.sublayers)
    try:
        search = Search(
            folder / "study.journal", subject.args, units, arguments.method, arguments.seed, arguments.trials,
            arguments.warm_starts, settings | {"weights_sha256": about["weights_sha256"]},
        )  # fmt: skip
    except ValueError as error:
        lines = [*str(error).splitlines(), f"--output {folder}: take another folder, or the same settings"]
        raise InputError("\n".join(lines)) from None
    if is_done(folder / "search.json", search):
        best = best_of(search.trials)[0]
        print(f"done before: {len(search.trials)} trials; best score {best.worth.score:.4f}; see {folder}")
        return 0
    to_search, to_test = prompts[0::2], prompts[1::2]
    try:
        with StopSignals("stopping, trials that are done are kept") as signals:
            go_through(search, model, to_search, arguments, signals)
            finalists, chosen, compared, test = decide(search, model, to_search, to_test, arguments, signals)
    except Stopped:
        print(f"stopped behind {len(search.trials)} trials, which are kept; the same command goes on", file=sys.stderr)
        return STOPPED
    settings |= {"method": search.method, "seed": search.seed, "warm_starts": arguments.warm_starts}
    settings |= {"sublayers": arguments.sublayers, "data": arguments.data, "final_rounds": arguments.final_rounds}
    write(folder, about, search, finalists, chosen, compared, test, arguments)
    return 0


def is_done(file: Path, search: "Search") -> bool:
    """Whether nothing is left to do: `file` tells of all trials that there are, and no more are wanted."""
    if len(search.trials) < search.target or not file.is_file():
        return False
    try:
        return len(json.loads(file.read_text())["trials"]) == len(search.trials)
    except (ValueError, KeyError, TypeError):
        return False


def go_through(
    search: "Search", model: Decoder, prompts: list[Tensor], arguments: argparse.Namespace, signals: StopSignals
) -> None:
    """All trials, with a progress bar. Raises Stopped."""
    from regdrop_titan.generation.search import best_of, by_formula, by_measurement

    objective = {"formula": by_formula, "measured": by_measurement}[arguments.objective]
    worth = objective(model, prompts, arguments.new_tokens, arguments.draft_length, arguments.draft_exit)
    with tqdm(total=search.target, initial=len(search.trials), desc=search.method, unit="trial") as bar:
        for _ in search.run(worth):
            best = best_of(search.trials)[0]
            bar.set_postfix_str(f"best {best.worth.score:.3f} with {len(best.parts)} parts", refresh=False)
            bar.update()
            if signals.received:
                raise Stopped


def decide(
    search: "Search", model: Decoder, to_search: list[Tensor], to_test: list[Tensor], arguments: argparse.Namespace,
    signals: StopSignals,
) -> tuple[list["Trial"], "Trial", list[Comparison], Comparison]:  # fmt: skip
    """The best few, the one that is chosen, and measurements of each of them on the prompts of the search and of that
    one on the others. Raises Stopped."""
    from regdrop_titan.generation.search import best_of

    finalists = best_of(search.trials, FINALISTS)
    rounds = arguments.final_rounds
    with tqdm(total=(len(finalists) + 1) * (rounds + 1), desc="measure", unit="round") as bar:

        def progress() -> None:
            bar.update()
            if signals.received:
                raise Stopped

        def measured(trial: "Trial", prompts: list[Tensor]) -> Comparison:
            draft = Draft(trial.parts, arguments.draft_length, arguments.draft_exit)
            return compare(model, prompts, draft, arguments.new_tokens, rounds, progress)

        compared = [measured(trial, to_search) for trial in finalists]
        order = sorted(range(len(finalists)), key=lambda i: -compared[i].speed_up)
        # a score of the formula is exact; a measured one was noisy, and the highest of many is mostly luck
        chosen = finalists[order[0]] if arguments.objective == "measured" else finalists[0]
        return finalists, chosen, compared, measured(chosen, to_test)


def write(
    folder: Path, about: dict[str, Any], search: "Search", finalists: list["Trial"], chosen: "Trial",
    compared: list[Comparison], test: Comparison, arguments: argparse.Namespace,
) -> None:  # fmt: skip
    """search.json last: a search whose figures it holds has its other files."""
    from regdrop_titan.generation.search import front_of
    from regdrop_titan.generation.search_plots import plot_search

    draft = Draft(chosen.parts, arguments.draft_length, arguments.draft_exit)
    write_draft(folder / "draft.json", draft, {
        "checkpoint": about["checkpoint"], "weights_sha256": about["weights_sha256"], "method": search.method,
        "seed": search.seed, "trials": len(search.trials), "objective": arguments.objective,
        "score": chosen.worth.score, "test_speed_up": test.speed_up,
    })  # fmt: skip
    title = f"{about['label']}: {search.method}, {len(search.trials)} trials by {arguments.objective}"
    plot_search(search.trials, chosen, arguments.draft_length, title, folder / "front.png")
    write_json(folder / "search.json", {
        **about,
        "best": chosen.to_dict(),
        "front": [trial.number for trial in front_of(search.trials)],
        "finalists": [
            {**trial.to_dict(), "measured": found.to_dict()} for trial, found in zip(finalists, compared, strict=True)
        ],
        "test": test.to_dict(),
        "trials": [trial.to_dict() for trial in search.trials],
    })  # fmt: skip
    for trial, found in zip(finalists, compared, strict=True):
        print(f"{'*' if trial is chosen else ' '} layers {' '.join(map(part_text, trial.parts))}: score "
              f"{trial.worth.score:.3f}, alpha {trial.worth.alpha:.3f}, c {trial.worth.c:.3f}; measured "
              f"{found.speed_up:.2f} times as fast")  # fmt: skip
    low, high = test.speed_up_quartiles
    print(f"on other prompts: alpha {test.acceptance.alpha:.3f}, c {test.c:.3f}, {test.tokens_per_second:.1f} tokens/s, "
          f"{test.speed_up:.2f} times as fast as plain decoding (quartiles {low:.2f}, {high:.2f})")  # fmt: skip
    if not test.same_tokens:
        print("the draft's text is not plain decoding's: near-ties fell otherwise in the batched pass", file=sys.stderr)
    print(f"wrote {folder}/search.json, draft.json and front.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", required=True, help="…/checkpoint/step-N, or …/checkpoint for the newest")
    parser.add_argument("--data", required=True, help="JSONL, Parquet, text (file or folder), or a packed set")
    parser.add_argument("--text-key", default="text", help="key or column of the text (text; XSum's is document)")
    parser.add_argument("--tokenizer", help="folder, file or 'bytes'; default: the one kept beside the data")
    parser.add_argument("--method", choices=("tpe", "gp", "nsga2", "hill", "annealing"), default="tpe",
                        help="Bayesian (tpe, gp), genetic (nsga2), hill climbing, annealing (tpe)")  # fmt: skip
    parser.add_argument("--trials", type=int, default=50, help="subsets to try in all (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (0)")
    parser.add_argument("--sublayers", action="store_true", help="attention and feed-forward apart, not whole layers")
    parser.add_argument("--no-warm-starts", dest="warm_starts", action="store_false", help="begin at random")
    parser.add_argument("--objective", choices=("formula", "measured"), default="formula",
                        help="measured acceptance over FLOPs, or tokens/s (noisy) (formula)")  # fmt: skip
    parser.add_argument("--draft-length", type=int, default=5, help="tokens drafted at a time (5)")
    parser.add_argument("--draft-exit", type=draft_exit, default=None, metavar="P|adaptive|none",
                        help="a draft stops behind a token less sure than P (none)")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=8, help="to search with; as many others are to test (8)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt (64)")
    parser.add_argument("--new-tokens", type=int, default=64, help="written behind each prompt (64)")
    parser.add_argument("--final-rounds", type=int, default=5, help="of measuring the best few at the end (5)")
    parser.add_argument("--output", type=Path, help="folder of the results; default: drafts/METHOD in the run's")
    try:
        return run(parser.parse_args())
    except (InputError, CheckpointError, DataError) as error:
        return tell(error)


if __name__ == "__main__":
    sys.exit(interruptible(main))

"""Search the layers of a model that draft best for all of it (self-speculative decoding).

    python scripts/search_draft.py --checkpoint outputs/RUN/checkpoint --data data/stdlib/validation
    python scripts/search_draft.py --checkpoint outputs/RUN/checkpoint --data xsum.parquet --text-key document \\
        --method nsga2 --sublayers --trials 200 --objective measured

Leaves search.json, draft.json (the draft, for generate.py --speculative), front.png and study.journal in --output. The
same command goes on with a search that was stopped; with more --trials, with one that was done. See
docs/draft_search.md.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from torch import Tensor
from tqdm import tqdm

from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data.packed import DataError
from regdrop_titan.evaluation.results import describe
from regdrop_titan.evaluation.subjects import InputError, Subject, checkpoint_subject, tell
from regdrop_titan.evaluation.verbs import check_positive
from regdrop_titan.generation.drafts import Draft, DraftExit, parse_exit, part_text
from regdrop_titan.generation.prompts import read_prompts, tokens_sha256
from regdrop_titan.models import Decoder
from regdrop_titan.signals import STOPPED, StopSignals, interruptible

if TYPE_CHECKING:
    from regdrop_titan.generation.search import Search, Trial
    from regdrop_titan.generation.search_results import Findings

# what scores depend on, beside the model, the prompts, the method and the seed
SETTINGS = ("objective", "draft_length", "draft_exit", "prompts", "prompt_tokens", "new_tokens")


class Stopped(Exception):
    """By a signal, with the study as it was behind the last trial."""


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror}") from None
    try:
        with FileLock(folder / ".lock", timeout=0):
            return search_in(folder, subject, prompts, arguments)
    except Timeout:
        raise InputError(f"{folder}: another search is running in it") from None


def search_in(folder: Path, subject: Subject, prompts: list[Tensor], arguments: argparse.Namespace) -> int:
    from regdrop_titan.generation.search import Search, best_of, units_of
    from regdrop_titan.generation.search_results import tells_all, write_findings

    model = subject.load()
    given = {name: value for name, value in vars(arguments).items() if name not in ("checkpoint", "output")}
    about = describe("draft-search", subject, model, given | {"prompts_sha256": tokens_sha256(prompts)})
    settings = {name: given[name] for name in SETTINGS}
    settings |= {"prompts_sha256": tokens_sha256(prompts), "weights_sha256": about["weights_sha256"]}
    try:
        search = Search(
            folder / "study.journal", subject.args, units_of(subject.args, arguments.sublayers), arguments.method,
            arguments.seed, arguments.trials, arguments.warm_starts, settings,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(f"{error}\n--output {folder}: take another folder, or the same settings") from None
    if tells_all(folder, search):
        best = best_of(search.trials)[0]
        print(f"done before: {len(search.trials)} trials, best score {best.worth.score:.3f}; see {folder}")
        return 0
    try:
        with StopSignals("stopping; what is tried is kept") as signals:
            found = find(search, model, prompts, arguments, signals)
    except Stopped:
        print(f"stopped with {len(search.trials)} trials, which are kept; the same command goes on", file=sys.stderr)
        return STOPPED
    write_findings(folder, about, search, found)
    tell_findings(found)
    print(f"wrote {folder}/search.json, draft.json and front.png")
    return 0


def find(
    search: "Search", model: Decoder, prompts: list[Tensor], arguments: argparse.Namespace, signals: StopSignals
) -> "Findings":
    """Search and decide, with progress bars. Raises Stopped."""
    from regdrop_titan.generation.search import best_of, by_formula, by_measurement
    from regdrop_titan.generation.search_results import FINALISTS, decide

    def advance(bar: tqdm) -> None:
        bar.update()
        if signals.received:
            raise Stopped

    def draft_of(trial: "Trial") -> Draft:
        return Draft(trial.parts, arguments.draft_length, arguments.draft_exit)

    to_search, to_test = prompts[0::2], prompts[1::2]
    objective = {"formula": by_formula, "measured": by_measurement}[arguments.objective]
    worth = objective(model, to_search, arguments.new_tokens, arguments.draft_length, arguments.draft_exit)
    with tqdm(total=search.target, initial=len(search.trials), desc=search.method, unit="trial") as bar:
        for _ in search.run(worth):
            best = best_of(search.trials)[0]
            bar.set_postfix_str(f"best {best.worth.score:.3f} with {len(best.parts)} parts", refresh=False)
            advance(bar)
    n_comparisons = min(FINALISTS, len(search.trials)) + 1
    with tqdm(total=n_comparisons * (arguments.final_rounds + 1), desc="measure", unit="round") as bar:
        return decide(
            search, model, to_search, to_test, arguments.new_tokens, draft_of, arguments.final_rounds,
            noisy=arguments.objective == "measured", progress=lambda: advance(bar),
        )  # fmt: skip


def tell_findings(found: "Findings") -> None:
    for trial, measured in zip(found.finalists, found.measured, strict=True):
        worth, sign = trial.worth, "*" if trial is found.chosen else " "
        print(f"{sign} {' '.join(map(part_text, trial.parts))}: score {worth.score:.3f}, alpha {worth.alpha:.3f}, "
              f"c {worth.c:.3f}; measured {measured.speed_up:.2f} times as fast as plain decoding")  # fmt: skip
    test, (low, high) = found.test, found.test.speed_up_quartiles
    print(f"* on other prompts: alpha {test.acceptance.alpha:.3f}, c {test.c:.3f}, {test.tokens_per_second:.1f} "
          f"tokens/s, {test.speed_up:.2f} times as fast (quartiles {low:.2f}, {high:.2f})")  # fmt: skip
    if found.chosen.worth.score <= 1:
        print("by its score no draft makes this model faster")
    if not test.same_tokens:
        print("its text is not plain decoding's: near-ties fell otherwise where several tokens were read at once",
              file=sys.stderr)  # fmt: skip


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
    parser.add_argument("--draft-exit", type=parse_exit, default=None, metavar="P|adaptive|none",
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

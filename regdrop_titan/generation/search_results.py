"""What a draft search has found: which draft is chosen, what it is worth, and the files that tell of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import write_json
from ..models import Decoder
from .drafts import Draft, write_draft
from .measure import Comparison, compare
from .search import Search, Trial, best_of, front_of
from .search_plots import plot_search

FINALISTS = 3
RESULT, DRAFT, PLOT = "search.json", "draft.json", "front.png"


@dataclass(frozen=True)
class Findings:
    """The best few trials, measured on the prompts of the search, and one of them on others."""

    finalists: list[Trial]
    measured: list[Comparison]  # of each finalist
    chosen: Trial
    draft: Draft
    test: Comparison


def decide(
    search: Search,
    model: Decoder,
    to_search: Sequence[Tensor],
    to_test: Sequence[Tensor],
    new_tokens: int,
    draft_of: Callable[[Trial], Draft],
    rounds: int,
    noisy: bool,
    progress: Callable[[], object] = lambda: None,
) -> Findings:
    """Measure the best few trials and choose.

    Args:
        rounds: of each comparison, at least 2; one more comes before, and FINALISTS + 1 comparisons are made at most.
        noisy: the scores were measured: the highest of many are high by luck too, and the measurements here decide.
            Else the highest score does, and the same search always chooses the same.
        progress: called after each round.
    """
    finalists = best_of(search.trials, FINALISTS)
    measured = [compare(model, to_search, draft_of(each), new_tokens, rounds, progress) for each in finalists]
    fastest = max(range(len(finalists)), key=lambda i: measured[i].speed_up)
    chosen = finalists[fastest if noisy else 0]
    draft = draft_of(chosen)
    return Findings(finalists, measured, chosen, draft, compare(model, to_test, draft, new_tokens, rounds, progress))


def write_findings(folder: Path, about: dict[str, Any], search: Search, found: Findings) -> None:
    """The three files; RESULT is the last, so that where it tells of a search, the others do.

    Args:
        about: what stands at the beginning, of `evaluation.results.describe`.
    """
    n = len(search.trials)
    write_draft(folder / DRAFT, found.draft, {
        "checkpoint": about["checkpoint"], "weights_sha256": about["weights_sha256"], "method": search.method,
        "seed": search.seed, "trials": n, "objective": about["settings"]["objective"],
        "score": found.chosen.worth.score, "test_speed_up": found.test.speed_up,
    })  # fmt: skip
    title = f"{about['label']}: {search.method}, {n} trials"
    plot_search(search.trials, found.chosen, found.draft.length, title, folder / PLOT)
    write_json(folder / RESULT, {
        **about,
        "best": found.chosen.to_dict(),
        "front": [trial.number for trial in front_of(search.trials)],
        "finalists": [
            trial.to_dict() | {"measured": measured.to_dict()}
            for trial, measured in zip(found.finalists, found.measured, strict=True)
        ],
        "test": found.test.to_dict(),
        "trials": [trial.to_dict() for trial in search.trials],
    })  # fmt: skip


def tells_all(folder: Path, search: Search) -> bool:
    """Whether `folder` has the findings of all trials, and no more are wanted."""
    try:
        told = len(json.loads((folder / RESULT).read_text())["trials"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return told == len(search.trials) >= search.target

"""What `evaluate.py` has left in files, as scores by table, section and column.

The head of every file is that of `evaluation/results.py`; each verb has a function here that takes its scores out of
the rest. A file that no verb wrote, or whose content is not the verb's, is a fault that names it.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .runs import ReportError, number

RULER_TASKS = 13  # that the papers' mean is over


class Section(NamedTuple):
    """A part of a table, such as a suite of tasks or a length. Sections are sorted."""

    place: float
    name: str


class Column(NamedTuple):
    """A score's name; `{}` stands for `number`, by which the columns of one name are sorted."""

    name: str
    number: int = 0

    @property
    def title(self) -> str:
        return self.name.replace("{}", str(self.number))


@dataclass(frozen=True)
class Score:
    value: float
    error: float | None = None  # standard error over the samples
    tasks: tuple[str, ...] = ()  # that it is the mean over; empty: it is no mean
    of: int = 0  # tasks of the whole mean


WHOLE = Section(0, "")  # of a table without sections
MEAN = Column("mean")
Scores = dict[tuple[Section, Column], Score]
Tables = dict[str, Scores]  # by the table's name


@dataclass(frozen=True)
class Result:
    """A file of results."""

    file: Path
    verb: str
    label: str
    weights_sha256: str
    step: int | None  # of the checkpoint; None where it is no `step-N`
    time: str  # UTC, ISO 8601
    settings: dict[str, Any]
    tables: Tables


def score(value: Any, error: Any = None, tasks: Iterable[str] = (), of: int = 0) -> Score | None:
    """None where `value` is null or NaN: it could not be computed. Raises ValueError for what is no number."""
    if value is None or value != value:
        return None
    if number(value) is None:
        raise ValueError(f"{value!r} is no number")
    return Score(float(value), number(error), tuple(tasks), of)


def known(scores: dict[tuple[Section, Column], Score | None]) -> Scores:
    return {key: value for key, value in scores.items() if value is not None}


def position_loss_scores(content: dict[str, Any]) -> Tables:
    found = {(WHOLE, Column("{}x", int(at.removesuffix("x")))): score(v) for at, v in content["loss_at"].items()}
    return {"position_loss": known(found)}


def copying_scores(content: dict[str, Any]) -> Tables:
    found = {}
    for each in content["scores"]:
        for kind in ("ema", "cla"):
            column = Column(kind.upper() + "-{}", int(each["length"]))
            found[WHOLE, column] = score(each[kind], each[f"{kind}_error"])
    return {"copying": known(found)}


def depth_scores(content: dict[str, Any]) -> Tables:
    """Sections are numbers of layers kept. Of the contiguous runs of one length the best stands."""
    n_layers = content["full"]["n_layers"]
    columns = {
        "exits": Column("early exit"),
        "balcony": Column("trained exit, + 1 layer"),
        "alternate_last": Column("without odd layers, last first"),
        "alternate_first": Column("without odd layers, first first"),
        "runs": Column("without the best contiguous run"),
    }
    found: dict[tuple[Section, Column], Score | None] = {}
    for family, column in columns.items():
        for each in content["families"].get(family, []):
            share = each["n_layers"] / n_layers
            key = Section(-share, f"{each['n_layers']} of {n_layers} ({100 * share:.4g} %)"), column
            new, best = score(each["loss"], each["loss_error"]), found.get(key)
            if best is None or (new is not None and new.value < best.value):
                found[key] = new
    return {"depth": known(found)}


def moments_scores(content: dict[str, Any]) -> Tables:
    """Sections are dropouts."""
    found = {}
    for run in content["runs"]:
        section = Section(run["p"], f"{run['placement']}, p {run['p']:g}")
        for projection, value in run["mean_over_layers"].items():
            for kind in ("mean", "variance"):
                found[section, Column(f"{projection} {kind}")] = score(value[kind])
    return {"moments": known(found)}


def lm_eval_scores(content: dict[str, Any]) -> Tables:
    return {
        "ruler": known(ruler_means(content.get("ruler") or {})),
        "ruler_tasks": known(ruler_tasks(content.get("ruler") or {})),
        "tasks": known(suites(content.get("suites") or {}, content.get("tasks") or {})),
    }


def ruler_mean(at: dict[str, Any]) -> Score | None:
    """RULER's mean at a length, or of the tasks that there are: never the one for the other."""
    tasks = tuple(sorted(at["tasks"]))
    whole = len(tasks) >= RULER_TASKS and at["mean"] is not None
    return score(at["mean"] if whole else at["mean_of_available"], tasks=tasks, of=RULER_TASKS)


def ruler_means(ruler: dict[str, Any]) -> dict[tuple[Section, Column], Score | None]:
    found: dict[tuple[Section, Column], Score | None] = {}
    for length, at in ruler.items():
        found[WHOLE, Column("RULER {}", int(length))] = ruler_mean(at)
        error = at.get("errors", {}).get("niah_single_1")
        found[WHOLE, Column("NIAH-1 {}", int(length))] = score(at.get("niah_1"), error)
    return found


def ruler_tasks(ruler: dict[str, Any]) -> dict[tuple[Section, Column], Score | None]:
    """Sections are lengths."""
    found: dict[tuple[Section, Column], Score | None] = {}
    for length, at in ruler.items():
        section = Section(int(length), length)
        for task, value in at["tasks"].items():
            found[section, Column(task)] = score(value, at.get("errors", {}).get(task))
        found[section, MEAN] = ruler_mean(at)
    return found


def suites(found_suites: dict[str, Any], tasks: dict[str, Any]) -> dict[tuple[Section, Column], Score | None]:
    """Sections are suites, with their means; tasks that are in none are a section of their own."""
    found: dict[tuple[Section, Column], Score | None] = {}
    in_none = dict.fromkeys(tasks)
    for suite, content in found_suites.items():
        section = Section(0, suite)
        measured = [task for task in content["tasks"] if task not in content["left_out"]]
        for task in measured:
            in_none.pop(task, None)
            found[section, task_column(task, tasks[task])] = task_score(tasks[task])
        n_whole = len(measured) + len(content["left_out"])
        found[section, MEAN] = score(content["mean"], tasks=sorted(measured), of=n_whole)
    for task in in_none:
        found[Section(1, "none"), task_column(task, tasks[task])] = task_score(tasks[task])
    return found


def task_column(name: str, task: dict[str, Any]) -> Column:
    """Scores of another metric or number of shots are other scores."""
    return Column(f"{name} ({task['metric']}, {task['shots']} shots)")


def task_score(task: dict[str, Any]) -> Score | None:
    return score(task["value"], task["stderr"])


SCORES: dict[str, Callable[[dict[str, Any]], Tables]] = {
    "lm-eval": lm_eval_scores,
    "depth": depth_scores,
    "position-loss": position_loss_scores,
    "copying": copying_scores,
    "moments": moments_scores,
}


def read_result(file: Path) -> Result:
    """Raises ValueError saying why `file` is none."""
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    verb = content.get("verb") if isinstance(content, dict) else None
    if not isinstance(verb, str) or verb not in SCORES:
        raise ValueError(f"{file}: holds no result of evaluate.py {{{','.join(SCORES)}}}")
    try:
        step = re.fullmatch(r"step-(\d+)", Path(content["checkpoint"]).name)
        return Result(
            file=file,
            verb=verb,
            label=str(content["label"]),
            weights_sha256=str(content["weights_sha256"]),
            step=int(step[1]) if step else None,
            time=str(content["time"]),
            settings=dict(content["settings"]),
            tables=SCORES[verb](content),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: not as evaluate.py {verb} writes it: {type(error).__name__}: {error}") from None


def read_results(files: Iterable[Path]) -> tuple[list[Result], list[str]]:
    """The results in `files`, and a sentence for each file that is none."""
    results, faults = [], []
    for file in files:
        try:
            results.append(read_result(file))
        except ValueError as fault:
            faults.append(str(fault))
    return results, faults


def newest(results: Iterable[Result], key: Callable[[Result], Hashable]) -> tuple[list[Result], list[str]]:
    """Of results with equal keys the newest, and a sentence for each other."""
    found: dict[Hashable, Result] = {}
    older = []
    for result in sorted(results, key=lambda each: each.time):
        if before := found.get(key(result)):
            older.append(f"{before.file}: left out, {result.file} is newer")
        found[key(result)] = result
    return list(found.values()), older


@dataclass(frozen=True)
class NamedResults:
    """Results of models that are no runs, and a sentence for every file that is none."""

    results: list[Result]
    left_out: list[str]


def named_results(paths: Iterable[Path]) -> NamedResults:
    """The results in `paths`: files, or folders with such up to one level below.

    Raises ReportError for each that does not exist or holds no result.
    """
    results, left_out, wrong = [], [], []
    for path in paths:
        files = sorted([*path.glob("*.json"), *path.glob("*/*.json")]) if path.is_dir() else [path]
        found, faults = read_results(files)
        results += found
        if found:
            left_out += faults
        else:
            wrong += [f"--results {fault}" for fault in faults] or [f"--results {path}: no JSON file in it"]
    if wrong:
        raise ReportError(wrong)
    results, older = newest(results, lambda result: (result.verb, result.label, result.weights_sha256))
    return NamedResults(results, left_out + older)

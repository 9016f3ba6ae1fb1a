"""The papers' tables of evaluation results: a row for the runs that differ in the seed alone, and one for each model
that is no run.

Only scores of one step are averaged: a row whose step is not its runs' newest names it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..checkpoints.safety import survey
from .cells import markdown
from .evaluation_results import MEAN, Column, NamedResults, Result, Score, Section, newest, read_results
from .groups import Spread, spread
from .runs import Run
from .training_table import Row


@dataclass(frozen=True)
class Kind:
    """A table by its content. `section`: what its sections are, "" for a table without."""

    name: str
    title: str
    digits: int
    section: str = ""
    apart: bool = False  # each section has columns of its own


KINDS = (
    Kind("ruler", "RULER mean and NIAH-1 by length (LG table 1; with models that are no runs LG table 3)", 3),
    Kind("ruler_tasks", "RULER by task and length (LG table 8)", 3, "length"),
    Kind("tasks", "Tasks and their means (LG table 7, DD table A.3)", 3, "suite", apart=True),
    Kind("depth", "Loss with some of the layers (DD table 5)", 4, "layers kept"),
    Kind("position_loss", "Loss at multiples of the training context (LG fig. 4)", 4),
    Kind("copying", "Copying by source length: whole answers (EMA) and letters (CLA) right", 3),
    Kind("moments", "Mismatch of pre-activations between training and evaluation (LG fig. 3)", 4, "dropout"),
)


EXPLANATION = (
    "Scores are shares, losses nats a token; mean ± sample deviation over the runs of a row (none for one run), all at "
    "one step: the runs' newest, unless the row names another. -: not measured. (k/n): a mean over k of its n tasks, "
    "not comparable with the whole one."
)


@dataclass
class Entry:
    """A row of every table."""

    row: int | None  # of the training table; None for a model that is no run
    label: str
    results: list[Result]  # of all verbs and all of the row's runs


@dataclass(frozen=True)
class Cell:
    """Scores of a row's runs. `tasks` and `of`: see `Score`."""

    spread: Spread
    runs: int
    error: float | None  # mean standard error
    tasks: tuple[str, ...]
    of: int


@dataclass
class Line:
    entry: Entry
    section: Section
    cells: dict[Column, Cell]

    @property
    def runs(self) -> int:
        return max(cell.runs for cell in self.cells.values())


@dataclass
class Table:
    kind: Kind
    lines: list[Line]
    remarks: list[str]

    def columns(self, lines: Iterable[Line]) -> list[Column]:
        """Of some lines: those of one name together, by number; the mean last."""
        found = list(dict.fromkeys(column for line in lines for column in line.cells))
        names = list(dict.fromkeys(column.name for column in found))
        return sorted(found, key=lambda column: (column == MEAN, names.index(column.name), column.number))


@dataclass
class Evaluation:
    """All tables that there are results for, and a sentence for every file that is not in them."""

    tables: list[Table] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def build_evaluation(rows: list[Row], named: NamedResults) -> Evaluation:
    """The tables of the `evaluation` folders of the rows' runs, and of `named` models."""
    entries, left_out = run_entries(rows)
    entries += model_entries(named.results)
    tables = [table for kind in KINDS if (table := build_table(kind, entries)).lines]
    return Evaluation(tables, left_out + named.left_out)


def run_entries(rows: list[Row]) -> tuple[list[Entry], list[str]]:
    """One for each row and step, and a sentence for every file that is in none."""
    entries, left_out = [], []
    for n, row in enumerate(rows, 1):
        by_step: dict[int | None, list[Result]] = {}
        for run in row.group.runs:
            found, faults = read_results(sorted((run.folder / "evaluation").glob("*.json")))
            results, older = newest(found, lambda result: (result.verb, result.step))
            left_out += faults + older
            for result in results:
                by_step.setdefault(result.step, []).append(result)
        usual = {newest_step(run) for run in row.group.averaged} if by_step else set()
        for step, results in by_step.items():
            label = row.label if usual == {step} else f"{row.label} (step {'unknown' if step is None else step})"
            entries.append(Entry(n, label, results))
    return entries, left_out


def newest_step(run: Run) -> int | None:
    """Of the newest whole checkpoint; where none is left, the last logged step."""
    whole, _ = survey(run.folder / "checkpoint")
    return whole[-1] if whole else run.training[-1].step if run.training else None


def model_entries(results: list[Result]) -> list[Entry]:
    """One for each model that is no run, told apart by label and weights."""
    models: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        models.setdefault((result.label, result.weights_sha256), []).append(result)
    return [Entry(None, label, found) for (label, _), found in models.items()]


def build_table(kind: Kind, entries: list[Entry]) -> Table:
    lines: dict[tuple[int, Section], Line] = {}
    remarks = []
    for n, entry in enumerate(entries):
        having = [result for result in entry.results if result.tables.get(kind.name)]
        scores: dict[tuple[Section, Column], list[Score]] = {}
        for result in having:
            for key, value in result.tables[kind.name].items():
                scores.setdefault(key, []).append(value)
        for (section, column), values in scores.items():
            cell = average(values)
            if cell.runs < len(values):
                remarks.append(
                    f"{entry.label}: {column.title} {section.name}".rstrip()
                    + f" averages {cell.runs} of {len(values)} runs; the others have other tasks in their mean"
                )
            lines.setdefault((n, section), Line(entry, section, {})).cells[column] = cell
    ordered = sorted(lines.items(), key=lambda item: (item[0][1], item[0][0]))
    return Table(kind, [line for _, line in ordered], remarks + settings_remarks(kind, entries))


def average(scores: list[Score]) -> Cell:
    """Of those whose mean is over the same tasks, the most there are: means over other tasks are other quantities."""
    tasks = max((each.tasks for each in scores), key=lambda tasks: (len(tasks), tasks))
    same = [each for each in scores if each.tasks == tasks]
    errors = spread(each.error for each in same if each.error is not None)
    found = spread(each.value for each in same)
    assert found is not None  # scores are finite
    return Cell(found, len(same), errors.mean if errors else None, tasks, same[0].of)


def settings_remarks(kind: Kind, entries: list[Entry]) -> list[str]:
    """Where results of a table were measured under different settings, these settings."""
    values: dict[str, dict[str, list[str]]] = {}
    for entry in entries:
        for result in (result for result in entry.results if result.tables.get(kind.name)):
            for key, value in result.settings.items():
                values.setdefault(key, {}).setdefault(str(value), []).append(entry.label)
    remarks = []
    for key, found in values.items():
        if len(found) > 1:
            shown = "; ".join(f"{value} ({', '.join(dict.fromkeys(labels))})" for value, labels in found.items())
            remarks.append(f"measured under different settings, {key}: {shown}")
    return remarks


def evaluation_markdown(table: Table) -> str:
    """Title, table, and what must be known about it."""
    parts = [f"### {table.kind.title}"]
    for name, lines in parts_of(table):
        columns = table.columns(lines)
        parts += [f"{table.kind.section} {name}:"] if name else []
        parts.append(markdown([line_cells(line, columns, table.kind) for line in lines]))
    parts.append("\n".join(f"- {remark}" for remark in table.remarks + partial_remarks(table)))
    return "\n\n".join(part for part in parts if part)


def parts_of(table: Table) -> list[tuple[str, list[Line]]]:
    """The lines that stand in one Markdown table, with the section's name where it is one of its own."""
    if not table.kind.apart:
        return [("", table.lines)]
    sections = dict.fromkeys(line.section for line in table.lines)
    return [(section.name, [line for line in table.lines if line.section == section]) for section in sections]


def line_cells(line: Line, columns: list[Column], kind: Kind) -> dict[str, str]:
    row = {"#": "" if line.entry.row is None else str(line.entry.row), "model": line.entry.label}
    if kind.section and not kind.apart:
        row[kind.section] = line.section.name
    cells = {column.title: cell_text(line.cells.get(column), line.runs, kind.digits) for column in columns}
    return row | cells | {"runs": str(line.runs)}


def cell_text(cell: Cell | None, runs: int, digits: int) -> str:
    if cell is None:
        return "-"
    text = f"{cell.spread.mean:.{digits}f}"
    if cell.spread.deviation is not None:
        text += f" ± {cell.spread.deviation:.{digits}f}"
    if len(cell.tasks) < cell.of:
        text += f" ({len(cell.tasks)}/{cell.of})"
    return text + (f" [{cell.runs} of {runs} runs]" if cell.runs < runs else "")


def partial_remarks(table: Table) -> list[str]:
    """What the means that are not whole are over."""
    cells = [cell for line in table.lines for cell in line.cells.values() if len(cell.tasks) < cell.of]
    return list(
        dict.fromkeys(
            f"({len(cell.tasks)}/{cell.of}): not the whole mean, but over {', '.join(cell.tasks)}" for cell in cells
        )
    )


def line_values(line: Line, column: Column, kind: Kind) -> dict[str, Any]:
    """A cell as plain numbers, None where there is none: a line of the table's CSV."""
    cell = line.cells[column]
    return {
        "row": line.entry.row,
        "model": line.entry.label,
        kind.section or "section": line.section.name or None,
        "score": column.title,
        "mean": cell.spread.mean,
        "deviation": cell.spread.deviation,
        "standard_error": cell.error,
        "runs": cell.runs,
        "tasks": len(cell.tasks) or None,
        "tasks_of_whole": cell.of or None,
    }


def table_values(table: Table) -> list[dict[str, Any]]:
    columns = table.columns(table.lines)
    return [line_values(line, column, table.kind) for line in table.lines for column in columns if column in line.cells]

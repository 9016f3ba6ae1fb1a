"""The files of a report."""

import csv
import json
import os
from pathlib import Path
from typing import Any

from ..files import write_whole
from .evaluation_tables import (
    EXPLANATION,
    KINDS,
    Evaluation,
    evaluation_markdown,
    partial_remarks,
    table_values,
)
from .runs import Run
from .training_table import Row, explanation, markdown_table, remarks, row_values, run_values, runs_table


def default_output(runs: list[Run]) -> Path:
    """`report` in the common parent folder of the runs."""
    parents = [run.folder.parent for run in runs if run.folder.is_dir()] or [run.folder.parent for run in runs]
    return Path(os.path.commonpath(parents)) / "report"


def write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_report(
    folder: Path,
    rows: list[Row],
    last: int | None,
    evaluation: Evaluation,
    plots: dict[str, dict],
    left_out: dict[str, str],
) -> list[str]:
    """Write `report.md`, `report.csv`, `runs.csv`, `report.json` and a CSV for each table of evaluation results; one of
    an earlier report that is not made now is removed. Returns the files' names.

    Args:
        plots: the numbers of each plot that was made, by the name of its file in `folder`.
        left_out: why each other plot was not made.
    """
    lines = ["# Report", "", markdown_table(rows), "", explanation(last)]
    if notes := remarks(rows):
        lines += ["", "## Remarks", "", *(f"- {note}" for note in notes)]
    if found := evaluation_lines(evaluation):
        lines += ["", "## Evaluation", "", *found]
    lines += ["", "## Runs", "", runs_table(rows, last), "", "## Plots", "", *(f"![{name}]({name})" for name in plots)]
    lines += ["", *(f"- {name} was not made: {why}" for name, why in left_out.items())]
    write_whole(folder / "report.md", "\n".join(lines) + "\n")
    table = [row_values(n, row) for n, row in enumerate(rows, 1)]
    runs = [run_values(n, run, last) for n, row in enumerate(rows, 1) for run in row.group.runs]
    write_csv(folder / "report.csv", table)
    write_csv(folder / "runs.csv", runs)
    evaluated = {each.kind.name: table_values(each) for each in evaluation.tables}
    for kind in KINDS:
        if kind.name in evaluated:
            write_csv(folder / f"{kind.name}.csv", evaluated[kind.name])
        else:
            (folder / f"{kind.name}.csv").unlink(missing_ok=True)
    numbers = {
        "last": last,
        "rows": table,
        "runs": runs,
        "evaluation": {
            "tables": evaluated,
            "remarks": {each.kind.name: each.remarks + partial_remarks(each) for each in evaluation.tables},
            "left_out": evaluation.left_out,
        },
        "plots": plots,
        "left_out": left_out,
    }
    write_whole(folder / "report.json", json.dumps(numbers, allow_nan=False) + "\n")
    return ["report.md", "report.csv", "runs.csv", "report.json", *(f"{name}.csv" for name in evaluated), *plots]


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """The tables as Markdown, what they hold, and the files that are not in them."""
    lines = [line for table in evaluation.tables for line in (evaluation_markdown(table), "")]
    lines += [EXPLANATION, ""] if lines else []
    return lines + [f"- {fault}" for fault in evaluation.left_out]

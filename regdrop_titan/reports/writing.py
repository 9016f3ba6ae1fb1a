"""The files of a report."""

import csv
import json
import os
from pathlib import Path
from typing import Any

from ..files import write_whole
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
    folder: Path, rows: list[Row], last: int | None, plots: dict[str, dict], left_out: dict[str, str]
) -> None:
    """Write `report.md`, `report.csv`, `runs.csv` and `report.json`.

    Args:
        plots: the numbers of each plot that was made, by the name of its file in `folder`.
        left_out: why each other plot was not made.
    """
    lines = ["# Report", "", markdown_table(rows), "", explanation(last)]
    if notes := remarks(rows):
        lines += ["", "## Remarks", "", *(f"- {note}" for note in notes)]
    lines += ["", "## Runs", "", runs_table(rows, last), "", "## Plots", "", *(f"![{name}]({name})" for name in plots)]
    lines += ["", *(f"- {name} was not made: {why}" for name, why in left_out.items())]
    write_whole(folder / "report.md", "\n".join(lines) + "\n")
    table = [row_values(n, row) for n, row in enumerate(rows, 1)]
    runs = [run_values(n, run, last) for n, row in enumerate(rows, 1) for run in row.group.runs]
    write_csv(folder / "report.csv", table)
    write_csv(folder / "runs.csv", runs)
    numbers = {"last": last, "rows": table, "runs": runs, "plots": plots, "left_out": left_out}
    write_whole(folder / "report.json", json.dumps(numbers, allow_nan=False) + "\n")

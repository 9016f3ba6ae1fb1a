"""Tables and plots over finished runs.

    python scripts/report.py outputs/RUN outputs/OTHER
    python scripts/report.py outputs/SWEEP --output report
    python scripts/report.py outputs/SWEEP --results outputs/baselines

A RUN is a run's folder, a sweep's folder, or a folder with such up to two levels below. What evaluate.py left in
their `evaluation` folders stands in tables of its own.
"""

import argparse
import sys
from pathlib import Path

from regdrop_titan.reports import (
    Group,
    ReportError,
    build_evaluation,
    build_rows,
    default_output,
    evaluation_lines,
    find_runs,
    group_runs,
    markdown_table,
    named_results,
    remarks,
    write_report,
)
from regdrop_titan.reports.plots import draw
from regdrop_titan.signals import interruptible


def report(arguments: argparse.Namespace) -> None:
    faults = [] if arguments.last is None or arguments.last >= 1 else [f"--last {arguments.last}: must be at least 1"]
    named: Path | None = arguments.baseline
    try:
        runs = find_runs([*arguments.runs, *([named] if named else [])])
    except ReportError as error:
        faults += error.faults
    try:
        models = named_results(arguments.results)
    except ReportError as error:
        faults += error.faults
    if faults:
        raise ReportError(faults)
    groups = group_runs(runs)
    baseline = named_baseline(groups, named) if named else None
    folder = arguments.output or default_output(runs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError([f"--output {folder}: {error.strerror}"]) from None
    rows = build_rows(groups, arguments.last, baseline)
    evaluation = build_evaluation(rows, models)
    plots, left_out = draw(rows, folder)
    written = write_report(folder, rows, arguments.last, evaluation, plots, left_out)
    print(markdown_table(rows))
    for line in remarks(rows):
        print(f"  {line}")
    for line in evaluation_lines(evaluation):
        print(line)
    for name, why in left_out.items():
        print(f"  {name} was not made: {why}")
    print(f"wrote {', '.join(written)} to {folder}")


def named_baseline(groups: list[Group], path: Path) -> Group:
    """The group of the run, or runs, in `path`."""
    folders = {run.folder for run in find_runs([path])}
    found = [group for group in groups if any(run.folder in folders for run in group.runs)]
    if len(found) > 1:
        raise ReportError([f"--baseline {path}: its runs differ in more than the seed; name one of them"])
    if not found[0].averaged:
        raise ReportError([f"--baseline {path}: no step is logged there"])
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, of runs, or of a sweep")
    parser.add_argument("--output", type=Path, help="default: report in the common parent folder of the runs")
    parser.add_argument(
        "--last", type=int, help="train loss: mean over so many logged steps; default: the last 5 %% of them"
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="DIR",
        help="compare with this run; default: the one without layer dropout and all else equal",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=Path, metavar="PATH", nargs="+", default=[],
        help="what evaluate.py wrote for models that are no runs: files, or folders with such up to one level below",
    )  # fmt: skip
    try:
        report(parser.parse_args())
    except ReportError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

"""What finished runs have come to: found, read, grouped over seeds, compared with the dense baseline, as tables.

A run that is partial, failed or absent stays in the table, with its status and why. `plots` draws the rows.
"""

from .evaluation_results import named_results
from .evaluation_tables import build_evaluation
from .groups import Group, group_runs, window
from .runs import ReportError, find_runs
from .training_table import build_rows, markdown_table, remarks
from .writing import default_output, evaluation_lines, write_report

__all__ = [
    "Group",
    "ReportError",
    "build_evaluation",
    "build_rows",
    "default_output",
    "evaluation_lines",
    "find_runs",
    "group_runs",
    "markdown_table",
    "named_results",
    "remarks",
    "window",
    "write_report",
]

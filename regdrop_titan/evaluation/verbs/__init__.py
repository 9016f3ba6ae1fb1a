"""The verbs of `scripts/evaluate.py`, a module each: `NAME`, `SUMMARY`, `add_arguments(parser)` and
`evaluate(subjects, arguments)`, which writes results and raises InputError for arguments that it cannot use."""

import argparse

from ..subjects import InputError


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raise InputError with a line for each of these arguments that is, or holds, a number below 1; None is none."""
    faults = []
    for name in names:
        value = getattr(arguments, name)
        faults += [
            f"--{name.replace('_', '-')} {number}: must be at least 1"
            for number in (value if isinstance(value, list) else [value])
            if number is not None and number < 1
        ]
    if faults:
        raise InputError("\n".join(faults))

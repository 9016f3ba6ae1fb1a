"""Whether the numbers among a verb's arguments make sense."""

import argparse
import math

LEAST = {"rounds": 2, "warmup": 0, "pieces": 0, "cutoff": 0, "cutoffs": 0, "meeting": 0}
RATES = ("p", "rates")


def size_faults(arguments: argparse.Namespace) -> list[str]:
    """A line for every number that cannot be used: sizes are above 0 unless LEAST says otherwise, rates in [0, 1), and
    a model's width a multiple of 128 (an even number of heads of 64)."""
    faults = []
    for name, value in vars(arguments).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            option = f"--{name.replace('_', '-')} {number}"
            if not math.isfinite(number):
                faults.append(f"{option}: must be finite")
            elif name in RATES:
                if not 0 <= number < 1:
                    faults.append(f"{option}: must be in [0, 1)")
            elif name in LEAST:
                if number < LEAST[name]:
                    faults.append(f"{option}: must be at least {LEAST[name]}")
            elif number <= 0:
                faults.append(f"{option}: must be above 0")
            elif name == "dim" and number % 128:
                faults.append(f"{option}: must be a multiple of 128 (an even number of heads of 64)")
    return faults

"""Paired timings of the parts, one verb of `scripts/benchmark.py` a module: NAME, `add_arguments`, `measure`."""

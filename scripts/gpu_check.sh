#!/usr/bin/env bash
# Checks every GPU path against its oracle and times training and generation, on one GPU, in at most 12 minutes, with
# the Python that is active (or that PYTHON names). --rehearse does the same at tiny sizes on a CPU; --help tells all.
# How to carry it to a machine without a network: docs/gpu_check.md.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"

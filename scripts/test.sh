#!/usr/bin/env bash
# Makes .venv where missing and runs the test suite, two files at a time. Extra arguments go to pytest:
# ./scripts/test.sh -k vpad
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
export OMP_NUM_THREADS=1 # threads of two processes on two cores would wait for each other
exec python -m pytest -n 2 --dist loadfile "$@"

#!/usr/bin/env bash
# Makes .venv where missing and runs the test suite. Extra arguments go to pytest: ./scripts/test.sh -k vpad
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
exec python -m pytest "$@"

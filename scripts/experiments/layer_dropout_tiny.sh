#!/usr/bin/env bash
# The second paper's table 3 at a size for a CPU: every distribution of layer dropout over depth under every schedule over
# time, against the dense model; two seeds; 20 runs of 500 steps (sweeps/layer_dropout_tiny.toml).
#   ./scripts/experiments/layer_dropout_tiny.sh [--jobs N]
# --jobs: runs at a time, which share the cores (default: 2). A second call does what is missing. The report (report.md,
# CSV, PNG) goes to outputs/sweeps/layer_dropout_tiny/report.
set -euo pipefail
. "$(dirname "$0")/begin.sh"

status=0
python scripts/sweep.py sweeps/layer_dropout_tiny.toml --run local --jobs "$jobs" || status=$?
((status <= 1)) || exit "$status" # stopped, or could not start
python scripts/report.py outputs/sweeps/layer_dropout_tiny
exit "$status"

#!/usr/bin/env bash
# Trains under random kills, signals, full disks and damaged checkpoints, and compares the final weights and losses
# with those of an undisturbed run: ./scripts/chaos.sh --faults 50 [--seed 0] [--folder outputs/chaos]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
OMP_NUM_THREADS=1 exec python -m tests.reliability.chaos "$@"

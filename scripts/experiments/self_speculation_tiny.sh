#!/usr/bin/env bash
# The second paper's table 4 at a size for a CPU: a dense model and one with layer dropout, whose own layers then draft for them,
# found by four kinds of search; 2 runs of 1500 steps (sweeps/self_speculation_tiny.toml), 8 searches, paired timings.
#   ./scripts/experiments/self_speculation_tiny.sh [--jobs N]
# --jobs: runs at a time, which share the cores (default: 2). Searches and timings come one after another: nothing else should
# run on the machine then. A second call does what is missing, and times again. The table (self_speculation.md), its numbers
# (.json) and figure (.png) go to outputs/sweeps/self_speculation_tiny.
set -euo pipefail
. "$(dirname "$0")/begin.sh"

for part in train validation; do
    python scripts/prepare_data.py --input "data/stdlib/text/$part.jsonl" --tokenizer bytes --output "data/stdlib_bytes/$part"
done
status=0
folder=outputs/sweeps/self_speculation_tiny
python scripts/sweep.py sweeps/self_speculation_tiny.toml --run local --jobs "$jobs" || status=$?
((status <= 1)) || exit "$status" # stopped, or could not start
for run in dense ild; do
    for method in tpe nsga2 hill annealing; do
        python scripts/search_draft.py --checkpoint "$folder/$run/checkpoint" --data data/stdlib_bytes/validation \
            --method "$method" --trials 60 --prompts 4 --draft-length 8 --draft-exit 0.3 --final-rounds 2
    done
done
python scripts/experiments/self_speculation_table.py --folder "$folder"
exit "$status"

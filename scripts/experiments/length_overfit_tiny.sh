#!/usr/bin/env bash
# The first paper's figures 1 and 4 at a size for a CPU: the five settings of a tiny NAPE Llama-3, trained on contexts of 64
# tokens for several epochs of a small corpus, and watched at up to 32 times that length; two seeds; 10 runs of 1000 steps
# (sweeps/length_overfit_tiny.toml).
#   ./scripts/experiments/length_overfit_tiny.sh [--jobs N]
# --jobs: runs at a time, which share the cores (default: 2). A second call does what is missing. The figures, their table
# (length_overfit.md) and numbers (length_overfit.json) go to outputs/sweeps/length_overfit_tiny.
set -euo pipefail
. "$(dirname "$0")/begin.sh"

if [ ! -f data/stdlib_tenth/manifest.json ]; then # every tenth training module: small enough for several epochs
    awk 'NR % 10 == 1' data/stdlib/text/train.jsonl >data/stdlib/text/tenth.jsonl
    python scripts/prepare_data.py --input data/stdlib/text/tenth.jsonl --tokenizer data/stdlib/tokenizer.json \
        --output data/stdlib_tenth
fi
status=0
folder=outputs/sweeps/length_overfit_tiny
python scripts/sweep.py sweeps/length_overfit_tiny.toml --run local --jobs "$jobs" || status=$?
((status <= 1)) || exit "$status" # stopped, or could not start
for run in "$folder"/seed=*; do
    if grep -q '"status": "done"' "$run/sweep.json" 2>/dev/null && [ ! -f "$run/evaluation/position_loss.json" ]; then
        python scripts/evaluate.py position-loss --checkpoint "$run/checkpoint" --data data/stdlib/long \
            --multiple 32 --window 64 || status=$?
    fi
done
python scripts/experiments/length_overfit_plots.py --folder "$folder"
exit "$status"

#!/usr/bin/env bash
# From nothing to a trained and evaluated model: makes .venv, builds a small corpus from the sources of Python's
# standard library, trains train_configs/debug_nape_llama3.toml (VPAD) with layer dropout, evaluates it on long
# documents. Run it again to resume; --fresh starts over. Other arguments override the configuration:
# --training.steps 600
set -euo pipefail
cd "$(dirname "$0")/.."

run=outputs/quickstart
overrides=()
for argument in "$@"; do
    case "$argument" in
        --fresh) rm -rf "$run" ;;
        -h | --help)
            sed -n '2,5s/^# //p' "$0"
            exit 0
            ;;
        *) overrides+=("$argument") ;;
    esac
done
. scripts/venv.sh

gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
processes=$((gpus > 0 ? gpus : 2))
torchrun --nproc_per_node="$processes" train.py \
    --job.config_file train_configs/debug_nape_llama3.toml --job.dump_folder "$run" \
    --layer_dropout.p_max 0.4 --layer_dropout.sampling balanced "${overrides[@]}"
python scripts/evaluate.py position-loss --checkpoint "$run/checkpoint" --data data/stdlib/long --documents 48 \
    --output "$run"
python - "$run" <<'PYTHON'
import json, sys
folder = sys.argv[1]
records = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
first, last = records[0], records[-1]
print(f"\nLoss {first['loss']:.2f} at step {first['step']}, {last['loss']:.2f} at step {last['step']}.")
print(f"Plots: {folder}/loss.png and {folder}/position_loss.png")
PYTHON

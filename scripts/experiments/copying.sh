#!/usr/bin/env bash
# The first paper's copying experiment on a CPU: tiny Mamba2 models under weight decay, no regularization, Pre-Linear
# dropout and VPAD, several seeds each, trained on strings of 5 to 10 letters and tested up to 30.
#   ./scripts/experiments/copying.sh [--seeds 3] [--steps 1500] [--p 0.1] [--folder outputs/experiments/copying]
# Runs that are finished are not done again. Writes copying.json, copying.md and copying.png into the folder.
set -euo pipefail
cd "$(dirname "$0")/../.."

seeds=3 steps=1500 p=0.1 folder=outputs/experiments/copying
while (($#)); do
    case "$1" in
        --seeds | --steps | --p | --folder)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        -h | --help)
            sed -n '2,5s/^# //p' "$0"
            exit 0
            ;;
        *)
            echo "error: unknown argument $1 (see --help)" >&2
            exit 2
            ;;
    esac
done
. scripts/venv.sh

declare -A settings=(
    [wd]="--optimizer.weight_decay 0.1"
    [no_wd]="--optimizer.weight_decay 0.0"
    [pre_linear]="--dropout.placement pre_linear --dropout.p $p"
    [vpad]="--dropout.placement vpad --dropout.p $p"
)
for ((seed = 1; seed <= seeds; seed++)); do
    for setting in wd no_wd pre_linear vpad; do
        run="$folder/${setting}_$seed"
        [ -f "$run/evaluation/copying.json" ] && continue
        echo "== $setting, seed $seed of $seeds"
        # shellcheck disable=SC2086
        python train.py --job.config_file train_configs/debug_mamba2_copy.toml --job.dump_folder "$run" \
            --training.seed "$seed" --training.steps "$steps" --metrics.log_freq 100 --validation.no-enable \
            --checkpoint.interval "$steps" ${settings[$setting]}
        python scripts/evaluate.py copying --checkpoint "$run/checkpoint" --lengths 5 10 15 20 30 --samples 500
    done
done
python scripts/experiments/copying_table.py --folder "$folder"

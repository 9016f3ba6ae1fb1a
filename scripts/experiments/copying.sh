#!/usr/bin/env bash
# The first paper's copying experiment on a CPU: tiny Mamba2 models under weight decay, no regularization, Pre-Linear
# dropout and VPAD, several seeds each, trained on strings of 3 to 6 letters and tested on up to 12.
#   ./scripts/experiments/copying.sh [--seeds 5] [--steps 800] [--p 0.1] [--jobs 1] \
#                                    [--folder outputs/experiments/copying]
# --jobs: runs at a time, which share the cores. Runs that are finished are not done again, and one that failed is
# reported and leaves the others going. Writes copying.json, copying.md and copying.png into the folder.
set -euo pipefail
cd "$(dirname "$0")/../.."

seeds=5 steps=800 p=0.1 jobs=1 folder=outputs/experiments/copying
while (($#)); do
    case "$1" in
        --seeds | --steps | --p | --jobs | --folder)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        -h | --help)
            sed -n '2,7s/^# //p' "$0"
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
export OMP_NUM_THREADS=$((($(nproc) + jobs - 1) / jobs))
train_and_evaluate() { # SETTING SEED
    local run="$folder/${1}_$2"
    # shellcheck disable=SC2086
    python train.py --job.config_file train_configs/debug_mamba2_copy.toml --job.dump_folder "$run" \
        --training.seed "$2" --training.steps "$steps" --lr_scheduler.warmup_steps $((steps / 20)) \
        --metrics.log_freq 50 --validation.no-enable --checkpoint.interval "$steps" ${settings[$1]} &&
        python scripts/evaluate.py copying --checkpoint "$run/checkpoint" --lengths 3 6 7 8 9 10 12 --samples 1000
}

runs=()
for ((seed = 1; seed <= seeds; seed++)); do
    for setting in wd no_wd pre_linear vpad; do
        [ -f "$folder/${setting}_$seed/evaluation/copying.json" ] || runs+=("$setting $seed")
    done
done
mkdir -p "$folder"
failed=0 done=0
trap 'kill $(jobs -p) 2>/dev/null' EXIT
finish_one() {
    local status=0
    wait -n || status=$?
    ((++done))
    ((status == 0)) || failed=$((failed + 1))
    echo "== $done of ${#runs[@]} runs done, $failed failed, $SECONDS s"
}
for run in ${runs[@]+"${runs[@]}"}; do
    # shellcheck disable=SC2046
    (($(jobs -rp | wc -l) < jobs)) || finish_one
    read -r setting seed <<<"$run"
    train_and_evaluate "$setting" "$seed" >"$folder/${setting}_$seed.log" 2>&1 &
done
while ((done < ${#runs[@]})); do finish_one; done
python scripts/experiments/copying_table.py --folder "$folder"
if ((failed)); then
    echo "error: $failed runs failed, see the logs $folder/*.log" >&2
    exit 1
fi

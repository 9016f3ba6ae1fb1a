"""Does the best learning rate stay when the width changes? Short runs of a grid of learning rates at several widths,
under several parametrizations (DD fig. 3, and the judge of any muP).

    python scripts/experiments/lr_transfer.py [--widths 64 128 256] [--kinds completep standard] [--steps 100]

Runs in one process, on one GPU where there is one; a second call does what is missing. Writes lr_transfer.json,
lr_transfer.md and lr_transfer.png into --folder. Any key of the TOML can be overridden: --architecture.n_layers 4.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from regdrop_titan.config import ConfigError, JobConfig, load_config
from regdrop_titan.data.packed import DataError
from regdrop_titan.data.stdlib_corpus import build_stdlib_corpus
from regdrop_titan.files import write_json
from regdrop_titan.parametrization.short_runs import Batches, resized, train_briefly
from regdrop_titan.signals import interruptible

Losses = dict[tuple[str, int, float], list[float]]  # by kind, width, learning rate; one a seed


def final_loss(config: JobConfig, steps: int, device: torch.device, bar: tqdm) -> float:
    """Mean training loss of the last tenth of the steps."""
    data = Batches(config, steps)
    losses = []
    for loss in train_briefly(data.model(config, device), config, data.batches, constant_lr=False):
        losses.append(loss)
        bar.update()
    return statistics.mean(losses[-max(1, steps // 10) :])


def best(losses: Losses, kind: str, width: int) -> float:
    """The learning rate with the lowest mean loss; a diverged run (NaN) is the worst."""
    at = {lr: statistics.mean(v) for (k, w, lr), v in losses.items() if (k, w) == (kind, width)}
    return min(at, key=lambda lr: (math.isnan(at[lr]), at[lr]))


def table(losses: Losses, kinds: list[str], widths: list[int], lrs: list[float]) -> str:
    lines = ["| parametrization | width | " + " | ".join(f"{lr:.2g}" for lr in lrs) + " | best |"]
    lines.append("|---|---|" + "---|" * (len(lrs) + 1))
    for kind in kinds:
        for width in widths:
            chosen = best(losses, kind, width)
            means = [(lr, statistics.mean(losses[kind, width, lr])) for lr in lrs]
            cells = [f"**{mean:.3f}**" if lr == chosen else f"{mean:.3f}" for lr, mean in means]
            lines.append(f"| {kind} | {width} | {' | '.join(cells)} | {chosen:.2g} |")
    return "\n".join(lines)


def plot(losses: Losses, kinds: list[str], widths: list[int], lrs: list[float], path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(kinds), 4), layout="constrained")
    all_axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(all_axes, kinds, strict=True):
        for i, width in enumerate(widths):
            color = colormaps["viridis"](i / max(1, len(widths) - 1) * 0.9)
            means = [statistics.mean(losses[kind, width, lr]) for lr in lrs]
            axes.plot(lrs, means, "o-", markersize=3, color=color, label=f"width {width}")
            chosen = best(losses, kind, width)
            axes.plot(chosen, statistics.mean(losses[kind, width, chosen]), "*", markersize=14, color=color)
        axes.set(title=kind, xlabel="learning rate of the base width", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    all_axes[0].set_ylabel("training loss at the end (star: best)")
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", default="train_configs/debug_celerity.toml")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument(
        "--kinds", nargs="+", choices=("standard", "mup", "completep"), default=["completep", "standard"]
    )
    parser.add_argument("--lrs", type=float, nargs="+", default=[2.0**-k for k in range(11, 4, -1)])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/experiments/lr_transfer"))
    own, overrides = parser.parse_known_args()
    short = ["--training.seq_len", "32", "--training.global_batch_size", "32", "--architecture.n_layers", "2",
             "--layer_dropout.p_max", "0.0", "--validation.no-enable"]  # fmt: skip
    runs: dict[tuple[str, int, float, int], JobConfig] = {}
    try:
        for kind in own.kinds:
            for lr in own.lrs:
                for seed in range(1, own.seeds + 1):
                    config = load_config([
                        "--job.config_file", own.config, *short, *overrides, "--parametrization.kind", kind,
                        "--optimizer.lr", str(lr), "--training.seed", str(seed), "--training.steps", str(own.steps),
                        "--lr_scheduler.warmup_steps", str(own.steps // 10),
                    ])  # fmt: skip
                    for width in own.widths:
                        n_layers = config.architecture.n_layers or 0
                        runs[kind, width, lr, seed] = resized(config, width, n_layers)
        if config.training.dataset_source == "stdlib":
            build_stdlib_corpus(Path(config.training.dataset_path or "").parent)
    except (ConfigError, DataError) as error:
        print(f"error: the experiment cannot run:\n{error}", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own.folder.mkdir(parents=True, exist_ok=True)
    file = own.folder / "lr_transfer.json"
    settings = {"config": own.config, "overrides": overrides, "steps": own.steps}
    before = json.loads(file.read_text()) if file.exists() else {"settings": settings, "runs": []}
    if before["settings"] != settings:
        print(f"error: {file} is of other settings; give another --folder", file=sys.stderr)
        return 2
    # JSON has no NaN: a diverged run is null there
    done = {
        (r["kind"], r["width"], r["lr"], r["seed"]): math.nan if r["loss"] is None else r["loss"]
        for r in before["runs"]
    }
    missing = [key for key in runs if key not in done]
    with tqdm(total=len(missing) * own.steps, unit="step", mininterval=1.0) as bar:
        for key in missing:
            bar.set_description("{}, width {}, lr {:.2g}, seed {}".format(*key))
            done[key] = final_loss(runs[key], own.steps, device, bar)
            records = [
                dict(zip(("kind", "width", "lr", "seed"), k, strict=True)) | {"loss": v} for k, v in done.items()
            ]
            write_json(file, {"settings": settings, "runs": records})
    losses: Losses = {}
    for kind, width, lr, seed in runs:
        losses.setdefault((kind, width, lr), []).append(done[kind, width, lr, seed])
    text = table(losses, own.kinds, own.widths, own.lrs)
    (own.folder / "lr_transfer.md").write_text(text + "\n")
    plot(losses, own.kinds, own.widths, own.lrs, own.folder / "lr_transfer.png")
    print(f"{text}\nwrote {own.folder}/lr_transfer.json, lr_transfer.md and lr_transfer.png")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

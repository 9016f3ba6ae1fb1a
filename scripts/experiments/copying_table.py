"""The copying experiment's table: mean and standard deviation over seeds of each setting's scores, by source length."""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from regdrop_titan.signals import interruptible

SETTINGS = {"wd": "WD", "no_wd": "no WD", "pre_linear": "Pre-Linear", "vpad": "VPAD"}


def read(folder: Path) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """(EMA, CLA) of every seed, by setting and length."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {name: defaultdict(list) for name in SETTINGS}
    for file in sorted(folder.glob("*/evaluation/copying.json")):
        name = re.sub(r"_\d+$", "", file.parts[-3])
        if name in found:
            for score in json.loads(file.read_text())["scores"]:
                found[name][score["length"]].append((score["ema"], score["cla"]))
    return {name: scores for name, scores in found.items() if scores}


def spread(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def plot(found: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, score, title in zip(figure.subplots(1, 2), (0, 1), ("whole strings (EMA)", "letters (CLA)"), strict=True):
        for name, scores in found.items():
            lengths = sorted(scores)
            means, deviations = zip(*(spread([s[score] for s in scores[n]]) for n in lengths), strict=True)
            axes.errorbar(lengths, means, deviations, marker="o", capsize=3, label=SETTINGS[name])
        axes.axvspan(3, 6, alpha=0.12, color="grey")
        axes.set(xlabel="letters of the source (grey: trained)", ylabel="share right", title=title, ylim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("outputs/experiments/copying"))
    folder = parser.parse_args().folder
    found = read(folder)
    if not found:
        print(f"error: {folder}: no finished run SETTING_SEED/evaluation/copying.json in it", file=sys.stderr)
        return 2
    lengths = sorted({length for scores in found.values() for length in scores})
    lines = ["| setting | seeds | " + " | ".join(f"EMA-{n} | CLA-{n}" for n in lengths) + " |"]
    lines.append("|---|---|" + "---|---|" * len(lengths))
    table: dict[str, dict] = {}
    for name, scores in found.items():
        cells = []
        for n in lengths:
            for which, kind in enumerate(("ema", "cla")):
                mean, deviation = spread([s[which] for s in scores[n]])
                table.setdefault(name, {})[f"{kind}-{n}"] = {"mean": mean, "deviation": deviation}
                cells.append(f"{mean:.3f} ± {deviation:.3f}")
        lines.append(f"| {SETTINGS[name]} | {len(scores[lengths[0]])} | " + " | ".join(cells) + " |")
    (folder / "copying.md").write_text("\n".join(lines) + "\n")
    (folder / "copying.json").write_text(json.dumps(table, indent=2) + "\n")
    plot(found, folder / "copying.png")
    print("\n".join(lines))
    print(f"wrote {folder}/copying.json, copying.md and copying.png")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

"""`benchmark.py all`: the verbs whose figures have a bound."""

import argparse
import dataclasses
import json
import subprocess
import sys

NAME = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = sorted({bound.verb for bound in BOUNDS})
    parser.add_argument("--only", nargs="+", choices=verbs, default=[], metavar="VERB", help="of them")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="the rest: options of every verb")


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a figure of a benchmark may be at most, on 2 cores."""

    verb: str
    options: tuple[str, ...]
    row: str
    most: float
    figure: str = "ratio"


BOUNDS = (
    Bound("dense", (), "rope", 1.02),  # TorchTitan's llama3 at equal size
    Bound("dense", (), "nape vpad", 1.08),  # NAPE without dropout
    Bound("dense", ("--compile",), "rope", 1.02),
    Bound("dense", ("--compile",), "nape vpad", 1.04),
    Bound("layer-dropout", (), "skipped 0.5 balanced", 0.55),  # the dense stack
    Bound("mamba2", (), "ours, chunk 256", 1.0),  # transformers
    Bound("generation", ("--batch-size", "1"), "ours / transformers", 1.0),
    Bound("generation", ("--batch-size", "1", "--family", "mamba2"), "ours / transformers", 1.0),
    Bound("attention", (), "nape, cut / nape, whole", 0.6),
    Bound("attention", (), "nape, cut / causal", 1.0),
    Bound("loss", (), "4 pieces", 0.25, "peak_ratio"),
)


def measure(arguments: argparse.Namespace) -> dict:
    """All that have a bound, one after another; status 1 where a figure is above its own. About 20 minutes, in which
    nothing else should run."""
    folder = arguments.output.parent / "benchmark_all"
    folder.mkdir(parents=True, exist_ok=True)
    runs = list(dict.fromkeys((bound.verb, bound.options) for bound in BOUNDS))
    found: dict[tuple[str, tuple[str, ...]], dict] = {}
    for number, (verb, options) in enumerate(runs):
        if arguments.only and verb not in arguments.only:
            continue
        print(f"[{number + 1}/{len(runs)}] {verb} {' '.join(options)}", flush=True)
        file = folder / ("_".join([verb, *options]).replace("--", "") + ".json")
        command = [sys.executable, sys.argv[0], verb, *options, *arguments.options, "--output", str(file)]
        subprocess.run(command, check=True)
        found[verb, options] = json.loads(file.read_text())["rows"]
    rows = {}
    print(f"{'figure':<64}{'found':>8}{'at most':>9}")
    for bound in BOUNDS:
        if (bound.verb, bound.options) in found:
            value = found[bound.verb, bound.options][bound.row][bound.figure]
            name = " ".join([bound.verb, *bound.options, bound.row])
            rows[name] = {bound.figure: value, "at_most": bound.most, "held": value <= bound.most}
            print(f"{name:<64}{value:>8.3f}{bound.most:>9.2f}{'' if value <= bound.most else '   above its bound'}")
    return {"rows": rows, "held": all(row["held"] for row in rows.values())}

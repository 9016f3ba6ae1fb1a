"""`benchmark.py stragglers`: layer dropout on ranks that wait for each other, simulated."""

import argparse
import dataclasses
import itertools
import os
import statistics
from pathlib import Path

import numpy as np
import torch

from ..distributed.stragglers import LayerTime, simulate, step_seconds
from ..regularization import layer_rates
from .layer_dropout import stack_of_blocks
from .results import read_result
from .timing import Step, add_sizes, default_device, synchronize, time_rounds

NAME = "stragglers"
SIZES = ("dim", "layers", "seq_len", "batch_size", "position")  # of a result of layer-dropout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, dim=512, layers=24, seq_len=512, rounds=7, warmup=2, steps=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024], help=" ")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="sequences of a rank")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.4, 0.8], help="p_max")
    parser.add_argument(
        "--meeting", type=float, default=0.0,
        help="time of a layer's gathers that nothing hides, in dense layers of the largest batch",
    )  # fmt: skip
    parser.add_argument("--against", type=Path, help="result of layer-dropout under torchrun on this machine")


def measure(arguments: argparse.Namespace) -> dict:
    """What layer dropout saves in time where ranks wait for each other at every layer, simulated from the time of a
    layer here, for 8 to 1024 ranks; with --against, beside a measured run of several ranks."""
    simulated: list[dict] = []
    notes: list[str] = []
    check: dict | None = None
    L, S, d, meeting = arguments.layers, arguments.seq_len, arguments.dim, arguments.meeting
    if arguments.against is not None:
        check = compare_with_run(arguments)
        notes += [
            f"{name}, time to dense: measured {row['measured']:.3f}, simulated {row['simulated']:.3f}, "
            f"error {row['error']:+.1%}"
            for name, row in check["rows"].items()
        ]
    time = layer_time(d, S, max(arguments.batches), "nape", arguments.rounds, arguments.warmup)
    time = dataclasses.replace(time, meeting=meeting * (time.fixed + time.sequence * max(arguments.batches)))
    notes.append(
        f"a layer: {1000 * time.fixed:.2f} ms + {1000 * time.sequence:.2f} ms a sequence; meeting "
        f"{1000 * time.meeting:.2f} ms"
    )
    for name, p_max in itertools.product(("uniform", "increasing"), arguments.rates):
        rates = layer_rates(name, "constant", p_max, L, 0, 1)
        for ranks, batch, sampling in itertools.product(arguments.ranks, arguments.batches, ("bernoulli", "balanced")):
            found = simulate(rates, ranks, batch, sampling, time, arguments.steps)
            simulated.append({"distribution": name, "p_max": p_max, "ranks": ranks, "batch": batch,
                              "sampling": sampling, **dataclasses.asdict(found)})  # fmt: skip
    plot = arguments.output.with_suffix(".png")
    plot.parent.mkdir(parents=True, exist_ok=True)
    plot_stragglers(simulated, plot)
    print(f"wrote {plot}")
    return {"rows": {}, "simulated": simulated, "layer_time": dataclasses.asdict(time), "against": check,
            "notes": notes}  # fmt: skip


def compare_with_run(arguments: argparse.Namespace) -> dict:
    """A layer-dropout benchmark of several ranks on this machine, and what the simulation makes of it: the time of a
    layer is measured here in one process, the meeting is what the run's dense step took beside it."""
    run = read_result(arguments.against, "ranks", *(f"sizes.{name}" for name in SIZES), "rows.dense.seconds")
    sizes, ranks = run["sizes"], run["ranks"]
    d, L, S, B, position = (sizes[name] for name in SIZES)
    time = layer_time(d, S, B, position, arguments.rounds, arguments.warmup)
    devices = None if torch.cuda.is_available() else min(ranks, os.cpu_count() or ranks)
    alone = step_seconds(np.full((ranks, L), B), time, devices)
    meeting = max(0.0, run["rows"]["dense"]["seconds"] - alone) / L
    time = dataclasses.replace(time, meeting=meeting)
    found = {}
    for name, row in run["rows"].items():
        words = name.split()
        if words[0] != "skipped" or float(words[1]) == 0:
            continue
        rates = torch.full((L,), float(words[1]), dtype=torch.float64)
        share = simulate(rates, ranks, B, words[2], time, arguments.steps, devices).time
        found[name] = {"measured": row["ratio"], "simulated": share, "error": share / row["ratio"] - 1}
    return {"file": str(arguments.against), "layer_time": dataclasses.asdict(time), "devices": devices, "rows": found}


def plot_stragglers(rows: list[dict], file: Path) -> None:
    """The share of the saved compute that is saved in time, by ranks, a line for each local batch."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((row["distribution"], row["p_max"]) for row in rows))
    figure = Figure(figsize=(3.4 * len(kinds), 3.6), layout="constrained")
    for axes, (name, p_max) in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        own = [row for row in rows if (row["distribution"], row["p_max"]) == (name, p_max)]
        batches = sorted({row["batch"] for row in own})
        for number, batch in enumerate(batches):
            for sampling, style in (("bernoulli", "o-"), ("balanced", "s--")):
                line = [row for row in own if row["batch"] == batch and row["sampling"] == sampling]
                axes.plot(
                    [row["ranks"] for row in line], [row["time_saved_of_compute_saved"] for row in line], style,
                    markersize=3, linewidth=1, color=f"C{number}",
                    label=f"local batch {batch}, {sampling}",
                )  # fmt: skip
        computed = statistics.fmean(row["computed"] for row in own)
        axes.set(
            title=f"{name}, p_max {p_max:g}\n{1 - computed:.0%} of the compute saved", xscale="log", ylim=(-0.05, 1.1)
        )
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time saved / compute saved")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    figure.savefig(file, dpi=150)


def layer_time(d: int, S: int, B: int, position: str, rounds: int, warmup: int) -> LayerTime:
    """Of one block, forward and backward, by how many of B sequences it keeps."""
    device = default_device()
    model = stack_of_blocks(d, 1, position).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    (block,) = model.layers.values()
    x = torch.randn(B, S, d, device=device, dtype=next(model.parameters()).dtype, requires_grad=True)
    context = block.context(S, device, None)

    def step(n: int) -> Step:
        keep = torch.arange(B)[:, None] < n
        ((own,),) = model.kept(x, keep, None)

        def run() -> None:
            block(x, context, (own,)).sum().backward()
            synchronize()

        return run

    counts = sorted({1, *(max(1, B * quarters // 4) for quarters in (1, 2, 3, 4))})
    seconds = time_rounds({str(n): step(n) for n in counts}, rounds, warmup)
    return LayerTime.fit(counts, [statistics.median(seconds[str(n)]) for n in counts])

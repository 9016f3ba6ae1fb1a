"""How much of a step's communication is hidden behind its computing, by torch's profiler."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import Step, synchronize

Interval = tuple[float, float]


def profiled(step: Step, trace: Path) -> dict[str, float]:
    """Run `step` once and write its Chrome trace; the result is that of `communication`."""
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
        step()
        synchronize()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    return communication(json.loads(trace.read_text())["traceEvents"])


def communication(events: list[dict]) -> dict[str, float]:
    """Of the events of a Chrome trace, in seconds: the time with a collective under way, waiting for the other ranks
    included (`communication`), and the part of it in which this rank computed nothing (`exposed`).

    On a GPU those are NCCL's kernels and all others; with gloo its own events and torch's operators.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    if kernels:
        collectives = [event for event in kernels if "nccl" in event["name"]]
        computing = [event for event in kernels if "nccl" not in event["name"]]
    else:
        collectives = [event for event in complete if event["name"].startswith("gloo:")]
        computing = [event for event in complete if event["name"].startswith("aten::")]
    busy, computes = union(map(interval, collectives)), union(map(interval, computing))
    both = length(busy) + length(computes) - length(union([*busy, *computes]))
    return {"communication": length(busy) / 1e6, "exposed": (length(busy) - both) / 1e6}


def interval(event: dict) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(disjoint: list[Interval]) -> float:
    return sum(end - begin for begin, end in disjoint)

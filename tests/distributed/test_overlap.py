"""How much communication a step hides: by hand, and of two real ranks."""

import json

from regdrop_titan.benchmarks.overlap import communication

from .harness import torchrun


def event(name, begin, end, cat="kernel"):
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin}


def test_gpu_kernels_by_hand():
    """Collectives 10-40, 30-50 and 90-100, computing 0-20, 25-28 and 45-60: hidden 10, 3 and 5 of 50 microseconds."""
    events = [
        event("ncclDevKernel_AllGather", 10, 40), event("ncclDevKernel_ReduceScatter", 30, 50),
        event("ncclDevKernel_AllGather", 90, 100), event("gemm", 0, 20), event("gemm", 25, 28), event("norm", 45, 60),
        event("aten::mm", 0, 100, "cpu_op"), {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    found = communication(events)
    assert round(1e6 * found["communication"], 6) == 50 and round(1e6 * found["exposed"], 6) == 32


def test_gloo_by_hand():
    events = [event("gloo:all_gather", 0, 10, "user_annotation"), event("aten::mm", 8, 20, "cpu_op"),
              event("autograd::engine::evaluate_function: X", 0, 30, "cpu_op")]  # fmt: skip
    found = communication(events)
    assert round(1e6 * found["communication"], 6) == 10 and round(1e6 * found["exposed"], 6) == 8


def test_nothing_to_hide():
    assert communication([event("gemm", 0, 20)]) == {"communication": 0.0, "exposed": 0.0}


def test_of_two_ranks(tmp_path):
    """The profiled steps gather every layer in both passes, whatever the ranks keep of it."""
    out, traces = tmp_path / "bench.json", tmp_path / "traces"
    sizes = ["--dim", "128", "--layers", "2", "--seq-len", "16", "--batch-size", "2", "--rounds", "2", "--warmup", "1"]
    options = ["--rates", "0.9", "--profile", str(traces), "--output", str(out)]
    done = torchrun(2, "scripts/benchmark.py", "layer-dropout", *sizes, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["command"].startswith("torchrun --nproc_per_node=2 scripts/benchmark.py layer-dropout --dim 128")
    overlaps = result["overlaps"]
    assert set(overlaps) == {"dense", "skipped 0.9 bernoulli", "skipped 0.9 balanced"}
    assert all(0 < found["exposed"] <= found["communication"] for found in overlaps.values())
    for name in overlaps:
        for rank in (0, 1):
            events = json.loads((traces / f"{name.replace(' ', '_')}_rank{rank}.json").read_text())["traceEvents"]
            # of the root and both layers; the backward pass gathers the layers once more, and reduces all three
            assert sum(event["name"] == "gloo:all_gather" for event in events) == 5
            assert sum(event["name"] == "gloo:all_reduce" for event in events) == 3

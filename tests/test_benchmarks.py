"""`scripts/benchmark.py`: every verb at tiny sizes, the bounds, the report, and what is refused."""

import argparse
import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from regdrop_titan.benchmarks import bounds, input_pipeline
from regdrop_titan.benchmarks.report import ABOVE, Figure, Section, write_report
from regdrop_titan.benchmarks.results import table
from regdrop_titan.benchmarks.sizes import size_faults
from regdrop_titan.benchmarks.timing import row
from regdrop_titan.data.packed import PackedDataset
from regdrop_titan.models import build_model

MODEL = ["--dim", "128", "--seq-len", "16", "--batch-size", "4", "--rounds", "3", "--warmup", "1"]


@pytest.fixture
def run(tmp_path, script):
    """Runs a verb in this process: its result."""

    def measure(*arguments: str) -> dict:
        out = tmp_path / "bench.json"
        assert script("benchmark", *arguments, "--output", str(out)) == 0
        return json.loads(out.read_text())

    return measure


def test_a_row_by_hand():
    """The median of the ratios is not the ratio of the medians."""
    seconds = {"a": [1.0, 4.0, 3.0], "b": [2.0, 2.0, 6.0]}
    assert row(seconds, "a", "b", peak=1) == {
        "seconds": 3.0, "ratio": 0.5, "quartiles": [0.5, 2.0], "base": "b", "peak": 1,
    }  # fmt: skip


def test_dense(run):
    result = run("dense", *MODEL, "--layers", "1")
    assert result["rows"]["torchtitan llama3"]["ratio"] == 1.0
    assert {"rope", "nape", "nape vpad", "nape pre_norm", "nape pre_linear"} <= set(result["rows"])
    assert all(len(seconds) == 3 for seconds in result["seconds"].values())
    rope = result["rows"]["rope"]
    assert rope["base"] == "torchtitan llama3" and rope["tokens_per_second"] == pytest.approx(64 / rope["seconds"])
    assert result["command"].startswith("python scripts/benchmark.py dense --dim 128")
    assert "--output" not in result["command"] and result["arguments"]["layers"] == 1


@pytest.mark.slow
def test_dense_compiled(run):
    """More variants than dynamo keeps graphs of one function by itself."""
    assert set(run("dense", *MODEL, "--layers", "1", "--compile")["rows"]) >= {"rope", "nape vpad"}


def test_dense_attention(run):
    rows = run("dense", *MODEL, "--layers", "1", "--attention")["rows"]
    assert {"nape entmax15", "nape adaptive", "nape ssmax", "nape attention_p"} <= set(rows) and "nape vpad" not in rows


def test_layer_dropout(run):
    rows = run("layer-dropout", *MODEL, "--layers", "2", "--rates", "0", "0.5")["rows"]
    assert {"dense", "masked 0.5", "skipped 0.0 bernoulli", "skipped 0.5 bernoulli", "skipped 0.5 balanced"} == set(
        rows
    )
    half = rows["skipped 0.5 balanced"]
    assert half["computed"] == 0.5 and half["time_saved_of_compute_saved"] == pytest.approx((1 - half["ratio"]) / 0.5)
    assert "time_saved_of_compute_saved" not in rows["dense"]


def test_generation(run):
    """With transformers' answers, token for token."""
    result = run("generation", *MODEL, "--layers", "1", "--new-tokens", "4")
    assert set(result["rows"]) == {"ours / transformers", "in pieces / one forward"}
    assert result["rows"]["ours / transformers"]["same_tokens"] is True
    assert len(result["seconds"]["ours"]) == 3


def test_loss(run):
    sizes = ["--dim", "128", "--vocab-size", "4096", "--seq-len", "512", "--rounds", "2", "--warmup", "0"]
    (found,) = run("loss", *sizes, "--pieces", "32", "--skip-whole")["rows"].values()
    assert 0 < found["peak_mib"] < 64 and found["ratio"] == found["peak_ratio"] == 1  # whole logits alone: 64 MiB


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_attention(tmp_path, run, packed):
    """Time, the cache's memory, and errors of a checkpoint that fall with the cutoff."""
    model = build_model("nape_llama3", "debug", dim=32, n_layers=1, ffn_dim=32, vocab_size=256)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "checkpoint/step-1"), no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_args": dataclasses.asdict(model.args)}))
    sizes = ["--dim", "128", "--seq-len", "32", "--batch-size", "1", "--rounds", "2", "--warmup", "0"]
    error = ["--checkpoint", str(tmp_path / "checkpoint"), "--data", str(packed / "train")]
    result = run("attention", *sizes, *error, "--cutoffs", "1", "15", "40", "--lengths", "200")
    assert {"nape, cut / causal", "nape, cut / nape, whole", "alibi, cut / alibi, whole"} <= set(result["rows"])
    whole, cut = result["cache_bytes"]["nape 200"]  # 400 slots of 128 channels; half of the heads have 41 + 200
    assert whole == 2 * 4 * 128 * 400 and cut == 2 * 4 * 64 * (400 + 241)
    assert any(f"nape, 200 tokens: whole {whole / 2**20:.1f} MiB" in note for note in result["notes"])
    errors = [result["errors"]["200"][cutoff][0] for cutoff in ("1.0", "15.0", "40.0")]
    assert errors[0] > 1e-2 > errors[1] > 1e-12 > errors[2]


def test_data(run):
    result = run("data", "--megabytes", "0.3", "--vocab-size", "300", "--samples", "16", "--rounds", "2")
    assert set(result["rows"]) == {"1 worker / bare tokenizer", "2 workers / 1 worker"}
    assert result["loader"]["tokens_per_second"] > 0


def test_loader(run):
    """A packed set is read in less time than a text is tokenized; TorchTitan's loader gives as many tokens."""
    sizes = ["--megabytes", "0.1", "--vocab-size", "300", "--seq-len", "256", "--batch-size", "2", "--batches", "3"]
    result = run("loader", *sizes, "--rounds", "3")
    ours = result["rows"]["ours"]
    assert ours["base"] == "torchtitan" and ours["ratio"] < 1
    assert ours["tokens_per_second"] == pytest.approx(3 * 2 * 256 / ours["seconds"])


def test_stragglers(run, tmp_path):
    """Beside a measured run; its picture."""
    sizes = {"dim": 128, "layers": 2, "seq_len": 16, "batch_size": 4, "position": "nape"}
    rows = {"dense": {"seconds": 0.01, "ratio": 1.0}, "skipped 0.5 balanced": {"seconds": 0.006, "ratio": 0.6}}
    (tmp_path / "run.json").write_text(json.dumps({"sizes": sizes, "ranks": 2, "rows": rows}))
    small = ["--dim", "128", "--layers", "2", "--seq-len", "16", "--ranks", "2", "--batches", "2", "--steps", "2"]
    result = run("stragglers", *small, "--rounds", "2", "--against", str(tmp_path / "run.json"))
    found = result["against"]["rows"]["skipped 0.5 balanced"]
    assert found["error"] == pytest.approx(found["simulated"] / 0.6 - 1)
    assert result["notes"][0] == (
        f"skipped 0.5 balanced, time to dense: measured 0.600, simulated {found['simulated']:.3f}, "
        f"error {found['error']:+.1%}"
    )
    assert len(result["simulated"]) == 2 * 2 * 2 and (tmp_path / "bench.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[1]", "has no ranks, sizes.dim"),
        ('{"ranks": 2, "sizes": {"dim": 1, "layers": 1, "seq_len": 1, "batch_size": 1}, "rows": []}',
         "has no sizes.position, rows.dense.seconds"),
    ],
)  # fmt: skip
def test_a_run_to_compare_with_that_is_none(text, fault, tmp_path, script, capsys):
    """One message before anything is measured."""
    file = tmp_path / "run.json"
    if text is not None:
        file.write_text(text)
    began = time.monotonic()
    assert script("benchmark", "stragglers", "--against", str(file)) == 2
    error = capsys.readouterr().err
    assert f"error: {file}: {fault}" in error and error.count("\n") == 1
    assert time.monotonic() - began < 5


def test_sizes():
    arguments = argparse.Namespace(
        dim=64, layers=0, rounds=1, warmup=0, rates=[0.5, 1.0, -0.1], p=0.0, cutoff=-1.0, megabytes=float("nan"),
        lengths=[5, -2], compile=False, family="mamba2", only=[], seq_len=32,
    )  # fmt: skip
    assert size_faults(arguments) == [
        "--dim 64: must be a multiple of 128 (an even number of heads of 64)",
        "--layers 0: must be above 0",
        "--rounds 1: must be at least 2",
        "--rates 1.0: must be in [0, 1)",
        "--rates -0.1: must be in [0, 1)",
        "--cutoff -1.0: must be at least 0",
        "--megabytes nan: must be finite",
        "--lengths -2: must be above 0",
    ]


def test_sizes_are_refused(script, capsys):
    assert script("benchmark", "dense", "--rounds", "0", "--seq-len", "-3") == 2
    assert "--seq-len -3: must be above 0; --rounds 0: must be at least 2" in capsys.readouterr().err


# `all` runs a script of ours in place of scripts/benchmark.py, which writes a result at once
FAKE = """
import json, os, signal, sys, time
verb, file = sys.argv[1], sys.argv[-1]
if verb in {failing!r}:
    print("Traceback: ...\\nMemoryError: no room for " + verb, file=sys.stderr)
    sys.exit(3)
if verb in {hanging!r}:
    open(file + ".pid", "w").write(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
rows = {rows!r}.get(verb, {{}})
if "mamba2" in sys.argv[2:]:
    rows = {{name: row | {{"ratio": 1.1}} for name, row in rows.items()}}
words = sys.argv[1:-2]
json.dump({result!r} | {{"rows": rows, "command": " ".join(["python scripts/benchmark.py", *words])}}, open(file, "w"))
"""
RESULT = {
    "arguments": {"dim": 768, "compile": True, "rates": [0.0, 0.5], "p": 0.1, "against": None},
    "date": "2026-01-02",
    "device": "CPU x86_64",
    "processor": "Some CPU",
    "cores": 2,
    "memory_gib": 24,
    "threads": 2,
    "versions": {"torch": "2.13.0", "torchtitan": "0.2.2", "transformers": "5.0"},
}


def row_of(ratio: float, base: str, **extras) -> dict:
    return {"seconds": 0.25, "ratio": ratio, "quartiles": [ratio - 0.01, ratio + 0.02], "base": base, **extras}


GENERATION = {"ours / transformers": row_of(0.8, "transformers", same_tokens=True)}


@pytest.fixture
def run_all(tmp_path, monkeypatch):
    """`all` with verbs that write `rows` at once; (its result, its report)."""

    def measure(*words: str, rows: dict, failing=(), hanging=()) -> tuple[dict, str]:
        fake = tmp_path / "fake.py"
        fake.write_text(FAKE.format(rows=rows, failing=list(failing), hanging=list(hanging), result=RESULT))
        monkeypatch.setattr("sys.argv", [str(fake)])
        parser = argparse.ArgumentParser()
        bounds.add_arguments(parser)
        parser.add_argument("--output", type=Path, default=tmp_path / "all.json")
        report = tmp_path / "docs/benchmarks.md"
        result = bounds.measure(parser.parse_args(["--report", str(report), *words]))
        return result, report.read_text()

    return measure


def test_all_holds_ratios_to_their_bounds(run_all, capsys):
    """Both runs of the verb that is named, with the options; the second is above its bound."""
    result, report = run_all("--only", "generation", "--options", "--rounds", "3", rows={"generation": GENERATION})
    figures = list(result["bounds"].values())
    assert [(figure["found"], figure["most"], figure["state"]) for figure in figures] == [
        (0.8, 1.0, "held"), (1.1, 1.0, ABOVE),
    ]  # fmt: skip
    assert not result["held"] and not result["failed"]
    out = capsys.readouterr().out
    assert "[1/2] generation --batch-size 1 " in out and "[2/2] generation --batch-size 1 --family mamba2 " in out
    assert out.count(ABOVE) == 1
    assert "`python scripts/benchmark.py generation --batch-size 1 --family mamba2 --rounds 3`, 2026-01-02" in report
    assert (
        "Run with other options than the bounds are for**, see the commands: generation --batch-size 1, generation"
        in report
    )


@pytest.mark.parametrize(("ratio", "status"), [(0.5, 0), (1.5, 1)])
def test_the_status_of_all(ratio, status, tmp_path, script, monkeypatch):
    def run_verb(command):
        result = RESULT | {
            "rows": {"ours": row_of(ratio, "torchtitan")},
            "command": "python scripts/benchmark.py loader",
        }
        Path(command[-1]).write_text(json.dumps(result))
        return 0, ""

    monkeypatch.setattr(bounds, "run_verb", run_verb)
    places = ["--output", str(tmp_path / "all.json"), "--report", str(tmp_path / "report.md")]
    assert script("benchmark", "all", "--only", "loader", *places) == status
    assert json.loads((tmp_path / "all.json").read_text())["bounds"]["loader ours"]["found"] == ratio


def test_all_within(run_all):
    result, _ = run_all("--only", "loader", rows={"loader": {"ours": row_of(0.01, "torchtitan")}})
    assert result["held"] and list(result["bounds"]) == ["loader ours"]


def test_all_goes_on_after_a_failure(run_all, tmp_path, capsys):
    """The failure is told, an older result of that verb is not taken for its own, and the status is 1."""
    rows = {"loader": {"ours": row_of(0.01, "torchtitan")}, "mamba2": {"ours, chunk 256": row_of(0.7, "transformers")}}
    run_all("--only", "mamba2", rows=rows)
    result, report = run_all("--only", "mamba2", "loader", rows=rows, failing=["mamba2"])
    assert result["failed"] == {"mamba2": 3} and not result["held"]
    assert {name: figure["state"] for name, figure in result["bounds"].items()} == {
        "mamba2 ours, chunk 256": "failed", "loader ours": "held",
    }  # fmt: skip
    error = capsys.readouterr().err
    assert "mamba2 failed with status 3:\nTraceback: ...\nMemoryError: no room for mamba2\n" in error
    assert "| mamba2 ours, chunk 256 |  |  | 1.00 | failed |" in report
    assert "`python scripts/benchmark.py mamba2`: failed with status 3." in report


def test_only_keeps_earlier_results(run_all, tmp_path):
    """The report has what ran before; a file of an older version and a verb that never ran are none."""
    rows = {"loader": {"ours": row_of(0.01, "torchtitan")}, "mamba2": {"ours, chunk 256": row_of(1.7, "transformers")}}
    run_all("--only", "mamba2", rows=rows)
    (tmp_path / "benchmark_all/attention.json").write_text('{"rows": {"nape, cut / causal": {"ratio": 0.9}}}')
    result, report = run_all("--only", "loader", rows=rows)
    assert result["held"] and list(result["bounds"]) == ["loader ours"]
    assert f"| mamba2 ours, chunk 256 | transformers | 1.700 [1.690, 1.720] | 1.00 | {ABOVE} |" in report
    assert "| attention nape, cut / causal |  |  | 1.00 | not run |" in report
    assert "`python scripts/benchmark.py attention`: not run." in report


def test_an_interrupt_ends_the_verb_too(run_all, tmp_path, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(SystemExit) as end:
            run_all("--only", "loader", "mamba2", rows={}, hanging=["loader"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 128 + signal.SIGINT
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("interrupted in loader; results of the 1 runs before it are in")
    pid = int((tmp_path / "benchmark_all/loader.json.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_options_are_checked_before_anything_runs(tmp_path, script, capsys):
    """Every verb's faults at once."""
    out = ["--output", str(tmp_path / "all.json")]
    words = ["all", "--only", "loader", "mamba2", "--report", str(tmp_path), *out]
    assert script("benchmark", *words, "--options", "--layers", "0", "--rounds", "1") == 2
    error = capsys.readouterr().err.splitlines()
    assert error == [
        "error: --options: mamba2: --layers 0: must be above 0",
        "error: --options: mamba2: --rounds 1: must be at least 2",
        "error: --options: loader: unrecognized arguments: --layers 0",
        f"error: --report {tmp_path}: is a folder",
    ]
    assert not (tmp_path / "benchmark_all").exists()


def test_the_verbs_of_bounds():
    """Each bound is of a run, and the options of each run are those of its verb."""
    assert {(bound.verb, bound.options) for bound in bounds.BOUNDS} == set(bounds.RUNS) - {("stragglers", ())}
    arguments = argparse.Namespace(options=[], report=Path("report.md"))
    bounds.check(list(bounds.RUNS), arguments)


def test_the_table():
    """A base that is in a row's name is not told twice; columns are empty where a row has no such thing."""
    lines = table({"a / b": row_of(0.5, "b", same_tokens=True), "c": row_of(1.0, "b", peak_mib=6027.4)})
    assert lines == [
        {"variant": "a", "seconds": "0.25", "ratio [quartiles]": "0.500 [0.490, 0.520]", "to": "b",
         "same tokens": "yes", "peak mib": ""},
        {"variant": "c", "seconds": "0.25", "ratio [quartiles]": "1.000 [0.990, 1.020]", "to": "b",
         "same tokens": "", "peak mib": "6,027"},
    ]  # fmt: skip


def test_the_report(tmp_path):
    """What is in it, from a known result."""
    picture = tmp_path / "stragglers.png"
    picture.write_bytes(b"png")
    result = RESULT | {"rows": GENERATION, "command": "python scripts/benchmark.py generation", "notes": ["7 MiB"]}
    sections = [
        Section("generation", "python scripts/benchmark.py generation", "Answers.", "run", result),
        Section("stragglers", "python scripts/benchmark.py stragglers", "Ranks.", "run",
                result | {"rows": {}, "command": "python scripts/benchmark.py stragglers"}, picture),
        Section("loss", "python scripts/benchmark.py loss", "Pieces.", "not run"),
    ]  # fmt: skip
    figures = [Figure("generation ours", 1.0, "held", 0.8, [0.79, 0.82], "b"), Figure("loss", 0.25, "not run")]
    report = tmp_path / "out/benchmarks.md"
    write_report(report, figures, sections)
    text = report.read_text()
    head, _, generation, stragglers, loss = (part.strip() for part in text.split("\n## "))
    assert "on: Some CPU, 2 cores, 24 GiB; torch 2.13.0, torchtitan 0.2.2, transformers 5.0; 2 threads." in head
    assert "**GPU figures are missing**" in head and "scripts/gpu_check.sh" in head and "other options" not in head
    assert "| generation ours | b | 0.800 [0.790, 0.820] | 1.00 | held |\n| loss |  |  | 0.25 | not run |" in text
    assert generation.splitlines() == [
        "generation",
        "",
        "Answers. `python scripts/benchmark.py generation`, 2026-01-02: dim 768, compile, rates 0 0.5, p 0.1.",
        "",
        "| variant | seconds | ratio [quartiles] | to | same tokens |",
        "| --- | --- | --- | --- | --- |",
        "| ours | 0.25 | 0.800 [0.790, 0.820] | transformers | yes |",
        "",
        "- 7 MiB",
    ]
    assert stragglers.endswith("![stragglers](benchmarks_stragglers.png)")
    assert (tmp_path / "out/benchmarks_stragglers.png").read_bytes() == b"png"
    assert loss.splitlines()[-1] == "`python scripts/benchmark.py loss`: not run."
    assert (tmp_path / "out/benchmarks.png").stat().st_size > 10_000 and "](benchmarks.png)" in text


def test_machines_that_differ_are_told(tmp_path):
    """By every section, and not at the top; figures of a GPU are not missing then."""
    results = [
        RESULT | {"rows": {}, "command": "python scripts/benchmark.py loss"},
        RESULT | {"rows": {}, "command": "python scripts/benchmark.py loss --dim 128", "device": "H200"},
    ]
    sections = [Section("loss", "python scripts/benchmark.py loss", "Pieces.", "run", result) for result in results]
    write_report(tmp_path / "report.md", [Figure("loss", 0.25, "held", 0.2)], sections)
    text = (tmp_path / "report.md").read_text()
    assert text.count("Measured on: Some CPU, 2 cores") == 1 and text.count("Measured on: H200, Some CPU") == 1
    assert "GPU figures are missing" not in text
    assert "**Run with other options than the bounds are for**, see the commands: loss." in text


def test_input_pipeline_benchmark(packed, monkeypatch):
    """Data that take as long as the step: half of the time is waiting, and a step ahead most of it is gone."""
    sample = PackedDataset.__getitem__
    monkeypatch.setattr(PackedDataset, "__getitem__", lambda self, i: time.sleep(0.02) or sample(self, i))
    parser = argparse.ArgumentParser()
    input_pipeline.add_arguments(parser)
    sizes = ["--seq-len", "32", "--batch-size", "2", "--accumulation", "2", "--steps", "5", "--rounds", "2"]
    result = input_pipeline.measure(
        parser.parse_args([*sizes, "--tokens-per-second", "1600", "--data", str(packed / "train")])
    )
    assert result["step_seconds"] == 0.08
    waiting = {name: row["waiting"] for name, row in result["rows"].items()}
    assert len(waiting) == 4 and waiting["device computes, prefetch 0"] >= 0.5
    assert waiting["device computes, prefetch 1"] < 0.4
    assert waiting["Python launches, prefetch 0"] >= 0.5 and 0 < waiting["Python launches, prefetch 1"] < 1
    ahead = result["rows"]["device computes, prefetch 1"]
    assert ahead["base"] == "device computes, prefetch 0" and ahead["ratio"] < 0.9 and ahead["longest_wait"] > 0

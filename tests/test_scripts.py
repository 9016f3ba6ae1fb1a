"""The scripts: help, a quick benchmark, and shell files that parse."""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from regdrop_titan.benchmarks import input_pipeline
from regdrop_titan.data.packed import PackedDataset
from regdrop_titan.data.tokenizers import train_tokenizer
from regdrop_titan.models import build_model

from .distributed.harness import ROOT, environment


def python(*command):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=240
    )


HELPFUL = [
    "average_checkpoints", "benchmark", "evaluate", "export_hf", "generate", "import_hf", "prepare_data",
    "search_draft", "sweep", "train_exits", "train_tokenizer",
]  # fmt: skip


@pytest.mark.parametrize("name", HELPFUL)
def test_help(name, script, capsys):
    assert script(name, "--help") == 0
    assert "usage" in capsys.readouterr().out
    assert script(name, "nonsense") == 2


def test_dense_benchmark(tmp_path):
    out = tmp_path / "bench.json"
    sizes = ["--dim", "128", "--layers", "1", "--seq-len", "32", "--batch-size", "1", "--rounds", "3", "--warmup", "1"]
    done = python("scripts/benchmark.py", "dense", *sizes, "--output", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["rows"]["torchtitan llama3"]["ratio"] == 1.0
    assert {"rope", "nape", "nape vpad", "nape pre_norm", "nape pre_linear"} <= set(result["rows"])
    assert all(len(seconds) == 3 for seconds in result["seconds"].values())


def test_layer_dropout_benchmark(tmp_path):
    out = tmp_path / "bench.json"
    sizes = ["--dim", "128", "--layers", "2", "--seq-len", "16", "--batch-size", "4", "--rounds", "3", "--warmup", "1"]
    done = python("scripts/benchmark.py", "layer-dropout", *sizes, "--rates", "0", "0.5", "--output", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {"dense", "masked 0.5", "skipped 0.0 bernoulli", "skipped 0.5 bernoulli", "skipped 0.5 balanced"} == set(
        rows
    )
    assert rows["skipped 0.5 balanced"]["kept"] == 0.5
    assert python("scripts/benchmark.py", "layer-dropout", "--rates", "1").returncode == 2


def test_generation_benchmark(tmp_path, script):
    """With transformers' answers, token for token."""
    out = tmp_path / "bench.json"
    sizes = ["--dim", "128", "--layers", "1", "--seq-len", "16", "--batch-size", "2", "--rounds", "2", "--warmup", "1"]
    assert script("benchmark", "generation", *sizes, "--new-tokens", "4", "--output", str(out)) == 0
    result = json.loads(out.read_text())
    assert result["same_tokens"] and set(result["rows"]) == {"ours / transformers", "in pieces / one forward"}
    assert len(result["seconds"]["ours"]) == 2


def test_all_benchmarks(tmp_path, monkeypatch, script, capsys):
    """The verbs that are named run with their options; a figure above its bound is told, with status 1."""
    ran = []

    def run(command, check):
        ran.append(command[2:-2])
        ours = 0.8 if len(ran) == 1 else 1.1
        rows = {"ours / transformers": {"ratio": ours}}
        Path(command[-1]).write_text(json.dumps({"rows": rows}))

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["all", "--only", "generation", "--output", str(tmp_path / "all.json"), "--options", "--rounds", "3"]
    assert script("benchmark", *arguments) == 1
    assert ran == [
        ["generation", "--batch-size", "1", "--rounds", "3"],
        ["generation", "--batch-size", "1", "--family", "mamba2", "--rounds", "3"],
    ]
    out = capsys.readouterr().out
    assert out.count("above its bound") == 1
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["held"] for row in rows.values()] == [True, False]


def test_loss_benchmark(tmp_path):
    out = tmp_path / "bench.json"
    sizes = ["--dim", "128", "--vocab-size", "4096", "--seq-len", "512", "--rounds", "2", "--warmup", "0"]
    done = python("scripts/benchmark.py", "loss", *sizes, "--pieces", "32", "--skip-whole", "--output", str(out))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"].values()
    assert 0 < row["peak_mib"] < 64 and row["ratio"] == 1  # whole logits alone have 64 MiB


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_attention_benchmark(tmp_path, script, packed):
    """Time, the cache's memory, and errors of a checkpoint that fall with the cutoff."""
    model = build_model("nape_llama3", "debug", dim=32, n_layers=1, ffn_dim=32, vocab_size=256)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "checkpoint/step-1"), no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_args": dataclasses.asdict(model.args)}))
    out = tmp_path / "bench.json"
    sizes = ["--dim", "128", "--seq-len", "32", "--batch-size", "1", "--rounds", "2", "--warmup", "0"]
    error = [
        "--checkpoint",
        str(tmp_path / "checkpoint"),
        "--data",
        str(packed / "train"),
        "--cutoffs",
        "1",
        "15",
        "40",
    ]
    assert script("benchmark", "attention", *sizes, *error, "--lengths", "200", "--output", str(out)) == 0
    result = json.loads(out.read_text())
    assert {"nape, cut / causal", "nape, cut / nape, whole", "alibi, cut / alibi, whole"} <= set(result["rows"])
    whole, cut = result["cache_bytes"]["nape 200"]  # 400 slots of 128 channels; half of the heads have 41 + 200
    assert whole == 2 * 4 * 128 * 400 and cut == 2 * 4 * 64 * (400 + 241)
    errors = [result["errors"]["200"][cutoff][0] for cutoff in ("1.0", "15.0", "40.0")]
    assert errors[0] > 1e-2 > errors[1] > 1e-12 > errors[2]


def test_data_benchmark(tmp_path, script):
    out = tmp_path / "bench.json"
    sizes = ["--megabytes", "0.3", "--vocab-size", "300", "--samples", "16", "--rounds", "2"]
    assert script("benchmark", "data", *sizes, "--output", str(out)) == 0
    result = json.loads(out.read_text())
    assert set(result["rows"]) == {"1 worker / bare tokenizer", "2 workers / 1 worker"}
    assert result["loader"]["tokens_per_second"] > 0


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
    for row in result["rows"].values():
        low, high = row["quartiles"]
        assert low <= row["waiting"] <= high and row["longest_seconds"] > 0


def test_train_tokenizer(tmp_path, script, capsys):
    """The tokenizer of the filtered text; a bad record is named; a tokenizer that is there is not overwritten."""
    texts = [f"the {i} quick brown foxes" * 3 for i in range(50)]
    records = [{"body": text, "s": i % 2} for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--text-key", "body", "--filter", "s==1", "--vocab-size", "270",
                 "--output"]  # fmt: skip
    assert script("train_tokenizer", *arguments, str(tmp_path / "out")) == 0
    expected = json.loads(train_tokenizer(texts[1::2], 270).to_str())
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == expected
    assert script("train_tokenizer", *arguments, str(tmp_path / "out")) == 2
    assert "exists; packed sets may depend on it" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"body": "a", "s": 1}\n{"body": null, "s": 1}\n')
    assert script("train_tokenizer", *arguments, str(tmp_path / "other")) == 2
    assert "a.jsonl, line 2: body is null" in capsys.readouterr().err


SHELL = [*sorted((ROOT / "scripts").rglob("*.sh")), *sorted((ROOT / "scripts").rglob("*.sbatch")), ROOT / ".ci/run"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0

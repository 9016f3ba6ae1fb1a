"""The scripts: help, a quick benchmark, and shell files that parse."""

import json
import subprocess
import sys

import pytest

from .distributed.harness import ROOT, environment


def python(*command):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=240
    )


@pytest.mark.parametrize("script", ["benchmark", "evaluate"])
def test_help(script):
    done = python(f"scripts/{script}.py", "--help")
    assert done.returncode == 0 and "usage" in done.stdout
    assert python(f"scripts/{script}.py", "nonsense").returncode == 2


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


@pytest.mark.parametrize("script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci/run"], ids=lambda p: p.name)
def test_shell_scripts_parse(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0

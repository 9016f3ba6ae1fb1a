"""The experiments' tables and figures from logs written by hand; their scripts' arguments."""

import json
import statistics
import subprocess

import pytest

from .distributed.harness import ROOT

CONTEXT = 4


def write_run(folder, rounds, loss):
    """`rounds`: loss by multiple of the training context, for each validation round."""
    (folder / "evaluation").mkdir(parents=True)
    lines = [{"step": 10 * n} | {f"loss_{m}x": v for m, v in each.items()} for n, each in enumerate(rounds)]
    (folder / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"loss": loss, "documents": 3, "train_context": CONTEXT}
    (folder / "evaluation/position_loss.json").write_text(json.dumps(result))


def test_length_overfit_plots(tmp_path, script, capsys):
    """Ends, rises above the lowest round, and differences from weight decay of the same seed."""
    rise = {("wd", 1): 0.25, ("wd", 2): 0.75, ("vpad", 2): 0.125, ("vpad", 3): 0.5}
    for (setting, seed), up in rise.items():
        rounds = [{1: 9.0, 8: 1.0}, {1: 3.0, 8: 4.0}, {1: 2.0, 8: 4.0 + up}]
        write_run(tmp_path / f"seed={seed},{setting}", rounds, [5.0] * CONTEXT + [4.0 + up] * 28)
    assert script("experiments/length_overfit_plots", "--folder", str(tmp_path)) == 0
    numbers = json.loads((tmp_path / "length_overfit.json").read_text())
    assert numbers["1x"]["wd"] == {"1": 2.0, "2": 2.0} and numbers["8x"]["vpad"] == {"2": 4.125, "3": 4.5}
    assert numbers["1x above its lowest round"]["wd"] == {"1": 0.0, "2": 0.0}
    # the round before training, which was lower, does not count
    assert numbers["8x above its lowest round"]["wd"] == {"1": 0.25, "2": 0.75}
    # averages over 4 positions that end at least 4 behind the context hold none from inside it
    assert numbers["position loss past the context"]["vpad"] == pytest.approx({"2": 4.125, "3": 4.5})
    assert numbers["position loss within the context"]["wd"] == {"1": 5.0, "2": 5.0}
    assert numbers["rise to the last positions"]["wd"] == pytest.approx({"1": -0.75, "2": -0.25})
    assert numbers["the same above WD's"]["vpad"] == pytest.approx({"2": 0.125 - 0.75})
    markdown = (tmp_path / "length_overfit.md").read_text()
    mean, deviation = statistics.mean((4.125, 4.5)), statistics.stdev((4.125, 4.5))
    (row,) = [line.split(" | ") for line in markdown.splitlines() if line.startswith("| VPAD")]
    assert row[1] == "2" and row[3] == f"{mean:.3f} ± {deviation:.3f}" and row[-1] == "-0.625 |"
    assert "| Pre-Norm | 0 | - |" in markdown and markdown in capsys.readouterr().out
    for name in ("length_overfit_steps.png", "length_overfit_positions.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_length_overfit_without_runs(tmp_path, script, capsys):
    assert script("experiments/length_overfit_plots", "--folder", str(tmp_path)) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["layer_dropout_tiny", "length_overfit_tiny"])
def test_arguments(name):
    """Help, and wrong ones, before anything is installed or run."""

    def call(*arguments):
        command = ["bash", f"scripts/experiments/{name}.sh", *arguments]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=20)

    helped = call("--help")
    assert helped.returncode == 0 and f"./scripts/experiments/{name}.sh [--jobs N]" in helped.stdout
    for wrong in (["--jobs", "0"], ["--jobs"], ["--seeds"]):
        refused = call(*wrong)
        assert refused.returncode == 2 and refused.stderr.startswith("error: ")

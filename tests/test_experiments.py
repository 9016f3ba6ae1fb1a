"""The experiments' tables and figures from logs written by hand; their scripts' arguments."""

import json
import statistics
import subprocess

import pytest

from regdrop_titan.generation.drafts import Draft, write_draft

from .distributed.harness import ROOT
from .evaluation.tiny_runs import TEXT
from .evaluation.tiny_runs import write_run as write_model_run

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


def test_self_speculation_table(tmp_path, script, capsys):
    """Every draft is timed on prompts that no search has seen: all layers are always right, c is their cost."""
    texts = [{"text": line} for line in TEXT]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = {"data": str(tmp_path / "texts.jsonl"), "text_key": "text", "prompts": 2, "prompt_tokens": 4}
    for run in ("dense", "ild"):
        write_model_run(tmp_path / run)
        for method, parts in (
            ("tpe", (0, 1, 2)),
            ("nsga2", (0,)),
            ("hill", (0, (1, "attention"))),
            ("annealing", (2,)),
        ):
            folder = tmp_path / run / "drafts" / method
            folder.mkdir(parents=True)
            write_draft(folder / "draft.json", Draft(parts, 3), {})
            found = {"settings": settings, "trials": [{}] * 7, "best": {"score": 1.25}}
            (folder / "search.json").write_text(json.dumps(found))
    small = ["--folder", str(tmp_path), "--prompts", "2", "--new-tokens", "9", "--rounds", "2"]
    assert script("experiments/self_speculation_table", *small) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "self_speculation.md").read_text() in out and "| 0 1a (2) |" in out
    assert (tmp_path / "self_speculation.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "self_speculation.json").read_text())["rows"]
    assert [(row["run"], row["method"]) for row in rows[3:5]] == [("dense", "annealing"), ("ild", "tpe")]
    for row in rows:
        assert row["same_tokens"] and row["trials"] == 7 and row["score"] == 1.25 and len(row["by_prompt"]) == 2
        low, high = row["speed_up_quartiles"]
        assert 0 < low <= row["speed_up"] <= high
    assert rows[0]["alpha"] == rows[0]["accepted_share"] == 1.0 and rows[0]["layers"] == ["0", "1", "2"]
    assert rows[1]["tokens_a_pass"] <= rows[0]["tokens_a_pass"] == 3.0
    (tmp_path / "ild/drafts/hill/search.json").unlink()
    assert script("experiments/self_speculation_table", *small, "--rounds", "1") == 2
    assert "--rounds 1: must be at least 2" in capsys.readouterr().err
    assert script("experiments/self_speculation_table", *small) == 2
    assert "ild/drafts/hill: has no search.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["layer_dropout_tiny", "length_overfit_tiny", "self_speculation_tiny"])
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

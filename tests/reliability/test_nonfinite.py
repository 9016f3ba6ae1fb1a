"""A loss or gradient that is not finite reaches neither the weights nor a checkpoint (report L3)."""

import json

import pytest
import torch

from regdrop_titan.checkpoints import load_model, survey
from regdrop_titan.metrics import read_records

from ..distributed.harness import DDP, PP, TP, run_cases

SIX = ["--training.steps", "6", "--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "0"]
SKIP = [*SIX, "--training.on_nonfinite", "skip"]
# (layout, what is not finite, on which of 2 ranks): skipped at step 3, and the same with the update left out
SKIPPED = {
    "nan_fsdp": ([], "nan", 1),
    "loss_fsdp": ([], "loss", 1),
    "gradient_fsdp": ([], "gradient", 0),
    "nan_ddp": (DDP, "nan", 1),
    "loss_ddp": (DDP, "loss", 0),
    "gradient_tp": (TP, "gradient", 1),
    "nan_pp": (PP, "nan", 1),
    "gradient_pp": (PP, "gradient", 0),
}
LAYOUTS = {"fsdp": [], "ddp": DDP, "tp": TP, "pp": PP}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, packed):
    folder = tmp_path_factory.mktemp("nonfinite")
    cases = {
        name: {"args": SKIP + layout, "nonfinite": [what, rank, [3]]} for name, (layout, what, rank) in SKIPPED.items()
    }
    cases |= {f"omitted_{name}": {"args": SIX + layout, "omitted": [3]} for name, layout in LAYOUTS.items()}
    cases["stop"] = {"args": SIX, "nonfinite": ["nan", 1, [3]]}
    cases["in_a_row"] = {"args": [*SKIP, "--training.max_skips", "2"], "nonfinite": ["loss", 0, [2, 4, 5, 6]]}
    again = ["--job.dump_folder", str(folder / "nan_fsdp"), "--training.steps", "8"]
    cases["again"] = {"args": SKIP + again, "nonfinite": ["nan", 0, [7]]}
    run_cases(2, folder, packed, cases)
    return folder


@pytest.mark.parametrize("name", SKIPPED)
def test_a_skipped_step_is_a_step_without_its_update(runs, name):
    """On all ranks alike, bit for bit: later losses and the final weights; data and learning rate go on."""
    skipped = [r for r in read_records(runs / name / "metrics.jsonl") if r["step"] <= 6]
    omitted = read_records(runs / f"omitted_{name.split('_')[1]}/metrics.jsonl")
    assert [r["step"] for r in skipped] == [1, 2, 3, 4, 5, 6]
    assert skipped[2]["loss"] is None and skipped[2]["grad_norm"] is None
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [r[key] for r in skipped if r["step"] != 3] == [r[key] for r in omitted if r["step"] != 3], key
    assert skipped[2]["lr"] == omitted[2]["lr"] and skipped[2]["tokens"] == omitted[2]["tokens"]
    assert [r["skipped_steps"] for r in skipped] == [0, 0, 1, 1, 1, 1]
    a = load_model(runs / name / "checkpoint/step-6").state_dict()
    b = load_model(runs / f"omitted_{name.split('_')[1]}/checkpoint/step-6").state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_stop_leaves_the_last_good_checkpoint(runs):
    errors = [(runs / f"stop/error.{rank}").read_text() for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert errors[0].startswith("step 3: the loss is not finite on rank 1; its update was left out, the weights are ")
    assert survey(runs / "stop/checkpoint") == ([1, 2], {})
    assert [r["step"] for r in read_records(runs / "stop/metrics.jsonl")] == [1, 2]
    a = load_model(runs / "stop/checkpoint/step-2").state_dict()
    b = load_model(runs / "omitted_fsdp/checkpoint/step-2").state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_too_many_in_a_row(runs):
    """Steps 4, 5 and 6 after a good one, at most 2 allowed; the lone step 2 does not count."""
    error = (runs / "in_a_row/error.0").read_text()
    assert error.startswith("step 6: the loss is not finite on rank 0; it is number 3 in a row (training.max_skips)")
    assert [r["skipped_steps"] for r in read_records(runs / "in_a_row/metrics.jsonl")] == [0, 1, 1, 2, 3]


def test_the_count_goes_on_after_a_resume(runs):
    records = [json.loads(line) for line in (runs / "nan_fsdp/metrics.jsonl").read_text().splitlines()]
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert "NaN" not in (runs / "nan_fsdp/metrics.jsonl").read_text()
    assert (runs / "nan_fsdp/loss.png").read_bytes().startswith(b"\x89PNG")

"""Dropout in real runs: which ranks share masks, and bit-for-bit resume (reports D8, D9)."""

import json
import math

import pytest
import torch

from regdrop_titan.checkpoints import load_model
from regdrop_titan.data.packed import PackedDataset

from .harness import run_cases

P = "--parallelism."
VPAD = ["--dropout.placement", "vpad", "--dropout.p", "0.2"]
LAYOUTS = {
    "fsdp": [],
    "tp": [P + "tensor_parallel_degree", "2"],
    "pp": [P + "pipeline_parallel_degree", "2"],
    "ac": ["--activation_checkpoint.mode", "full"],
}
RESUMED = {
    "vpad": VPAD,
    "pre_norm": ["--dropout.placement", "pre_norm", "--dropout.p", "0.2"],
    "pre_linear_ac": ["--dropout.placement", "pre_linear", "--dropout.p", "0.2", "--dropout.mask", "per_linear",
                      "--activation_checkpoint.mode", "full"],
    "scheduled": [*VPAD, "--dropout.schedule", "decreasing", "--dropout.total_steps", "6"],
}  # fmt: skip
RESUMED_ON_2 = RESUMED | {"vpad_tp": VPAD + LAYOUTS["tp"], "vpad_pp": VPAD + LAYOUTS["pp"]}


def resume_cases(options: dict, folder) -> dict[str, dict]:
    """For each option: 6 steps in one go, and 3 + resume + 3 in another dump folder."""
    cases = {}
    for name, args in options.items():
        args = [*args, "--checkpoint.enable", "--checkpoint.interval", "3"]
        cases[f"{name}_whole"] = {"args": [*args, "--training.steps", "6"]}
        cases[f"{name}_parts"] = {"args": [*args, "--training.steps", "3"]}
        again = ["--job.dump_folder", str(folder / f"{name}_parts"), "--training.steps", "6"]
        cases[f"{name}_again"] = {"args": args + again}
    return cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dropout")


@pytest.fixture(scope="module")
def one(folder, packed):
    run_cases(1, folder / "1", packed, resume_cases(RESUMED, folder / "1"))
    return folder / "1"


@pytest.fixture(scope="module")
def two(folder, packed):
    masks = {
        name: {"args": VPAD + args + ["--training.steps", "2"], "masks": str(folder / f"masks_{name}")}
        for name, args in LAYOUTS.items()
    }
    run_cases(2, folder / "2", packed, masks | resume_cases(RESUMED_ON_2, folder / "2"))
    return folder / "2"


def drawn(folder, name: str) -> list[list]:
    """[step, shape, hash] of every mask that each rank drew."""
    lines = [(folder.parent / f"masks_{name}.{rank}").read_text().splitlines() for rank in (0, 1)]
    return [[json.loads(line) for line in rank] for rank in lines]


@pytest.mark.parametrize("name", ["fsdp", "tp", "pp"])
def test_every_mask_of_a_run_is_its_own(two, name):
    """Over ranks, steps, micro-batches and layers: data-parallel ranks see other sequences, tensor-parallel ranks
    other tokens, pipeline ranks other layers."""
    ranks = drawn(two, name)
    hashes = [mask[2] for rank in ranks for mask in rank]
    assert len(set(hashes)) == len(hashes)
    # 2 steps x micro-batches x sublayers of the rank's layers, each over the rank's rows and tokens
    micro_batches, sublayers, shape = {
        "fsdp": (2, 8, [2, 32, 64]),
        "tp": (4, 8, [2, 16, 64]),
        "pp": (8, 4, [1, 32, 64]),
    }[name]
    assert [len(rank) for rank in ranks] == [2 * micro_batches * sublayers] * 2
    assert all(mask[1] == shape for rank in ranks for mask in rank)


def test_recomputation_repeats_the_masks(two):
    """With full recomputation each mask is drawn twice, and the draws are those of the plain run."""
    plain, recomputed = drawn(two, "fsdp"), drawn(two, "ac")
    for a, b in zip(plain, recomputed, strict=True):
        counts = {mask[2]: 0 for mask in a}
        for mask in b:
            counts[mask[2]] += 1  # KeyError: a mask that the plain run did not draw
        assert set(counts.values()) == {2}


def read(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def check_resume(folder, name):
    whole, parts = read(folder / f"{name}_whole"), read(folder / f"{name}_parts")
    assert [record["step"] for record in parts] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [record[key] for record in parts] == [record[key] for record in whole], key
    a, b = (load_model(folder / f"{name}_{kind}/checkpoint/step-6").state_dict() for kind in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert all(math.isfinite(record["loss"]) for record in whole)


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_for_bit_on_one_process(one, name):
    check_resume(one, name)


@pytest.mark.parametrize("name", RESUMED_ON_2)
def test_resume_is_bit_for_bit_on_two(two, name):
    check_resume(two, name)


def test_dropout_acts_in_training(one, two):
    """Another placement gives another loss at the first step; the same one differs over layouts only in its masks."""
    losses = {name: read(one / f"{name}_whole")[0]["loss"] for name in RESUMED if name != "scheduled"}
    assert len(set(losses.values())) == len(losses)
    assert read(two / "vpad_whole")[0]["loss"] == pytest.approx(losses["vpad"], abs=0.1)
    assert read(two / "vpad_whole")[0]["loss"] != losses["vpad"]


def test_a_scheduled_rate_follows_the_steps(one):
    """DTS: 0.2 at the first step, 0 at the last, also after a resume."""
    assert [record["dropout_rate"] for record in read(one / "scheduled_parts")] == pytest.approx(
        [0.2 * (1 - t / 5) for t in range(6)]
    )


def test_data_go_on_where_they_stopped(packed):
    """The token stream of steps 4-6 after a resume is that of the whole run: what the loader's state says."""
    dataset = PackedDataset(packed / "train", 32, seed=42)
    assert len(dataset) > 6 * 8  # within one epoch, so that equal losses mean equal data
    firsts = [dataset[i]["input"].tolist() for i in range(48)]
    assert len({tuple(first) for first in firsts}) == 48

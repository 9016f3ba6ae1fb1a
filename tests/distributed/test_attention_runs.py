"""SmolLM3, scaled queries, 1.5-entmax and attention dropout in real runs: layouts as one process; resume."""

import pytest

from .harness import DDP, PP, TP, run_cases
from .test_dropout_runs import check_resume, resume_cases

VPAD = ["--dropout.placement", "vpad", "--dropout.p", "0.1"]
LAYERS = ["--layer_dropout.p_max", "0.6", "--layer_dropout.schedule", "constant"]
SCALED = ["--architecture.scaling", "adaptive", "--architecture.scaling_init", "identity"]
SMOLLM3 = ["--model.name", "smollm3", "--architecture.sliding_window", "7", *SCALED, *VPAD, *LAYERS]
KINDS = {
    "smollm3": SMOLLM3,
    "entmax": ["--architecture.attention", "entmax15", "--architecture.scaling", "adaptive", *VPAD, *LAYERS],
    "ssmax": ["--architecture.scaling", "ssmax", "--architecture.scaled_heads", "all"],
}
LAYOUTS = {
    "smollm3_fsdp": [], "smollm3_ddp": DDP, "smollm3_tp": TP, "smollm3_compile": ["--compile.enable"],
    "entmax_fsdp": [], "entmax_tp": TP, "entmax_pp": PP, "ssmax_tp": TP,
}  # fmt: skip
# combinations of the above
FURTHER = {
    "smollm3_ac": ["--activation_checkpoint.mode", "full"], "entmax_compile": ["--compile.enable"],
    "ssmax_fsdp": [], "ssmax_pp": PP,
}  # fmt: skip
DROPPED = ["--dropout.attention_p", "0.2"]
RESUMED = {"dropped_fsdp": DROPPED, "dropped_entmax_tp": DROPPED + KINDS["entmax"] + TP}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("attention_runs")


@pytest.fixture(scope="module")
def runs(folder, packed):
    one = {name: {"args": args, "same_masks": True} for name, args in KINDS.items()}
    two = {name: {"args": KINDS[name.split("_")[0]] + args, "same_masks": True} for name, args in LAYOUTS.items()}
    two["dense_fsdp"] = {"args": []}
    two["dropped_ac"] = {"args": [*DROPPED, "--activation_checkpoint.mode", "full"]}
    two |= resume_cases(RESUMED, folder / "2")
    # weights without scaled queries, and two runs from there, with and without them
    weights = ["--model.name", "smollm3", "--checkpoint.enable"]
    start = [*weights, "--checkpoint.initial_load_path", str(folder / "2/weights/checkpoint/step-3")]
    two["weights"] = {"args": weights}
    two["from_weights"] = {"args": start}
    two["scaled_from_weights"] = {"args": [*start, *SCALED]}
    return run_cases(1, folder / "1", packed, one) | run_cases(2, folder / "2", packed, two)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(runs, name):
    compare(runs[name], runs[name.split("_")[0]])


@pytest.mark.slow
def test_further_layouts(runs, folder, packed):
    cases = {name: {"args": KINDS[name.split("_")[0]] + args, "same_masks": True} for name, args in FURTHER.items()}
    for name, records in run_cases(2, folder / "further", packed, cases).items():
        compare(records, runs[name.split("_")[0]])


def compare(records, expected):
    for record, one in zip(records, expected, strict=True):
        rel = 1e-5 if record["step"] == 1 else 1e-4
        assert record["loss"] == pytest.approx(one["loss"], rel=rel)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=rel)


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_for_bit(runs, folder, name):
    check_resume(folder / "2", name)


def test_attention_dropout_is_on_and_recomputed_alike(runs):
    """Other losses than without it; with recomputation the same ones bit for bit."""
    for dropped, dense, again in zip(runs["dropped_fsdp_whole"], runs["dense_fsdp"], runs["dropped_ac"], strict=False):
        assert abs(dropped["loss"] - dense["loss"]) > 1e-5
        assert (again["loss"], again["grad_norm"]) == (dropped["loss"], dropped["grad_norm"])


def test_continual_pretraining_begins_to_scale(runs):
    """From weights that know nothing of scaled queries: the first loss bit for bit theirs, then another way."""
    plain, scaled = runs["from_weights"], runs["scaled_from_weights"]
    assert scaled[0]["loss"] == plain[0]["loss"] < runs["weights"][0]["loss"]
    assert scaled[2]["loss"] != plain[2]["loss"]

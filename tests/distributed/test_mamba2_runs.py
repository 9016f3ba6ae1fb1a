"""Mamba2 and hybrid stacks in real runs: every layout as one process, VPAD and layer dropout on; resume; decay."""

import pytest
import torch

from regdrop_titan.checkpoints import load_model
from regdrop_titan.checkpoints.safety import load_state, read_metadata
from regdrop_titan.metrics import read_records

from .harness import DDP, PP, TP, run_cases
from .test_dropout_runs import check_resume, resume_cases

MAMBA = ["--model.name", "mamba2", "--architecture.ssm_head_dim", "16", "--architecture.state_size", "16",
         "--architecture.chunk_size", "12", "--architecture.no-tied_embeddings",
         "--dropout.placement", "vpad", "--dropout.p", "0.1",
         "--layer_dropout.p_max", "0.8", "--layer_dropout.schedule", "constant"]  # fmt: skip
HYBRID = [*MAMBA, "--architecture.layers", "mamba,attention"]
KINDS = {"mamba": MAMBA, "hybrid": HYBRID, "documents": [*MAMBA, "--architecture.document_mask"],
         "tied": [*MAMBA, "--architecture.tied_embeddings"],
         "sublayer": [*HYBRID, "--layer_dropout.unit", "sublayer"]}  # fmt: skip
LAYOUTS = {
    "mamba_fsdp": [], "mamba_ddp": DDP, "mamba_tp": TP, "mamba_pp": PP,
    "mamba_ac": ["--activation_checkpoint.mode", "full"], "mamba_compile": ["--compile.enable"],
    "hybrid_tp": TP, "hybrid_pp": PP, "documents_tp": TP, "tied_tp": TP,
}  # fmt: skip
FURTHER = {"hybrid_fsdp": [], "sublayer_tp": TP}  # combinations of the above
FOUR = {"mamba_fsdp_tp": TP, "mamba_pp_fsdp": PP}
PASSING = [*HYBRID, "--layer_dropout.p_max", "0.0", "--training.state_passing"]
# local batches of 2 on one data-parallel rank: the same rows follow each other in all of them
ALIKE = {"passing_tp": TP, "passing_tp_ac": [*TP, "--activation_checkpoint.mode", "full"]}
RESUMED = {"mamba_fsdp": MAMBA, "mamba_tp": MAMBA + TP, "passing_fsdp": PASSING}
BF16 = ["--training.mixed_precision_param", "bfloat16"]


def kind(name: str) -> list[str]:
    return KINDS[name.split("_")[0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mamba2_runs")


@pytest.fixture(scope="module")
def reference(folder, packed):
    cases = {name: {"args": args, "same_masks": True} for name, args in KINDS.items()}
    cases["bf16"] = {"args": MAMBA + BF16, "same_masks": True}
    cases["passing"] = {"args": PASSING, "same_masks": True}
    cases["from_zero"] = {"args": PASSING[:-1], "same_masks": True}
    return run_cases(1, folder / "1", packed, cases)


@pytest.fixture(scope="module")
def runs(folder, packed):
    two = {name: {"args": kind(name) + args, "same_masks": True} for name, args in LAYOUTS.items()}
    two |= resume_cases(RESUMED, folder / "2")
    two |= {name: {"args": PASSING + args, "same_masks": True} for name, args in ALIKE.items()}
    decayed = ["--checkpoint.enable", "--optimizer.weight_decay", "0.1"]
    two["bf16"] = {"args": [*MAMBA, *BF16, *decayed], "same_masks": True}
    four = {name: {"args": kind(name) + args, "same_masks": True} for name, args in FOUR.items()}
    return run_cases(2, folder / "2", packed, two) | run_cases(4, folder / "4", packed, four)


@pytest.mark.parametrize("name", [*LAYOUTS, *FOUR])
def test_every_layout_trains_as_one_process(runs, reference, name):
    compare(runs[name], reference[name.split("_")[0]])


@pytest.mark.slow
def test_further_layouts(folder, packed, reference):
    cases = {name: {"args": kind(name) + args, "same_masks": True} for name, args in FURTHER.items()}
    for name, records in run_cases(2, folder / "further", packed, cases).items():
        compare(records, reference[name.split("_")[0]])


def compare(records, expected):
    assert [record["step"] for record in records] == [1, 2, 3]
    for record, one in zip(records, expected, strict=True):
        first = record["step"] == 1
        assert record["loss"] == pytest.approx(one["loss"], rel=1e-5 if first else 1e-4)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 if first else 1e-4)
        assert record["kept_fraction"] == one["kept_fraction"] < 1
        assert record["flops_saved"] == pytest.approx(one["flops_saved"])


@pytest.mark.slow
def test_compiled_under_tensor_parallel(folder, packed, reference):
    """Half a minute of compilation each."""
    cases = {"mamba": MAMBA, "passing": PASSING}
    compiled = {name: {"args": [*args, *TP, "--compile.enable"], "same_masks": True} for name, args in cases.items()}
    for name, records in run_cases(2, folder / "compiled", packed, compiled).items():
        for record, one in zip(records, reference[name], strict=True):
            assert record["loss"] == pytest.approx(one["loss"], rel=1e-4)
            assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_for_bit(runs, folder, name):
    check_resume(folder / "2", name)


@pytest.mark.parametrize("name", ALIKE)
def test_passed_states_in_every_layout(runs, reference, name):
    """As one process; another loss than from zero, from the second micro-batch on."""
    for record, one, other in zip(runs[name], reference["passing"], reference["from_zero"], strict=True):
        assert record["loss"] == pytest.approx(one["loss"], rel=1e-5 if record["step"] == 1 else 1e-4)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert abs(one["loss"] - other["loss"]) > 1e-4


def test_passed_states_of_another_layout_are_refused(runs, folder, packed):
    args = [*PASSING, "--checkpoint.enable", "--training.steps", "7"]
    case = {"args": [*args, "--job.dump_folder", str(folder / "2/passing_fsdp_whole")]}
    with pytest.raises(AssertionError, match=r"cannot be loaded: .*passed_states.data_parallel_0_of_1"):
        run_cases(1, folder / "1", packed, {"elsewhere": case})
    case["args"] += ["--checkpoint.exclude_from_loading", "passed_states"]
    run_cases(1, folder / "1", packed, {"elsewhere": case})
    assert read_records(folder / "2/passing_fsdp_whole/metrics.jsonl")[-1]["step"] == 7


def test_mixed_precision_keeps_decays_in_fp32(runs, reference, folder):
    """bf16 with FSDP2: near the autocast run of one process; no decay of A_log, dt_bias and D, decay of the rest."""
    for record, one in zip(runs["bf16"], reference["bf16"], strict=True):
        assert record["loss"] == pytest.approx(one["loss"], rel=2e-2)
    checkpoint = folder / "2/bf16/checkpoint/step-3"
    names = [key for key in read_metadata(checkpoint).state_dict_metadata if key.endswith(".weight_decay")]
    state = dict.fromkeys(names, -1.0)
    load_state(state, checkpoint, no_dist=True)
    undecayed = {name for name, value in state.items() if value == 0}
    assert undecayed == {name for name in names if ".ssm." in name} and len(undecayed) == 12
    model = load_model(checkpoint)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())

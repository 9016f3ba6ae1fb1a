"""Mamba2 and hybrid stacks in real runs: every layout as one process, VPAD and layer dropout on; resume; decay."""

import pytest
import torch

from regdrop_titan.checkpoints import load_model
from regdrop_titan.checkpoints.safety import load_state, read_metadata

from .harness import run_cases
from .test_dropout_runs import check_resume, resume_cases

P = "--parallelism."
TP = [P + "tensor_parallel_degree", "2"]
PP = [P + "pipeline_parallel_degree", "2"]
DDP = [P + "data_parallel_replicate_degree", "2", P + "data_parallel_shard_degree", "1"]
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
    "mamba_ac": ["--activation_checkpoint.mode", "full"], "mamba_compile_tp": [*TP, "--compile.enable"],
    "hybrid_fsdp": [], "hybrid_tp": TP, "hybrid_pp": PP, "documents_tp": TP, "tied_tp": TP, "sublayer_tp": TP,
}  # fmt: skip
FOUR = {"mamba_fsdp_tp": TP, "mamba_pp_fsdp": PP}
RESUMED = {"mamba_fsdp": MAMBA, "mamba_tp": MAMBA + TP}
BF16 = ["--training.mixed_precision_param", "bfloat16"]


def kind(name: str) -> list[str]:
    return KINDS[name.split("_")[0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mamba2_runs")


@pytest.fixture(scope="module")
def reference(folder, packed):
    cases = {name: {"args": args, "same_masks": True} for name, args in KINDS.items()}
    cases["bf16"] = {"args": MAMBA + BF16}
    return run_cases(1, folder / "1", packed, cases)


@pytest.fixture(scope="module")
def runs(folder, packed):
    two = {name: {"args": kind(name) + args, "same_masks": True} for name, args in LAYOUTS.items()}
    two |= resume_cases(RESUMED, folder / "2")
    two["bf16"] = {"args": [*MAMBA, *BF16, "--checkpoint.enable", "--optimizer.weight_decay", "0.1"]}
    four = {name: {"args": kind(name) + args, "same_masks": True} for name, args in FOUR.items()}
    return run_cases(2, folder / "2", packed, two) | run_cases(4, folder / "4", packed, four)


@pytest.mark.parametrize("name", [*LAYOUTS, *FOUR])
def test_every_layout_trains_as_one_process(runs, reference, name):
    expected = reference[name.split("_")[0]]
    assert [record["step"] for record in runs[name]] == [1, 2, 3]
    for record, one in zip(runs[name], expected, strict=True):
        first = record["step"] == 1
        assert record["loss"] == pytest.approx(one["loss"], rel=1e-5 if first else 1e-4)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 if first else 1e-4)
        assert record["kept_fraction"] == one["kept_fraction"] < 1
        assert record["flops_saved"] == pytest.approx(one["flops_saved"])


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_for_bit(runs, folder, name):
    check_resume(folder / "2", name)


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

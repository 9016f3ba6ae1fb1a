"""Celerity under CompleteP in real runs: every layout as one process, VPAD and layer dropout on; groups; resume."""

import pytest
import torch

from regdrop_titan.checkpoints.safety import load_state, read_metadata

from .harness import DDP, PP, TP, run_cases
from .test_dropout_runs import check_resume, resume_cases

# twice the width and depth of the base, biases and LayerNorm, FFN of 4 d
CELERITY = ["--model.name", "celerity", "--architecture.n_kv_heads", "4", "--architecture.ffn_dim", "256",
            "--parametrization.kind", "completep", "--parametrization.base_dim", "32",
            "--parametrization.base_layers", "2", "--optimizer.weight_decay", "0.1"]  # fmt: skip
DROPS = ["--dropout.placement", "vpad", "--dropout.p", "0.1",
         "--layer_dropout.p_max", "0.6", "--layer_dropout.schedule", "constant"]  # fmt: skip
LAYOUTS = {"fsdp": [], "ddp": DDP, "tp": TP, "pp": PP, "compile": ["--compile.enable"],
           "tp_ac": [*TP, "--activation_checkpoint.mode", "full"]}  # fmt: skip
RESUMED = {"fsdp": CELERITY + DROPS, "pp": CELERITY + DROPS + PP}
AT_BASE = ["--parametrization.base_dim", "64", "--parametrization.base_layers", "4",
           "--parametrization.attention_scale", "inverse"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("celerity_runs")


@pytest.fixture(scope="module")
def runs(folder, packed):
    one = {"one": {"args": CELERITY + DROPS, "same_masks": True}}
    standard = ["--parametrization.kind", "standard", "--parametrization.decay", "matrices"]
    one["base"] = {"args": [*CELERITY, *AT_BASE]}
    one["standard"] = {"args": [*CELERITY, *AT_BASE, *standard]}
    two = {name: {"args": CELERITY + DROPS + args, "same_masks": True} for name, args in LAYOUTS.items()}
    two |= resume_cases(RESUMED, folder / "2")
    return run_cases(1, folder / "1", packed, one) | run_cases(2, folder / "2", packed, two)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(runs, name):
    for record, one in zip(runs[name], runs["one"], strict=True):
        rel = 1e-5 if record["step"] == 1 else 1e-4
        assert record["loss"] == pytest.approx(one["loss"], rel=rel)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=rel)
        assert record["lr"] == one["lr"]  # the schedule's, whatever groups a stage has
        assert record["kept_fraction"] == one["kept_fraction"] < 1


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_for_bit(runs, folder, name):
    check_resume(folder / "2", name)


def test_completep_at_base_size_is_standard(runs):
    """Without layer dropout and with the same attention scale, three steps bit for bit."""
    for a, b in zip(runs["base"], runs["standard"], strict=True):
        assert (a["loss"], a["grad_norm"], a["lr"]) == (b["loss"], b["grad_norm"], b["lr"])


@pytest.mark.parametrize("name", RESUMED)
def test_groups_in_the_checkpoint(runs, folder, name):
    """What the optimizer has for each parameter, over all stages: lr and eps over m_d = 2, eps over m_L = 2 too."""
    checkpoint = folder / f"2/{name}_whole/checkpoint/step-6"
    wanted = ("lr", "initial_lr", "eps", "weight_decay")
    keys = [key for key in read_metadata(checkpoint).state_dict_metadata
            if key.startswith("optimizer.param_groups.") and key.endswith(wanted)]  # fmt: skip
    state: dict = dict.fromkeys(keys, 0.0)
    load_state(state, checkpoint)
    found = {}
    for key, value in state.items():
        parameter, setting = key.removeprefix("optimizer.param_groups.").rsplit(".", 1)
        found.setdefault(parameter, {})[setting] = value
    assert len(found) == 4 * 16 + 4
    for parameter, own in found.items():
        hidden = parameter.startswith("layers.")
        matrix = hidden and "norm" not in parameter and parameter.endswith("weight")
        ends = parameter in ("tok_embeddings.weight", "output.weight")
        assert own["initial_lr"] == (5e-3 if matrix else 1e-2), parameter
        assert own["weight_decay"] == (0.2 if matrix else 0.1 if ends else 0.0), parameter
        assert own["eps"] == 1e-8 / (4 if hidden else 2), parameter
    assert torch.tensor([own["lr"] / own["initial_lr"] for own in found.values()]).std() < 1e-9

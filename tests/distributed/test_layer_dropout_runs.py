"""Layer dropout in real runs: the same masks, losses and gradients in every layout; resume; savings as predicted."""

import json

import pytest
import torch

from regdrop_titan.checkpoints import load_model
from regdrop_titan.regularization import mean_rate

from .harness import DDP, PP, ROOT, TP, P, run_cases, train_py
from .test_dropout_runs import check_resume, read, resume_cases

ILD = ["--layer_dropout.p_max", "0.9", "--layer_dropout.schedule", "constant"]
BALANCED = ["--layer_dropout.p_max", "0.7", "--layer_dropout.sampling", "balanced"]
SUBLAYER = ["--layer_dropout.p_max", "0.7", "--layer_dropout.schedule", "constant", "--layer_dropout.unit", "sublayer"]
DOCUMENTS = [*ILD, "--architecture.document_mask"]
OP_AC = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
LAYOUTS = {
    2: {
        "ild_fsdp": ILD,
        "ild_ddp": ILD + DDP,
        "ild_tp": ILD + TP,
        "ild_pp": ILD + PP,
        "ild_ac_full": [*ILD, "--activation_checkpoint.mode", "full"],
        "ild_ac_op": ILD + OP_AC,
        "ild_compile": [*ILD, "--compile.enable"],
        "ild_masked": [*ILD, "--layer_dropout.no-skip_compute"],
        "sublayer_fsdp": SUBLAYER,
        "sublayer_tp": SUBLAYER + TP,
        "sublayer_pp": SUBLAYER + PP,
        "documents_pp": DOCUMENTS + PP,
        "batch_fsdp": [*ILD, "--layer_dropout.granularity", "batch"],
    },
    4: {
        "ild_fsdp_tp": ILD + TP,
        "ild_pp_fsdp": ILD + PP,
        "ild_interleaved": [*ILD, *PP, P + "pipeline_parallel_schedule", "Interleaved1F1B"],
    },
}
REFERENCES = {"ild": ILD, "sublayer": SUBLAYER, "documents": DOCUMENTS, "batch": LAYOUTS[2]["batch_fsdp"]}
SAVINGS = {
    "bernoulli": ["--layer_dropout.p_max", "0.6"],
    "balanced": BALANCED,
    "uniform": ["--layer_dropout.p_max", "0.5", "--layer_dropout.distribution", "uniform"],
    "alternating": ["--layer_dropout.p_max", "0.5", "--layer_dropout.distribution", "alternating",
                    "--layer_dropout.schedule", "increasing"],
    "extreme": ["--layer_dropout.p_max", "0.99", "--layer_dropout.distribution", "uniform",
                "--layer_dropout.schedule", "constant"],
}  # fmt: skip
CASES = [(n, name) for n, layouts in LAYOUTS.items() for name in layouts]
# combinations of the above
FURTHER = {
    2: {"ild_compile_ac": [*ILD, "--compile.enable", *OP_AC], "documents_fsdp": DOCUMENTS},
    4: {
        "ild_hsdp": [*ILD, P + "data_parallel_replicate_degree", "2"],
        "ild_compile_fsdp_tp": [*ILD, *TP, "--compile.enable"],
    },
}
RESUMED = {
    "ild": ILD,
    "balanced_vpad": [
        *BALANCED,
        "--layer_dropout.total_steps",
        "6",
        "--dropout.placement",
        "vpad",
        "--dropout.p",
        "0.2",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layer_dropout")


@pytest.fixture(scope="module")
def reference(folder, packed):
    cases = {name: {"args": args} for name, args in REFERENCES.items()}
    steps = ["--training.steps", "20", "--lr_scheduler.total_steps", "20", "--optimizer.lr", "1e-3"]
    cases |= {name: {"args": args + steps} for name, args in SAVINGS.items()}
    return run_cases(1, folder / "1", packed, cases | resume_cases(RESUMED, folder / "1"))


@pytest.fixture(scope="module")
def runs(folder, packed, reference):
    two = {name: {"args": args} for name, args in LAYOUTS[2].items()}
    two |= resume_cases(RESUMED | {"ild_pp": ILD + PP}, folder / "2")
    # stopped on one process, resumed on two
    elastic = [*ILD, "--checkpoint.enable", "--checkpoint.interval", "3"]
    two["elastic"] = {"args": [*elastic, "--training.steps", "6", "--job.dump_folder", str(folder / "1/elastic")]}
    run_cases(1, folder / "1", packed, {"elastic": {"args": [*elastic, "--training.steps", "3"]}})
    results = {(2, name): records for name, records in run_cases(2, folder / "2", packed, two).items()}
    four = run_cases(4, folder / "4", packed, {name: {"args": args} for name, args in LAYOUTS[4].items()})
    return results | {(4, name): records for name, records in four.items()}


@pytest.mark.parametrize(("n", "name"), CASES)
def test_every_layout_trains_as_one_process(runs, reference, n, name):
    """ILD at 0.9 and 2 sequences a micro-batch: ranks that keep nothing of a layer beside ranks that do."""
    compare(name, runs[n, name], reference[name.split("_")[0]])


@pytest.mark.slow
def test_further_layouts(folder, packed, reference):
    for n, layouts in FURTHER.items():
        cases = {name: {"args": args} for name, args in layouts.items()}
        for name, records in run_cases(n, folder / f"further_{n}", packed, cases).items():
            compare(name, records, reference[name.split("_")[0]])


def compare(name, records, expected):
    assert [record["step"] for record in records] == [1, 2, 3]
    for record, one in zip(records, expected, strict=True):
        assert record["loss"] == pytest.approx(one["loss"], rel=1e-5 if record["step"] == 1 else 1e-4)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert record["kept_fraction"] == one["kept_fraction"] < 1
        if name != "ild_masked":
            assert record["flops_saved"] == pytest.approx(one["flops_saved"])


def test_masking_saves_nothing(runs):
    assert all(record["flops_saved"] == 0 for record in runs[2, "ild_masked"])


@pytest.mark.parametrize("name", SAVINGS)
def test_savings_are_those_that_mean_rate_predicts(reference, folder, name):
    """After 20 steps, within 4 standard errors of the draws (balanced: within one sequence a step and layer sum)."""
    options = dict(zip(SAVINGS[name][::2], SAVINGS[name][1::2], strict=True))
    get = lambda key, default: options.get(f"--layer_dropout.{key}", default)  # noqa: E731
    p_max, L, T, G = float(get("p_max", 0)), 4, 20, 8
    predicted = mean_rate(get("distribution", "increasing"), get("schedule", "decreasing"), p_max, L, T)
    last = reference[name][-1]
    assert last["step"] == T and all(torch.isfinite(torch.tensor(record["loss"])) for record in reference[name])
    error = 1 / (2 * L) if name == "balanced" else 4 * (predicted * (1 - predicted) / (L * T * G)) ** 0.5
    assert abs(last["flops_saved"] - predicted) < error
    assert last["flops_executed"] < last["flops"]
    planned = json.loads((folder / "1" / name / "config.json").read_text())["flops"]
    assert planned["dense"] == last["flops"] and planned["saved_share_of_layers"] == pytest.approx(predicted)


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_for_bit_on_one_process(reference, folder, name):
    check_resume(folder / "1", name)


@pytest.mark.parametrize("name", [*RESUMED, "ild_pp"])
def test_resume_is_bit_for_bit_on_two(runs, folder, name):
    check_resume(folder / "2", name)


def test_resumed_on_another_number_of_ranks(runs, folder):
    """The same masks, and losses to 1e-4."""
    whole, parts = read(folder / "1/ild_whole"), read(folder / "1/elastic")
    assert [record["step"] for record in parts] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(parts, whole, strict=True):
        assert a["kept_fraction"] == b["kept_fraction"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["flops_saved"] == pytest.approx(b["flops_saved"])
    load_model(folder / "1/elastic/checkpoint")


def test_ranks_with_other_masks_are_refused(folder, packed):
    """Two tensor-parallel ranks that drop different sequences would give a wrong result and no error."""
    case = {"args": ILD + TP, "other_masks": True}
    with pytest.raises(AssertionError, match="the ranks drew different layer-dropout masks at step 1"):
        run_cases(2, folder / "differ", packed, {"differ": case})


def test_the_debug_config(tmp_path, packed):
    config = ROOT / "train_configs/debug_layer_dropout.toml"
    statuses, said = train_py(
        2, tmp_path, "--job.config_file", str(config), "--training.steps", "3", "--layer_dropout.total_steps", "300",
        "--job.dump_folder", str(tmp_path / "out"), "--training.dataset_source", "prepared",
        "--training.dataset_path", str(packed / "train"), "--validation.no-enable",
    )  # fmt: skip
    assert statuses == [0, 0], said
    assert "layer dropout: rate 0.25" in said

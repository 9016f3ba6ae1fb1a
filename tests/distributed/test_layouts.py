"""Every layout trains as one process does: same initial weights, losses and gradient norms on the same batches."""

import json

import pytest
import torch

from regdrop_titan.checkpoints import load_model

from .harness import run_cases

P = "--parallelism."
DDP = [P + "data_parallel_replicate_degree", "2", P + "data_parallel_shard_degree", "1"]
TP = [P + "tensor_parallel_degree", "2"]
PP = [P + "pipeline_parallel_degree", "2"]
SAVE = ["--checkpoint.enable", "--checkpoint.interval", "100"]
VALIDATE = ["--validation.enable", "--validation.freq", "2", "--validation.local_batch_size", "2"]
DOCUMENTS = ["--architecture.document_mask"]
OPTIONS = {  # whatever the layout, these change what is computed, so each has its own one-process reference
    "rope_window": ["--architecture.position", "rope", "--architecture.sliding_window", "8"],
    "documents": DOCUMENTS,
    "cut": ["--architecture.alibi_cutoff", "1"],
    "tied": ["--architecture.tied_embeddings"],
}
LAYOUTS = {
    2: {
        "fsdp": SAVE,
        "ddp": DDP + SAVE,
        "tp": TP + SAVE,
        "tp_no_loss_parallel": [*TP, P + "disable_loss_parallel"],
        "pp": PP + SAVE,
        "ac_full": ["--activation_checkpoint.mode", "full"],
        "ac_op": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"],
        "compile": ["--compile.enable"],
        "compile_tp": ["--compile.enable", *TP],
        "rope_window": OPTIONS["rope_window"] + TP,
        "documents": OPTIONS["documents"] + PP,
        "cut": OPTIONS["cut"] + TP,
        "tied": OPTIONS["tied"],
        "tied_tp": OPTIONS["tied"] + TP,
    },
    4: {
        "hsdp": [P + "data_parallel_replicate_degree", "2", *SAVE],
        "fsdp_tp": TP + SAVE,
        "pp_fsdp": PP + SAVE,
        "pp_tp": PP + TP,
    },
}
CASES = [(n, name) for n, layouts in LAYOUTS.items() for name in layouts]
# combinations of the above
FURTHER = {
    2: {
        "ac_layer": ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "2"],
        "compile_ac": ["--compile.enable", "--activation_checkpoint.mode", "full"],
        "documents_fsdp": OPTIONS["documents"],
    },
    4: {
        "interleaved": [*PP, P + "pipeline_parallel_schedule", "Interleaved1F1B"],
        "compile_fsdp_tp": ["--compile.enable", *TP],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def reference(folder, packed):
    cases = {"one": SAVE, "one_accumulated": [*SAVE, "--training.local_batch_size", "8"], **OPTIONS}
    cases = {name: {"args": args + VALIDATE, "check_init": True} for name, args in cases.items()}
    return run_cases(1, folder / "1", packed, cases)


@pytest.fixture(scope="module")
def runs(folder, packed, reference):
    results = {}
    for n, layouts in LAYOUTS.items():
        cases = {name: {"args": args + VALIDATE, "check_init": True} for name, args in layouts.items()}
        results |= {(n, name): records for name, records in run_cases(n, folder / str(n), packed, cases).items()}
    return results


def reference_of(name: str) -> str:
    return next((option for option in OPTIONS if name.startswith(option)), "one")


@pytest.mark.parametrize(("n", "name"), CASES)
def test_losses_and_gradient_norms_equal_one_process(runs, reference, n, name):
    compare(runs[n, name], reference[reference_of(name)])


def compare(records, expected):
    assert [record["step"] for record in records] == [1, 2, 3]
    for record, one in zip(records, expected, strict=True):
        assert record["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert record["tokens"] == one["tokens"] == record["step"] * 8 * 32


@pytest.mark.slow
def test_further_layouts(folder, packed, reference):
    for n, layouts in FURTHER.items():
        cases = {name: {"args": args + VALIDATE, "check_init": True} for name, args in layouts.items()}
        for name, records in run_cases(n, folder / f"further_{n}", packed, cases).items():
            compare(records, reference[reference_of(name)])


def test_options_differ_from_the_reference(reference):
    """The options under test change the loss, so that agreeing on them means something."""
    losses = {name: records[-1]["loss"] for name, records in reference.items()}
    assert losses["one"] == pytest.approx(losses["one_accumulated"], rel=1e-5)
    for option in OPTIONS:
        assert abs(losses[option] - losses["one"]) > 1e-3


@pytest.mark.parametrize(("n", "name"), CASES)
def test_validation_is_the_token_weighted_mean_in_every_layout(runs, folder, n, name):
    """22 windows do not divide into whole batches, and every round sees the same ones."""
    read = lambda path: [json.loads(line) for line in (path / "validation.jsonl").read_text().splitlines()]  # noqa: E731
    got, one = read(folder / str(n) / name), read(folder / "1" / reference_of(name))
    assert [record["step"] for record in got] == [1, 2, 3]
    for record, expected in zip(got, one, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.parametrize(("n", "name"), [(n, name) for n, name in CASES if "--checkpoint.enable" in LAYOUTS[n][name]])
def test_a_checkpoint_of_any_layout_loads_on_one_process(runs, folder, n, name):
    model = load_model(folder / str(n) / name / "checkpoint")
    one = load_model(folder / "1" / "one" / "checkpoint")
    tokens = torch.arange(1, 33)[None]
    with torch.no_grad():
        # three AdamW steps at a high rate: differences of 1e-7 in gradients near zero become 1e-4 in weights
        torch.testing.assert_close(model(tokens), one(tokens), rtol=1e-2, atol=5e-3)

"""`training.loss_chunks` in every layout: what one process computes from whole logits, in training and validation."""

import json

import pytest

from .harness import DDP, PP, TP, P, run_cases

PIECES = ["--training.loss_chunks", "3"]  # of 64 tokens: 22, 22, 20
TIED = ["--architecture.tied_embeddings"]
VALIDATE = ["--validation.enable", "--validation.freq", "2"]
STEPS = ["--training.steps", "2", "--training.local_batch_size", "2"]
LAYOUTS = {
    "fsdp": [],
    "ddp": DDP,
    "tp": TP,
    "tp_no_loss_parallel": [*TP, P + "disable_loss_parallel"],
    "pp": PP,
    "compile_ac": ["--compile.enable", "--compile.backend", "aot_eager", "--activation_checkpoint.mode", "full"],
    "tied": TIED,
    "tied_tp": TIED + TP,
    "moments": ["--metrics.log_moments", "1", "--dropout.placement", "vpad", "--dropout.p", "1e-9", *PP],
}
# combinations of the above
FURTHER = {
    2: {"interleaved": [*PP, P + "pipeline_parallel_schedule", "Interleaved1F1B"]},
    4: {"fsdp_tp": TP, "pp_fsdp": PP, "pp_tp": PP + TP, "tied_fsdp_tp": TIED + TP},
}


def in_pieces(layouts: dict[str, list[str]]) -> dict[str, dict]:
    return {name: {"args": [*STEPS, *VALIDATE, *PIECES, *args], "no_logits": True} for name, args in layouts.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loss")


@pytest.fixture(scope="module")
def reference(folder, packed):
    """Of one process: whole, and in pieces."""
    whole = [*STEPS, *VALIDATE, "--training.loss_chunks", "1"]
    cases = {"untied": {"args": whole}, "tied": {"args": whole + TIED}, **in_pieces({"one": []})}
    return run_cases(1, folder / "1", packed, cases)


@pytest.fixture(scope="module")
def runs(folder, packed):
    return run_cases(2, folder / "2", packed, in_pieces(LAYOUTS))


def compare(records, folder, name, reference, reference_folder):
    whole = "tied" if name.startswith("tied") else "untied"
    assert len(records) == len(reference[whole]) == 2
    for record, one in zip(records, reference[whole], strict=True):
        assert record["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    got, one = (
        [json.loads(line)["loss"] for line in (path / "validation.jsonl").read_text().splitlines()]
        for path in (folder / name, reference_folder / whole)
    )
    assert got == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradient_norms_equal_those_of_whole_logits(runs, reference, folder, name):
    compare(runs[name], folder / "2", name, reference, folder / "1")


def test_one_process_agrees_too(reference, folder):
    compare(reference["one"], folder / "1", "one", reference, folder / "1")


@pytest.mark.slow
def test_further_layouts(folder, packed, reference):
    for n, layouts in FURTHER.items():
        where = folder / f"further_{n}"
        for name, records in run_cases(n, where, packed, in_pieces(layouts)).items():
            compare(records, where, name, reference, folder / "1")

"""`metrics.log_moments` in real runs: every layout logs what one process does, and trains as it would without."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .harness import DDP, PP, TP, run_cases
from .test_mamba2_runs import HYBRID, PASSING

VPAD = ["--dropout.placement", "vpad", "--dropout.p", "0.2"]
LOGGED = ["--metrics.log_moments", "2"]
LAYERS = ["--layer_dropout.p_max", "0.8", "--layer_dropout.schedule", "constant",
          "--layer_dropout.scale", "eval_density"]  # fmt: skip
STEPS = ["--training.steps", "2"]
WHOLE = ["--training.local_batch_size", "4"]  # on one data-parallel rank: the last micro-batch is that of 2 ranks by 2
AC = ["--activation_checkpoint.mode", "full"]
COMPILE = ["--compile.enable", "--compile.backend", "aot_eager"]
LAYOUTS = {
    "vpad_fsdp": [],
    "vpad_ddp": DDP,
    "vpad_tp": TP + WHOLE,
    "vpad_pp": PP + WHOLE,
    "vpad_compile_ac": COMPILE + AC,
    "hybrid_tp": TP + WHOLE,
}
# with masks of their own, and layer dropout: losses must not change
TRAINED = {"fsdp": [*VPAD, *LAYERS], "pp": [*VPAD, *LAYERS, *PP]}
FOUR = {
    "vpad_fsdp_tp": TP,
    "vpad_pp_fsdp": PP,
    "vpad_interleaved": [*PP, "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"],
    "hybrid_compile_fsdp_tp": TP + COMPILE,
}


def kind(name: str) -> list[str]:
    return VPAD if name.startswith("vpad") else HYBRID


@pytest.fixture(scope="module")
def reference(tmp_path_factory, packed):
    folder = tmp_path_factory.mktemp("moments") / "1"
    cases = {name: {"args": [*kind(name), *STEPS, *WHOLE, *LOGGED], "same_masks": True} for name in ("vpad", "hybrid")}
    cases["vpad"]["args"].append("--metrics.enable_tensorboard")
    cases |= {"passing": {"args": PASSING}, "passing_logged": {"args": [*PASSING, *LOGGED]}}
    return folder, run_cases(1, folder, packed, cases)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, packed):
    cases = {
        name: {"args": [*kind(name), *STEPS, *args, *LOGGED], "same_masks": True} for name, args in LAYOUTS.items()
    }
    for name, args in TRAINED.items():
        cases |= {name: {"args": args}, f"{name}_logged": {"args": [*args, *LOGGED]}}
    return run_cases(2, tmp_path_factory.mktemp("moments") / "2", packed, cases)


def moments(record: dict) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.startswith("moments/")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_logs_what_one_process_does(runs, reference, name):
    check_moments(runs[name], reference[1][name.split("_")[0]])


def check_moments(records: list[dict], one: list[dict]) -> None:
    assert [bool(moments(record)) for record in records] == [False, True]
    expected, found = moments(one[1]), moments(records[1])
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert value > 0.005
        assert found[key] == pytest.approx(value, rel=2e-3), key


@pytest.mark.parametrize("name", TRAINED)
def test_training_does_not_change(runs, name):
    """Bit for bit, with masks drawn, layer dropout on and its scale, which is no part of what is measured."""
    check_unchanged(runs[name], runs[f"{name}_logged"])


def test_training_does_not_change_the_states_that_are_passed_on(reference):
    check_unchanged(reference[1]["passing"], reference[1]["passing_logged"])


@pytest.mark.slow
def test_four_ranks(reference, tmp_path, packed):
    """What above is one at a time, together; and compiled training does not change either."""
    cases = {name: {"args": [*kind(name), *STEPS, *args, *LOGGED], "same_masks": True} for name, args in FOUR.items()}
    compiled = [*VPAD, *LAYERS, *TP, *COMPILE]
    cases |= {"compiled": {"args": compiled}, "compiled_logged": {"args": [*compiled, *LOGGED]}}
    runs = run_cases(4, tmp_path, packed, cases)
    for name in FOUR:
        check_moments(runs[name], reference[1][name.split("_")[0]])
    check_unchanged(runs["compiled"], runs["compiled_logged"])


def check_unchanged(plain: list[dict], logged: list[dict]) -> None:
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in logged] == [record[key] for record in plain]
    assert [bool(moments(record)) for record in logged] == [False, True, False]


def test_tensorboard_has_them(reference):
    folder, records = reference
    events = EventAccumulator(str(folder / "vpad/tb"))
    events.Reload()
    (event,) = events.Scalars("moments/variance/layers.3.attention.wq")
    assert event.step == 2
    assert event.value == pytest.approx(records["vpad"][1]["moments/variance/layers.3.attention.wq"])

"""scripts/gpu_check.sh without a GPU: the checks at tiny sizes, that each can fail, and the time it keeps."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from regdrop_titan.gpu_check import command, kernels, runs, whole_models, worker
from regdrop_titan.gpu_check.parts import PARTS, Part
from regdrop_titan.gpu_check.rows import (
    FAILED,
    MEASURED,
    NEEDS_CUDA,
    NEEDS_FLA,
    OUT_OF_TIME,
    PASSED,
    Machine,
    Row,
    bounded,
    compared,
    relative_error,
)

from .conftest import ROOT


@pytest.fixture
def machine(tmp_path):
    return Machine(torch.device("cpu"), tmp_path, small=True, backend="aot_eager")


def failed(rows) -> set[str]:
    return {row.name for row in rows if row.status == FAILED}


CHECKS = {
    kernels.flex_attention_against_sdpa: 6,  # rows that need CUDA
    kernels.scan_against_fp64: 1,
    kernels.loss_in_pieces: 0,
    kernels.dropout_statistics: 0,
    whole_models.models_against_cpu: 0,
    whole_models.no_synchronisation: 2,
    whole_models.recomputation: 0,
    whole_models.cache_in_pieces: 0,
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_checks_pass_on_a_cpu(machine, check):
    """The same code as on a GPU, at a rehearsal's sizes; what has no kernel for a CPU says so."""
    rows = check(machine)
    statuses = [row.status for row in rows]
    assert statuses.count(NEEDS_CUDA) == CHECKS[check]
    assert set(statuses) <= {PASSED, NEEDS_CUDA} and (PASSED in statuses or len(rows) == CHECKS[check]), rows


# What a GPU alone would run, by other kernels -----------------------------------------------------------------------


class AsOnCuda(Machine):
    cuda = True


@pytest.fixture
def as_on_cuda(tmp_path, monkeypatch):
    """A CPU that takes the ways of a GPU: FlexAttention's backward is refused there by a look at the device alone."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    right = kernels.flex_attention_with_slopes
    monkeypatch.setattr(
        kernels, "flex_attention_with_slopes", lambda *args: right(*args[:5], kernels.flex_attention)
    )  # fmt: skip
    return AsOnCuda(torch.device("cpu"), tmp_path, small=True, backend="aot_eager")


def test_the_backward_of_flex_attention(as_on_cuda, monkeypatch):
    """It is compared, and a gradient that is 5 % off is seen."""
    rows = kernels.flex_attention_against_sdpa(as_on_cuda)
    assert {row.status for row in rows} == {PASSED}
    assert sum(row.name.endswith(": backward") for row in rows) == len(kernels.SMALL_FLEX_CASES)
    right = kernels.flex_attention_with_slopes

    def wrong(*args):
        out = right(*args)
        return 1.05 * out - 0.05 * out.detach()

    monkeypatch.setattr(kernels, "flex_attention_with_slopes", wrong)
    rows = kernels.flex_attention_against_sdpa(as_on_cuda)
    assert failed(rows) == {row.name for row in rows if row.name.endswith(": backward")}


def test_the_kernels_of_the_scan(as_on_cuda, monkeypatch):
    """They are compared where fla-core is there."""
    monkeypatch.setattr(kernels, "has_fla", lambda: False)
    assert NEEDS_FLA in {row.status for row in kernels.scan_against_fp64(as_on_cuda)}
    monkeypatch.setattr(kernels, "has_fla", lambda: True)
    monkeypatch.setattr(
        kernels, "kernel_scan", lambda x, dt, A, B, C, *rest: kernels.chunked_scan(x, dt, A, B, C, 16, *rest)
    )
    names = {row.name: row.status for row in kernels.scan_against_fp64(as_on_cuda)}
    assert len(names) == 4 and set(names.values()) == {PASSED} and any("kernels" in name for name in names)


@pytest.mark.parametrize("found", [None, "called a synchronizing CUDA operation"])
def test_waiting_for_the_device_fails(as_on_cuda, monkeypatch, found):
    """So does a debug mode that notices nothing."""

    def waits(work):
        work()
        return found

    monkeypatch.setattr(whole_models, "waits", waits)
    rows = whole_models.no_synchronisation(as_on_cuda)
    expected = {rows[0].name} if found is None else {row.name for row in rows[1:]}
    assert len(rows) == 3 and failed(rows) == expected


@pytest.mark.parametrize("names", [["NAPE", "Mamba2", "Mamba2, documents"], ["NAPE"]])
def test_models_with_a_scan_need_fla_core(as_on_cuda, monkeypatch, names):
    monkeypatch.setattr(whole_models, "has_fla", lambda: False)
    can_run, rows = whole_models.variants(as_on_cuda, names)
    assert can_run == ["NAPE"] and [(row.name, row.status) for row in rows] == [(n, NEEDS_FLA) for n in names[1:]]


# Each check sees a wrong result -------------------------------------------------------------------------------------


def test_wrong_attention_fails(machine, monkeypatch):
    """Slopes that are left out, which every shape survives."""
    right = kernels.flex_attention_with_slopes

    def without_slopes(q, k, v, context, *args, **kwargs):
        context.slopes = None
        return right(q, k, v, context, *args, **kwargs)

    monkeypatch.setattr(kernels, "flex_attention_with_slopes", without_slopes)
    rows = kernels.flex_attention_against_sdpa(machine)
    forward = {row.name for row in rows if row.name.endswith(": forward")}
    assert {name for name in forward if "no slopes" not in name} <= failed(rows)
    assert not any("no slopes" in name for name in failed(rows))


def test_a_wrong_scan_fails(machine, monkeypatch):
    """A document's start that is not seen; the oracle is the same function in fp64."""
    right = kernels.chunked_scan

    def without_starts(x, dt, A, B, C, chunk, state, starts):
        return right(x, dt, A, B, C, chunk, state, starts if x.dtype == torch.float64 else None)

    monkeypatch.setattr(kernels, "chunked_scan", without_starts)
    assert len(failed(kernels.scan_against_fp64(machine))) == 2


def test_a_wrong_loss_fails(machine, monkeypatch):
    """A gradient that is 5 % off, the value being right."""

    class Head(kernels.Head):
        def forward(self, h, labels=None, pieces=1):
            return super().forward(1.05 * h - 0.05 * h.detach(), labels, pieces)

    monkeypatch.setattr(kernels, "Head", Head)
    assert len(failed(kernels.loss_in_pieces(machine))) == 4


@pytest.mark.parametrize(
    "wrong, fails",
    [
        (lambda x, p: x * (torch.rand_like(x) >= p), "variance"),  # not scaled
        (lambda x, p: 0.05 + kernels.inverted_dropout(x, p), "mean"),
        (lambda x, p: kernels.inverted_dropout(x, p, x > 0.1), "another mask"),
    ],
)
def test_wrong_dropout_fails(machine, monkeypatch, wrong, fails):
    monkeypatch.setattr(kernels, "vpad", wrong)
    found = failed(kernels.dropout_statistics(machine))
    assert any(fails in name for name in found) and all(name.startswith("VPAD") for name in found)


def test_a_mask_that_is_drawn_again_fails(machine, monkeypatch):
    """Recomputation without the generator's state."""
    right = whole_models.checkpoint_wrapper
    monkeypatch.setattr(whole_models, "checkpoint_wrapper", lambda block, **_: right(block, preserve_rng_state=False))
    assert failed(whole_models.recomputation(machine)) >= {
        "recomputation, vpad, eager",
        "recomputation, pre_norm, eager",
    }


def test_wrong_models_fail(machine, monkeypatch):
    """Without its positions logits and gradients differ by more than the bound."""
    right = whole_models.models_of

    def other_positions(machine, variant, **options):
        return right(machine, "NoPE", **options)[0], right(machine, variant, **options)[1]

    monkeypatch.setattr(whole_models, "models_of", other_positions)
    monkeypatch.setattr(whole_models, "SMALL_VARIANTS", ("NAPE",))
    assert failed(whole_models.models_against_cpu(machine)) == {"NAPE: logits and loss", "NAPE: gradients"}
    monkeypatch.setattr(whole_models, "FAMILIES", ("NAPE",))
    assert "cache, NAPE" in failed(whole_models.cache_in_pieces(machine))


def test_layer_dropout_that_skips_other_rows_fails(machine, monkeypatch):
    right = whole_models.results

    def shifted(model, tokens, keep, scale):
        return right(model, tokens, keep=keep.roll(1, 0) if model.args.skip_compute else keep, scale=scale)

    monkeypatch.setattr(whole_models, "results", shifted)
    monkeypatch.setattr(whole_models, "compile_each_block", lambda model, machine: model)
    rows = whole_models.layer_dropout(machine)
    assert len(rows) == 8 and len(failed(rows)) == 8
    monkeypatch.setattr(whole_models, "results", right)
    assert not failed(whole_models.layer_dropout(machine))


def test_a_worse_answer_fails(machine, monkeypatch):
    monkeypatch.setattr(
        whole_models,
        "generate",
        lambda model, prompts, n, **_: ([torch.zeros(n, dtype=torch.int64)] * len(prompts), {}),
    )
    assert len(failed(whole_models.greedy_generation(machine))) == 3


def test_losses_that_differ_by_a_bit_fail():
    whole = [{"step": step, "loss": 2.0} for step in range(1, runs.STEPS + 1)]
    assert not failed(runs.resumed_rows(whole, whole))
    changed = [*whole[:-1], {"step": runs.STEPS, "loss": 2.0 + 2**-20}]
    assert failed(runs.resumed_rows(whole, changed)) == {"resume: losses"}
    assert failed(runs.resumed_rows(whole, whole[runs.STOP :])) == {"resume: every step once"}


def test_nan_and_another_shape_fail():
    nan = torch.tensor([1.0, torch.nan])
    ones = torch.ones(2)
    rows = [compared("nan first", [nan, ones], [ones, ones], 1.0), compared("nan last", [ones, nan], [ones, ones], 1.0)]
    assert [row.status for row in rows] == [FAILED, FAILED] and rows[0].message == "the error is nan"
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.ones(1), ones)
    assert bounded("at the bound", 1.0, 1.0).status == PASSED
    assert compared("half", [1.5 * ones], [ones], 0.4).error == pytest.approx(0.5)


def test_no_variant_breaks_the_others(machine, monkeypatch):
    """A model that raises is a row, and others go on."""
    right = whole_models.models_of

    def broken(machine, variant, **options):
        if variant == "SmolLM3, window":
            raise RuntimeError("no kernel")
        return right(machine, variant, **options)

    monkeypatch.setattr(whole_models, "models_of", broken)
    rows = whole_models.models_against_cpu(machine)
    (row,) = [row for row in rows if row.status == FAILED]
    assert (row.name, row.message) == ("SmolLM3, window", "RuntimeError: no kernel")
    assert len(rows) == 2 * len(whole_models.SMALL_VARIANTS) - 1


# Figures ------------------------------------------------------------------------------------------------------------


def test_figures_are_of_the_second_half():
    """The first steps compile; memory is the most of all steps."""
    records = [
        {"tokens_per_second": rate, "mfu": rate / 1000, "memory_gib": memory, "kept_fraction": 0.75}
        for rate, memory in ((1, 9), (2, 5), (100, 6), (300, 6), (200, 6))
    ]
    assert runs.figures_of(records) == {"tokens/s": 200, "MFU": 0.2, "GiB": 9, "computed": 0.75}


@pytest.mark.parametrize("mfu, said", [(0.5, "reached"), (0.4, "not reached")])
def test_throughput_is_set_beside_the_dense_run(machine, monkeypatch, mfu, said):
    def train(machine, name, config, *overrides):
        records = [
            {"step": 1, "tokens_per_second": 90.0 if "vpad" in overrides else 100.0, "mfu": mfu, "memory_gib": 1}
        ]
        folder = machine.output / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps(records[0]) + "\n")
        return records

    monkeypatch.setattr(runs, "train", train)
    (dense,), (vpad,) = (runs.timed_400m(machine, name) for name in ("400M dense", "400M VPAD"))
    assert dense.message == f"goal on an H200: MFU 0.45, {said}" and dense.status == MEASURED
    assert vpad.figures["tokens/s to dense"] == 0.9 and not vpad.message


def test_a_failed_command_names_its_log(machine):
    with pytest.raises(runs.ChildFailed, match=r"status 2: .*No such file.*missing\.log"):
        runs.called(machine, "missing", "scripts/no_such_script.py")


# The time, and what is told -----------------------------------------------------------------------------------------


class Clock:
    """Time that passes when a part runs."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.asked: list[tuple[str, float]] = []

    def ask(self, part, seconds):
        self.asked.append((part.name, seconds))
        taken = part.run(None)
        if taken > seconds:
            self.left -= seconds
            raise command.PartLost("ended")
        self.left -= taken
        return [Row(part.name, PASSED)]


def test_the_time_is_kept(capsys):
    """What does not fit is a row, what comes later and fits is run; no part goes on beyond the end."""
    parts = [
        Part("a", lambda _: 30, 20, 1),
        Part("long", lambda _: 500, 500, 1),
        Part("b", lambda _: 95, 20, 1),
        Part("endless", lambda _: 1e9, 40, 1),
        Part("c", lambda _: 1, 20, 1),
    ]
    clock, found, written = Clock(240), {}, []
    command.run_parts(parts, False, clock.ask, lambda: clock.left, found, lambda: written.append(len(found)))
    assert [(name, rows[0].status) for name, rows in found.items()] == [
        ("a", PASSED), ("long", OUT_OF_TIME), ("b", FAILED), ("endless", FAILED), ("c", OUT_OF_TIME),
    ]  # fmt: skip
    assert clock.asked == [("a", 90), ("b", 90), ("endless", 120)] and clock.left == 0
    assert written == [1, 3, 4]
    assert "[2/5] long (about 500 s): 30 s gone, 210 s left" in capsys.readouterr().out
    assert command.status_of(found) == 1 and command.status_of({"a": found["a"], "c": found["c"]}) == 0


def test_a_rehearsal_has_its_own_times():
    clock, found = Clock(10), {}
    command.run_parts([Part("a", lambda _: 1, 99, 2)], True, clock.ask, lambda: clock.left, found)
    assert found["a"][0].status == PASSED


def test_an_exception_is_a_row(machine):
    def run(machine):
        raise RuntimeError("the device\nsays no")

    (row,) = worker.run(Part("broken", run, 1, 1), machine)
    assert row == Row("broken", FAILED, message="RuntimeError: the device\nsays no")
    table = command.table({"broken": [row, Row("timed", MEASURED, figures={"tokens/s": 12345.6, "MFU": 0.4321})]})
    assert "| broken | FAILED |  |  | RuntimeError: the device says no |" in table
    assert "| timed | measured |  |  | tokens/s 12,346, MFU 0.432 |" in table


@pytest.fixture
def in_a_worker(tmp_path):
    """A worker whose process is this code."""
    made = []

    def make(code: str) -> command.Worker:
        made.append(command.Worker(tmp_path, rehearse=True))
        made[-1].command = [sys.executable, "-c", f"import json, os, sys, time\nprint('{{}}', flush=True)\n{code}"]
        return made[-1]

    yield make
    for one in made:
        one.stop()


ANSWER = "[print(json.dumps({'rows': [{'name': n.strip(), 'status': 'passed'}], 'lives': LIVES}), flush=True) "
ANSWER += "for n in sys.stdin]"
PART = Part("a part", lambda _: [], 1, 1)


def test_a_worker_answers(in_a_worker):
    """The same process for the next part, and another where the device is lost."""
    for lives in (True, False):
        asked = in_a_worker(ANSWER.replace("LIVES", str(lives)))
        processes = []
        for _ in range(2):
            assert asked.ask(PART, 30) == [Row("a part", PASSED)]
            processes.append(asked.process)
        assert (processes[0] is not None) == lives and (processes[0] is processes[1])


def test_a_lost_worker_is_told(in_a_worker):
    with pytest.raises(command.PartLost, match=r"its process ended \(see .*checks\.log\)"):
        in_a_worker("sys.stdin.readline(); os._exit(3)").ask(PART, 30)
    asleep = in_a_worker("sys.stdin.readline(); time.sleep(1000)")
    with pytest.raises(command.PartLost, match="ended after 2 s without a result"):
        asleep.ask(PART, 2)
    assert asleep.process is None


def test_main_writes_what_it_found(tmp_path, monkeypatch, capsys):
    """Status 1 and the row where something failed; the files hold what the table does."""
    monkeypatch.setattr(command, "PARTS", (Part("good", lambda _: [], 1, 1), Part("bad", lambda _: [], 1, 1)))
    answers = {
        "good": [Row("good", PASSED, error=1e-7, bound=1e-3)], "bad": [Row("bad", FAILED, error=0.5, bound=0.1)]
    }  # fmt: skip
    monkeypatch.setattr(command.Worker, "ask", lambda self, part, seconds: answers[part.name])
    assert command.main(["--rehearse", "--output", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["parts"]["bad"][0]["status"] == FAILED and results["rehearsal"] == "on a CPU"
    said = capsys.readouterr().out
    assert "FAILED bad: error 0.5, above 0.1" in said and "1 passed, 1 FAILED, 0 measured" in said
    assert "| good | passed | 1.0e-07 | 1.0e-03 |" in (tmp_path / "results.md").read_text()
    assert command.main(["--rehearse", "--output", str(tmp_path), "--parts", "good"]) == 0


def test_without_cuda_and_with_wrong_options(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--output", str(tmp_path / "none")]) == 2
    assert "no CUDA device" in capsys.readouterr().err and not (tmp_path / "none").exists()
    with pytest.raises(SystemExit) as end:
        command.main(["--rehearse", "--minutes", "-1", "--parts", "dance"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "dance" in said and "--minutes -1" in said


def test_missing_packages_are_told_at_once(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check_script", ROOT / "scripts/gpu_check.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    wanted = ["torch>=2.11", "no-such-package==1", "fla-core>=0.6", "nor_this!=2; platform_system == 'Linux'"]
    assert script.missing(wanted) == ["no-such-package==1", "nor_this!=2"]
    monkeypatch.setattr(script, "missing", lambda _: ["no-such-package==1"])
    assert script.main() == 2
    assert "pip install --no-index --find-links wheels 'no-such-package==1'" in capsys.readouterr().err


def test_parts_have_names_of_their_own():
    assert len({part.name for part in PARTS}) == len(PARTS)
    # what matters most fits
    names = [part.name for part in PARTS]
    assert sum(part.seconds for part in PARTS[: names.index("greedy generation")]) < 12 * 60


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts/gpu_check.sh", "--rehearse", "--minutes", "60", "--output", str(tmp_path)],
        env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert list(parts) == [part.name for part in PARTS]
    statuses = {row["status"] for rows in parts.values() for row in rows}
    assert statuses == {PASSED, MEASURED, NEEDS_CUDA}

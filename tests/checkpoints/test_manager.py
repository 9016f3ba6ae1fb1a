"""Saving, resuming, rolling back and deleting in real runs of one process."""

import os
import shutil
from concurrent.futures import Future

import pytest
import torch

from regdrop_titan.checkpoints import CheckpointError, load_model, survey
from regdrop_titan.checkpoints.manager import CheckpointManager
from regdrop_titan.config import ConfigError, load_config
from regdrop_titan.metrics import read_records

from ..distributed.harness import BASE, run_cases

SAVE = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2",
        "--checkpoint.keep_every", "3"]  # fmt: skip


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory, packed):
    """A run to step 6, then variations on copies of its folder."""
    folder = tmp_path_factory.mktemp("manager")
    run_cases(1, folder, packed, {"first": {"args": [*SAVE, "--training.steps", "6"]},
                                  "asynchronous": {"args": [*SAVE, "--training.steps", "4", "--checkpoint.async_mode",
                                                            "async"]}})  # fmt: skip
    for name in ("rolled", "damaged", "elsewhere", "hopeless"):
        shutil.copytree(folder / "first", folder / name)
    os.truncate(next((folder / "damaged/checkpoint/step-6").glob("*.distcp")), 100)
    shutil.rmtree(folder / "elsewhere/checkpoint/step-6")
    shutil.copytree(folder / "elsewhere/checkpoint/step-5", folder / "elsewhere/checkpoint/step-99.bak")
    for step in (3, 5, 6):
        (folder / f"hopeless/checkpoint/step-{step}/.metadata").unlink()
    initial = ["--checkpoint.initial_load_path", str(folder / "first/checkpoint/step-6")]
    run_cases(1, folder, packed, {
        "rolled": {"args": [*SAVE, "--training.steps", "5", "--checkpoint.load_step", "3"]},
        "damaged": {"args": [*SAVE, "--training.steps", "7"]},
        "elsewhere": {"args": [*SAVE, "--training.steps", "6", *initial]},
        "hopeless": {"args": [*SAVE, "--training.steps", "1", "--optimizer.lr", "1e-12", *initial]},
    })  # fmt: skip
    return folder


def test_retention(runs):
    """The two newest, and multiples of 3."""
    assert names(runs / "first/checkpoint") == ["step-3", "step-5", "step-6"]
    assert names(runs / "asynchronous/checkpoint") == ["step-3", "step-4"]


def test_a_roll_back_loses_nothing(runs):
    """Steps 5 and 6 of the branch that was given up stay under other names; a resume takes the new branch."""
    assert names(runs / "rolled/checkpoint") == [
        "step-3", "step-4", "step-5", "step-5.replaced-1", "step-6.replaced-1",
    ]  # fmt: skip
    old, new = load_model(runs / "first/checkpoint/step-5"), load_model(runs / "rolled/checkpoint")
    for a, b in zip(old.parameters(), new.parameters(), strict=True):
        assert torch.equal(a, b)  # the same steps, done again
    assert survey(runs / "rolled/checkpoint")[0] == [3, 4, 5]


def test_resume_passes_over_a_damaged_checkpoint(runs):
    """Step 6 is cut: training goes on from step 5, does step 6 as before, and logs each step once."""
    first = read_records(runs / "first/metrics.jsonl")
    again = read_records(runs / "damaged/metrics.jsonl")
    assert [record["step"] for record in again] == [1, 2, 3, 4, 5, 6, 7]
    assert [a["loss"] for a in again[:6]] == [b["loss"] for b in first]


def test_an_initial_checkpoint_is_read_only_by_a_new_run(runs):
    """A folder with a whole checkpoint resumes it, whatever `step-99.bak` says; one without takes the initial one."""
    resumed = read_records(runs / "elsewhere/metrics.jsonl")
    assert resumed[-1]["loss"] == read_records(runs / "first/metrics.jsonl")[-1]["loss"]
    assert "step-99.bak" in names(runs / "elsewhere/checkpoint")
    started, source = load_model(runs / "hopeless/checkpoint/step-1"), load_model(runs / "first/checkpoint/step-6")
    for a, b in zip(started.parameters(), source.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-9)
    assert {"step-3", "step-5", "step-6"} <= set(names(runs / "hopeless/checkpoint"))  # incomplete ones are left


def test_a_step_that_is_not_there(runs, tmp_path, packed):
    (tmp_path / "run.toml").write_text(BASE.format(packed=packed))
    args = ["--job.config_file", str(tmp_path / "run.toml"), "--checkpoint.enable", "--job.dump_folder"]
    with pytest.raises(ConfigError, match=r"checkpoint.load_step = 7: there is no such .*checkpoint: 3, 5, 6"):
        load_config([*args, str(runs / "first"), "--checkpoint.load_step", "7"], inputs=True)
    with pytest.raises(ConfigError, match=r"checkpoint.initial_load_path: .*nowhere: has no .metadata"):
        load_config([*args, str(tmp_path / "new"), "--checkpoint.initial_load_path", "nowhere"], inputs=True)


def test_a_failed_asynchronous_save_is_raised_with_path_and_cause():
    manager = object.__new__(CheckpointManager)
    manager.enable, manager.current, manager.save_future = False, "out/checkpoint/step-4", None
    manager.raise_failed_save()
    manager.save_future = Future()
    manager.raise_failed_save()  # still at work
    manager.save_future.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"out/checkpoint/step-4: could not be saved: OSError: .*No space left"):
        manager.raise_failed_save()

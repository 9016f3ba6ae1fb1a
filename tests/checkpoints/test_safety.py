"""Which checkpoints are whole, and that reading one never runs code from it."""

import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from regdrop_titan.checkpoints import CheckpointError, check_complete, survey
from regdrop_titan.checkpoints.safety import load_state, steps_in


class Evil:
    """Unpickled by the ordinary unpickler, it makes a folder: the sign that code has run."""

    def __init__(self, sign):
        self.sign = str(sign)

    def __reduce__(self):
        return os.mkdir, (self.sign,)


def save(folder, **state):
    dcp.save({"weight": torch.arange(1000.0), **state}, checkpoint_id=str(folder), no_dist=True)


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "step-5", step=5, run={"note": "text", "betas": (0.9, 0.95)})
    return tmp_path / "step-5"


def test_a_whole_checkpoint_is_read(checkpoint):
    check_complete(checkpoint)
    state = {"weight": torch.zeros(1000), "step": 0, "run": {"note": "", "betas": (0.0, 0.0)}}
    load_state(state, checkpoint, no_dist=True)
    assert torch.equal(state["weight"], torch.arange(1000.0))
    assert state["step"] == 5 and state["run"] == {"note": "text", "betas": (0.9, 0.95)}


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda c: (c / ".metadata").unlink(), "has no .metadata, it was not written to its end"),
        (lambda c: (c / ".metadata").write_bytes(b""), "cannot be read"),
        (lambda c: (c / ".metadata").write_bytes((c / ".metadata").read_bytes()[:50]), "cannot be read"),
        (lambda c: (c / ".metadata").write_bytes(pickle.dumps({"a": 1})), "is a dict, not a checkpoint's metadata"),
        (lambda c: next(c.glob("*.distcp")).unlink(), "missing, .metadata names it"),
        (lambda c: os.truncate(next(c.glob("*.distcp")), 100), "100 bytes, .metadata names"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_passed_over(checkpoint, damage, fault):
    """Reports C1 and C9: the one before counts, and nothing is deleted."""
    shutil.copytree(checkpoint, checkpoint.with_name("step-10"))
    damage(checkpoint.with_name("step-10"))
    with pytest.raises(CheckpointError, match=fault):
        check_complete(checkpoint.with_name("step-10"))
    complete, faults = survey(checkpoint.parent)
    assert complete == [5] and fault in faults[10]
    assert checkpoint.with_name("step-10").is_dir()


def test_names_are_matched_exactly(tmp_path):
    for name in ("step-1", "step-20", "step-0", "step-99.bak", "step-007", "old-step-3", "step-4 copy", "step--1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-50").touch()
    assert steps_in(tmp_path) == [0, 1, 20] and steps_in(tmp_path / "nowhere") == []


def test_tampered_metadata_are_refused(checkpoint, tmp_path):
    sign = tmp_path / "code_has_run"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(sign)))
    with pytest.raises(CheckpointError, match=r"step-5/.metadata: cannot be read: names posix.mkdir, which no"):
        check_complete(checkpoint)
    with pytest.raises(CheckpointError, match=r"names posix.mkdir"):
        load_state({"weight": torch.zeros(1000)}, checkpoint, no_dist=True)
    assert not sign.exists()
    with open(checkpoint / ".metadata", "rb") as file:  # the trap works
        pickle.load(file)
    assert sign.exists()


def test_tampered_objects_are_refused(tmp_path):
    sign = tmp_path / "code_has_run"
    save(tmp_path / "step-5", step=Evil(sign))
    assert not sign.exists()
    with pytest.raises(CheckpointError, match="step is not plain data, it may be tampered with"):
        load_state({"weight": torch.zeros(1000), "step": 0}, tmp_path / "step-5", no_dist=True)
    assert not sign.exists()


def test_what_is_missing_is_named(checkpoint):
    with pytest.raises(CheckpointError, match=r"step-5: cannot be loaded: .*absent"):
        load_state({"weight": torch.zeros(1000), "absent": torch.zeros(2)}, checkpoint, no_dist=True)

"""The quick form of scripts/chaos.sh, each kind of fault once; and that it would notice what it looks for."""

import shutil
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from regdrop_titan.metrics import StepLog, read_records

from .chaos import FAULTS, Chaos, Watch


def test_each_fault_once(tmp_path):
    """Weights, losses and logs as of the undisturbed run, and each loss of that is noticed by the check."""
    chaos = Chaos(tmp_path / "chaos", len(FAULTS), seed=3)
    chaos.carry_out()
    assert chaos.check()["faults"] == 7
    assert {status.split(":")[0] for status in chaos.statuses} == set(FAULTS)
    log = StepLog(chaos.run / "metrics.jsonl")
    last = read_records(log.path)[-1]
    log.rewind(last["step"] - 1)
    with pytest.raises(AssertionError, match="not every step once"):
        chaos.check()
    log.append(last | {"loss": last["loss"] * (1 + 1e-7)})
    with pytest.raises(AssertionError, match=r"metrics.jsonl: loss differs"):
        chaos.check()
    shutil.rmtree(chaos.run / f"checkpoint/step-{last['step']}")  # the newest is then of another step
    with pytest.raises(AssertionError, match="the weights differ"):
        chaos.check()


def test_a_vanished_checkpoint_is_noticed(tmp_path):
    for step in (3, 6):
        dcp.save({"weight": torch.ones(4)}, checkpoint_id=str(tmp_path / f"step-{step}"), no_dist=True)
    watch = Watch(tmp_path)
    time.sleep(0.3)
    shutil.rmtree(tmp_path / "step-3")  # an older one may go
    time.sleep(0.3)
    assert watch.newest == 6 and not watch.faults
    (tmp_path / "step-6/.metadata").unlink()
    time.sleep(0.3)
    watch.stop()
    assert watch.faults == ["step-6 vanished before a newer checkpoint was whole"]

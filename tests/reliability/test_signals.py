"""SIGTERM, SIGUSR1 and Ctrl-C: saved at the next step boundary, exit status 75; a second one ends at once."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from regdrop_titan import signals
from regdrop_titan.checkpoints import survey
from regdrop_titan.metrics import read_records
from regdrop_titan.signals import StopSignals

from ..distributed.harness import BASE, ROOT, environment
from ..distributed.ranks import Ranks, train

LONG_STEPS = ["--training.global_batch_size", "16384"]  # half a minute each, of which a test sees the beginning


def train_after(rank, before, args):
    if before is not None:
        before(rank)
    return train(rank, args)


@pytest.fixture
def run(tmp_path, packed):
    """Starts a run of two ranks in `tmp_path/out`."""
    (tmp_path / "run.toml").write_text(BASE.format(packed=packed))

    started = []

    def start(*args, before=None):
        base = ["--job.config_file", str(tmp_path / "run.toml"), "--job.dump_folder", str(tmp_path / "out")]
        target = functools.partial(train_after, before=before, args=[*base, *args])
        started.append(Ranks(2, target, tmp_path / "log"))
        return started[-1]

    yield start
    for ranks in started:
        ranks.signal(signal.SIGKILL)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def logged(tmp_path) -> int:
    return len(read_records(tmp_path / "out/metrics.jsonl"))


# One process -------------------------------------------------------------------------------------------------


def test_signals_are_noted_and_handlers_come_back(monkeypatch):
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    monkeypatch.setattr(signals, "SAME_REQUEST", 0.3)
    before = [signal.getsignal(number) for number in StopSignals.NUMBERS]
    with StopSignals("stopping") as stop:
        assert not stop.received
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: stop.received)
        assert stop.name == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher that forwards what all have received
        time.sleep(0.35)
        assert not ended
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: ended)
        assert ended == [128 + signal.SIGTERM] and stop.name == "SIGUSR1"
    assert [signal.getsignal(number) for number in StopSignals.NUMBERS] == before
    with StopSignals("stopping") as stop:  # again, in the same process
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: stop.received)
    assert len(ended) == 1


def test_after_the_end_nothing_is_a_request(monkeypatch):
    monkeypatch.setattr(signals.os, "_exit", lambda status: pytest.fail("ended"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals("stopping") as stop:
            stop.finish()
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # ignored
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not stop.received


def test_in_another_thread_handlers_are_left_alone():
    before = [signal.getsignal(number) for number in StopSignals.NUMBERS]
    seen = []

    def inside():
        with StopSignals("stopping"):
            seen.extend(signal.getsignal(number) for number in StopSignals.NUMBERS)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == before


# Two ranks ---------------------------------------------------------------------------------------------------


def test_one_signal_to_one_rank_stops_all_at_the_same_step(run, tmp_path):
    """With a save in the background, and at any place of a run: the next start goes on behind the last step."""
    args = ["--training.steps", "100000", "--lr_scheduler.total_steps", "100", "--checkpoint.enable",
            "--checkpoint.interval", "5", "--checkpoint.async_mode", "async", "--validation.enable",
            "--validation.freq", "2"]  # fmt: skip
    for number, rank in ((signal.SIGTERM, 1), (signal.SIGINT, None)):
        before = logged(tmp_path)
        ranks = run(*args)
        wait_for(lambda before=before: logged(tmp_path) >= before + 3)
        ranks.signal(number, rank)
        assert ranks.wait() == [75, 75], ranks.said()[-3000:]
        (stopped,) = re.findall(rf"Stopped by {signal.Signals(number).name} behind step (\d+), which", ranks.said())
        assert survey(tmp_path / "out/checkpoint")[0][-1] == int(stopped) == logged(tmp_path)
        if before:
            assert f"Training starts at step {before + 1}" in ranks.said()
    assert "Traceback" not in ranks.said()
    assert [r["step"] for r in read_records(tmp_path / "out/metrics.jsonl")] == list(range(1, int(stopped) + 1))


def test_a_second_signal_ends_at_once_and_harms_nothing(run, tmp_path):
    ranks = run("--training.steps", "1", "--checkpoint.enable")
    assert ranks.wait() == [0, 0]
    ranks = run("--training.steps", "100", "--checkpoint.enable", *LONG_STEPS)
    wait_for(lambda: "Training starts at step 2" in ranks.said())
    time.sleep(3)  # into the step: a signal before it would be answered at once
    ranks.signal(signal.SIGTERM)
    wait_for(lambda: "a second signal ends at once" in ranks.said())
    time.sleep(signals.SAME_REQUEST + 0.2)
    ranks.signal(signal.SIGTERM)
    begun = time.monotonic()
    assert ranks.wait() == [143, 143]
    assert time.monotonic() - begun < 5
    assert survey(tmp_path / "out/checkpoint") == ([1], {}) and logged(tmp_path) == 1


def test_without_checkpoints_nothing_is_claimed(run, tmp_path):
    ranks = run("--training.steps", "100000", "--lr_scheduler.total_steps", "100")
    wait_for(lambda: logged(tmp_path) >= 2)
    ranks.signal(signal.SIGUSR1, 1)
    assert ranks.wait() == [1, 1]
    assert "nothing is saved, checkpoints are off" in ranks.said()


def test_a_round_of_validation_that_was_cut_is_done_at_the_next_start(run, tmp_path):
    """By a kill at the first step, and by a signal at the last one."""
    args = ["--training.steps", "2", "--checkpoint.enable", "--checkpoint.interval", "1", "--validation.enable",
            "--validation.freq", "1"]  # fmt: skip
    for step, before, expected in ((1, killed_in_validation, [-9, 1]), (2, terminated_in_validation, [75, 75])):
        ranks = run(*args, before=before)
        assert ranks.wait() == expected, ranks.said()[-3000:]
        assert survey(tmp_path / "out/checkpoint")[0][-1] == step and logged(tmp_path) == step
        assert len(read_records(tmp_path / "out/validation.jsonl")) == step - 1
    assert run(*args).wait() == [0, 0]
    assert [r["step"] for r in read_records(tmp_path / "out/validation.jsonl")] == [1, 2]


def _in_validation(rank: int, number: int) -> None:
    """The signal comes to rank 0 in the round of the step that this process does itself."""
    from regdrop_titan.data.loader import ValidationLoader
    from regdrop_titan.trainer import Trainer

    batches, init = ValidationLoader.__iter__, Trainer.__init__

    def init_and_keep(self, *args):
        ValidationLoader.trainer = self
        init(self, *args)

    def signalled(self):
        trainer = ValidationLoader.trainer
        for batch in batches(self):
            if rank == 0 and trainer.stepped:
                os.kill(os.getpid(), number)
                wait_for(lambda: trainer.signals.received)
            yield batch

    Trainer.__init__, ValidationLoader.__iter__ = init_and_keep, signalled


def terminated_in_validation(rank: int) -> None:
    _in_validation(rank, signal.SIGTERM)


def killed_in_validation(rank: int) -> None:
    _in_validation(rank, signal.SIGKILL)


def test_a_signal_before_the_first_step(run, tmp_path):
    """Nothing to save, nothing lost: status 75, and the same command begins."""
    ranks = run("--training.steps", "2", "--checkpoint.enable", before=signalled_by_the_rehearsal)
    assert ranks.wait() == [75, 75], ranks.said()[-3000:]
    assert not (tmp_path / "out/checkpoint").exists()
    ranks = run("--training.steps", "2", "--checkpoint.enable")
    assert ranks.wait() == [0, 0] and logged(tmp_path) == 2


def signalled_by_the_rehearsal(rank: int) -> None:
    from regdrop_titan.trainer import Trainer

    rehearse = Trainer.rehearse

    def rehearse_and_signal(self):
        rehearse(self)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: self.signals.received)

    Trainer.rehearse = rehearse_and_signal


# torchrun ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["torchrun", pytest.param("one rank", marks=pytest.mark.slow)])
def test_under_torchrun(tmp_path, packed, whom):
    """To torchrun, which forwards it, as SLURM and Kubernetes do; or to one rank alone."""
    (tmp_path / "run.toml").write_text(BASE.format(packed=packed))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "train.py",
        "--job.config_file", str(tmp_path / "run.toml"), "--job.dump_folder", str(tmp_path / "out"),
        "--training.steps", "100000", "--lr_scheduler.total_steps", "100", "--checkpoint.enable",
    ]  # fmt: skip
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, stderr=said)
    try:
        wait_for(lambda: logged(tmp_path) >= 3)
        pid = process.pid
        if whom == "one rank":
            children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout
            pid = int(children.split()[-1])
        os.kill(pid, signal.SIGTERM)
        assert process.wait(60) == 1  # torchrun's own
    finally:
        process.kill()
    text = (tmp_path / "said").read_text()
    (stopped,) = re.findall(r"Stopped by SIGTERM behind step (\d+), which is saved: the same command goes on", text)
    assert survey(tmp_path / "out/checkpoint")[0] == [int(stopped)] and logged(tmp_path) == int(stopped)
    if whom == "one rank":
        assert "exitcode  : 75" in text and "exitcode  : -" not in text

"""scripts/slurm/train.sbatch with real torchrun and ranks; SLURM's commands are stand-ins that do what it would."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from regdrop_titan.checkpoints import survey
from regdrop_titan.metrics import read_records

from ..distributed.harness import BASE, ROOT, environment

STANDINS = {
    # runs its command on "the node"
    "srun": 'exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> "$STANDINS/requeued"; fi',
    # signals every process of the step: torchrun and the ranks, not the batch shell
    "scancel": 'pkill "${1/--signal=/-}" -f "(torchrun|train.py).*$STANDINS/out"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.fixture
def submit(tmp_path, packed):
    """Starts the batch script as SLURM would, in a folder of its own."""
    for name, text in STANDINS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    (tmp_path / "run.toml").write_text(BASE.format(packed=packed))
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1",
             "SLURM_GPUS_ON_NODE": "2", "STANDINS": str(tmp_path)}  # fmt: skip
    environ = environment() | slurm | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def start(*args: str) -> subprocess.Popen:
        with open(tmp_path / "said", "a") as said:
            return subprocess.Popen(
                ["bash", str(ROOT / "scripts/slurm/train.sbatch"), "--job.config_file", "run.toml",
                 "--job.dump_folder", str(tmp_path / "out"), "--checkpoint.enable", *args],
                cwd=tmp_path, env=environ, stdout=said, stderr=said,
            )  # fmt: skip

    return start


def test_at_the_time_limit_it_saves_and_queues_itself_again(submit, tmp_path):
    job = submit("--training.steps", "100000")
    try:
        end = time.monotonic() + 90
        while len(read_records(tmp_path / "out/metrics.jsonl")) < 3:
            assert time.monotonic() < end and job.poll() is None, (tmp_path / "said").read_text()[-3000:]
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300: to the batch shell alone
        assert job.wait(60) != 0
    finally:
        job.kill()
    said = (tmp_path / "said").read_text()
    (stopped,) = re.findall(r"Stopped by SIGUSR1 behind step (\d+), which is saved", said)
    assert survey(tmp_path / "out/checkpoint")[0] == [int(stopped)]
    assert "regdrop_titan/trainer.py" not in said  # torchrun's own traceback is there
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    again = submit("--training.steps", str(int(stopped) + 2))
    assert again.wait(90) == 0, (tmp_path / "said").read_text()[-3000:]
    assert f"Training starts at step {int(stopped) + 1}" in (tmp_path / "said").read_text()
    assert (tmp_path / "requeued").read_text().count("requeue") == 1

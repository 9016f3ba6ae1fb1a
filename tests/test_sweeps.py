"""Sweeps: what a file expands to, what is refused, what is run again, and what others are given to run."""

import contextlib
import csv
import fcntl
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import regdrop_titan.sweeps.launchers as sweep_launchers
import regdrop_titan.sweeps.runs as sweep_runs
from regdrop_titan.config import load_config
from regdrop_titan.models import build_model
from regdrop_titan.sweeps import SweepError, read_sweep
from regdrop_titan.sweeps.launchers import Slurm, SlurmTask, node_launcher
from regdrop_titan.sweeps.local import devices, rank_status, reason

from .distributed.harness import ROOT

# A small model on the copying task, one sequence a step
TINY = """
[model]
name = "nape_llama3"
flavor = "debug"
[architecture]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 48
vocab_size = 30
[training]
dataset = "copying"
copying_lengths = [2, 3]
seq_len = 15
local_batch_size = 1
global_batch_size = 1
steps = 3
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 0
[metrics]
log_freq = 1
[checkpoint]
enable = true
[activation_checkpoint]
mode = "none"
"""

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "vocab_size": 30}

FOUR = """
[grid]
"training.seed" = [1, 2]
[[runs]]
name = "plain"
[[runs]]
name = "vpad"
dropout = { placement = "vpad", p = 0.1 }
"""

# one more that cannot run, and one that ends by a loss that is not finite
FAULTY = """
[[runs]]
name = "plain"
[[runs]]
"dropout.placement" = "vpad"
"dropout.p" = 0.1
[[runs]]
name = "invalid"
"dropout.p" = 1.5
"optimizer.beta1" = 2.0
[[runs]]
name = "crashing"
"optimizer.lr" = 1e30
[[runs]]
name = "seeded"
"training.seed" = 7
[[runs]]
name = "layers"
"layer_dropout.p_max" = 0.5
"""
GOOD = ["plain", "placement=vpad,p=0.1", "seeded", "layers"]


@pytest.fixture
def write(tmp_path):
    """Writes a sweep file over the tiny configuration, with results under `out`."""
    (tmp_path / "tiny.toml").write_text(TINY)

    def to_file(text: str, top: str = "") -> Path:
        file = tmp_path / "sweep.toml"
        file.write_text(f'config = "{tmp_path}/tiny.toml"\nfolder = "{tmp_path}/out"\n{top}\n{text}')
        return file

    return to_file


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Replaces torchrun and train.py by a stand-in, which writes the last step's record; a rate of 1e30 fails, and the
    run `lasting` waits for SIGINT. Returns a function that tells which runs it was started for."""
    stub, calls = tmp_path / "stub.py", tmp_path / "calls"
    stub.write_text(f"""
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--job.dump_folder") + 1])
with open({str(calls)!r}, "a") as file:
    file.write(json.dumps([folder.name, os.environ["OMP_NUM_THREADS"], os.getpid()]) + "\\n")
if "1e+30" in sys.argv:
    print("error: step 2: the loss is not finite")
    sys.exit(1)
if folder.name == "lasting" and not (folder / "checkpoint/step-1").exists():
    def save(*_):
        (folder / "checkpoint/step-1").mkdir(parents=True)
        sys.exit(75)
    signal.signal(signal.SIGINT, save)
    (folder / "ready").touch()
    time.sleep(60)
(folder / "metrics.jsonl").write_text(json.dumps({{"step": 3, "loss": 2.5}}) + "\\n")
""")
    for module in (sweep_runs, sweep_launchers):
        monkeypatch.setattr(module, "local_launcher", lambda processes: [sys.executable, str(stub)])

    def started() -> list[str]:
        return [json.loads(line)[0] for line in calls.read_text().splitlines()] if calls.exists() else []

    return started


def summary(tmp_path) -> dict[str, str]:
    found = json.loads((tmp_path / "out/sweep.json").read_text())
    assert found["name"] == "sweep"
    return {run["name"]: run["status"] for run in found["runs"]}


# The file --------------------------------------------------------------------------------------------------------


def test_every_combination(write, tmp_path):
    """Grid x linked x runs, the last changing fastest; settings are base, [set] and values; names are the values'."""
    sweep = read_sweep(
        write("""
[set]
"training.steps" = 5
[grid]
layer_dropout.distribution = ["uniform", "increasing"]
"training.copying_lengths" = [[1, 2], [2, 3]]
[[linked]]
"optimizer.lr" = [1e-3, 2e-5]
"compile.enable" = [true, false]
[[linked]]
"layer_dropout.p_max" = [0.1, 0.2]
names = ["low", "high"]
[[runs]]
"dropout.placement" = "none"
[[runs]]
name = "vpad"
dropout.placement = "vpad"
dropout.p = 0.1
""")
    )
    assert len(sweep.runs) == len({run.name for run in sweep.runs}) == 32
    assert sweep.name == "sweep" and sweep.processes == 1 and sweep.folder == tmp_path / "out"
    prefix = "distribution=uniform,copying_lengths=1-2,lr=0.001,enable=true,low,"
    assert [run.name for run in sweep.runs[:3]] == [
        prefix + "placement=none", prefix + "vpad", prefix.replace("low", "high") + "placement=none"
    ]  # fmt: skip
    last = sweep.runs[-1]
    assert last.name == "distribution=increasing,copying_lengths=2-3,lr=2e-05,enable=false,high,vpad"
    assert last.values == {
        "layer_dropout.distribution": "increasing", "training.copying_lengths": [2, 3], "optimizer.lr": 2e-5,
        "compile.enable": False, "layer_dropout.p_max": 0.2, "dropout.placement": "vpad", "dropout.p": 0.1,
    }  # fmt: skip
    assert last.settings == {"job.config_file": str(tmp_path / "tiny.toml"), "training.steps": 5} | last.values
    assert all(shlex.quote(run.name) == run.name for run in sweep.runs)

    config = load_config(last.arguments(), 1)
    assert config.training.copying_lengths == [2, 3] and config.training.steps == 5
    assert (config.optimizer.lr, config.compile.enable, config.dropout.p) == (2e-5, False, 0.1)
    assert config.job.dump_folder == str(tmp_path / "out" / last.name)


def test_names(write, tmp_path):
    """Whole keys where two have one last word; a base configuration by its file's name; nothing a shell would read."""
    (tmp_path / "other one.toml").write_text(TINY)
    sweep = read_sweep(
        write(f"""
[grid]
"job.config_file" = ["{tmp_path}/tiny.toml", "{tmp_path}/other one.toml"]
"dropout.schedule" = ["constant"]
"layer_dropout.schedule" = ["decreasing"]
"job.description" = ["a b$c/d"]
""")
    )
    names = [run.name for run in sweep.runs]
    rest = "dropout.schedule=constant,layer_dropout.schedule=decreasing,description=a-b-c-d"
    assert names == [f"tiny,{rest}", f"other-one,{rest}"]
    assert [run.settings["job.config_file"] for run in sweep.runs] == [
        str(tmp_path / "tiny.toml"), str(tmp_path / "other one.toml")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[grid]\n"job.description" = ["a b", "a$b"]', "2 runs have the name description=a-b"),
        ('[grid]\n"training.seed" = [1, 1]', "2 runs have the name seed=1"),
        ('[[runs]]\nname = "../up"\n[[runs]]\nname = "b"', "name '../up': must be letters"),
        ('[[runs]]\nname = "sweep.json"', "name 'sweep.json': must be letters"),
        (f'[[runs]]\nname = "{"a" * 201}"', "201 characters, 200 are possible"),
    ],
)
def test_names_refused(write, text, fault):
    with pytest.raises(SweepError) as caught:
        read_sweep(write(text))
    assert fault in str(caught.value)


def test_all_faults_at_once(write, script, capsys, tmp_path):
    file = write(
        """
[set]
"job.dump_folder" = "elsewhere"
"training.step" = 3
"training.seed" = 1
[grid]
"optimizer.lr" = [1e-3, "fast"]
"training.seed" = [1, 2]
"dropout.p" = []
"training.steps" = 4
"dropout.mask" = ["per_sublayer"]
[[linked]]
"optimizer.beta1" = [0.9, 0.8]
"optimizer.beta2" = [0.9]
[[linked]]
"dropout.mask" = ["per_linear"]
names = 3
[[runs]]
[[runs]]
"dropout.placment" = "vpad"
""",
        top="processes = 0\nfolders = 1",
    )
    file.write_text(file.read_text().replace("tiny.toml", "missing.toml"))
    assert script("sweep", str(file), "--run", "local") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the sweep cannot start:\n") and "Traceback" not in said
    assert sorted(line.strip() for line in said.splitlines()[1:]) == sorted([
        "folders: unknown; a sweep has config, folder, processes, set, grid, linked, runs",
        "processes = 0: must be at least 1",
        f"config = '{tmp_path}/missing.toml': no such file (from the project's root)",
        "[set]: job.dump_folder: every run has a folder of its own; set `folder`, at the top, to that of all",
        "[set]: training.step: unknown key; did you mean training.steps?",
        "[grid]: optimizer.lr = 'fast': must be a number",
        "[grid]: dropout.p: has no values",
        "[grid]: training.steps = 4: must be a list of values",
        "[[linked]] number 1: lists of different lengths: optimizer.beta1 2, optimizer.beta2 1",
        "[[linked]] number 2: names = 3: must be a list of strings",
        "[[runs]] number 1: has neither a name nor a key",
        "[[runs]] number 2: dropout.placment: unknown key; did you mean dropout.placement?",
        "dropout.mask: is on 2 axes",
        "training.seed: is in [set] and on an axis",
    ])  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_file_refused(tmp_path, write):
    with pytest.raises(SweepError, match="no such file"):
        read_sweep(tmp_path / "none.toml")
    with pytest.raises(SweepError, match="not valid TOML"):
        read_sweep(write("[grid"))
    with pytest.raises(SweepError, match="nothing varies"):
        read_sweep(write('[set]\n"training.steps" = 5'))
    (tmp_path / "bare.toml").write_text('grid = 3\n[[runs]]\nname = "a"')
    with pytest.raises(SweepError) as caught:
        read_sweep(tmp_path / "bare.toml")
    assert caught.value.faults == ["grid = 3: must be a table, [grid]", "config: must name the base configuration"]


def test_default_folder(tmp_path):
    file = tmp_path / "rates.toml"
    file.write_text('config = "train_configs/debug_copying.toml"\n[grid]\n"training.seed" = [3]')
    (run,) = read_sweep(file).runs
    assert run.folder == Path("outputs/sweeps/rates/seed=3")


# Here ------------------------------------------------------------------------------------------------------------


def test_print(write, script, capsys, tmp_path):
    """Lists what runs cost, and commands that load; names the run that cannot run; leaves nothing."""
    assert script("sweep", str(write(FAULTY))) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].split(maxsplit=5) == ["state", "run", "parameters", "steps", "tokens", "GiB a rank  at step  loss"]
    rows = [line.split() for line in lines[1:7]]
    assert [row[1] for row in rows] == ["plain", GOOD[1], "invalid", "crashing", "seeded", "layers"]
    assert [row[0] for row in rows] == ["invalid" if row[1] == "invalid" else "waiting" for row in rows]
    n_parameters = sum(parameter.numel() for parameter in build_model("nape_llama3", "debug", **SIZES).parameters())
    assert rows[0][2:6] == [f"{n_parameters / 1e3:.3g}", "K", "3", "45"]  # 3 steps of 15 tokens
    assert 16 * n_parameters < float(rows[0][6]) * 2**30 < 1e6  # at least weights, gradients and moments
    assert said.err.splitlines() == [
        "invalid cannot run:", "  optimizer.beta1 = 2.0: must be in [0, 1)", "  dropout.p = 1.5: must be in [0, 1)"
    ]  # fmt: skip
    assert len(lines[8:]) == 5
    command = shlex.split(lines[9])
    assert command[:5] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    config = load_config(command[6:], 1)
    assert (config.dropout.placement, config.job.dump_folder) == ("vpad", str(tmp_path / "out" / GOOD[1]))
    assert not (tmp_path / "out").exists()

    assert script("sweep", str(write(FAULTY)), "--processes", "2") == 1
    assert capsys.readouterr().err.count("cannot run:") == 6  # a global batch of 1 on 2 ranks


def test_one_invalid_and_one_failing_run(write, script, capsys, trained, tmp_path):
    """4 results, both faults told, status 1; called again only what is missing is run."""
    file = str(write(FAULTY))
    assert script("sweep", file, "--run", "local") == 1
    said = capsys.readouterr()
    assert "invalid cannot run:\n  optimizer.beta1 = 2.0: must be in [0, 1)\n  dropout.p = 1.5" in said.err
    assert "crashing failed: step 2: the loss is not finite\n" in said.err
    assert "4/5] layers: done, step 3, loss 2.5000" in said.out.replace("5/5", "4/5")
    assert trained() == ["plain", GOOD[1], "crashing", "seeded", "layers"]
    assert summary(tmp_path) == dict.fromkeys(GOOD, "done") | {"invalid": "invalid", "crashing": "failed"}
    record = json.loads((tmp_path / "out/crashing/sweep.json").read_text())
    assert (record["status"], record["exit_status"], record["starts"]) == ("failed", 1, 1)
    assert record["settings"]["optimizer.lr"] == 1e30 and shlex.split(record["command"])[2] == "train.py"
    assert not (tmp_path / "out/invalid").exists()

    assert script("sweep", file, "--run", "local") == 1
    assert "4 of 5 runs are done already" in capsys.readouterr().out
    assert trained()[5:] == ["crashing"]
    assert json.loads((tmp_path / "out/crashing/sweep.json").read_text())["starts"] == 2

    # mended, all is well; and there is nothing left to do
    Path(file).write_text(Path(file).read_text().replace("1e30", "1e-4").replace("2.0", "0.8").replace("1.5", "0.2"))
    assert script("sweep", file, "--run", "local") == 0
    assert trained()[6:] == ["invalid", "crashing"]
    assert script("sweep", file, "--run", "local") == 0
    assert len(trained()) == 8 and set(summary(tmp_path).values()) == {"done"}


def test_none_can_run(write, script, capsys, trained):
    assert script("sweep", str(write('[grid]\n"dropout.p" = [1.5, 2.0]')), "--run", "local") == 2
    said = capsys.readouterr().err
    assert "none of the runs can run" in said and "p=1.5 cannot run:" in said and "p=2.0 cannot run:" in said
    assert trained() == []


def test_no_folder(write, script, capsys, trained, tmp_path):
    (tmp_path / "out").write_text("a file")
    assert script("sweep", str(write(FOUR)), "--run", "local") == 2
    assert f"folder = '{tmp_path}/out': File exists" in capsys.readouterr().err and trained() == []


def test_other_settings_never_count(write, script, capsys, trained, tmp_path):
    """A folder with results of other settings is refused, whichever way they changed; or put aside, and run anew."""
    runs = '[grid]\n"training.seed" = [1, 2]\n'
    assert script("sweep", str(write(runs)), "--run", "local") == 0
    file = write('[set]\n"optimizer.lr" = 1e-4\n' + runs)
    assert script("sweep", str(file), "--run", "local") == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/out/seed=1 holds a run with other settings: optimizer.lr: 0.0008 -> 0.0001" in said
    assert "seed=2 holds" in said and len(trained()) == 2
    (tmp_path / "tiny.toml").write_text(TINY.replace("copying_lengths = [2, 3]", "copying_lengths = [1, 3]"))
    assert script("sweep", str(write(runs)), "--run", "local") == 2
    assert "training.copying_lengths: [2, 3] -> [1, 3]" in capsys.readouterr().err

    assert script("sweep", str(write(runs)), "--run", "local", "--restart-changed") == 0
    assert trained()[2:] == ["seed=1", "seed=2"]
    before = json.loads((tmp_path / "out/seed=1.replaced-1/sweep.json").read_text())
    now = json.loads((tmp_path / "out/seed=1/sweep.json").read_text())
    lengths = [record["config"]["training"]["copying_lengths"] for record in (before, now)]
    assert lengths == [[2, 3], [1, 3]] and now["starts"] == 1


def test_failed_without_a_checkpoint_begins_anew(write, script, trained):
    """Other settings of a run that left nothing to go on from are no fault."""
    assert script("sweep", str(write('[[runs]]\nname = "a"\n"optimizer.lr" = 1e30')), "--run", "local") == 1
    assert script("sweep", str(write('[[runs]]\nname = "a"\n"optimizer.lr" = 1e-3')), "--run", "local") == 0
    assert trained() == ["a", "a"]


LASTING = '[[runs]]\nname = "first"\n[[runs]]\nname = "lasting"\n[[runs]]\nname = "last"'


def signal_when_ready(folder: Path, number: int) -> threading.Thread:
    """Sends this process a signal once the lasting run waits for one."""

    def send() -> None:
        for _ in range(600):
            if (folder / "out/lasting/ready").exists():
                os.kill(os.getpid(), number)
                return
            threading.Event().wait(0.05)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_a_signal(write, script, capsys, trained, tmp_path, number, status):
    """The run in progress saves and stops, the sweep ends, and the next call goes on."""
    file = str(write(LASTING))
    handler = signal.getsignal(number)
    thread = signal_when_ready(tmp_path, number)
    assert script("sweep", file, "--run", "local") == status
    thread.join()
    assert signal.getsignal(number) == handler
    said = capsys.readouterr().out
    assert f"{number.name}: the runs in progress save and stop" in said and "the same command goes on" in said
    assert summary(tmp_path) == {"first": "done", "lasting": "stopped", "last": "waiting"}
    assert json.loads((tmp_path / "out/lasting/sweep.json").read_text())["exit_status"] == 75
    assert script("sweep", file, "--run", "local") == 0
    assert trained() == ["first", "lasting", "lasting", "last"]


def test_two_at_once(write, script, trained, tmp_path, monkeypatch):
    """Both are in progress together, each with its share of the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    thread = signal_when_ready(tmp_path, signal.SIGINT)
    text = LASTING.replace('last"', 'lasting-too"').replace("first", "before")
    assert script("sweep", str(write(text, top="processes = 1")), "--run", "local", "--jobs", "2") == 130
    thread.join()
    threads = [json.loads(line)[1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(threads) >= 2 and set(threads) == {"6"}
    assert summary(tmp_path)["lasting"] == "stopped" and summary(tmp_path)["before"] == "done"


def test_gpus_of_runs_at_once(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices(slot, 2, 2) for slot in (0, 1)] == ["0,1", "2,3"]
    assert devices(0, 4, 1) is None
    with pytest.raises(SweepError, match="need 6, there are 4"):
        devices(0, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert devices(1, 1, 2) == "7"


def test_a_run_in_use_is_left_alone(write, script, capsys, trained, tmp_path):
    (tmp_path / "out/last").mkdir(parents=True)
    with open(tmp_path / "out/last/sweep.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = str(write('[[runs]]\nname = "first"\n[[runs]]\nname = "last"'))
        assert script("sweep", file, "--run", "local") == 1
    assert trained() == ["first"] and "last failed: another process works on it" in capsys.readouterr().err
    assert script("sweep", file, "--run", "local") == 0


def test_why_a_run_failed():
    said = """\
[titan] step 1
error: the configuration cannot run:
  dropout.p = 1.5: must be in [0, 1)
E1130 12:47:01.815000 2252 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[0]:
  exitcode  : 1 (pid: 1)
Root Cause (first observed failure):
[1]:
  exitcode  : 2 (pid: 2289)
"""
    assert rank_status(said, 1) == 2 and rank_status("", 1) == 1
    assert reason(said, 2) == "the configuration cannot run:\n  dropout.p = 1.5: must be in [0, 1)"
    assert reason("Traceback\nValueError: no\ntorch.distributed.x.ChildFailedError: y", 1) == "ValueError: no"
    assert reason("", -9) == "signal SIGKILL" and reason("", 3) == "exit status 3"


def test_run_one(write, script, capsys, trained, tmp_path):
    """One of the runs: 0 when done, 75 when it saved and stopped, 1 and 2 for faults; the others' summary stays."""
    file = str(write(LASTING + '\n[[runs]]\nname = "crashing"\n"optimizer.lr" = 1e30'))
    thread = signal_when_ready(tmp_path, signal.SIGUSR1)
    assert script("sweep", file, "--run-one", "lasting") == 75
    thread.join()
    assert script("sweep", file, "--run-one=lasting") == 0
    assert script("sweep", file, "--run-one", "lasting") == 0
    assert script("sweep", file, "--run-one", "crashing") == 1
    assert trained() == ["lasting", "lasting", "crashing"]
    assert summary(tmp_path) == {"first": "waiting", "lasting": "done", "last": "waiting", "crashing": "failed"}
    assert script("sweep", file, "--run-one", "none") == 2
    assert "--run-one none: not a run of" in capsys.readouterr().err


# Elsewhere -------------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Puts stand-ins of commands in front of PATH; returns a function that makes one and a file of what they were
    called with."""
    folder, calls = tmp_path / "bin", tmp_path / "called"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n{body}\n')
        (folder / name).chmod(0o755)
        return calls

    return make


def test_sbatch(write, script, capsys, commands, tmp_path):
    """An array over the runs that are missing and can run; a task starts its run, and is queued again once saved."""
    file = str(write(FAULTY))
    options = ["--gpus", "4", "--time", "2:00:00", "--partition", "long", "--array-parallelism", "2", "--cpus", "8"]
    assert script("sweep", file, "--run", "slurm", *options) == 1  # for the invalid one
    path = tmp_path / "out/sweep.sbatch"
    said = capsys.readouterr()
    assert f"wrote {path}, an array of 5 runs. Submit it:\nsbatch {path}" in said.out
    assert "invalid cannot run:" in said.err and summary(tmp_path)["invalid"] == "invalid"
    text = path.read_text()
    directives = dict(
        line.split(" --")[1].split("=") for line in text.splitlines() if line.startswith("#SBATCH --") and "=" in line
    )
    assert directives == {
        "job-name": "sweep", "array": "0-4%2", "nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "4",
        "cpus-per-task": "8", "time": "2:00:00", "partition": "long", "signal": "B:USR1@300", "open-mode": "append",
        "output": str(tmp_path / "out/slurm/%A_%a.log"),
    }  # fmt: skip
    assert "#SBATCH --requeue\n" in text and (tmp_path / "out/slurm").is_dir()

    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "77"}
    called = commands("srun", "exit 75")
    commands("scontrol", "")
    commands("scancel", "")
    assert subprocess.run(["bash", path], cwd=ROOT, env=environment).returncode == 75
    relative = os.path.relpath(file, ROOT)
    command = f"{sys.executable} scripts/sweep.py {relative} --processes 1 --run-one {GOOD[1]}"
    assert called.read_text().splitlines() == [f"srun {command}", "scontrol requeue 77"]

    # the signal before the time limit goes on to the step, whose end is waited for
    called.write_text("")
    commands("srun", "kill -USR1 $PPID; sleep 1; exit 0")
    assert subprocess.run(["bash", path], cwd=ROOT, env=environment).returncode == 0
    assert called.read_text().splitlines() == [f"srun {command}", "scancel --signal=USR1 77"]


def test_nodes_of_one_run(monkeypatch, commands):
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    assert node_launcher(8)[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"]
    commands("scontrol", "echo node3; echo node4")
    for name, value in {"NNODES": "2", "JOB_ID": "20007", "JOB_NODELIST": "node[3-4]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert node_launcher(8)[3:] == [
        "--nnodes=2", "--nproc_per_node=8", "--rdzv_id=20007", "--rdzv_backend=c10d", "--rdzv_endpoint=node3:20007"
    ]  # fmt: skip


def test_submit(write, script, capsys, commands, tmp_path):
    """submitit submits one array whose tasks are the runs."""
    pytest.importorskip("submitit")
    commands("srun", "")
    called = commands("sbatch", "echo Submitted batch job 12")
    options = ["--run", "slurm", "--submit", "--gpus", "0", "--time", "1-02:30:00", "--partition", "long"]
    assert script("sweep", str(write(FOUR)), *options) == 0
    assert "submitted 4 runs: 12_0 12_1 12_2 12_3" in capsys.readouterr().out
    (call,) = called.read_text().splitlines()
    assert call.startswith("sbatch ")
    (script_file,) = (tmp_path / "out/slurm").glob("*submission.sh")
    text = script_file.read_text()
    for line in ("array=0-3%4", "partition=long", "time=1590", "nodes=1", "signal=USR2@300", "job-name=sweep"):
        assert f"#SBATCH --{line}\n" in text
    task = pickle.loads((tmp_path / "out/slurm/12_2_submitted.pkl").read_bytes()).function
    assert task.command[-2:] == ["--run-one", "seed=2,plain"]
    assert script("sweep", str(write(FOUR)), *options[:-4], "--time", "forever") == 2
    assert "--time forever: must be HOURS:MM" in capsys.readouterr().err


def test_submit_without_submitit(write, script, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert script("sweep", str(write(FOUR)), "--run", "slurm", "--submit", "--time", "1:00") == 2
    assert "--submit needs submitit: pip install 'regdrop-titan[slurm]'" in capsys.readouterr().err
    assert script("sweep", str(write(FOUR)), "--run", "slurm", "--submit") == 2


def test_slurm_task(tmp_path):
    """A task fails with its run, and is stopped and queued again before the time limit."""
    pytest.importorskip("submitit")
    with pytest.raises(subprocess.CalledProcessError):
        SlurmTask(["false"])()
    SlurmTask(["true"])()
    task = SlurmTask(["sleep", "60"])

    def call() -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            task()

    thread = threading.Thread(target=call)
    thread.start()
    while task.process is None:
        pass
    while Path(f"/proc/{task.process.pid}/comm").read_text() != "sleep\n":
        pass
    task.process.send_signal(signal.SIGUSR2)
    again = task.checkpoint()
    thread.join()
    assert task.process.returncode == -signal.SIGTERM  # USR2, which submitit takes, does not reach it
    assert again.function.command == ["sleep", "60"] and again.function.process is None


@pytest.mark.parametrize(("time", "minutes"), [("0:30", 30), ("24:00:00", 1440), ("2-01:15", 2955)])
def test_time_limits(time, minutes):
    assert Slurm(time=time).minutes() == minutes


def test_wandb(write, script, capsys, tmp_path):
    """The agent's command, as W&B makes it, is a run of this sweep."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    assert script("sweep", str(write(FOUR)), "--run", "wandb") == 2
    assert '4 of 4 runs do not log to W&B: put "metrics.enable_wandb" = true under [set]' in capsys.readouterr().err
    file = write('[set]\n"metrics.enable_wandb" = true\n' + FOUR, top="processes = 1")
    assert script("sweep", str(file), "--run", "wandb") == 0
    sweep = yaml.safe_load((tmp_path / "out/wandb.yaml").read_text())
    names = ["seed=1,plain", "seed=1,vpad", "seed=2,plain", "seed=2,vpad"]
    assert sweep["parameters"] == {"run-one": {"values": names}} and sweep["method"] == "grid"
    assert (sweep["name"], sweep["program"]) == ("sweep", "scripts/sweep.py")
    made = create_sweep_command_args({"args": {"run-one": {"value": names[1]}}})
    words = [word for part in sweep["command"] for word in (made["args"] if part == "${args}" else [part])]
    relative = os.path.relpath(file, ROOT)
    assert words == [
        "${env}", "${interpreter}", "${program}", relative, "--processes", "1", "--run-one=seed=1,vpad"
    ]  # fmt: skip


# With train.py ---------------------------------------------------------------------------------------------------


def check_trained(folder: Path, name: str) -> None:
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3] and 2 < records[-1]["loss"] < 5
    config = json.loads((folder / name / "config.json").read_text())
    assert config["training"]["seed"] == (7 if name == "seeded" else 42)
    assert (folder / name / "checkpoint/step-3/.metadata").exists()


def test_real_run(write, script, capsys, tmp_path):
    """torchrun and train.py train it, with its settings."""
    file = str(write('[[runs]]\nname = "seeded"\n"training.seed" = 7'))
    assert script("sweep", file, "--run", "local") == 0
    check_trained(tmp_path / "out", "seeded")
    assert summary(tmp_path) == {"seeded": "done"}


@pytest.mark.slow
def test_six_real_runs(write, script, capsys, tmp_path):
    """`test_one_invalid_and_one_failing_run` with torchrun and train.py."""
    file = str(write(FAULTY))
    assert script("sweep", file, "--run", "local") == 1
    said = capsys.readouterr()
    assert "invalid cannot run:\n  optimizer.beta1 = 2.0" in said.err
    assert re.search("crashing failed: step 2: the (gradient norm is nan|loss is not finite)", said.err)
    assert summary(tmp_path) == dict.fromkeys(GOOD, "done") | {"invalid": "invalid", "crashing": "failed"}
    for name in GOOD:
        check_trained(tmp_path / "out", name)
    ended = {name: json.loads((tmp_path / "out" / name / "sweep.json").read_text())["ended"] for name in GOOD}
    assert script("sweep", file, "--run", "local") == 1
    assert ended == {name: json.loads((tmp_path / "out" / name / "sweep.json").read_text())["ended"] for name in GOOD}
    assert json.loads((tmp_path / "out/crashing/sweep.json").read_text())["starts"] == 2

    assert script("report", str(tmp_path / "out")) == 0
    table = (tmp_path / "out/report/report.md").read_text()
    for name in (*GOOD, "invalid", "crashing"):
        assert re.search(rf"^\|.*\b{re.escape(name)}\b.*\|$", table, re.M), name
    runs = list(csv.DictReader((tmp_path / "out/report/runs.csv").read_text().splitlines()))
    assert {run["name"]: run["status"] for run in runs} == summary(tmp_path)


@pytest.mark.parametrize("file", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda file: file.stem)
def test_the_papers_sweeps(file):
    """Every run of every sweep file can run (looked at under one seed); the file says how to run it."""
    sweep = read_sweep(file)
    seed = sweep.runs[0].values.get("training.seed")
    _, invalid = sweep_runs.check([r for r in sweep.runs if r.values.get("training.seed") == seed], sweep.processes)
    assert invalid == {} and len(sweep.runs) >= 2
    head = file.read_text().split("\n\n")[0]
    assert f"scripts/sweep.py sweeps/{file.name}" in head and f"outputs/sweeps/{file.stem}" in head
    assert sweep.folder == Path("outputs/sweeps") / file.stem

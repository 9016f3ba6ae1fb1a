"""Training of exits in real runs: every layout as one process, resume, falling KL, a backbone that stays as it is."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from regdrop_titan.adapters import load_exits
from regdrop_titan.adapters.balcony import exits_record
from regdrop_titan.adapters.command import exits_config
from regdrop_titan.checkpoints import load_model
from regdrop_titan.checkpoints.safety import read_metadata
from regdrop_titan.config import ConfigError, model_args
from regdrop_titan.evaluation.subjects import weights_sha256
from regdrop_titan.metrics import read_records

from .harness import DDP, run_cases
from .ranks import Ranks

MAMBA = ["--model.name", "mamba2", "--architecture.ssm_head_dim", "16", "--architecture.state_size", "16",
         "--architecture.chunk_size", "12"]  # fmt: skip
FAMILIES = {
    "nape": ["--architecture.document_mask"],
    "mamba": MAMBA,
    "hybrid": [*MAMBA, "--architecture.layers", "attention,mamba", "--architecture.no-tied_embeddings"],
    "celerity": ["--model.name", "celerity", "--architecture.n_kv_heads", "4", "--parametrization.kind", "completep",
                 "--parametrization.base_dim", "32", "--parametrization.base_layers", "2",
                 "--layer_dropout.p_max", "0.5", "--layer_dropout.scale", "eval_density",
                 "--layer_dropout.schedule", "constant"],
}  # fmt: skip
STEPS = ["--training.steps", "4", "--lr_scheduler.warmup_steps", "1", "--checkpoint.interval", "2", "--optimizer.lr",
         "1e-2", "--optimizer.implementation", "for-loop"]  # fmt: skip
DROPPING = ["--dropout.placement", "vpad", "--dropout.p", "0.2", "--optimizer.weight_decay", "0.1"]


def train_exits(rank: int, runs: list[list[str]], ports: list[int]) -> int:
    """`train_exits.py` with each of some arguments, one after another in the same rank, on a port each."""
    from regdrop_titan.adapters.command import main

    for args, port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if status := main(args, ""):
            return status
    return 0


def start(n: int, folder: Path, *runs: list[str]) -> Ranks:
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in runs]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in free]
    return Ranks(
        n, functools.partial(train_exits, runs=list(runs), ports=ports), folder / f"said-{time.monotonic_ns()}"
    )


def run_exits(n: int, folder: Path, *runs: list[str]) -> tuple[list[int], str]:
    """Exit statuses of `n` ranks, and what they printed."""
    ranks = start(n, folder, *runs)
    return ranks.wait(240), ranks.said()


def exits_of(run: Path, out: Path, *args: str) -> list[str]:
    return ["--checkpoint", str(run), "--exits", "2", "1", "--job.dump_folder", str(out), *STEPS, *args]


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("balcony_runs")


@pytest.fixture(scope="module")
def backbones(folder, packed):
    """A run of each family, and the hashes of all that it left."""
    cases = {name: {"args": [*args, "--checkpoint.enable"]} for name, args in FAMILIES.items()}
    run_cases(1, folder / "runs", packed, cases)
    return hashes(folder / "runs")


@pytest.fixture(scope="module")
def one(folder, backbones):
    """Each family in one process, in one go."""
    runs = [exits_of(folder / "runs" / name, folder / "1" / name) for name in FAMILIES]
    runs.append(exits_of(folder / "runs/nape", folder / "1/accumulated", "--training.local_batch_size", "8"))
    long = ["--training.steps", "30", "--checkpoint.interval", "15", "--validation.enable", "--validation.freq", "10"]
    runs.append(exits_of(folder / "runs/nape", folder / "1/long", *long))
    statuses, said = run_exits(1, folder, *runs)
    assert statuses == [0], said[-5000:]
    return said


@pytest.fixture(scope="module")
def two(folder, backbones):
    """Each family on two ranks (FSDP2), replicated, and stopped and resumed with dropout in the exits."""
    runs = [exits_of(folder / "runs" / name, folder / "2" / name) for name in FAMILIES]
    runs.append(exits_of(folder / "runs/nape", folder / "2/ddp", *DDP))
    runs.append(exits_of(folder / "runs/hybrid", folder / "2/bf16", "--training.mixed_precision_param", "bfloat16"))
    runs.append(exits_of(folder / "runs/hybrid", folder / "2/whole", *DROPPING))
    for steps in ("2", "4"):
        schedule = ["--training.steps", steps, "--lr_scheduler.total_steps", "4"]
        runs.append(exits_of(folder / "runs/hybrid", folder / "2/parts", *DROPPING, *schedule))
    statuses, said = run_exits(2, folder, *runs)
    assert statuses == [0, 0], said[-5000:]
    return said


def compare(records, expected):
    assert [record["step"] for record in records] == [record["step"] for record in expected]
    for record, other in zip(records, expected, strict=True):
        for key in ("loss", "grad_norm", "exit_kl/1", "exit_kl/2"):
            # 2e-8 nats: a KL is a sum of differences of log-probabilities near -5, which fp32 rounds by 5e-7
            assert record[key] == pytest.approx(other[key], rel=1e-5, abs=2e-8), key
        assert record["loss"] == pytest.approx((record["exit_kl/1"] + record["exit_kl/2"]) / 2, rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_train_as_one(folder, one, two, name):
    compare(read_records(folder / "2" / name / "metrics.jsonl"), read_records(folder / "1" / name / "metrics.jsonl"))


def test_replicas_and_accumulation_train_as_one(folder, one, two):
    expected = read_records(folder / "1/nape/metrics.jsonl")
    compare(read_records(folder / "2/ddp/metrics.jsonl"), expected)
    compare(read_records(folder / "1/accumulated/metrics.jsonl"), expected)


def test_mixed_precision(folder, one, two):
    """bf16 under FSDP2, with a backbone in fp32 that stays bit for bit, near the run in fp32."""
    records = read_records(folder / "2/bf16/metrics.jsonl")
    for record, other in zip(records, read_records(folder / "1/hybrid/metrics.jsonl"), strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=0.1)


@pytest.mark.slow
def test_four_ranks_train_as_one(folder, one, backbones):
    """HSDP, and FSDP2 over four."""
    hsdp = ["--parallelism.data_parallel_replicate_degree", "2"]
    runs = [exits_of(folder / "runs/hybrid", folder / f"4/{name}", *args) for name, args in (("hsdp", hsdp), ("", []))]
    statuses, said = run_exits(4, folder, *runs)
    assert statuses == [0] * 4, said[-5000:]
    for name in ("4/hsdp", "4"):
        compare(read_records(folder / name / "metrics.jsonl"), read_records(folder / "1/hybrid/metrics.jsonl"))


def test_resume_is_bit_for_bit(folder, two):
    whole, parts = (read_records(folder / f"2/{name}/metrics.jsonl") for name in ("whole", "parts"))
    assert [record["step"] for record in parts] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "lr", "tokens", "exit_kl/1", "exit_kl/2"):
        assert [record[key] for record in parts] == [record[key] for record in whole], key
    backbone = load_model(folder / "runs/hybrid")
    a, b = (load_exits(folder / f"2/{name}", backbone) for name in ("whole", "parts"))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    begun = load_exits(folder / "2/parts/checkpoint/step-2", backbone)
    assert not all(torch.equal(x, y) for x, y in zip(b.parameters(), begun.parameters(), strict=True))


def test_the_kl_falls_at_every_exit(folder, one):
    records = read_records(folder / "1/long/metrics.jsonl")
    for key in ("loss", "exit_kl/1", "exit_kl/2"):
        first, last = (sum(record[key] for record in part) / 5 for part in (records[:5], records[-5:]))
        assert last < 0.5 * first, key
    validation = read_records(folder / "1/long/validation.jsonl")
    assert [record["step"] for record in validation] == [1, 10, 20, 30]
    assert validation[0]["loss"] > validation[1]["loss"] > validation[3]["loss"] > 0
    assert validation[3]["loss"] == pytest.approx(records[-1]["loss"], rel=0.5)
    rates = [record["lr"] for record in records]
    assert rates[0] == max(rates) == 1e-2 and rates[15] == pytest.approx(5e-3, rel=0.1) and rates[-1] < 1e-4


def test_the_backbone_stays_as_it_is(folder, backbones, one, two):
    """Its files byte for byte, and its weights in training by their hash, which the exits know."""
    assert hashes(folder / "runs") == backbones
    for name in FAMILIES:
        sha256 = weights_sha256(load_model(folder / "runs" / name))
        for n, said in (("1", one), ("2", two)):
            assert exits_record(folder / n / name)[1]["backbone_sha256"] == sha256
            assert said.count(f"The backbone is unchanged, sha256 of its weights {sha256}") >= 1
            assert said.count(f"step-3, sha256 of its weights {sha256}") >= 1


def test_a_checkpoint_holds_the_exits_alone(folder, two):
    config = json.loads((folder / "2/hybrid/config.json").read_text())
    assert config["exits"]["layers"] == [1, 2] and config["model_args"]["n_layers"] == 4
    names = list(read_metadata(folder / "2/hybrid/checkpoint/step-4").state_dict_metadata)
    weights = [name for name in names if name.split(".")[0] not in ("optimizer", "lr_scheduler", "train_state")]
    weights = [name for name in weights if not name.startswith("dataloader")]
    assert {".".join(name.split(".")[:2]) for name in weights} == {"exits.1", "exits.2"}
    moments = [name for name in names if name.startswith("optimizer.state.")]
    assert moments and all(name.startswith("optimizer.state.exits.") for name in moments)


def test_a_signal_saves_and_the_same_command_goes_on(folder, backbones):
    args = exits_of(folder / "runs/nape", folder / "signal", "--training.steps", "100000")
    ranks = start(2, folder, args)
    end = time.monotonic() + 60
    while not read_records(folder / "signal/metrics.jsonl") and time.monotonic() < end:
        time.sleep(0.05)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.said()[-3000:]
    step = read_records(folder / "signal/metrics.jsonl")[-1]["step"]
    statuses, said = run_exits(2, folder, [*args, "--training.steps", str(step + 1)])
    assert statuses == [0, 0], said[-3000:]
    assert [record["step"] for record in read_records(folder / "signal/metrics.jsonl")] == list(range(1, step + 2))


def test_wrong_arguments(folder, two, script, capfd, monkeypatch):
    """All at once, in one message, with status 2; nothing is trained."""
    run = str(folder / "runs/nape")
    for args, messages in (
        (["--checkpoint", str(folder)], ["no whole checkpoint"]),
        (["--checkpoint", str(folder / "2/nape")], ["step-4: holds exits, not a model"]),
        (
            ["--checkpoint", run, "--exits", "0", "2", "2", "4", "--parallelism.tensor_parallel_degree", "2",
             "--architecture.dim", "32", "--optimizer.lrr", "1", "--dropout.p", "2"],
            ["exit 0, 4: the model has 4 layers, an exit is after 1 ... 3", "exit 2: named twice",
             "--architecture.dim: is the checkpoint's",
             "optimizer.lrr: unknown key; did you mean optimizer.lr?", "dropout.p = 2.0: must be in [0, 1)"],
        ),
        (
            ["--checkpoint", run, "--parallelism.tensor_parallel_degree", "2", "--architecture.dim", "64",
             "--compile.enable", "--training.loss_chunks", "4", "--job.config_file", "F.toml"],
            ["parallelism.tensor_parallel_degree: not for exits", "--architecture.dim: is the checkpoint's",
             "compile.enable: not for exits", "training.loss_chunks: not for exits",
             "--job.config_file: the settings are those of the run's"],
        ),
        (
            ["--checkpoint", run, "--exits", "2", "--job.dump_folder", str(folder / "2/nape")],
            ["has checkpoints of the exits 1 2; name those, or another job.dump_folder"],
        ),
    ):  # fmt: skip
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        assert script("train_exits", *args) == 2
        said = capfd.readouterr().err
        assert all(message in said for message in messages), said
        assert "Traceback" not in said
    assert not (folder / "runs/nape/exits").exists()


def test_imported_weights(folder, backbones, packed, tmp_path):
    """A config.json without settings of a run: data are named by overrides, sizes are the model's; defaults."""
    shutil.copytree(folder / "runs/celerity/checkpoint", tmp_path / "checkpoint")
    saved = json.loads((folder / "runs/celerity/config.json").read_text())
    imported = {"model": {"name": "celerity", "flavor": None}, "model_args": saved["model_args"], "tokenizer": None}
    (tmp_path / "config.json").write_text(json.dumps(imported))
    data = ["--training.dataset_path", str(packed / "train"), "--training.seq_len", "32"]
    config, checkpoint, args, layers = exits_config(tmp_path, None, data, 1)
    assert layers == (1, 2) and checkpoint == tmp_path / "checkpoint/step-3"
    assert dataclasses.asdict(args) == saved["model_args"] and args.eval_scale is not None
    now = model_args(config)
    assert (now.dim, now.ffn, now.depth_multiplier, now.vocab_size) == (64, "relu2", 2, 256)
    assert config.job.dump_folder == str(tmp_path / "exits") and config.training.steps == 1000
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("AdamW", 5e-4, 0.0)
    schedule = config.lr_scheduler
    assert (schedule.decay_type, schedule.warmup_steps, schedule.min_lr_factor) == ("cosine", 10, 0.0)
    config = exits_config(tmp_path, [2], [*data, "--training.steps=300"], 1)[0]
    assert config.lr_scheduler.warmup_steps == 3
    config = exits_config(tmp_path, [2], [*data, "--lr_scheduler.warmup-steps", "0"], 1)[0]
    assert config.lr_scheduler.warmup_steps == 0
    with pytest.raises(ConfigError, match=r"training.dataset_path: must name a packed set"):
        exits_config(tmp_path, None, [], 1)


def test_exits_of_other_weights_are_not_gone_on_with(folder, two, backbones):
    args = exits_of(folder / "runs/nape", folder / "2/nape", "--training.steps", "6")
    record = folder / "2/nape/config.json"
    before = record.read_text()
    record.write_text(before.replace(json.loads(before)["exits"]["backbone_sha256"], "0" * 64))
    try:
        statuses, said = run_exits(1, folder, args)
    finally:
        record.write_text(before)
    assert statuses == [2] and "has exits of other weights (sha256 000000000000)" in said and "Traceback" not in said


def test_depth_evaluation_finds_them(folder, one, packed, script, capsys, tmp_path):
    """Named, and beside their run; exits of other weights are refused when named, else passed over."""
    run = tmp_path / "nape"
    shutil.copytree(folder / "runs/nape", run)
    data = ["--checkpoint", str(run), "--data", str(packed / "validation"), "--samples", "4", "--analyses", "exits"]
    exits = str(folder / "1/long")
    assert script("evaluate", "depth", *data, "--exits", exits) == 0
    assert "trained exit 1" in capsys.readouterr().out
    named = json.loads((run / "evaluation/depth.json").read_text())
    assert named["settings"]["exits"] == f"{exits}/checkpoint/step-30"
    assert [each["n_layers"] for each in named["families"]["balcony"]] == [1, 2]
    for each, zero_shot in zip(named["families"]["balcony"], named["families"]["exits"][1:], strict=False):
        assert each["weight_bytes"] > zero_shot["weight_bytes"] and each["flops"] > zero_shot["flops"]
        assert abs(each["loss"] - named["full"]["loss"]) < abs(zero_shot["loss"] - named["full"]["loss"])
    shutil.copytree(folder / "1/long", run / "exits")
    assert script("evaluate", "depth", *data) == 0
    assert json.loads((run / "evaluation/depth.json").read_text())["families"] == named["families"]
    capsys.readouterr()
    shutil.rmtree(run / "exits")
    shutil.copytree(folder / "1/mamba", run / "exits")
    assert script("evaluate", "depth", *data) == 0
    assert "exits of another model" in capsys.readouterr().out
    assert "balcony" not in json.loads((run / "evaluation/depth.json").read_text())["families"]
    assert script("evaluate", "depth", *data, "--exits", str(run / "exits")) == 2
    assert "--exits: " in capsys.readouterr().err
    assert script("evaluate", "depth", *data, "--exits", str(run), exits) == 2
    said = capsys.readouterr().err
    assert "--exits: 2 for 1 models" in said and "holds no exits" in said

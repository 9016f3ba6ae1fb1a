"""Going on with a run under another configuration: what wins, what is told, what is refused (reports C5, C6, L1)."""

import json
import pickle
import shutil

import pytest
import torch

from regdrop_titan.checkpoints.safety import METADATA, CheckpointError, load_state, read_metadata
from regdrop_titan.config import ConfigError, load_config
from regdrop_titan.config.resume import differences, write_config
from regdrop_titan.metrics import read_records
from regdrop_titan.plan import learning_rates

from .distributed.harness import BASE, run_cases
from .packed_sets import markov_documents, write_packed

SAVE = ["--checkpoint.enable", "--checkpoint.interval", "3"]
CHANGED = ["--training.steps", "9", "--optimizer.lr", "5e-3", "--optimizer.weight_decay", "0.3", "--optimizer.beta2",
           "0.9", "--training.global_batch_size", "4", "--dropout.placement", "vpad", "--dropout.p", "0.2",
           "--lr_scheduler.total_steps", "12"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, packed):
    """3 steps; then on copies: on to 9 with other settings, and the same with the first 3 under them as well."""
    folder = tmp_path_factory.mktemp("resume")
    run_cases(1, folder, packed, {"first": {"args": [*SAVE, "--training.steps", "3"]}})
    shutil.copytree(folder / "first", folder / "changed")
    run_cases(1, folder, packed, {"changed": {"args": [*SAVE, *CHANGED]}})
    return folder


@pytest.fixture
def resumed(runs, packed, tmp_path):
    """The faults of going on in a copy of the first run with other arguments."""
    shutil.copytree(runs / "first", tmp_path / "out")
    (tmp_path / "run.toml").write_text(BASE.format(packed=packed))

    def faults(*args) -> list[str]:
        base = ["--job.config_file", str(tmp_path / "run.toml"), "--job.dump_folder", str(tmp_path / "out")]
        try:
            load_config([*base, "--checkpoint.enable", *args], inputs=True)
        except ConfigError as error:
            return error.faults
        return []

    return faults


def test_the_new_configuration_wins(runs, packed):
    """The learning rate of every later step is the new schedule's, whatever the checkpoint holds."""
    before, after = (read_records(runs / name / "metrics.jsonl") for name in ("first", "changed"))
    assert [r["step"] for r in after] == list(range(1, 10))
    assert after[:3] == before
    toml = runs / "base.toml"
    args = ["--job.config_file", str(toml), *CHANGED]
    assert [r["lr"] for r in after[3:]] == pytest.approx(learning_rates(load_config(args), list(range(4, 10))))
    # 3 steps of 8 sequences of 32 tokens, then 4 sequences each
    assert [r["tokens"] for r in after] == [256, 512, 768, *range(896, 1537, 128)]
    config = json.loads((runs / "changed/config.json").read_text())
    assert config["optimizer"]["weight_decay"] == 0.3
    assert json.loads((runs / "changed/config.1.json").read_text())["optimizer"]["weight_decay"] != 0.3


def test_betas_and_weight_decay_are_the_new_ones(runs):
    """As the next checkpoint holds them, for every parameter; the moments and their step go on."""
    names = [key for key in read_metadata(runs / "changed/checkpoint/step-9").state_dict_metadata
             if key.startswith("optimizer.param_groups.") and key.endswith((".weight_decay", ".betas"))]  # fmt: skip
    assert len(names) > 10
    state = {name: 0.0 if name.endswith(".weight_decay") else (0.0, 0.0) for name in names}
    load_state(state, runs / "changed/checkpoint/step-9", no_dist=True)
    found = {(name.rsplit(".", 1)[1], value) for name, value in state.items()}
    assert found == {("weight_decay", 0.3), ("betas", (0.9, 0.9))}
    step = {"optimizer.state.norm.weight.step": torch.zeros(())}
    load_state(step, runs / "changed/checkpoint/step-9", no_dist=True)
    assert step["optimizer.state.norm.weight.step"] == 9


def test_differences_are_named():
    before = {"optimizer": {"lr": 0.1, "gone": 1}, "training": {"steps": 3}, "job": {"dump_folder": "a"}, "flops": 1}
    now = {"optimizer": {"lr": 0.2, "new": 2}, "training": {"steps": 3}, "job": {"dump_folder": "b"}, "flops": 2}
    assert differences(before, now) == ["optimizer.lr: 0.1 -> 0.2"]


def test_older_configurations_are_kept(tmp_path):
    for value in (1, 1, 2, 3):
        write_config(tmp_path, {"value": value})
    kept = {path.name: json.loads(path.read_text())["value"] for path in tmp_path.iterdir()}
    assert kept == {"config.json": 3, "config.1.json": 1, "config.2.json": 2}


def test_the_same_is_not_refused(resumed, packed, tmp_path):
    assert resumed() == []
    shutil.copytree(packed / "train", tmp_path / "moved")  # the same data elsewhere
    assert resumed("--training.dataset_path", str(tmp_path / "moved"), "--training.seed", "1", *CHANGED) == []


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--architecture.dim", "32"], "architecture.dim = 32: the checkpoints in {out} are of dim = 64; train from"),
        (["--architecture.n_layers", "5"], "architecture.n_layers = 5: the checkpoints in {out} are of n_layers = 4"),
        (["--architecture.vocab_size", "512"], "architecture.vocab_size = 512: the checkpoints in {out} are of"),
        (["--architecture.tied_embeddings"], "architecture.tied_embeddings = True: the checkpoints"),
        (["--training.seq_len", "16"], "training.seq_len = 16: the run's position in its data counts samples of 32"),
        (["--training.dataset", "copying", "--training.copying_lengths", "2", "5"],
         "training.dataset = 'copying': the checkpoints in {out} are of 'packed'"),
        (["--architecture.norm", "layernorm"], "architecture.norm = layernorm: the checkpoints in {out} are of norm ="),
        (["--parametrization.base_dim", "32"], "parametrization.base_dim = 32: the checkpoints in {out} are of 0"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(resumed, tmp_path, args, fault):
    (found,) = resumed(*args)
    assert found.startswith(fault.format(out=tmp_path / "out"))
    assert found.endswith("in a new job.dump_folder with checkpoint.initial_load_path")


def test_other_data_are_refused(resumed, tmp_path, packed):
    write_packed(tmp_path / "other", markov_documents(100, 100, 256, seed=5), 256)
    write_packed(tmp_path / "tokens", markov_documents(100, 100, 256, seed=5), 256, tokenizer="another")
    (found,) = resumed("--training.dataset_path", str(tmp_path / "other"))
    assert "names other packed sets, or other shares, than the run has read so far" in found
    (found,) = resumed("--training.dataset_path", f"{packed / 'train'}:0.5,{tmp_path / 'other'}:0.5")
    assert "or other shares" in found
    (found,) = resumed("--training.dataset_path", str(tmp_path / "tokens"))
    assert "was tokenized by another (" in found and "are of stand-in (" in found


def test_all_refusals_at_once_and_none_for_a_new_run(resumed, tmp_path):
    args = ["--architecture.dim", "32", "--architecture.n_layers", "5", "--training.seq_len", "16"]
    assert len(resumed(*args)) == 3
    (tmp_path / "out/checkpoint/step-3/.metadata").unlink()  # no whole checkpoint: the run begins anew
    assert resumed(*args) == []


def test_a_state_that_is_not_there_is_an_error(runs, tmp_path):
    """Report C5: one of the optimizer's moments is gone."""
    shutil.copytree(runs / "first/checkpoint/step-3", tmp_path / "step-3")
    metadata = read_metadata(tmp_path / "step-3")
    name = "optimizer.state.norm.weight.exp_avg"
    del metadata.state_dict_metadata[name]
    (tmp_path / "step-3" / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"step-3: cannot be loaded: .*{name}"):
        load_state({name: torch.zeros(64)}, tmp_path / "step-3", no_dist=True)


@pytest.mark.parametrize(
    ("steps", "warmup", "decay_ratio", "factors"),
    [
        (10, 2, 0.2, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.55]),
        (4, 10, None, [0.25, 0.5, 0.75, 1]),
        (10, 6, 0.8, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 0.775, 0.55, 0.325]),
        (10, 10, 0.2, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        (1, 0, None, [1]),
    ],
)
def test_learning_rates_as_documented(steps, warmup, decay_ratio, factors):
    """Report L1, the table of docs/resume.md: factors of optimizer.lr by step, min_lr_factor 0.1, linear."""
    args = ["--training.steps", str(steps), "--lr_scheduler.warmup_steps", str(warmup), "--lr_scheduler.min_lr_factor",
            "0.1", "--optimizer.lr", "1.0"]  # fmt: skip
    args += [] if decay_ratio is None else ["--lr_scheduler.decay_ratio", str(decay_ratio)]
    assert learning_rates(load_config(args), list(range(1, steps + 1))) == pytest.approx(factors)

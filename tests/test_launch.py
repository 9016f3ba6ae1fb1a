"""`train.py` as a user runs it: exit statuses, messages, resume, logs, first use of the debug corpus."""

import json
import os
import subprocess
import sys

import pytest

from regdrop_titan.checkpoints import load_model
from regdrop_titan.evaluation.copying import evaluate_copying
from regdrop_titan.launch import main

from .distributed.harness import BASE, ROOT, environment, torchrun, train_py
from .packed_sets import write_packed


def python(*command, **kwargs):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment() | kwargs.pop("env", {}), text=True,
        capture_output=True, timeout=240, **kwargs,
    )  # fmt: skip


@pytest.fixture
def toml(tmp_path, packed):
    file = tmp_path / "run.toml"
    file.write_text(BASE.format(packed=packed))
    return file


def test_faults_of_a_user_end_with_status_2_and_one_message(toml, tmp_path):
    done = python(
        "train.py", "--job.config_file", str(toml), "--dropout.p", "1.5", "--training.dataset_path", "nowhere"
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "dropout.p = 1.5: must be in [0, 1)" in done.stderr and "nowhere: no such folder" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_under_torchrun_one_rank_speaks(toml):
    done = torchrun(2, "train.py", "--job.config_file", str(toml), "--training.steps", "0")
    assert done.returncode != 0
    assert done.stderr.count("training.steps = 0: must be at least 1") == 1
    assert "exitcode  : 2" in done.stderr


def test_under_torchrun_a_broken_checkpoint_is_told_once(toml, tmp_path):
    """An error of all ranks after the process group is there: status 2, one message, no traceback."""
    (tmp_path / "out/checkpoint").mkdir(parents=True)
    args = ["train.py", "--job.config_file", str(toml), "--job.dump_folder", str(tmp_path / "out"),
            "--checkpoint.enable", "--training.steps", "1"]  # fmt: skip
    assert train_py(1, tmp_path, *args[1:])[0] == [0]
    # whole by its sizes, but the bytes of its tensors are not what they were
    (shard,) = (tmp_path / "out/checkpoint/step-1").glob("*.distcp")
    shard.write_bytes(b"\0" * shard.stat().st_size)
    done = torchrun(2, *args)
    assert done.returncode == 1 and "exitcode  : 2" in done.stderr
    assert done.stderr.count("checkpoint/step-1: cannot be loaded") == 1
    assert "regdrop_titan/trainer.py" not in done.stderr  # torchrun's own traceback follows


def test_a_world_size_that_does_not_fit(toml, tmp_path):
    args = ["--job.config_file", str(toml), "--parallelism.data_parallel_shard_degree", "3"]
    statuses, said = train_py(2, tmp_path, *args)
    assert statuses == [2, 2] and "does not fit 2 processes" in said


def test_plan_and_help(capsys):
    assert main(["--plan", "--job.config_file", str(ROOT / "train_configs/nape_llama3_400m_vpad.toml")]) == 0
    assert "423.5 M" in capsys.readouterr().out
    for args, status in ((["--plan", "--mfu", "0"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main(args)
        assert end.value.code == status
    assert "--section.key value" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory, packed):
    """A run of 2 processes with every logger on, stopped at 4 steps and extended to 6."""
    folder = tmp_path_factory.mktemp("run")
    toml = folder / "run.toml"
    toml.write_text(BASE.format(packed=packed))
    args = ["--job.config_file", str(toml), "--job.dump_folder", str(folder / "out"), "--checkpoint.enable",
            "--checkpoint.interval", "4", "--metrics.enable_tensorboard", "--metrics.enable_wandb",
            "--dropout.placement", "vpad", "--dropout.p", "0.1", "--validation.enable"]  # fmt: skip
    statuses, first = train_py(2, folder, *args, "--training.steps", "4")
    assert statuses == [0, 0], first
    # a crash after step 5 was logged and half of another line written
    with open(folder / "out/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "loss": 1.0}) + '\n{"step": 6, "lo')
    statuses, second = train_py(2, folder, *args, "--training.steps", "6")
    assert statuses == [0, 0], second
    return folder / "out", first, second


def test_what_a_run_leaves(run):
    out, first, second = run
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert {"step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "flops"} <= set(records[0])
    assert "mfu" not in records[0]  # an unknown peak gives no MFU, not a guess
    assert records[-1]["tokens"] == 6 * 8 * 32 and records[4]["loss"] > 2
    config = json.loads((out / "config.json").read_text())
    assert config["dropout"]["placement"] == config["model_args"]["placement"] == "vpad"
    assert config["model_args"]["vocab_size"] == 256 and config["training"]["steps"] == 6
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["step"] for line in (out / "validation.jsonl").read_text().splitlines()] == [1, 4, 6]
    assert "Training starts at step 5" in second
    assert "settings differ from the run's config.json; the new ones hold from step 5 on:" in second
    assert "  training.steps: 4 -> 6" in second and "settings differ" not in first
    summary = second.split("The run so far:")[1]
    for part in ("6 of 6", "1,536", f"{records[-1]['loss']:.4f}", "executed", str(out / "checkpoint/step-6")):
        assert part in summary
    assert "6 of 6 steps (100 %)" in second
    assert first.count("Training starts at step 1") == 1  # one rank logs


def test_a_resumed_run_is_one_run_to_tensorboard_and_wandb(run):
    """Report L7. TensorBoard has each step once, though a line after the last checkpoint was logged by the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, *_ = run
    assert len(list((out / "tb").glob("events.out.tfevents.*"))) == 2
    events = EventAccumulator(str(out / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss_metrics/global_avg_loss")] == [1, 2, 3, 4, 5, 6]
    ids = {folder.name.rsplit("-", 1)[1] for folder in out.rglob("wandb/offline-run-*")}
    assert ids == {(out / "wandb_run_id").read_text().strip()}
    assert len(list(out.rglob("wandb/offline-run-*"))) == 2


def test_tensorboard_forgets_what_is_done_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from regdrop_titan.metrics import TensorBoardLogger

    for last, steps in ((0, range(1, 9)), (5, range(6, 11))):  # a crash behind step 8, resumed from step 5
        logger = TensorBoardLogger(tmp_path)
        logger.rewind(last)
        for step in steps:
            logger.log({"loss": last + step}, step)
        logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(s, s if s <= 5 else s + 5) for s in range(1, 11)]


def test_data_of_another_tokenizer_are_not_evaluated(run, tmp_path, packed, script, capsys):
    write_packed(tmp_path / "other", [[1, 2, 3] * 30], 256, tokenizer="another")
    command = ["evaluate", "position-loss", "--checkpoint", str(run[0] / "checkpoint"), "--multiple", "2", "--output",
               str(tmp_path / "results"), "--data"]  # fmt: skip
    assert script(*command, str(tmp_path / "other")) == 2
    assert "was tokenized by another, the model was trained on tokens of stand-in" in capsys.readouterr().err
    assert script(*command, str(packed / "validation")) == 0
    assert script("evaluate", "copying", "--checkpoint", str(run[0] / "checkpoint")) == 2
    assert "copying needs a model that was trained on 'copying'" in capsys.readouterr().err


def test_copying_from_training_to_scores(toml, tmp_path, script, capsys):
    """The scores of the script are those of the checkpoint's model; a run on other data is refused."""
    out = tmp_path / "out"
    statuses, said = train_py(
        1, tmp_path, "--job.config_file", str(toml), "--job.dump_folder", str(out), "--training.steps", "2",
        "--training.dataset", "copying", "--training.copying_lengths", "2", "5", "--checkpoint.enable",
    )  # fmt: skip
    assert statuses == [0], said
    command = ["evaluate", "copying", "--checkpoint", str(out / "checkpoint"), "--lengths", "3", "2", "--samples"]
    assert script(*command, "20") == 0
    summary = json.loads((out / "evaluation/copying.json").read_text())
    assert summary["train_lengths"] == [2, 5] and [score["length"] for score in summary["scores"]] == [2, 3]
    expected = evaluate_copying(load_model(out / "checkpoint"), 3, 20)
    assert summary["scores"][1]["cla"] == pytest.approx(expected.cla)
    assert (out / "evaluation/copying.png").read_bytes().startswith(b"\x89PNG")
    assert script(*command, "0") == 2
    assert "--samples 0: must be at least 1" in capsys.readouterr().err


def test_a_new_run_in_an_old_folder_loses_no_log(tmp_path):
    from regdrop_titan.metrics import StepLog, read_records

    log = StepLog(tmp_path / "metrics.jsonl")
    log.rewind(0)  # nothing there
    for attempt in range(2):
        log.append({"step": 1, "attempt": attempt})
        log.rewind(0)
    assert read_records(tmp_path / "metrics.1.jsonl") == [{"step": 1, "attempt": 0}]
    assert read_records(tmp_path / "metrics.2.jsonl") == [{"step": 1, "attempt": 1}]


def test_plain_python_is_one_process_and_a_finished_run_ends_at_once(toml, tmp_path):
    args = ["train.py", "--job.config_file", str(toml), "--job.dump_folder", str(tmp_path / "out"),
            "--checkpoint.enable", "--training.steps", "2"]  # fmt: skip
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    first = python(*args, env=clean)
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "out/metrics.jsonl").read_text()
    statuses, second = train_py(1, tmp_path, *args[1:])
    assert statuses == [0] and "Training starts at step 3" in second
    assert (tmp_path / "out/metrics.jsonl").read_text() == before


def test_ranks_wait_for_the_one_that_builds_the_debug_corpus(tmp_path):
    """The debug config on a machine that has nothing yet, two ranks at once."""
    config = ROOT / "train_configs/debug_nape_llama3.toml"
    statuses, said = train_py(
        2, tmp_path, "--job.config_file", str(config), "--training.steps", "2",
        "--job.dump_folder", str(tmp_path / "out"), "--training.dataset_path", str(tmp_path / "corpus/train"),
        "--validation.dataset_path", str(tmp_path / "corpus/validation"),
        "--validation.context_dataset_path", str(tmp_path / "corpus/long"),
    )  # fmt: skip
    assert statuses == [0, 0], said
    assert (tmp_path / "corpus/long/manifest.json").exists()
    assert not list((tmp_path / "corpus").glob("*.partial"))


def test_torchtitans_own_data_sets(toml, tmp_path):
    """`training.dataset = "c4_test"` on a local folder, tokenized by TorchTitan's loader."""
    from regdrop_titan.data.stdlib_corpus import train_tokenizer

    texts = [f"document {i} says " + "many words " * 20 for i in range(64)]
    assets = tmp_path / "assets"
    assets.mkdir()
    train_tokenizer(texts, 300).save(str(assets / "tokenizer.json"))
    data = tmp_path / "c4"
    data.mkdir()
    (data / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    statuses, said = train_py(
        1, tmp_path, "--job.config_file", str(toml), "--job.dump_folder", str(tmp_path / "out"),
        "--training.steps", "2", "--training.dataset", "c4_test", "--training.dataset_path", str(data),
        "--model.hf_assets_path", str(assets), "--architecture.vocab_size", "300", "--validation.enable",
        "--validation.dataset", "c4_test", "--validation.dataset_path", str(data), "--validation.steps", "2",
    )  # fmt: skip
    assert statuses == [0], said
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 2

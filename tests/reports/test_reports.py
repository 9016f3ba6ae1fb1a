"""Reports: runs written by hand with known numbers, against a plain computation."""

import json
import math
import statistics

import pytest

from regdrop_titan.reports import build_rows, find_runs, group_runs, window
from regdrop_titan.reports.plots import draw, transfer_panels

from .written_runs import read_csv, write_run

STEP = 64 * 8  # tokens a step of the runs below
PARAMETERS = 2 * 2048 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128  # nape_llama3 debug


def rows_of(*folders, last=None):
    return build_rows(group_runs(find_runs(folders)), last)


DROPPED = {"layer_dropout__p_max": 0.4, "saved": 0.1}


def test_table(tmp_path, script, capsys):
    """Means, deviations, best seed, TPP, FLOPs and the comparison with dense, in the CSV, against plain arithmetic."""
    curves = {}
    for seed in (1, 2, 3):
        for name, values in (("dense", {}), ("dropped", DROPPED)):
            shift = {1: 0.3, 2: 0.0, 3: 0.1}[seed] * (1 if name == "dense" else 2)
            losses = [5 + shift - 0.05 * step + 0.01 * (step % 3) for step in range(40)]
            validation = {1: 6.0, 20: 4.5, 40: 3.0 + shift}
            curves[name, seed] = losses, validation
            write_run(tmp_path / f"{name}_{seed}", losses, validation, training__seed=seed, **values)
    write_run(tmp_path / "other_lr", [4.0] * 40, {40: 3.5}, optimizer__lr=0.5, **DROPPED)
    assert script("report", str(tmp_path)) == 0
    dense, dropped, other = read_csv(tmp_path / "report/report.csv")

    for row, name in ((dense, "dense"), (dropped, "dropped")):
        train = [statistics.mean(curves[name, seed][0][-2:]) for seed in (1, 2, 3)]  # 5 % of 40
        validation = [curves[name, seed][1][40] for seed in (1, 2, 3)]
        assert float(row["train_loss"]) == pytest.approx(statistics.mean(train), rel=1e-12)
        assert float(row["train_loss_deviation"]) == pytest.approx(statistics.stdev(train), rel=1e-9)
        assert float(row["validation_loss"]) == pytest.approx(statistics.mean(validation), rel=1e-12)
        assert float(row["validation_loss_deviation"]) == pytest.approx(statistics.stdev(validation), rel=1e-9)
        assert row["best"] == str(tmp_path / f"{name}_2")
        assert (row["runs"], row["averaged"], row["status"]) == ("3", "3", "3 done")
        assert (int(row["parameters"]), int(row["tokens"])) == (PARAMETERS, 40 * STEP)
        assert float(row["tpp"]) == pytest.approx(40 * STEP / PARAMETERS, rel=1e-12)
        assert float(row["flops"]) == 1000 * 40 * STEP
    for kind in ("train", "validation"):
        ratio = float(dropped[f"{kind}_loss"]) / float(dense[f"{kind}_loss"])
        assert float(dropped[f"{kind}_against_percent"]) == pytest.approx(100 * (ratio - 1), rel=1e-9)
        assert float(dense[f"{kind}_against_percent"]) == 0.0
        assert int(dropped[f"{kind}_against_tokens"]) == 40 * STEP
    assert float(dropped["flops_executed"]) == pytest.approx(0.92 * 1000 * 40 * STEP)
    assert float(dropped["flops_saved_of_all"]) == pytest.approx(0.08)
    assert float(dropped["flops_saved_of_layers"]) == pytest.approx(0.1)
    assert dense["flops_executed"] == dense["flops"] and float(dense["flops_saved_of_layers"]) == 0.0
    assert (dropped["distribution"], dropped["schedule"], dropped["p_max"]) == ("increasing", "decreasing", "0.4")
    assert dense["distribution"] == "none"

    # one run has no deviation, and no baseline with another learning rate is guessed
    assert other["train_loss_deviation"] == other["validation_loss_deviation"] == ""
    assert other["baseline"] == other["train_against_percent"] == ""
    assert "the nearest, dense_1, differs in optimizer.lr" in other["notes"]
    assert len(read_csv(tmp_path / "report/runs.csv")) == 7
    markdown, printed = (tmp_path / "report/report.md").read_text(), capsys.readouterr().out
    assert "| dropped_2 (best of 3) |" in markdown and "| dropped_2 (best of 3) |" in printed
    assert "mean over the last 5 % of the logged steps" in markdown
    assert "loss_by_tpp.png was not made" in printed
    assert json.loads((tmp_path / "report/report.json").read_text())["rows"][1]["p_max"] == 0.4


def test_what_separates_groups(tmp_path):
    """Seeds, logs, checkpoints and settings of a dropout that is off do not; those of training do."""
    write_run(tmp_path / "a", [3.0, 2.0])
    write_run(tmp_path / "b", [3.0, 2.2], training__seed=7, metrics__log_freq=2, checkpoint__interval=9)
    write_run(tmp_path / "c", [3.0, 2.4], training__seed=8, layer_dropout__distribution="uniform", dropout__p=0.1)
    write_run(tmp_path / "d", [3.0, 2.6], dropout__p=0.1, dropout__placement="vpad")
    write_run(tmp_path / "e", [3.0, 2.8], checkpoint__initial_load_path="somewhere")
    write_run(tmp_path / "f", [3.0, 1.0])
    write_run(tmp_path / "g", [3.0, 2.9], dropout__attention_p=0.1)
    first, vpad, loaded, weights = rows_of(tmp_path, last=1)
    assert "attention_p 0.1" in weights.settings
    assert [run.name for run in first.group.runs] == ["a", "b", "c", "f"]
    assert first.train.mean == pytest.approx(statistics.mean([2.0, 2.2, 2.4, 1.0]))
    assert first.best.name == "f"  # by train loss: there is no validation
    assert first.group.notes == ["2 averaged runs have seed 42"]
    assert "dropout.placement vpad" in vpad.settings and "initial_load_path somewhere" in loaded.settings


def test_key_of_another_version(tmp_path):
    """A key that an older config.json lacks has its default."""
    write_run(tmp_path / "new", [3.0, 2.0])
    old = write_run(tmp_path / "old", [3.0, 2.0], training__seed=1)
    config = json.loads((old / "config.json").read_text())
    del config["training"]["state_passing"], config["layer_dropout"]
    (old / "config.json").write_text(json.dumps(config))
    assert len(rows_of(tmp_path)) == 1


def test_baseline_at_unequal_tokens(tmp_path):
    """A run cut short is compared where both have a loss, a longer dense one there too; the table says so."""
    dense = [5 - 0.1 * step for step in range(40)]
    write_run(tmp_path / "dense", dense, {1: 6.0, 10: 4.0, 20: 3.0, 30: 2.5, 40: 2.0})
    cut = [5.5 - 0.1 * step for step in range(25)]
    write_run(tmp_path / "cut", cut, {1: 6.0, 10: 5.0, 20: 3.3}, steps=40, **DROPPED)
    row = rows_of(tmp_path, last=4)[0]
    assert row.group.status == "partial" and "logged to step 25 of 40" in row.group.runs[0].notes
    assert row.validation.mean == 3.3
    assert row.validation_against.tokens == 20 * STEP
    assert row.validation_against.percent == pytest.approx(10.0)
    assert row.train_against.tokens == 25 * STEP
    assert row.train_against.percent == pytest.approx(100 * (sum(cut[21:25]) / sum(dense[21:25]) - 1))
    assert any("training loss compared with dense at 12.8 k tokens" in note for note in row.group.notes)

    write_run(tmp_path / "short", [4.0] * 20, {20: 3.6}, lr_scheduler__warmup_steps=3, **DROPPED)
    short = rows_of(tmp_path / "dense", tmp_path / "short")[1]
    assert short.group.status == "done" and short.baseline.runs[0].name == "dense"
    assert short.validation_against.percent == pytest.approx(20.0)
    assert short.train_against.percent == pytest.approx(100 * (4.0 / dense[19] - 1))


def test_named_baseline(tmp_path, script, capsys):
    write_run(tmp_path / "runs/a", [4.0, 3.0], optimizer__lr=0.5)
    write_run(tmp_path / "runs/b", [4.0, 3.3], **DROPPED)
    named = write_run(tmp_path / "named", [4.0, 2.0], optimizer__lr=0.1)
    output = tmp_path / "out"
    arguments = [str(tmp_path / "runs"), "--baseline", str(named), "--output", str(output)]
    assert script("report", *arguments) == 0
    percents = [float(row["train_against_percent"]) for row in read_csv(output / "report.csv")]
    assert percents == pytest.approx([50.0, 65.0, 0.0])
    assert script("report", str(named), "--baseline", str(tmp_path / "runs")) == 2
    assert "differ in more than the seed" in capsys.readouterr().err


def test_statuses_of_a_sweep(tmp_path, script):
    """All six runs of a sweep are shown: done, invalid without a folder, crashed, diverged, cut short, waiting."""
    write_run(tmp_path / "r0", [3.0, 2.0], {2: 2.0}, training__seed=1)
    write_run(tmp_path / "r2", [3.0], steps=2, training__seed=2)
    write_run(tmp_path / "r3", [3.0, None], training__seed=3, optimizer__lr=9.0)
    write_run(tmp_path / "r4", [3.0, 2.0, 1.0], steps=9, optimizer__lr=0.5)
    listed = ["done", "invalid", "failed", "done", "running", "waiting"]
    runs = [
        {"name": f"run-{i}", "folder": str(tmp_path / f"r{i}"), "values": {"optimizer.lr": i, "training.seed": 5},
         "status": status}
        for i, status in enumerate(listed)
    ]  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps({"name": "six", "runs": runs}))
    assert script("report", str(tmp_path)) == 0
    shown = {run["name"]: run for run in read_csv(tmp_path / "report/runs.csv")}
    assert {name: run["status"] for name, run in shown.items()} == {
        "run-0": "done", "run-1": "invalid", "run-2": "failed", "run-3": "failed", "run-4": "running",
        "run-5": "waiting",
    }  # fmt: skip
    assert "its folder does not exist" in shown["run-1"]["notes"]
    assert "step, 2, is not finite" in shown["run-3"]["notes"]
    assert shown["run-3"]["train_loss"] == "" and shown["run-1"]["seed"] == "5"
    rows = rows_of(tmp_path)
    assert [[run.name for run in row.group.runs] for row in rows] == [
        ["run-0", "run-2"], ["run-1"], ["run-3"], ["run-4"], ["run-5"],
    ]  # fmt: skip
    assert rows[0].group.status == "1 done, 1 failed" and rows[0].train.mean == 2.0
    assert rows[1].label == "lr 1"
    markdown = (tmp_path / "report/report.md").read_text()
    assert all(f"| run-{i} |" in markdown for i in range(6))

    # one of its runs, where the sweep keeps its state under the same name
    (tmp_path / "r4/sweep.json").write_text(json.dumps({"name": "run-4", "status": "running"}))
    assert [run.name for run in find_runs([tmp_path / "r4"])] == ["r4"]

    # a sweep that was moved, below a folder that is given
    moved = tmp_path.rename(tmp_path.with_name("moved_" + tmp_path.name))
    assert [run.status for run in find_runs([moved])][:1] == ["done"]


def test_only_finished_runs_are_averaged(tmp_path):
    write_run(tmp_path / "a", [3.0, 2.0], training__seed=1)
    write_run(tmp_path / "b", [1.0], steps=2, training__seed=2)
    (row,) = rows_of(tmp_path)
    assert row.train.mean == 2.0 and row.train.deviation is None
    assert row.group.status == "1 done, 1 partial" and row.best.name == "a"
    assert row.group.notes == ["averaged are the finished runs, 1 of 2"]


def test_status_by_the_logs(tmp_path):
    """The last step need not be logged, but it is validated."""
    write_run(tmp_path / "log", [3.0, 2.0], steps=2, metrics__log_freq=2)
    write_run(tmp_path / "between", [3.0, 2.0], steps=3, metrics__log_freq=2)
    write_run(tmp_path / "unvalidated", [3.0, 2.0], {1: 3.0}, steps=3, metrics__log_freq=2)
    write_run(tmp_path / "validated", [3.0, 2.0], {1: 3.0, 3: 1.5}, steps=3, metrics__log_freq=2)
    (write_run(tmp_path / "silent", [3.0]) / "metrics.jsonl").write_text("")
    found = {run.name: run for run in find_runs([tmp_path])}
    assert {name: run.status for name, run in found.items()} == {
        "log": "done", "between": "done", "unvalidated": "partial", "validated": "done", "silent": "failed",
    }  # fmt: skip
    assert found["validated"].validation[-1].tokens == 3 * STEP


def test_broken_files_are_named(tmp_path, script, capsys):
    torn = write_run(tmp_path / "torn", [3.0, 2.0, 1.0], {3: 2.5})
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('5\n{"step": 4, "tok')
    with open(torn / "validation.jsonl", "a") as file:
        file.write('{"step": 3, "loss": NaN}\n\xff\n')
    broken = write_run(tmp_path / "broken", [3.0, 2.0])
    (broken / "config.json").write_text('{"training": {')
    odd = write_run(tmp_path / "odd", [3.0])
    (odd / "config.json").write_text(json.dumps({"training": {"steps": 1}, "layer_dropout": 3, "model_args": [1]}))
    assert script("report", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "metrics.jsonl: line 4 and 1 more are no record, left out" in printed
    assert "validation.jsonl: line 3 is no record" in printed
    assert "broken: no config; config.json cannot be read" in printed
    assert "odd: done; config.json: no size from model_args" in printed
    rows = {row["best"].rsplit("/")[-1]: row for row in read_csv(tmp_path / "report/report.csv")}
    assert rows["torn"]["train_loss"] == "1.0" and rows["torn"]["validation_loss"] == ""
    assert (rows["broken"]["train_loss"], rows["broken"]["parameters"]) == ("2.0", "")


def test_faults(tmp_path, script, capsys):
    """All at once, with status 2 and nothing written."""
    write_run(tmp_path / "run", [3.0])
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").write_text('{"name": "x"}')
    names = ["run", "empty", "sweep", "absent"]
    assert script("report", *(str(tmp_path / name) for name in names), "--last", "0") == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 4 and "Traceback" not in captured.err
    for part in ("--last 0", "empty: neither a run", "sweep.json: not a sweep", "absent: no such folder"):
        assert part in captured.err
    assert not (tmp_path / "report").exists()
    (tmp_path / "file").write_text("")
    assert script("report", str(tmp_path / "run"), "--output", str(tmp_path / "file")) == 2
    assert script("report") == 2
    assert script("report", "--help") == 0


def test_window():
    assert [window(n, None) for n in (1, 19, 40, 100)] == [1, 1, 2, 5]
    assert [window(n, 10) for n in (3, 100)] == [3, 10]


def test_plots(tmp_path):
    """The numbers of each plot; those without data are left out with the reason, and an older file goes."""
    for lr in (0.1, 0.2):
        for p_max in (0.0, 0.4):
            saved = 0.1 if p_max else None
            losses = [5 - step * lr / 30 - p_max for step in range(120)]
            write_run(tmp_path / f"{lr}_{p_max}", losses, {60: 3.0, 120: lr + p_max}, saved=saved, optimizer__lr=lr,
                      layer_dropout__p_max=p_max)  # fmt: skip
    write_run(tmp_path / "longer", [1.0] * 240, {240: 0.05}, optimizer__lr=0.1)
    write_run(tmp_path / "unfinished", [1.0] * 2, {1: 0.01}, steps=120, optimizer__lr=0.3)
    rows = rows_of(tmp_path)
    made, left_out = draw(rows, tmp_path)
    assert not left_out and all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in made)

    (panel,) = made["transfer.png"]["panels"]
    assert panel["x"] == "optimizer.lr" and panel["loss"] == "validation"
    assert {c["label"]: (c["x"], c["loss"]) for c in panel["curves"]} == {
        "p_max 0": ([0.1, 0.2], [0.1, 0.2]), "p_max 0.4": ([0.1, 0.2], [0.5, 0.6000000000000001]),
    }  # fmt: skip
    lengths = next(c for c in made["loss_by_tpp.png"]["curves"] if len(c["x"]) > 1)
    assert lengths["x"] == pytest.approx([120 * STEP / PARAMETERS, 240 * STEP / PARAMETERS])
    assert lengths["loss"] == [0.1, 0.05]
    curve = made["loss_by_flops.png"]["curves"][1]
    assert curve["label"] == "p_max 0.4, lr 0.1, steps 120"
    losses = [5 - step * 0.1 / 30 - 0.4 for step in range(120)]
    smooth = [statistics.mean(losses[i : i + 2]) for i in range(119)]  # 120 / 50 steps
    assert curve["training"]["loss"] == pytest.approx(smooth)
    assert curve["training"]["x"] == pytest.approx([0.92 * 1000 * step * STEP for step in range(2, 121)])
    assert curve["validation"]["x"] == pytest.approx([0.92 * 1000 * step * STEP for step in (60, 120)])
    assert any("(partial)" in curve["label"] for curve in made["loss_by_tokens.png"]["curves"])

    made, left_out = draw(rows[:1], tmp_path)
    assert set(left_out) == {"loss_by_tpp.png", "transfer.png"} and not (tmp_path / "transfer.png").exists()
    nothing = (write_run(tmp_path / "nothing", [math.nan]), write_run(tmp_path / "nothing2", [None]))
    assert len(draw(rows_of(*nothing), tmp_path)[1]) == 4


def test_batch_sizes_are_compared_at_equal_tokens(tmp_path):
    for batch, steps in ((8, 40), (16, 20), (32, 10), (8, 80), (16, 40)):
        write_run(tmp_path / f"{batch}_{steps}", [3.0] * steps, training__global_batch_size=batch)
    panel = transfer_panels(rows_of(tmp_path))["tokens a step"]
    assert [[mark.x / 64 for mark in curve] for curve in panel.curves] == [[8, 16, 32], [8, 16]]
    same_steps = transfer_panels(rows_of(tmp_path / "8_40", tmp_path / "16_40"))["tokens a step"]
    assert [[mark.x / 64 for mark in curve] for curve in same_steps.curves] == [[8, 16]]

"""Tables of evaluation results: files written by hand, against plain means and deviations."""

import json
import statistics

import pytest

from .written_runs import read_csv, write_run

TASKS = [
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot",
]  # fmt: skip
ALONE = TASKS[:1] + TASKS[4:6]  # need no external text


def write_result(folder, verb, content, name=None, step=2, label="model", time="2026-11-30T10:00:00", **settings):
    """What `evaluate.py VERB` leaves in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "verb": verb, "label": label, "checkpoint": f"somewhere/checkpoint/step-{step}", "weights_sha256": f"w{label}",
        "run": {}, "settings": {"samples": 100} | settings, "time": time,
    }  # fmt: skip
    file = folder / (name or f"{verb.replace('-', '_')}.json")
    file.write_text(json.dumps(head | content))
    return file


def ruler(shift, tasks=TASKS, lengths=(128, 64)):
    """`lm_eval.json`'s part on RULER: task i at length n has the share (i + shift) / (20 n / 64)."""
    found = {}
    for length in lengths:
        shares = {task: (TASKS.index(task) + shift) / (20 * length / 64) for task in tasks}
        mean = statistics.mean(shares.values())
        found[str(length)] = {
            "tasks": shares, "errors": {task: 0.01 * length for task in tasks},
            "mean": mean if len(tasks) == 13 else None, "mean_of_available": mean, "niah_1": shares["niah_single_1"],
            "left_out": {task: "no text" for task in TASKS if task not in tasks},
        }  # fmt: skip
    return {"ruler": found, "tasks": {}, "suites": {}}


def cells(file, **wanted):
    """Mean, deviation and runs of the line of a CSV that has these values."""
    (line,) = [line for line in read_csv(file) if all(line[key] == value for key, value in wanted.items())]
    return float(line["mean"]), float(line["deviation"]) if line["deviation"] else None, int(line["runs"])


def test_ruler(tmp_path, script, capsys):
    """LG tables 1, 3 and 8: means and deviations over seeds by setting, and a model that is no run."""
    shifts = {"plain": (1.0, 1.5, 4.0), "vpad": (3.0, 3.5)}
    for name, values in (("plain", {}), ("vpad", {"dropout__placement": "vpad", "dropout__p": 0.1})):
        for seed, shift in enumerate(shifts[name]):
            run = write_run(tmp_path / f"runs/{name}_{seed}", [3.0, 2.0], training__seed=seed, **values)
            write_result(run / "evaluation", "lm-eval", ruler(shift))
    write_result(tmp_path / "base/smollm3", "lm-eval", ruler(6.0, lengths=(64, 256)), label="SmolLM3-Base")
    assert script("report", str(tmp_path / "runs"), "--results", str(tmp_path / "base")) == 0
    report = tmp_path / "runs/report"
    plain, vpad = (line["model"] for line in read_csv(report / "ruler.csv") if line["score"] == "RULER 128")
    assert "vpad" in vpad and "placement none" in plain

    for model, seeds in ((plain, shifts["plain"]), (vpad, shifts["vpad"])):
        for length, factor in ((64, 1 / 20), (128, 1 / 40)):
            means = [(6 + shift) * factor for shift in seeds]  # the mean of 0 ... 12 is 6
            expected = (pytest.approx(statistics.mean(means)), pytest.approx(statistics.stdev(means)), len(seeds))
            assert cells(report / "ruler.csv", model=model, score=f"RULER {length}") == expected
            first = [shift * factor for shift in seeds]
            expected = (pytest.approx(statistics.mean(first)), pytest.approx(statistics.stdev(first)), len(seeds))
            assert cells(report / "ruler.csv", model=model, score=f"NIAH-1 {length}") == expected
            sixth = [(5 + shift) * factor for shift in seeds]
            expected = (pytest.approx(statistics.mean(sixth)), pytest.approx(statistics.stdev(sixth)), len(seeds))
            found = cells(report / "ruler_tasks.csv", model=model, length=str(length), score="niah_multikey_3")
            assert found == expected
    assert cells(report / "ruler.csv", model="SmolLM3-Base", score="RULER 256") == (12 / 80, None, 1)

    markdown, printed = (report / "report.md").read_text(), capsys.readouterr().out
    lines = [
        "| # | model | RULER 64 | RULER 128 | RULER 256 | NIAH-1 64 | NIAH-1 128 | NIAH-1 256 | runs |",
        f"| 1 | {plain} | 0.408 ± 0.080 | 0.204 ± 0.040 | - | 0.108 ± 0.080 | 0.054 ± 0.040 | - | 3 |",
        "|  | SmolLM3-Base | 0.600 | - | 0.150 | 0.300 | - | 0.075 | 1 |",
    ]
    assert all(line in markdown and line in printed for line in lines)
    by_task = [line for line in markdown.splitlines() if line.endswith("| 1 |") and "SmolLM3-Base | 256" in line]
    assert len(by_task) == 1 and by_task[0].split(" | ")[3:5] == ["0.075", "0.087"]
    written = json.loads((report / "report.json").read_text())["evaluation"]
    assert written["tables"]["ruler"][0]["deviation"] == pytest.approx(0.0804, abs=1e-4)
    error = next(line for line in read_csv(report / "ruler.csv") if line["score"] == "NIAH-1 128")["standard_error"]
    assert float(error) == pytest.approx(1.28)


def test_partial_means(tmp_path, script):
    """A mean over some of RULER's tasks is marked, and never averaged with one over others."""
    for seed, (shift, tasks) in enumerate([(1.0, TASKS), (2.0, ALONE), (5.0, TASKS)]):
        run = write_run(tmp_path / f"mixed_{seed}", [3.0, 2.0], training__seed=seed)
        write_result(run / "evaluation", "lm-eval", ruler(shift, tasks, (64,)))
    for seed, shift in enumerate((1.0, 4.0)):
        run = write_run(tmp_path / f"short_{seed}", [3.0, 2.0], training__seed=seed, optimizer__lr=0.5)
        write_result(run / "evaluation", "lm-eval", ruler(shift, ALONE, (64,)))
    assert script("report", str(tmp_path)) == 0
    lines = {line["row"]: line for line in read_csv(tmp_path / "report/ruler.csv") if line["score"] == "RULER 64"}
    assert float(lines["1"]["mean"]) == pytest.approx(9 / 20) and lines["1"]["runs"] == "2"
    assert (lines["1"]["tasks"], lines["2"]["tasks"], lines["2"]["tasks_of_whole"]) == ("13", "3", "13")
    assert float(lines["2"]["mean"]) == pytest.approx(5.5 / 20)  # tasks 0, 4, 5: 3, and shifts of 2.5
    markdown = (tmp_path / "report/report.md").read_text()
    assert " | 0.450 ± 0.141 [2 of 3 runs] | 0.133 ± 0.104 | 3 |" in markdown
    assert " | 0.275 ± 0.106 (3/13) | 0.125 ± 0.106 | 2 |" in markdown
    assert "- (3/13): not the whole mean, but over niah_multikey_2, niah_multikey_3, niah_single_1" in markdown
    assert "RULER 64 averages 2 of 3 runs; the others have other tasks in their mean" in markdown


def test_mean_of_too_few_tasks_is_none(tmp_path, script):
    """Also where a file calls it the mean."""
    run = write_run(tmp_path / "run", [3.0, 2.0])
    content = ruler(1.0, ALONE, (64,))
    content["ruler"]["64"]["mean"] = 0.9
    write_result(run / "evaluation", "lm-eval", content)
    assert script("report", str(run)) == 0
    assert "| 0.200 (3/13) |" in (tmp_path / "report/report.md").read_text()


def test_steps_are_not_mixed(tmp_path, script):
    """A result of an older checkpoint is a row of its own that names the step."""
    for seed, step in ((0, 2), (1, 2), (2, 1)):
        run = write_run(tmp_path / f"run_{seed}", [3.0, 2.0], training__seed=seed)
        write_result(run / "evaluation", "position-loss", {"loss_at": {"1x": 2.0 + seed, "16x": 4.0}}, step=step)
        if seed == 1:  # both are kept
            file = run / "evaluation/older.json"
            write_result(run / "evaluation", "position-loss", {"loss_at": {"1x": 9.0}}, name=file.name, step=1)
    assert script("report", str(tmp_path)) == 0
    newest, older = [line for line in read_csv(tmp_path / "report/position_loss.csv") if line["score"] == "1x"]
    assert (float(newest["mean"]), newest["runs"], newest["model"]) == (2.5, "2", "run_0")
    assert (float(older["mean"]), older["runs"], older["model"]) == (6.5, "2", "run_0 (step 1)")


def test_tasks_and_depth(tmp_path, script):
    """LG table 7, DD tables 5 and A.3: suites with their means, and losses by layers kept."""
    tasks = {
        name: {"metric": metric, "value": value, "stderr": 0.02, "n": 50, "shots": shots}
        for name, metric, value, shots in [
            ("arc_easy", "acc_norm", 0.5, 0), ("piqa", "acc", 0.7, 0), ("mmlu", "acc", 0.26, 5), ("wiki", "acc", 0.1, 0)
        ]
    }  # fmt: skip
    suites = {
        "short": {"mean": 0.6, "tasks": ["arc_easy", "piqa"], "left_out": {}},
        "downstream": {"mean": 0.38, "tasks": ["arc_easy", "mmlu"], "left_out": {"boolq": "no data"}},
    }
    run = write_run(tmp_path / "run", [3.0, 2.0])
    write_result(run / "evaluation", "lm-eval", {"tasks": tasks, "suites": suites})

    def entry(layers, loss):
        return {"n_layers": layers, "loss": loss, "loss_error": 0.1}

    families = {
        "exits": [entry(layers, 8.0 - layers) for layers in range(5)],
        "alternate_last": [entry(4, 4.0), entry(3, 4.25), entry(2, 4.75)],
        "runs": [entry(3, 5.5), entry(3, 4.5), entry(3, 6.0), entry(2, None)],
    }
    write_result(run / "evaluation", "depth", {"full": entry(4, 4.0), "families": families})
    assert script("report", str(run)) == 0
    lines = read_csv(tmp_path / "report/tasks.csv")
    assert [(line["suite"], line["score"], float(line["mean"])) for line in lines] == [
        ("downstream", "arc_easy (acc_norm, 0 shots)", 0.5), ("downstream", "mmlu (acc, 5 shots)", 0.26),
        ("downstream", "mean", 0.38), ("short", "arc_easy (acc_norm, 0 shots)", 0.5),
        ("short", "piqa (acc, 0 shots)", 0.7), ("short", "mean", 0.6), ("none", "wiki (acc, 0 shots)", 0.1),
    ]  # fmt: skip
    markdown = (tmp_path / "report/report.md").read_text()
    assert "| 1 | run | 0.500 | 0.260 | 0.380 (2/3) | 1 |" in markdown
    assert "| 1 | run | 0.500 | 0.700 | 0.600 | 1 |" in markdown
    depth = [line for line in markdown.splitlines() if line.startswith("| 1 | run |") and " of 4 " in line]
    assert depth == [
        "| 1 | run | 4 of 4 (100 %) | 4.0000 | 4.0000 | - | 1 |",
        "| 1 | run | 3 of 4 (75 %) | 5.0000 | 4.2500 | 4.5000 | 1 |",
        "| 1 | run | 2 of 4 (50 %) | 6.0000 | 4.7500 | - | 1 |",
        "| 1 | run | 1 of 4 (25 %) | 7.0000 | - | - | 1 |",
        "| 1 | run | 0 of 4 (0 %) | 8.0000 | - | - | 1 |",
    ]


def test_copying_and_moments(tmp_path, script):
    run = write_run(tmp_path / "run", [3.0, 2.0])
    scores = [{"length": n, "ema": 1 / n, "ema_error": 0.0, "cla": 0.5, "cla_error": 0.01} for n in (12, 3)]
    write_result(run / "evaluation", "copying", {"scores": scores})
    measured = [{"placement": "vpad", "p": 0.1, "mean_over_layers": {"wq": {"mean": 0.01, "variance": 0.25}}}]
    write_result(run / "evaluation", "moments", {"runs": measured})
    assert script("report", str(run)) == 0
    markdown = (tmp_path / "report/report.md").read_text()
    assert "| # | model | EMA-3 | EMA-12 | CLA-3 | CLA-12 | runs |" in markdown
    assert "| 1 | run | 0.333 | 0.083 | 0.500 | 0.500 | 1 |" in markdown
    assert "| 1 | run | vpad, p 0.1 | 0.0100 | 0.2500 | 1 |" in markdown


def test_files_that_are_no_results(tmp_path, script, capsys):
    """They are named and left out; the newest of two results of one checkpoint counts; tables of old reports go."""
    run = write_run(tmp_path / "run", [3.0, 2.0])
    folder = run / "evaluation"
    write_result(folder, "position-loss", {"loss_at": {"1x": 3.0}})
    write_result(folder, "position-loss", {"loss_at": {"1x": 2.5}}, name="newer.json", time="2026-12-01T00:00:00")
    (folder / "broken.json").write_text('{"verb": "depth"')
    (folder / "foreign.json").write_text("[1, 2]")
    write_result(folder, "depth", {"full": {"n_layers": 2}, "families": {"exits": [{"n_layers": 1}]}})
    write_result(
        folder, "copying", {"scores": [{"length": 3, "ema": "much", "ema_error": 0, "cla": 1, "cla_error": 0}]}
    )
    (tmp_path / "report").mkdir()
    (tmp_path / "report/ruler.csv").write_text("old")
    assert script("report", str(run)) == 0
    printed = capsys.readouterr().out
    for part in (
        "broken.json: not valid JSON", "foreign.json: holds no result of evaluate.py {lm-eval,depth,",
        "depth.json: not as evaluate.py depth writes it: KeyError: 'loss'",
        "copying.json: not as evaluate.py copying writes it: ValueError: 'much' is no number",
        f"position_loss.json: left out, {folder}/newer.json is newer",
    ):  # fmt: skip
        assert part in printed and part in (tmp_path / "report/report.md").read_text()
    assert cells(tmp_path / "report/position_loss.csv", score="1x") == (2.5, None, 1)
    assert not (tmp_path / "report/ruler.csv").exists()


def test_faults_of_results(tmp_path, script, capsys):
    """With those of the runs at once, status 2."""
    (tmp_path / "empty").mkdir()
    foreign = tmp_path / "foreign.json"
    foreign.write_text("{}")
    wrong = [str(tmp_path / "absent.json"), str(tmp_path / "empty"), str(foreign)]
    assert script("report", str(tmp_path / "no_run"), "--results", *wrong) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 4
    for part in ("no_run: no such", "absent.json: No such file", "empty: no JSON file in it", "foreign.json: holds no"):
        assert part in said


def test_unequal_settings_are_told(tmp_path, script, capsys):
    for seed, samples in ((0, 100), (1, 500)):
        run = write_run(tmp_path / f"run_{seed}", [3.0, 2.0], training__seed=seed, optimizer__lr=0.1 + seed)
        write_result(run / "evaluation", "position-loss", {"loss_at": {"1x": 3.0}}, samples=samples, data="long")
    assert script("report", str(tmp_path)) == 0
    assert "measured under different settings, samples: 100 (lr 0.1); 500 (lr 1.1)" in capsys.readouterr().out

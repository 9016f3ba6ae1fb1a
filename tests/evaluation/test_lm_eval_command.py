"""`evaluate.py lm-eval`: RULER at any length, suites, local data, ranks, what is left out."""

import functools
import json
import re
import sys

import pytest
from lm_eval.api.task import ConfigurableTask

from regdrop_titan.data.packed import DataError
from regdrop_titan.evaluation import lm, ruler, suites
from regdrop_titan.evaluation.lm import RegDropLM
from regdrop_titan.evaluation.subjects import InputError, Subject, checkpoint_subject

from ..distributed.ranks import Ranks
from .tiny_runs import write_questions, write_run

LENGTH = 1700


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command") / "run"
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Everything that RULER needs, a little of each, and short questions."""
    folder = write_questions(tmp_path_factory.mktemp("data"))
    essays = folder / ruler.ESSAYS
    essays.mkdir()
    text = "The river runs. A stone lies in it. Nobody sees the stone. " * 300
    (essays / "essays.jsonl").write_text(json.dumps({"text": text}) + "\n")
    punkt = folder / ruler.PUNKT / "english"
    punkt.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (punkt / name).write_text("")
    paragraphs = [
        {
            "context": f"The mountain number {i} is {i} miles high.",
            "qas": [
                {"question": f"How high is mountain {i}?", "is_impossible": False, "answers": [{"text": f"{i} miles"}]}
            ],
        }
        for i in range(120)
    ]
    (folder / "squad").mkdir()
    (folder / ruler.SQUAD).write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hops = [
        {"question": f"Who crossed river {i}?", "answer": f"walker {i}",
         "context": [[f"River {i}", [f"Walker {i} crossed it.", " It was cold."]]]}
        for i in range(120)
    ]  # fmt: skip
    (folder / "hotpotqa").mkdir()
    (folder / ruler.HOTPOT).write_text(json.dumps(hops))
    return folder


def documents(run, task, n, data=None, length=LENGTH, seed=0):
    return ruler.documents(task, length, n, checkpoint_subject(run).tokenizer, data, seed)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_samples_of_a_task(run, data, task):
    """As long as asked for, the answers in the prompt; the first samples the same for every number of them and after
    other tasks, others for another seed."""
    (one,), three = documents(run, task, 1, data), documents(run, task, 3, data)
    assert len(three) == 3 and three[0] == one
    tokenizer = checkpoint_subject(run).tokenizer
    for sample in three:
        assert sample["max_length"] == LENGTH and sample["outputs"]
        assert all(answer.lower() in sample["input"].lower() for answer in sample["outputs"])
        n_tokens = len(tokenizer.encode(sample["input"]))
        # of essays the generators take 500 words more or less, which are many tokens of this tokenizer
        assert (100 if ruler.ESSAYS in ruler.NEEDS.get(task, ()) else 0.45 * LENGTH) < n_tokens <= LENGTH
    assert documents(run, task, 1, data, seed=1)[0] != one


def test_what_is_left_out(run, data):
    """Named, with what is missing or why."""
    assert [name for name in ruler.TASKS if not ruler.missing_data(name, None)] == list(ruler.WITHOUT_DATA)
    assert ruler.missing_data("niah_single_2", None) == [ruler.ESSAYS, ruler.PUNKT]
    with pytest.raises(ruler.LeftOut, match=f"needs {ruler.SQUAD} in --data-dir"):
        documents(run, "ruler_qa_squad", 1)
    for task, why in {
        "niah_single_1": "Could not generate any sample",
        "ruler_vt": "its smallest sample has",
        "ruler_cwe": "its smallest sample has",
        "ruler_fwe": "has no vocabulary at 150 tokens",
        "ruler_qa_squad": "Could not generate any QA sample",
    }.items():
        with pytest.raises(ruler.LeftOut, match=why):
            documents(run, task, 1, data, length=150)


class Answering(RegDropLM):
    """Says all references, of two tasks the first alone, and of one task nothing."""

    def generate_until(self, requests, disable_tqdm=False):
        said = {"ruler_vt": 1, "niah_multivalue": 1, "ruler_cwe": 0}
        return ["; ".join(r.doc["outputs"][: said.get(r.task_name)]) for r in requests]


def test_ruler_at_a_length(run, data):
    """Recall by task by hand: 1, but 1 of 5 variables, 1 of 4 values, no word; their mean over all 13, or none."""
    model = Answering(str(run), max_length=0)
    found, samples = suites.evaluate_ruler(model, ruler.TASKS, LENGTH, 2, data, seed=0)
    expected = dict.fromkeys(ruler.TASKS, 1.0) | {"ruler_vt": 0.2, "niah_multivalue": 0.25, "ruler_cwe": 0.0}
    assert found["tasks"] == pytest.approx(expected)
    assert found["mean"] == found["mean_of_available"] == pytest.approx((10 + 0.2 + 0.25) / 13)
    assert found["niah_1"] == 1.0 and found["left_out"] == {} and set(found["samples"].values()) == {2}
    assert len(samples) == 26 and samples[0]["scores"] == {"recall": 1.0} and samples[0]["length"] == LENGTH
    # the prompt and its answer, which the generators count but for what they give of it
    assert LENGTH - 300 < found["longest"]["niah_single_1"] < LENGTH + 60
    some, _ = suites.evaluate_ruler(model, ["niah_single_1", "ruler_vt", "ruler_qa_squad"], LENGTH, 1, None, seed=0)
    assert some["mean"] is None and some["mean_of_available"] == pytest.approx(0.6)
    assert list(some["left_out"]) == ["ruler_qa_squad"]


def test_the_command(run, data, script, capsys, tmp_path):
    """Short tasks on local data, one of which cannot be read; NIAH at two lengths; of a part of the model."""
    (data / "baber/piqa").mkdir(parents=True)
    (data / "baber/piqa/broken.parquet").write_bytes(b"no parquet")
    arguments = ["lm-eval", "--checkpoint", str(run / "checkpoint"), "--tasks", "arc_easy", "piqa", "--suite", "niah",
                 "--data-dir", str(data), "--limit", "4", "--batch-size", "4", "--max-length", "0", "--output",
                 str(tmp_path)]  # fmt: skip
    assert script("evaluate", *arguments, "--lengths", "9x", "500", "--exit-layer", "1") == 0
    said = capsys.readouterr().out
    assert "left out: piqa: " in said and "NIAH-1" in said
    result = json.loads((tmp_path / "lm_eval.json").read_text())
    assert list(result["tasks"]) == ["arc_easy"] and list(result["left_out"]) == ["piqa"]
    score = result["tasks"]["arc_easy"]
    assert score["metric"] == "acc_norm" and score["n"] == 4 and score["shots"] == 0
    assert list(result["ruler"]) == ["500", "576"] and result["ruler"]["500"]["samples"] == {"niah_single_1": 4}
    assert result["ruler"]["500"]["mean"] is None and result["truncated"] == 0
    assert result["settings"]["exit_layer"] == 1 and len(result["first_prompt"]) == 8
    samples = [json.loads(line) for line in (tmp_path / "lm_eval_samples.jsonl").read_text().splitlines()]
    assert len(samples) == 12
    # the share of questions whose likeliest answer, a letter, is the right one
    right = 0
    for sample in samples[:4]:
        each = [
            answer[0] / len(text) for answer, text in zip(sample["answers"], choices(sample["doc_id"]), strict=True)
        ]
        right += each.index(max(each)) == sample["doc_id"] % 4
    assert score["value"] == right / 4
    assert (tmp_path / "lm_eval.png").read_bytes().startswith(b"\x89PNG")


def test_the_plan(run, data, script, capsys, monkeypatch):
    """Samples are made and counted, what lacks data is named, no model is loaded."""
    monkeypatch.setattr(Subject, "load", None)
    arguments = ["lm-eval", "--checkpoint", str(run / "checkpoint"), "--suite", "ruler", "--limit", "2", "--plan"]
    more = ["--tasks", "arc_easy", "--data-dir", str(data), "--lengths", "1700", "300"]
    assert script("evaluate", *arguments, *more) == 0
    said = capsys.readouterr().out
    assert "arc_easy: 6 samples" in said and "are left out" not in said
    assert re.search(r"1700  niah_single_1 +2 samples, 1\d\d\d to 1\d\d\d tokens a prompt", said)
    assert (
        said.count("  1700  ") == said.count("   300  ") == 13 and "300  ruler_cwe        left out: its small" in said
    )
    assert script("evaluate", *arguments, "--lengths", "1700") == 0
    said = capsys.readouterr().out
    assert f"7 of 13 tasks are left out ({', '.join(n for n in ruler.TASKS if n not in ruler.WITHOUT_DATA)})" in said
    assert all(need in said for need in (ruler.ESSAYS, ruler.PUNKT, ruler.SQUAD, ruler.HOTPOT))


def test_an_interrupted_call_goes_on(run, script, tmp_path, monkeypatch):
    """Its answers are kept: the second call asks for the others alone, gives what an undisturbed one gives, and leaves
    no file behind."""
    arguments = ["lm-eval", "--checkpoint", str(run / "checkpoint"), "--suite", "niah", "--limit", "3", "--lengths"]
    assert script("evaluate", *arguments, "500", "600", "--output", str(tmp_path / "whole")) == 0
    asked = []
    answers = RegDropLM._answers

    def interrupted(self, prompts, until, most):
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.extend(prompts)
        return answers(self, prompts, until, most)

    monkeypatch.setattr(RegDropLM, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script("evaluate", *arguments, "500", "600", "--output", str(tmp_path / "again"))
    assert [file.suffix for file in (tmp_path / "again").iterdir()] == [".db"]

    def counted(self, prompts, until, most):
        asked.extend(prompts)
        return answers(self, prompts, until, most)

    monkeypatch.setattr(RegDropLM, "_answers", counted)
    assert script("evaluate", *arguments, "500", "600", "--output", str(tmp_path / "again")) == 0
    assert len(asked) == 6 and not list((tmp_path / "again").glob("*.db"))
    whole, again = (json.loads((tmp_path / name / "lm_eval.json").read_text()) for name in ("whole", "again"))
    assert whole["ruler"] == again["ruler"]
    samples = [(tmp_path / name / "lm_eval_samples.jsonl").read_text() for name in ("whole", "again")]
    assert samples[0] == samples[1]


def choices(i):
    return ["the grass", "the tall sky " * (i + 1), "a stone", "one number"]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["name tasks by --tasks or --suite"]),
        (["--tasks", "nonsense", "more"], ["--tasks nonsense: lm-evaluation-harness has no such", "--tasks more"]),
        (["--suite", "ruler", "--lengths", "0x", "1k"], ["--lengths 0x: give tokens", "--lengths 1k"]),
        (["--suite", "niah", "--exit-layer", "9"], ["exit_layer 9: must be in 0 ... 3"]),
        (["--tasks", "ruler_qa_squad"], ["none of these tasks can be run here"]),
        (["--suite", "niah", "--limit", "0", "--batch-size", "-1"], ["--limit 0: must be", "--batch-size -1"]),
    ],
)
def test_bad_input(run, script, capsys, arguments, messages):
    assert script("evaluate", "lm-eval", "--checkpoint", str(run / "checkpoint"), *arguments) == 2
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said


def test_suite_means():
    from regdrop_titan.evaluation.verbs.lm_eval import suite_means

    scores = {"a": {"value": 0.5}, "b": {"value": 0.25}}
    means = suite_means(["s", "t", "ruler"], {"s": ("a", "b"), "t": ("a", "c"), "ruler": ()}, scores, {"c": "no data"})
    assert means["s"] == {"mean": 0.375, "tasks": ["a", "b"], "left_out": {}}
    assert means["t"] == {"mean": None, "tasks": ["a"], "left_out": {"c": "no data"}}


def test_the_harness_command_line(monkeypatch, capsys, tmp_path):
    """Which knows our model; a wrong checkpoint is status 2, without traceback."""
    arguments = [
        "lm_eval",
        "run",
        "--model",
        "regdrop",
        "--model_args",
        f"checkpoint={tmp_path}/none",
        "--tasks",
        "piqa",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert lm.main() == 2
    assert "no such folder" in capsys.readouterr().err


QUESTIONS = {
    "task": "questions", "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}", "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


def evaluate_questions(rank, run, output):
    """Of 5 questions, on this rank its share; the first rank writes what all have found."""
    import datasets

    lines = [{"question": f"The {w}", "answer": i % 2, "choices": ["sky", "grass is"]} for i, w in enumerate("abcde")]
    questions = ConfigurableTask(
        config=QUESTIONS | {"custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(lines)}}
    )
    model = RegDropLM(str(run), batch_size=2)
    found = suites.evaluate_tasks(model, {"questions": questions}, None, None)
    if found is not None:
        output.write_text(json.dumps([found[0], sorted(found[1], key=lambda sample: sample["doc_id"])]))
    return 0


def test_two_ranks_say_what_one_says(run, tmp_path):
    evaluate_questions(0, run, tmp_path / "one.json")
    ranks = Ranks(2, functools.partial(evaluate_questions, run=run, output=tmp_path / "two.json"), tmp_path / "said")
    assert ranks.wait(240) == [0, 0], ranks.said()
    (one, samples), (two, others) = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert (
        one["questions"]["n"] == two["questions"]["n"] == 5 and one["questions"]["value"] == two["questions"]["value"]
    )
    for a, b in zip(samples, others, strict=True):
        assert a["doc_id"] == b["doc_id"]
        assert [x[0] for x in a["answers"]] == pytest.approx([x[0] for x in b["answers"]], abs=1e-5)


def test_the_tokenizer_must_be_the_models(run, tmp_path):
    """Another tokenizer than that of the training data is refused, as is a missing one."""
    with pytest.raises(InputError, match="is not the tokenizer that the model was trained with"):
        RegDropLM(str(run), tokenizer="bytes")
    with pytest.raises((InputError, DataError), match="no such file"):
        RegDropLM(str(run), tokenizer=str(tmp_path / "none"))
    with pytest.raises(InputError, match="name one model"):
        RegDropLM()

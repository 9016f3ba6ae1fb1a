"""Draft search against all subsets of a small model; stops and goings on; the command."""

import itertools
import json
import math
import os
import random
import signal
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from regdrop_titan.data.packed import MANIFEST
from regdrop_titan.data.tokenizers import load_tokenizer
from regdrop_titan.evaluation.subjects import InputError, checkpoint_subject
from regdrop_titan.generation.drafts import flops_share, in_order, read_draft
from regdrop_titan.generation.prompts import read_prompts
from regdrop_titan.generation.search import METHODS, Search, Worth, best_of, by_formula, front_of, units_of, warm_starts
from regdrop_titan.generation.walks import neighbours
from regdrop_titan.models import build_model, flavor_args
from regdrop_titan.models.args import DecoderArgs

from ..evaluation.tiny_runs import TEXT, write_run
from ..models.test_cache import MODELS
from ..packed_sets import write_packed

FIVE = {**MODELS["nape"][1], "n_layers": 5}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Each trial is a dozen writes that wait for it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def brute_force():
    """The arguments of a model in which two of five layers do nearly all, and what each of its 31 drafts is worth."""
    model = build_model("nape_llama3", "debug", **FIVE).eval()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            size = 0.25 if "layers.1." in name or "layers.3." in name else 0.03
            parameter += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    prompts = list(torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(7)))
    worth = by_formula(model, prompts, 12, 4, None)
    subsets = [kept for kept in itertools.product([False, True], repeat=5) if any(kept)]
    parts = [tuple(i for i, has in enumerate(kept) if has) for kept in subsets]
    return model.args, {each: worth(each) for each in parts}


def test_worth(brute_force):
    """The formula by hand, for the whole model as its draft and for one layer."""
    args, found = brute_force
    whole = found[0, 1, 2, 3, 4]
    assert (whole.alpha, whole.accepted_share, whole.c) == (1, 1, 1)
    assert whole.score == pytest.approx(1.0)  # as many tokens a pass as passes' worth of work
    for parts, worth in found.items():
        assert worth.c == flops_share(args, parts, 8 + 12 // 2)
        assert 0 <= worth.accepted_share <= worth.alpha <= 1


@pytest.mark.parametrize("method", METHODS)
def test_finds_the_best(tmp_path, brute_force, method):
    """Within 18 trials of 31 subsets; no subset is tried twice. Going on to more than there are ends at all."""
    args, worth = brute_force
    search = Search(tmp_path / "study", args, units_of(args, False), method, 4, 18, False, {})
    assert list(search.run(worth.__getitem__)) == search.trials
    assert len({trial.kept for trial in search.trials}) == 18
    best = max(each.score for each in worth.values())
    assert best_of(search.trials)[0].worth.score >= 0.95 * best
    if method != "gp":  # slow
        search = Search(tmp_path / "study", args, units_of(args, False), method, 4, 100, False, {})
        list(search.run(worth.__getitem__))
        assert {trial.parts for trial in search.trials} == set(worth)
        assert best_of(search.trials)[0].worth.score == best


def test_front(tmp_path, brute_force):
    args, worth = brute_force
    search = Search(tmp_path / "study", args, units_of(args, False), "nsga2", 0, 31, True, {})
    list(search.run(worth.__getitem__))
    front = front_of(search.trials)
    for each in search.trials:
        better = [f for f in front if f.worth.alpha >= each.worth.alpha and f.worth.c <= each.worth.c]
        assert better and (each not in front or better == [each])


def made_up(args):
    """An objective without a model: sublayers matter by made-up numbers."""
    draws = random.Random(1)
    matters = {part: draws.expovariate(4) for part in units_of(args, True)}

    def worth(parts):
        having = set(itertools.chain(*(([part] if isinstance(part, tuple) else [(part, "attention"),
                                                                              (part, "feed_forward")])
                                       for part in parts)))  # fmt: skip
        alpha = math.exp(-sum(x for part, x in matters.items() if part not in having))
        c = 0.1 + 0.9 * len(having) / len(matters)
        return Worth((1 + 5 * alpha) / (1 + 5 * c), alpha, alpha, 1.0, c)

    return worth


class Killed(Exception):
    pass


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_exact_resume(tmp_path, method, warm):
    """A search that is killed in its 8th trial, and in the first one after that, with half a line written the second
    time, makes the trials that it would have made; another seed does not."""
    args = flavor_args("nape_llama3", "debug", **FIVE)
    worth, units = made_up(args), units_of(args, True)

    def killed_at(n):
        calls = itertools.count()

        def objective(parts):
            if next(calls) == n:
                raise Killed
            return worth(parts)

        return objective

    def search(name, seed=3, trials=12):
        return Search(tmp_path / name, args, units, method, seed, trials, warm, {"a": 1})

    undisturbed = search("whole")
    list(undisturbed.run(worth))
    for n in (7, 0):
        with pytest.raises(Killed):
            list(search("killed").run(killed_at(n)))
    with open(tmp_path / "killed", "a") as file:
        file.write('{"op_code": 4, "wor')
    again = search("killed")
    assert len(again.trials) == 7
    list(again.run(worth))
    assert again.trials == undisturbed.trials == search("killed", trials=5).trials
    if method != "gp":
        other = search("other", seed=4)
        list(other.run(worth))
        assert other.trials[-6:] != undisturbed.trials[-6:]


def test_warm_starts_come_first(tmp_path):
    args = flavor_args("nape_llama3", "debug", **{**FIVE, "n_layers": 8})
    units = units_of(args, True)
    starts = warm_starts(args, units)
    chosen = [in_order(args, [unit for unit, has in zip(units, kept, strict=True) if has]) for kept in starts]
    assert chosen[:3] == [(0, 2, 4, 6), (0, 1, 2, 7), (0, 1, 2, 3)]  # alternate, late run, exit
    assert len(set(starts)) == len(starts) and not any(all(kept) or not any(kept) for kept in starts)
    search = Search(tmp_path / "study", args, units, "hill", 0, 12, True, {})
    list(search.run(lambda parts: Worth(len(parts), 0.5, 0.5, 1.0, 0.5)))
    assert [trial.parts for trial in search.trials[:4]] == chosen[:4]
    assert [trial.origin for trial in search.trials] == ["warm start"] * 4 + ["hill"] * 8


def test_neighbours():
    assert set(neighbours((True, False, False))) == {
        (True, True, False), (True, False, True), (False, True, False), (False, False, True),
    }  # fmt: skip


def test_units():
    hybrid = flavor_args(MODELS["hybrid"][0], "debug", **MODELS["hybrid"][1])
    assert units_of(hybrid, True) == [0, (1, "attention"), (1, "feed_forward"), 2]
    assert units_of(DecoderArgs(n_layers=3), False) == [0, 1, 2]


def test_other_settings_are_refused(tmp_path):
    args = flavor_args("nape_llama3", "debug", **FIVE)
    Search(tmp_path / "study", args, units_of(args, False), "tpe", 0, 10, True, {"new_tokens": 8})
    with pytest.raises(ValueError) as error:
        Search(tmp_path / "study", args, units_of(args, False), "gp", 1, 10, True, {"new_tokens": 9})
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all(line.startswith(f"{tmp_path / 'study'}: holds a search with ") for line in lines)
    assert lines[0].endswith('method "tpe", not "gp"') and lines[2].endswith("new_tokens 8, not 9")


SMALL = ["--trials", "6", "--prompts", "2", "--prompt-tokens", "6", "--new-tokens", "6", "--final-rounds", "2"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text", "packed"])
def test_the_script(tmp_path, script, capsys, kind):
    """Each kind of data; the files; again; going on; other settings."""
    model = write_run(tmp_path)
    records = [{"document": text, "summary": "x"} for text in TEXT]
    if kind == "jsonl":
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        data = [str(tmp_path / "x.jsonl"), "--text-key", "document"]
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
        data = [str(tmp_path / "x.parquet"), "--text-key", "document", "--objective", "measured"]
    elif kind == "text":  # one text: windows of it
        (tmp_path / "x.txt").write_text(" ".join(TEXT))
        data = [str(tmp_path / "x.txt"), "--sublayers"]
    else:
        tokenizer = load_tokenizer(tmp_path / "data/tokenizer.json")
        write_packed(tmp_path / "packed", [tokenizer.encode(text).tolist() for text in TEXT], tokenizer.vocab_size)
        manifest = json.loads((tmp_path / "packed" / MANIFEST).read_text())
        manifest["tokenizer"]["sha256"] = tokenizer.sha256
        (tmp_path / "packed" / MANIFEST).write_text(json.dumps(manifest))
        data = [str(tmp_path / "packed"), "--draft-exit", "adaptive"]
    command = ["search_draft", "--checkpoint", str(tmp_path), "--data", *data, "--method", "annealing", *SMALL]
    capsys.readouterr()
    assert script(*command) == 0
    assert "times as fast as plain decoding" in capsys.readouterr().out
    folder = tmp_path / "drafts/annealing"
    result = json.loads((folder / "search.json").read_text())
    draft = read_draft(folder / "draft.json")
    assert draft.length == 5 and draft.exit == ("adaptive" if kind == "packed" else None)
    assert in_order(model.args, draft.parts) == draft.parts
    assert len(result["trials"]) == 6 and result["trials"][0]["origin"] == "warm start"
    assert result["test"]["same_tokens"] and len(result["finalists"]) == 3 and result["weights_sha256"]
    if kind == "parquet":
        fastest = max(result["finalists"], key=lambda each: each["measured"]["speed_up"])
        assert result["best"]["number"] == fastest["number"]
    else:
        assert result["best"]["score"] == max(trial["score"] for trial in result["trials"])
    assert (folder / "front.png").stat().st_size > 10_000
    if kind != "jsonl":
        return
    before = (folder / "search.json").read_bytes()
    assert script(*command) == 0
    assert "done before: 6 trials" in capsys.readouterr().out and (folder / "search.json").read_bytes() == before
    assert script(*command, "--trials", "7") == 0
    more = json.loads((folder / "search.json").read_text())["trials"]
    assert more[:6] == result["trials"] and len(more) == 7
    assert script(*command, "--new-tokens", "7", "--trials", "8") == 2
    assert "holds a search with new_tokens 6, not 7" in capsys.readouterr().err


def test_a_text_has_its_first_tokens_read(tmp_path):
    write_run(tmp_path)
    subject = checkpoint_subject(tmp_path)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["short", *TEXT[:2]]))
    ids = [load_tokenizer(tmp_path / "data/tokenizer.json").encode(text).tolist() for text in TEXT[:2]]
    found = [prompt.tolist() for prompt in read_prompts(subject, str(tmp_path / "x.jsonl"), "text", 3, 5)]
    assert found == [ids[0][:5], ids[1][:5], ids[0][5:10]]
    with pytest.raises(InputError, match=r"separate prompts of 5 tokens, 99 are needed"):
        read_prompts(subject, str(tmp_path / "x.jsonl"), "text", 99, 5)


def test_bad_arguments(tmp_path, script, capsys, monkeypatch):
    """All faults at once, no traceback; optuna that is not installed is named."""
    write_run(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    command = ["search_draft", "--checkpoint", str(tmp_path), "--data"]
    wrong = ["--trials", "0", "--draft-exit", "2", "--final-rounds", "1"]
    assert script(*command, str(tmp_path / "none.jsonl"), *wrong) == 2
    said = capsys.readouterr().err
    for message in (
        "--trials 0: must be",
        "--draft-exit 2.0: must be in [0, 1]",
        "--final-rounds 1",
        "none.jsonl: no such",
    ):
        assert message in said
    assert script(*command, str(tmp_path / "x.jsonl"), "--text-key", "document") == 2
    assert "x.jsonl, line 1: no key 'document'" in capsys.readouterr().err
    assert script(*command, str(tmp_path / "x.jsonl"), "--draft-exit", "often") == 2
    (tmp_path / "long.txt").write_text(" ".join(TEXT))
    assert script(*command, str(tmp_path / "long.txt"), *SMALL, "--output", str(tmp_path / "x.jsonl")) == 2
    assert f"--output {tmp_path / 'x.jsonl'}: File exists" in capsys.readouterr().err
    assert script("search_draft", "--checkpoint", str(tmp_path / "gone"), "--data", str(tmp_path / "x.jsonl")) == 2
    monkeypatch.setitem(sys.modules, "optuna", None)
    capsys.readouterr()
    assert script(*command, str(tmp_path / "x.jsonl")) == 2
    assert "pip install 'regdrop-titan[search]'" in capsys.readouterr().err


def test_a_signal_keeps_what_is_tried(tmp_path, script, capsys, monkeypatch):
    write_run(tmp_path)
    (tmp_path / "x.txt").write_text(" ".join(TEXT))
    command = [
        "search_draft",
        "--checkpoint",
        str(tmp_path),
        "--data",
        str(tmp_path / "x.txt"),
        "--method",
        "hill",
        *SMALL,
    ]
    run = Search.run

    def signalled(self, objective):
        for trial in run(self, objective):
            if trial.number == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)  # its thread reads it
            yield trial

    monkeypatch.setattr(Search, "run", signalled)
    assert script(*command) == 75
    assert "stopped with 3 trials" in capsys.readouterr().err
    assert not (tmp_path / "drafts/hill/search.json").exists()
    assert script(*command) == 0
    assert len(json.loads((tmp_path / "drafts/hill/search.json").read_text())["trials"]) == 6

"""Copying scores of models whose mistakes are known."""

from functools import partial

import pytest
import torch
from torch import nn

from regdrop_titan.data.copying import END, SEPARATOR, VOCAB_SIZE, source
from regdrop_titan.evaluation.copying import CopyingScore, evaluate_copying, greedy_answer, plot_copying
from regdrop_titan.models import build_model

A, Z = 0, 25


class Copier(nn.Module):
    """Copies by looking up, token by token, and errs where `wrong(position in the answer, right token)` says so.

    With `derailed`, it is wrong as well once the last token that it reads is not the source's.
    """

    def __init__(self, wrong=lambda position, token: False, *, mistake=Z, derailed=False):
        super().__init__()
        self.device = nn.Parameter(torch.zeros(()))
        self.wrong, self.mistake, self.derailed = wrong, mistake, derailed
        self.sources = []
        self.forwards = 0

    def forward(self, tokens):
        assert not torch.is_grad_enabled()
        self.forwards += 1
        logits = torch.zeros(*tokens.shape, VOCAB_SIZE)
        for row, text in enumerate(tokens.tolist()):
            separator = text.index(SEPARATOR)
            source = text[1:separator]
            if source not in self.sources:
                self.sources.append(source)
            answer = [*source, END]
            for i in range(separator, len(text)):
                position = i - separator
                token = answer[position]
                off = self.derailed and position and text[i] != answer[position - 1]
                logits[row, i, self.mistake if off or self.wrong(position, token) else token] = 1
        return logits

    def write(self, question, n_tokens):
        """Greedily, by full forwards."""
        written = question
        for _ in range(n_tokens):
            written = torch.cat([written, self(written)[:, -1:].argmax(-1)], dim=1)
        return written[:, question.shape[1] :]


@pytest.mark.parametrize("free_running", [False, True])
def test_a_perfect_copier(free_running):
    model = Copier()
    score = evaluate_copying(model, 12, 5, batch_size=2, write=model.write if free_running else None)
    assert score == CopyingScore(length=12, ema=1, ema_error=0, cla=1, cla_error=0, n_samples=5)
    assert model.forwards == 3 * (13 if free_running else 1)


@pytest.mark.parametrize("free_running", [False, True])
def test_a_letter_it_cannot_copy(free_running):
    """Every "a" becomes "z": both scores and their errors counted from the sources."""
    model = Copier(lambda position, token: token == A)
    score = evaluate_copying(model, 30, 200, write=model.write if free_running else None)
    assert len(model.sources) == 200 and {len(s) for s in model.sources} == {30}
    ema = sum(A not in s for s in model.sources) / 200
    shares = [1 - s.count(A) / 30 for s in model.sources]
    cla = sum(shares) / 200
    assert 0.2 < ema < 0.45 and 0.94 < cla < 0.98  # (25/26)^30 = 0.31, 25/26
    assert score.ema == pytest.approx(ema, abs=1e-12) and score.cla == pytest.approx(cla, abs=1e-12)
    assert score.ema_error == pytest.approx((ema * (1 - ema) / 200) ** 0.5, abs=1e-12)
    assert score.cla_error == pytest.approx((sum((s - cla) ** 2 for s in shares) / 200 / 200) ** 0.5, abs=1e-12)


@pytest.mark.parametrize(
    ("position", "ema", "cla"), [(0, 0, 0.9), (9, 0, 0.9), (10, 0, 1)], ids=["first", "last letter", "closing ."]
)
def test_one_mistake_an_answer(position, ema, cla):
    """The closing `.` counts for EMA and not for CLA. A mistake is a mistake outside of the letters too."""
    score = evaluate_copying(Copier(lambda at, token: at == position, mistake=SEPARATOR), 10, 4)
    assert (score.ema, score.ema_error) == (ema, 0)
    assert score.cla == pytest.approx(cla) and score.cla_error == pytest.approx(0, abs=1e-9)


def test_free_running_reads_its_own_answer():
    """A model that errs at position 3 if it is a letter before "n", and wherever what it reads is wrong:
    teacher-forced it errs once, free-running to the end. Wholly right answers are the same."""
    options = {"wrong": lambda position, token: position == 3 and token < 13, "mistake": SEPARATOR, "derailed": True}
    forced_model = Copier(**options)
    forced = evaluate_copying(forced_model, 10, 40)
    free_model = Copier(**options)
    free = evaluate_copying(free_model, 10, 40, write=free_model.write)
    errs = sum(s[3] < 13 for s in forced_model.sources) / 40
    assert 0.2 < errs < 0.8
    assert forced.cla == pytest.approx(1 - errs / 10) and free.cla == pytest.approx(1 - errs * 7 / 10)
    assert forced.ema == free.ema == pytest.approx(1 - errs)


@pytest.mark.parametrize("free_running", [False, True])
def test_batch_size_changes_nothing(free_running):
    def run(batch_size):
        model, done = Copier(lambda position, token: token == A), []
        score = evaluate_copying(
            model, 20, 7, batch_size=batch_size, write=model.write if free_running else None, progress=done.append
        )
        return score, model.sources, done

    (one, sources, done), (three, *_), (all_at_once, same_sources, at_once) = run(1), run(3), run(50)
    assert one == three == all_at_once and 0 < one.ema < 1
    assert sources == same_sources
    assert done == [1] * 7 and at_once == [7]


@pytest.mark.parametrize("layers", ["attention", "mamba"])
def test_what_a_decoder_writes(layers):
    """With its cache, as by full forwards."""
    options = {
        "layers": layers,
        "dim": 32,
        "n_layers": 2,
        "vocab_size": VOCAB_SIZE,
        "ssm_head_dim": 16,
        "state_size": 8,
    }
    heads = {"n_heads": 4, "n_kv_heads": 4, "ffn_dim": 48, "document_mask": True, "eos_id": END}
    model = build_model("mamba2", "debug", **options, **heads).eval()
    scores = [
        evaluate_copying(model, 9, 12, batch_size=5, write=write)
        for write in (partial(greedy_answer, model), partial(Copier.write, model))
    ]
    assert scores[0] == scores[1]
    question = torch.randint(0, VOCAB_SIZE, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(greedy_answer(model, question, 7), Copier.write(model, question, 7))


def test_samples_are_fixed_and_not_those_of_training():
    def sources(seed):
        model = Copier()
        evaluate_copying(model, 50, 20, seed=seed)
        return {tuple(s) for s in model.sources}

    assert sources(0) == sources(0) and not sources(0) & sources(1)
    for stream in ("training", "held out"):
        assert not sources(0) & {tuple(source(stream, 0, i, 50).tolist()) for i in range(20)}


@pytest.mark.parametrize(("length", "n_samples"), [(0, 5), (5, 0)])
def test_nothing_to_copy(length, n_samples):
    with pytest.raises(ValueError, match=f"length {length} and n_samples {n_samples} must be at least 1"):
        evaluate_copying(Copier(), length, n_samples)


def test_plot(tmp_path):
    scores = [CopyingScore(n, 1 - n / 400, 0.02, 1 - n / 900, 0.01, 100) for n in (300, 50, 100, 150)]
    plot_copying({"vpad": scores, "dense": scores[:2]}, (50, 100), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

"""Generation against full forwards, and with drafts against without."""

import json
import math

import pytest
import torch

from regdrop_titan.generation import generate
from regdrop_titan.generation.generate import verify
from regdrop_titan.generation.sampling import distribution, draw
from regdrop_titan.models import build_model

from ..evaluation.tiny_runs import write_run
from ..models.test_cache import MODELS, model_and_tokens

PROMPTS = (1, 3, 17, 26)  # tokens


def prompts_of(tokens):
    return [row[:n] for row, n in zip(tokens, PROMPTS, strict=True)]


def plainly(model, prompt, n, layers=None):
    """Greedy by full forwards of one row."""
    ids = prompt
    for _ in range(n):
        ids = torch.cat([ids, model(ids[None], layers=layers)[0, -1:].argmax(-1)])
    return ids[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_full_forwards(name):
    """Of every family and position kind; plainly, and with a draft of one layer: token for token. Rows of 1 to 26
    tokens do not touch each other."""
    model, tokens = model_and_tokens(name, 4, 30)
    expected = [plainly(model, prompt, 9) for prompt in prompts_of(tokens)]
    for options in ({}, {"draft_layers": [0], "draft_length": 3}, {"draft_layers": [1, 0], "draft_length": 9}):
        answers, stats = generate(model, prompts_of(tokens), 9, **options)
        assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True)), options
        assert stats["tokens"] == 36 and stats["passes"] <= 9
        assert 0 <= stats["accepted"] <= stats["drafted"]


@torch.no_grad()
def test_parts_of_the_model_write():
    model, tokens = model_and_tokens("nape", 4, 30)
    for options, layers in (({"exit_layer": 2}, [0, 1]), ({"skip_layers": [1]}, [0, 2]), ({"exit_layer": 0}, [])):
        answers, _ = generate(model, prompts_of(tokens), 5, **options)
        for answer, prompt in zip(answers, prompts_of(tokens), strict=True):
            assert torch.equal(answer, plainly(model, prompt, 5, layers))


@pytest.mark.parametrize("name", ["nape", "hybrid"])
def test_a_draft_of_all_layers_is_always_right(name):
    model, tokens = model_and_tokens(name, 4, 30)
    _, stats = generate(model, prompts_of(tokens), 12, draft_layers=[0, 1, 2], draft_length=3)
    assert stats["drafted"] == stats["accepted"] == 4 * 9 and stats["passes"] == 3


def test_a_draft_that_is_always_wrong():
    """Nothing of it is accepted, and the answer is the same."""
    model, tokens = model_and_tokens("nope", 4, 30)
    with torch.no_grad():  # layer 0 turns the stream round: the likeliest token becomes the least likely
        model.norm.weight.fill_(1.0)
        plain, _ = generate(model, prompts_of(tokens), 8)
    original = model.head

    def head(h):
        return original(h) if head.whole else -original(h)

    forward = model.forward

    def switching(*args, layers=None, **kwargs):
        head.whole = layers is None
        return forward(*args, layers=layers, **kwargs)

    model.head, model.forward = head, switching
    answers, stats = generate(model, prompts_of(tokens), 8, draft_layers=[0, 1, 2], draft_length=4)
    assert all(torch.equal(a, b) for a, b in zip(answers, plain, strict=True))
    assert stats["accepted"] == 0 and stats["passes"] == 8


def chi_square(counts, p):
    """The statistic and its bound at about 1e-4, by Wilson and Hilferty."""
    expected = counts.sum() * p
    kept = expected > 5
    observed = torch.cat([counts[kept], counts[~kept].sum()[None]])
    expected = torch.cat([expected[kept], expected[~kept].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    k = len(expected) - 1
    return statistic, k * (1 - 2 / (9 * k) + 3.72 * math.sqrt(2 / (9 * k))) ** 3


@torch.no_grad()
@pytest.mark.parametrize("draft", [None, [0], [2, 1]])
def test_samples_have_the_models_distribution(draft):
    """The second and third token of 4000 answers, of 12 ids at temperature 1.3: chi-square against the exact
    distribution, seed fixed; with drafts, some are accepted and some refused."""
    sizes = {"dim": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 24, "vocab_size": 12}
    model = build_model("nape_llama3", "debug", **sizes).eval()
    for i, parameter in enumerate(model.parameters()):  # layers that matter
        parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    prompt = torch.tensor([3, 5])
    answers, stats = generate(
        model, [prompt] * 4000, 3, temperature=1.3, draft_layers=draft, draft_length=2, seed=1
    )  # fmt: skip
    first = torch.stack([prompt.new_tensor([3, 5, a]) for a in range(12)])
    p_first = (model(prompt[None])[0, -1] / 1.3).softmax(-1).double()
    p_second = (model(first)[:, -1] / 1.3).softmax(-1).double()
    joint = p_first[:, None] * p_second  # (12, 12)
    pairs = torch.cat([first[:, None].expand(12, 12, 3), torch.arange(12).expand(12, 12)[..., None]], dim=-1)
    p_third = (model(pairs.reshape(144, 4))[:, -1] / 1.3).softmax(-1).double()
    tokens = torch.stack(answers)
    counts = torch.bincount(tokens[:, 0] * 12 + tokens[:, 1], minlength=144).double()
    statistic, bound = chi_square(counts, joint.flatten())
    assert statistic < bound
    counts = torch.bincount(tokens[:, 2], minlength=12).double()
    statistic, bound = chi_square(counts, joint.flatten() @ p_third)
    assert statistic < bound
    if draft is not None:
        assert 0.1 * stats["drafted"] < stats["accepted"] < 0.9 * stats["drafted"]
    again, _ = generate(model, [prompt] * 2, 3, temperature=1.3, draft_layers=draft, draft_length=2, seed=1)
    assert torch.equal(torch.stack(again), tokens[:2])  # a row's draws do not depend on the batch


def test_verification_by_hand():
    """p and q over 3 tokens: x is accepted with min(1, p/q), and what is drawn instead is max(0, p - q)."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).expand(20000, 2, 3)
    q = torch.tensor([[0.2, 0.2, 0.6]]).expand(20000, 1, 3)
    generators = [torch.Generator().manual_seed(i) for i in range(20000)]
    drafts = draw(q[:, 0], generators)[:, None]
    accepted, following = verify(p, q, drafts, generators)
    accepted = torch.tensor(accepted)
    share = accepted[drafts[:, 0] == 2].double().mean()
    assert share == pytest.approx(1 / 3, abs=4 * 0.471 / 12000**0.5)
    assert accepted[drafts[:, 0] < 2].min() == 1
    refused = following[accepted == 0]  # max(0, p - q) = 0.3, 0.1, 0
    assert (refused == 0).double().mean() == pytest.approx(0.75, abs=4 * 0.433 / len(refused) ** 0.5)
    assert (refused == 2).sum() == 0
    behind = following[accepted == 1]
    assert (behind == 2).double().mean() == pytest.approx(0.8, abs=4 * 0.4 / len(behind) ** 0.5)


def test_distributions():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0])
    assert distribution(logits).tolist() == [0, 1, 0, 0, 0]
    assert torch.allclose(distribution(logits, 2.0), (logits / 2).softmax(-1))
    e = torch.tensor([3.0, 3.0, 2.0]).exp()
    a, b, c = (e / e.sum()).tolist()
    assert distribution(logits, 1.0, top_k=3).tolist() == pytest.approx([0, a, c, b, 0])
    assert distribution(logits, 1.0, top_k=2).tolist() == pytest.approx([0, 0.5, 0, 0.5, 0])
    # the likeliest has 0.40: a second is needed for 0.5, a third for 0.85, whose first two have 0.81
    assert distribution(logits, 1.0, top_p=0.3).tolist() == [0, 1, 0, 0, 0]
    assert distribution(logits, 1.0, top_p=0.5).tolist() == pytest.approx([0, 0.5, 0, 0.5, 0])
    assert distribution(logits, 1.0, top_p=0.85).tolist() == pytest.approx([0, a, c, b, 0])


def test_ends_and_reports():
    model, tokens = model_and_tokens("nape", 4, 30)
    free, _ = generate(model, prompts_of(tokens), 12)
    heard = [[] for _ in PROMPTS]
    stop = int(free[2][4])
    answers, stats = generate(
        model, prompts_of(tokens), 12, draft_layers=[0, 1, 2], draft_length=5,
        finished=lambda row, new: new[-1] == stop, wrote=lambda row, new: heard[row].extend(new),
    )  # fmt: skip
    for answer, whole, said in zip(answers, free, heard, strict=True):
        ids = whole.tolist()
        assert answer.tolist() == said == (ids[: ids.index(stop) + 1] if stop in ids else ids)
    assert stats["tokens"] == sum(map(len, heard))


@pytest.mark.parametrize(
    ("prompts", "options", "messages"),
    [
        ([], {}, ["prompts: there are none"]),
        ([torch.tensor([1]), torch.tensor([], dtype=torch.long)], {}, ["prompt 1: is empty"]),
        ([torch.tensor([64])], {}, ["prompt 0: has ids outside of 0 ... 63"]),
        ([torch.tensor([1])], {"max_new_tokens": 0, "temperature": -1.0}, ["max_new_tokens 0", "temperature -1.0"]),
        ([torch.tensor([1])], {"top_k": 0, "top_p": 0.0}, ["top_k 0", "top_p 0.0"]),
        (
            [torch.tensor([1])],
            {"draft_layers": [], "draft_length": 0},
            ["draft_layers: there are none", "draft_length 0"],
        ),
        ([torch.tensor([1])], {"draft_layers": [3]}, ["draft_layers 3: there are 0 ... 2"]),
        (
            [torch.tensor([1])],
            {"exit_layer": 4, "skip_layers": [5]},
            ["exit_layer 4: must be in 0 ... 3", "skip_layers 5"],
        ),
    ],
)
def test_bad_input(prompts, options, messages):
    model, _ = model_and_tokens("nape", 2, 12)
    with pytest.raises(ValueError) as error:
        generate(model, prompts, **options)
    assert all(message in str(error.value) for message in messages)


def test_the_script(tmp_path, script, capsys):
    """The text of the ids, streamed; the same with a draft; a stop string; several prompts; wrong arguments."""
    model = write_run(tmp_path)
    name = ["--checkpoint", str(tmp_path), "--max-new-tokens", "12"]
    assert script("generate", *name, "--prompt", "The sky is") == 0
    plain = capsys.readouterr()
    from regdrop_titan.evaluation.subjects import checkpoint_subject

    tokenizer = checkpoint_subject(tmp_path).tokenizer
    ids = plainly(model, torch.tensor(tokenizer.encode("The sky is").tolist()), 12).tolist()
    ids = ids[: ids.index(0)] if 0 in ids else ids
    text = tokenizer.decode(ids)
    assert plain.out == f"The sky is{text}\n" and " tokens in " in plain.err
    assert script("generate", *name, "--prompt", "The sky is", "--speculative", "0", "2") == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out and "drafted tokens accepted" in drafted.err
    stop = text[2:4]
    assert script("generate", *name, "--prompt", "The sky is", "--stop", stop) == 0
    assert capsys.readouterr().out == f"The sky is{text.split(stop)[0]}\n"
    assert script("generate", *name, "--prompt", "The sky is", "--prompt", "A", "--exit-layer", "1") == 0
    assert capsys.readouterr().out.startswith("--- 1\nThe sky is")
    for wrong, message in (
        (["--prompt", ""], "--prompt 1: is empty"),
        (["--prompt", "A", "--exit-layer", "9"], "exit_layer 9: must be in 0 ... 3"),
        (["--prompt", "A", "--stop", ""], "--stop: a stop string is empty"),
        (["--prompt", "A", "--speculative", "7", "--top-p", "2"], "draft_layers 7: there are 0 ... 2"),
    ):
        assert script("generate", *name, *wrong) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"tokenizer": None})
    )
    assert script("generate", *name, "--prompt", "A", "--tokenizer", "bytes") == 0

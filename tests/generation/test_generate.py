"""Generation against full forwards, and with drafts against without."""

import copy
import importlib
import json
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from regdrop_titan.generation import Draft, generate
from regdrop_titan.generation.compiled import compiled_blocks
from regdrop_titan.generation.drafts import DraftExit, in_order, sublayers_of, write_draft
from regdrop_titan.generation.generate import verify
from regdrop_titan.generation.sampling import distribution, draw
from regdrop_titan.models import build_model
from regdrop_titan.models.block import SUBLAYERS
from regdrop_titan.models.cache import Cache

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
    """Of every family and position kind; plainly, and with drafts, mostly refused: token for token, states taken
    back (report S9). Rows of 1 to 26 tokens do not touch each other (M8)."""
    model, tokens = model_and_tokens(name, 4, 30)
    expected = [plainly(model, prompt, 9) for prompt in prompts_of(tokens)]
    drafts: list[dict] = [{"draft_layers": [0], "draft_length": 3}, {"draft_layers": [1, 0], "draft_length": 9}]
    for layer, kind in enumerate(model.args.layer_kinds):
        if kind != "mamba":  # single sublayers, the last of a window or of none
            drafts.append({"draft_layers": [(layer, "attention"), 2], "draft_length": 2} if layer < 2 else {})
            drafts.append({"draft_layers": [0, (layer, "feed_forward")] if layer else [(0, "feed_forward")]})
    drafts.append({"draft_layers": [0, 1], "draft_length": 4, "draft_exit": "adaptive"})
    for options in ({}, *drafts):
        answers, stats = generate(model, prompts_of(tokens), 9, **options)
        assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True)), options
        assert stats["tokens"] == 36 and stats["passes"] <= 9
        assert 0 <= stats["accepted"] <= stats["drafted"]


@torch.no_grad()
def test_parts_of_the_model_write():
    """Exits at 0 and L too (report S8)."""
    model, tokens = model_and_tokens("nape", 4, 30)
    for options, layers in (
        ({"exit_layer": 2}, [0, 1]),
        ({"exit_layer": 3}, None),
        ({"skip_layers": [1]}, [0, 2]),
        ({"exit_layer": 0}, []),
    ):
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

    def head(h, *_):
        return original(h) if head.whole else -original(h)

    forward = model.forward

    def switching(*args, layers=None, **kwargs):
        head.whole = layers is None
        return forward(*args, layers=layers, **kwargs)

    model.head, model.forward = head, switching
    answers, stats = generate(model, prompts_of(tokens), 8, draft_layers=[0, 1, 2], draft_length=4)
    assert all(torch.equal(a, b) for a, b in zip(answers, plain, strict=True))
    assert stats["accepted"] == 0 and stats["passes"] == 8


@torch.no_grad()
@pytest.mark.parametrize("name", ["nape", "smollm3 window", "celerity", "hybrid"])
def test_parts_are_the_models_own(name):
    """All sublayers are the whole model; one left out is the model whose sublayer adds nothing."""
    model, tokens = model_and_tokens(name, 2, 20)
    args = model.args
    whole = model(tokens)
    units = [sorted(sublayers_of(args, layer), key=str) for layer in range(args.n_layers)]
    everything = [unit for layer in units for unit in layer]
    assert torch.equal(model(tokens, layers=everything), whole)
    assert in_order(args, everything[::-1]) == tuple(range(args.n_layers))
    (layer,) = [layer for layer, kind in enumerate(args.layer_kinds) if kind != "mamba"][:1]
    for sublayer in SUBLAYERS:
        silent = copy.deepcopy(model)
        last = silent.layers[str(layer)]
        output = last.attention.inner.wo if sublayer == "attention" else last.feed_forward.inner.w2
        for parameter in output.parameters():
            parameter.zero_()
        rest = [unit for unit in everything if unit != (layer, sublayer)]
        assert not torch.allclose(whole, silent(tokens))
        torch.testing.assert_close(model(tokens, layers=in_order(args, rest)), silent(tokens), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_sublayer_in_evaluation_has_its_scale():
    """r_eval of a layer multiplies the update of its sublayer alone."""
    model, tokens = model_and_tokens("nape", 2, 12)
    model.args.eval_scale = [1.0, 0.5, 1.0]
    h, through = model.begin(tokens)
    with_half = through((1, "feed_forward"), h) - h
    model.args.eval_scale = None
    h, through = model.begin(tokens)
    torch.testing.assert_close(2 * with_half, through((1, "feed_forward"), h) - h)
    with pytest.raises(ValueError, match="cannot be with single sublayers"):
        model(tokens, layers=[(1, "attention")], keep=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"no layer \(1, 'norm'\)"):
        model(tokens, layers=[0, (1, "norm")])


def test_a_draft_stops_where_it_is_unsure():
    """A threshold of 1 stops behind the first drafted token, 0 never; one between, where the reference does."""
    model, tokens = model_and_tokens("nape", 4, 30)
    prompts = prompts_of(tokens)
    draft = {"draft_layers": [0, 1], "draft_length": 4}
    never, always = (generate(model, prompts, 12, **draft, draft_exit=exit)[1] for exit in (0.0, 1.0))
    assert never == pytest.approx(generate(model, prompts, 12, **draft)[1] | {"seconds": never["seconds"]})
    assert always["drafted"] <= always["verified"] and never["drafted"] > always["drafted"]
    prompt, threshold = tokens[3, :26], 0.05
    with torch.no_grad():
        plain, _ = generate(model, [prompt], 12)
        ids, drafted, passes = prompt, 0, 0
        while len(ids) < 26 + 12:  # by hand, from full forwards
            ahead = ids
            while len(ahead) - len(ids) < min(4, 26 + 12 - 1 - len(ids)):
                # what is read is read by all layers, what is drafted by the draft's alone
                h = drafted_stream(model, ids, ahead, [0, 1])
                p = model.head(h)[0, -1].softmax(-1)
                ahead = torch.cat([ahead, p.argmax()[None]])
                if p.max() < threshold:
                    break
            drafted, passes = drafted + len(ahead) - len(ids), passes + 1
            right = model(ahead[None])[0].argmax(-1)
            n = len(ids)
            while n < len(ahead) and ahead[n] == right[n - 1]:
                n += 1
            ids = torch.cat([ahead[:n], right[n - 1][None]])
    answers, stats = generate(model, [prompt], 12, **draft, draft_exit=threshold)
    assert torch.equal(answers[0], plain[0]) and torch.equal(ids[26:], plain[0])
    assert (stats["drafted"], stats["passes"]) == (drafted, passes)


def drafted_stream(model, ids, ahead, layers):
    """The residual stream (1, 1, d) of the last token of `ahead`: tokens before the last of `ids` by all layers, those
    behind by `layers`."""
    cache = Cache(1, len(ahead), len(ahead))
    model(ids[None, :-1], cache=cache)
    tokens = ahead[None, len(ids) - 1 :]
    cache.begin(tokens, None, None)
    h, through = model.begin(tokens, cache=cache)
    for layer in layers:
        h = through(layer, h)
    return h[:, -1:]


def test_the_adaptive_threshold():
    """It rises while less than the aim is accepted, falls while more is, and stays in (0, 1)."""
    stop = DraftExit("adaptive")
    seen = []
    for accepted in [1] * 200 + [5] * 400:
        stop.learn(accepted, 5)
        seen.append(stop.threshold)
    assert seen[0] > DraftExit.START and seen[199] == 0.99 and seen[-1] == 0.01
    fixed = DraftExit(0.3)
    fixed.learn(0, 5)
    assert fixed.threshold == 0.3
    assert DraftExit(None).unsure(torch.zeros(2, 5)) is None
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]])  # the largest probabilities are 1/3 and 0.98
    assert DraftExit(0.4).unsure(logits).tolist() == [True, False]


@pytest.mark.parametrize("name", ["nape documents", "hybrid"])
def test_compiled_blocks_write_the_same(name, monkeypatch):
    """With and without a draft; all layers of a kind share their graphs, which a second call finds again, and the model
    is as it was behind it. By dynamo alone: what a compiler makes of the graphs is torch's."""
    model, tokens = model_and_tokens(name, 4, 30)
    counter = CompileCounterWithBackend("eager")
    modules = importlib.import_module("regdrop_titan.generation.generate")
    enabled = []

    def by_counter(model, compile):
        enabled.append(compile)
        return compiled_blocks(model, compile, counter)

    monkeypatch.setattr(modules, "compiled_blocks", by_counter)
    torch._dynamo.reset()
    graphs = []
    for options in ({}, {"draft_layers": [0, 2], "draft_length": 2}):
        plain, _ = generate(model, prompts_of(tokens), 8, **options)
        for _ in range(2):
            answers, _ = generate(model, prompts_of(tokens), 8, **options, compile=True)
            assert all(torch.equal(a, b) for a, b in zip(answers, plain, strict=True))
            graphs.append(counter.frame_count)
    assert 0 < graphs[0] == graphs[1] < graphs[2] == graphs[3] <= 12
    assert enabled == [False, True, True] * 2
    assert all("forward" not in vars(block) for block in model.layers.values())
    with pytest.raises(KeyError), compiled_blocks(model, True, "eager"):
        raise KeyError
    assert all("forward" not in vars(block) for block in model.layers.values())
    torch._dynamo.reset()


def test_finished_rows_leave():
    """Rows that end early do not change what the others write, with and without a draft, for states too."""
    ends = [3, 10, 1, 6]
    for name in ("nape documents", "nape cut", "hybrid", "smollm3 window"):
        model, tokens = model_and_tokens(name, 4, 30)
        alone = [generate(model, [prompt], 10)[0][0].tolist() for prompt in prompts_of(tokens)]
        sizes = []
        forward = model.forward

        def counting(tokens, forward=forward, sizes=sizes, **kwargs):
            sizes.append(len(tokens))
            return forward(tokens, **kwargs)

        model.forward = counting
        for draft in ({}, {"draft_layers": [0, 1], "draft_length": 3}):
            answers, _ = generate(
                model, prompts_of(tokens), 10, **draft, finished=lambda row, ids: len(ids) == ends[row]
            )
            assert [answer.tolist() for answer in answers] == [a[:n] for a, n in zip(alone, ends, strict=True)]
            assert sizes[-1] <= 2


def test_a_cache_that_is_too_small():
    model, tokens = model_and_tokens("nape", 4, 30)
    answers, _ = generate(model, prompts_of(tokens), 4, max_length=30)
    assert all(len(answer) == 4 for answer in answers)
    with pytest.raises(ValueError) as error:
        generate(model, prompts_of(tokens), 5, max_length=20)
    assert str(error.value).splitlines() == [
        "prompt 2: 17 tokens and 5 new ones: the cache has room for 20 (max_length)",
        "prompt 3: 26 tokens and 5 new ones: the cache has room for 20 (max_length)",
    ]


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
@pytest.mark.parametrize(
    ("draft", "stop"), [(None, None), ([0], None), ([2, 1], None), ([(0, "attention"), 1], 0.2), ([0], "adaptive")]
)
def test_samples_have_the_models_distribution(draft, stop):
    """The second and third token of 4000 answers, of 12 ids at temperature 1.3: chi-square against the exact
    distribution, seed fixed; with drafts, some are accepted and some refused."""
    sizes = {"dim": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 24, "vocab_size": 12}
    model = build_model("nape_llama3", "debug", **sizes).eval()
    for i, parameter in enumerate(model.parameters()):  # layers that matter
        parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    prompt = torch.tensor([3, 5])
    answers, stats = generate(
        model, [prompt] * 4000, 3, temperature=1.3, draft_layers=draft, draft_length=2, draft_exit=stop, seed=1
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
    if stop is None:  # drafts that stop early draw as often as their batch does
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
        ([torch.tensor([1])], {"draft_layers": [(4, "attention")]}, ["draft_layers 4a: there are 0 ... 2"]),
        ([torch.tensor([1])], {"draft_layers": [1, (1, "attention")]}, ["draft_layers: one is named twice"]),
        ([torch.tensor([1])], {"draft_layers": [1], "draft_exit": 1.5}, ["draft_exit 1.5: must be in [0, 1]"]),
        (
            [torch.tensor([1])],
            {"exit_layer": 4, "skip_layers": [5]},
            ["exit_layer 4: must be in 0 ... 3", "skip_layers 5"],
        ),
        ([torch.tensor([1])], {"exit_layer": -1}, ["exit_layer -1: must be in 0 ... 3"]),
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
    file = tmp_path / "draft.json"
    write_draft(file, Draft((0, (1, "attention")), 3, 0.5), {})
    assert script("generate", *name, "--prompt", "The sky is", "--speculative", str(file), "--paired", "2") == 0
    paired = capsys.readouterr()
    assert paired.out == plain.out and "medians of 2 paired rounds" in paired.err and "c = " in paired.err
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
        (["--prompt", "A", "--speculative", "7", "--top-p", "2"], "top_p 2.0"),
        (["--prompt", "A", "--speculative", "1x"], "--speculative: '1x' is neither a layer (5) nor a sublayer"),
        (["--prompt", "A", "--speculative", "none.json"], "--speculative: none.json: No such file"),
        (["--prompt", "A", "--speculative", str(tmp_path / "config.json")], "config.json: holds no draft"),
        (["--prompt", "", "--draft-exit", "0.5"], "--draft-exit: needs a draft"),
        (["--prompt", "A", "--max-length", "6"], "1 tokens and 12 new ones: the cache has room for 6"),
        (["--prompt", "A\udcff", "--stop", "\udcff"], "--prompt 1: is not UTF-8"),
        (["--prompt", "A", "--stop", "\udcff"], "cannot write it"),
    ):
        assert script("generate", *name, *wrong) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"tokenizer": None})
    )
    assert script("generate", *name, "--prompt", "A", "--tokenizer", "bytes") == 0

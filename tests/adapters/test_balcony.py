"""Exits against models that are built of the same layers, their loss and gradient against the formula, their files, and
confident generation against full forwards."""

import dataclasses
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from regdrop_titan.adapters import Exits, balcony, exit_model, load_exits
from regdrop_titan.adapters.balcony import DecoderWithExits, default_exits, exit_args, exit_faults, exit_kl
from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.checkpoints.loading import state_sha256
from regdrop_titan.generation import generate, generate_confidently
from regdrop_titan.models import FAMILIES, Decoder

from ..evaluation.tiny_runs import write_run
from ..models.test_cache import model_and_tokens

KINDS = ["nape", "nape documents", "rope window", "smollm3 window", "celerity", "mamba2", "mamba2 documents", "hybrid"]


def trained(model: Decoder, layers=(1, 2), seed=0, size=0.1) -> Exits:
    """Exits that are no longer copies."""
    exits = Exits(model.args, layers)
    exits.copy_from(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in exits.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return exits.eval()


def scaled_model(name: str):
    """Layers with factors of their own in evaluation, in some of them."""
    model, tokens = model_and_tokens(name, 4, 30)
    if name in ("celerity", "hybrid"):
        model.args.eval_scale = [1.0, 0.8, 0.5]
    return model, tokens


def built_anew(model: Decoder, exits: Exits, k: int) -> Decoder:
    """A decoder of k + 1 layers of its own with these weights, in fp64."""
    args = exit_args(model.args, k)
    # CompleteP's multiplier stays that of the whole depth
    args = dataclasses.replace(args, base_layers=args.base_layers * (k + 1) / model.args.n_layers)
    new = Decoder(args)
    new.load_state_dict(model.state_dict(), strict=False)
    new.layers[str(k)].load_state_dict(exits[str(k)].block.state_dict())
    new.norm.load_state_dict(exits[str(k)].norm.state_dict())
    return new.double().eval()


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_an_exit_is_a_decoder_on_the_same_modules(name):
    """Logits as of a model that is built anew, whole and with a cache; no weight of its own."""
    model, tokens = scaled_model(name)
    exits = trained(model)
    for k in (1, 2):
        exited, new = exit_model(model, exits, k), built_anew(model, exits, k)
        logits = exited(tokens)
        torch.testing.assert_close(logits, new(tokens).float(), rtol=1e-4, atol=1e-4)
        assert (logits - model(tokens, layers=range(k))).abs().max() > 0.01
        assert exited.args.layer_kinds == [*model.args.layer_kinds[:k], model.args.layer_kinds[-1]]
        shared = {id(p) for p in [*model.parameters(), *exits.parameters()]}
        assert all(id(p) in shared for p in exited.parameters()) and not exited.training
        assert exited.args.n_parameters() == sum(p.numel() for p in exited.parameters())
        prompts = [row[:n] for row, n in zip(tokens, (1, 3, 17, 26), strict=True)]
        answers, _ = generate(exited, prompts, 4)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.cat([prompt, answer])
            assert torch.equal(new(ids[None, :-1])[0, len(prompt) - 1 :].argmax(-1), answer)
    with pytest.raises(ValueError, match="exit_layer 0: there are trained exits after 1, 2 layers"):
        exit_model(model, exits, 0)


@torch.no_grad()
def test_exits_begin_as_copies_of_the_last_layer_and_the_final_norm():
    model, tokens = scaled_model("hybrid")
    exits = Exits(model.args, [2, 1]).eval()
    exits.copy_from(model)
    assert exits.places == [1, 2]
    for k in exits.places:
        model.args.eval_scale = None
        expected = model(tokens, layers=[*range(k), 2])
        assert torch.equal(exit_model(model, exits, k)(tokens), expected)
    assert not {id(p) for p in exits.parameters()} & {id(p) for p in model.parameters()}


def test_which_exits():
    published = {"271M": (3, 7, 10), "503M": (2, 4, 9, 13), "906M": (3, 6, 12, 17)}
    for flavor, expected in published.items():
        assert default_exits("celerity", flavor, FAMILIES["celerity"][flavor]["n_layers"]) == expected
    assert default_exits("nape_llama3", "400M", 24) == (6, 12, 18)
    assert default_exits("celerity", "271M", 8) == (2, 4, 6)  # another depth than the flavor's
    assert [default_exits("nape_llama3", "debug", L) for L in (5, 4, 3, 2, 1)] == [
        (1, 2, 3), (1, 2), (1,), (), ()
    ]  # fmt: skip
    assert exit_faults([1, 3], 4) == []
    faults = exit_faults([0, 2, 2, 4], 4)
    assert faults == ["exit 0, 4: the model has 4 layers, an exit is after 1 ... 3", "exit 2: named twice"]
    assert "no place for an exit that saves anything in a model of 2 layers" in exit_faults([], 2)[0]
    with pytest.raises(ValueError, match="exit 4"):
        Exits(model_and_tokens("nape", 2, 12)[0].args, [4])


@pytest.mark.parametrize("limit", [2**26, 100])
def test_kl_and_its_gradient_are_the_formula(limit, monkeypatch):
    """sum p (log p - log q), differentiated by autograd in fp64; in one piece and a token at a time."""
    monkeypatch.setattr(balcony, "LOGITS", limit)
    generator = torch.Generator().manual_seed(0)
    students, teacher, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2, 5, 8), (2, 5, 8), (60, 8))
    )
    students.requires_grad_()
    upstream = torch.rand(3, 2, 5, generator=generator, dtype=torch.float64)
    kl = exit_kl(students, teacher, weight)
    (gradient,) = torch.autograd.grad((kl * upstream).sum(), students)
    turned = students.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # rows lie otherwise
    (of_turned,) = torch.autograd.grad((exit_kl(turned, teacher, weight) * upstream).sum(), turned)
    torch.testing.assert_close(of_turned, gradient)
    p, log_q = (teacher @ weight.T).softmax(-1), (students @ weight.T).log_softmax(-1)
    expected = (p * (p.log() - log_q)).sum(-1)
    (by_formula,) = torch.autograd.grad((expected * upstream).sum(), students)
    torch.testing.assert_close(kl, expected)
    torch.testing.assert_close(gradient, by_formula)
    assert kl.min() > 0 and gradient.abs().max() > 0.01
    assert exit_kl(teacher[None].clone().requires_grad_(), teacher, weight).abs().max() < 1e-12


def with_exits(model: Decoder, exits: Exits) -> DecoderWithExits:
    """What is trained, without a checkpoint."""
    whole = DecoderWithExits(model.args, tuple(exits.places), checkpoint=None)
    whole.load_state_dict(model.state_dict() | {f"exits.{k}": v for k, v in exits.state_dict().items()})
    return whole.train()


@pytest.mark.parametrize("name", KINDS)
def test_only_exits_learn_from_the_whole_model(name):
    """KL of every token as from the logits of both models; gradients reach all of the exits and nothing else; the
    backbone never drops, the exits do where that is asked for."""
    model, tokens = scaled_model(name)
    exits = trained(model)
    whole = with_exits(model, exits)
    kl = whole(tokens)
    assert kl.shape == (2, *tokens.shape)
    with torch.no_grad():
        log_p = model(tokens).double().log_softmax(-1)
        for row, k in enumerate(exits.places):
            log_q = exit_model(model, exits, k)(tokens).double().log_softmax(-1)
            expected = (log_p.exp() * (log_p - log_q)).sum(-1)
            torch.testing.assert_close(kl[row].double(), expected, rtol=1e-4, atol=1e-5)
    kl.mean().backward()
    for parameter_name, parameter in whole.named_parameters():
        assert parameter.requires_grad == parameter_name.startswith("exits.")
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name
    assert all(p.grad.abs().max() > 0 for n, p in whole.named_parameters() if p.requires_grad and "wk.bias" not in n)
    assert not any(module.training for module in whole.modules() if module not in set(whole.exits.modules()))
    assert whole.exits.training and not whole.eval().exits.training


def test_dropout_is_the_exits_alone():
    model, tokens = model_and_tokens("nape", 4, 30)
    model.args.placement, model.args.p = "vpad", 0.5
    exits = trained(model)
    whole = with_exits(model, exits)
    with torch.no_grad():
        first, second = whole(tokens), whole(tokens)
        assert (first != second).any()
        whole.norm.register_forward_hook(lambda module, args, output: seen.append(output))
        seen = []
        whole(tokens), whole(tokens)
        assert torch.equal(*seen)
        whole.eval()
        assert torch.equal(whole(tokens), whole(tokens))


def write_exits(folder, model, exits, **record):
    """As a training of them would leave its folder."""
    state = {f"exits.{name}": value for name, value in exits.state_dict().items()}
    dcp.save(state, checkpoint_id=str(folder / "checkpoint/step-3"), no_dist=True)
    about = {"layers": exits.places, "backbone": "RUN", "backbone_sha256": state_sha256(model.state_dict())}
    (folder / "config.json").write_text(json.dumps({"exits": about | record}))


def test_files(tmp_path):
    """Read back bit for bit; onto other weights, and from a folder that has none, refused."""
    model = write_run(tmp_path)
    exits = trained(model)
    write_exits(tmp_path / "exits", model, exits)
    for path in ("exits", "exits/checkpoint", "exits/checkpoint/step-3"):
        loaded = load_exits(tmp_path / path, model)
        assert loaded.places == [1, 2] and not loaded.training
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), exits.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="holds no exits"):
        load_exits(tmp_path, model)
    with torch.no_grad():
        model.norm.weight[0] += 1e-6
    with pytest.raises(CheckpointError, match=r"exits of another model: they were trained on RUN"):
        load_exits(tmp_path / "exits", model)


# Confident generation ------------------------------------------------------------------------------------------------

PROMPTS = (1, 3, 17, 26)  # tokens


def slowly(model, exits, prompt, n, threshold):
    """Greedy by full forwards of one row: ids, and who wrote each."""
    ids, by = prompt, []
    exited = {k: exit_model(model, exits, k) for k in exits.places}
    for _ in range(n):
        for k in exits.places:
            logits = exited[k](ids[None])[0, -1:]
            if logits.softmax(-1).max() >= threshold:
                break
        else:
            k, logits = None, model(ids[None])[0, -1:]
        by.append(k)
        ids = torch.cat([ids, logits.argmax(-1)])
    return ids[len(prompt) :], by


def confident_model(name):
    """With probabilities far from uniform, some of which are above one half."""
    model, tokens = scaled_model(name)
    with torch.no_grad():
        model.output.weight *= 8 if name != "celerity" else 40
    return model, trained(model, size=0.02), [row[:n] for row, n in zip(tokens, PROMPTS, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_confident_tokens_equal_full_forwards(name, monkeypatch):
    """At a threshold that the exits meet now and then. What waits is read in pieces of 5 tokens."""
    monkeypatch.setattr("regdrop_titan.generation.confident.piece_length", lambda *_: 5)
    model, exits, prompts = confident_model(name)
    largest = [exit_model(model, exits, k)(prompts[3][None]).softmax(-1).amax(-1) for k in exits.places]
    for share in (0.7, 0.5, 0.3, 0.9):  # greedy text repeats itself: look for a threshold that divides it
        threshold = torch.cat(largest).quantile(share).item()
        answers, stats = generate_confidently(model, exits, prompts, 10, threshold)
        if 0.05 < stats["exit 1"] < 0.95 and 0.05 < stats["whole model"] < 0.95:
            break
    else:
        raise AssertionError(f"no threshold divides the tokens: {stats}")
    expected = [slowly(model, exits, prompt, 10, threshold) for prompt in prompts]
    assert all(torch.equal(a, b) for a, (b, _) in zip(answers, expected, strict=True))
    by = [k for _, ks in expected for k in ks]
    assert stats["tokens"] == 40
    for k, label in ((1, "exit 1"), (2, "exit 2"), (None, "whole model")):
        assert stats[label] == by.count(k) / 40


@torch.no_grad()
@pytest.mark.parametrize("name", ["nape", "mamba2", "hybrid"])
def test_the_ends_of_the_threshold(name):
    """1: the model itself. Next to nothing: the first exit, also when tokens are drawn."""
    model, exits, prompts = confident_model(name)
    for options in ({}, {"temperature": 0.7, "top_k": 20, "seed": 3}):
        for threshold, writer, label in (
            (1.0, model, "whole model"),
            (1e-9, exit_model(model, exits, 1), "exit 1"),
        ):
            answers, stats = generate_confidently(model, exits, prompts, 9, threshold, **options)
            expected, _ = generate(writer, prompts, 9, **options)
            assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True))
            assert stats[label] == 1.0


@torch.no_grad()
def test_rows_end_on_their_own_and_are_told():
    model, exits, prompts = confident_model("hybrid")
    told = [[] for _ in prompts]
    answers, _ = generate_confidently(
        model, exits, prompts, 9, 0.5, finished=lambda row, ids: len(ids) == row + 2,
        wrote=lambda row, new: told[row].extend(new),
    )  # fmt: skip
    assert [len(answer) for answer in answers] == [2, 3, 4, 5] and [a.tolist() for a in answers] == told
    alone, _ = generate_confidently(model, exits, prompts[3:], 5, 0.5)
    assert torch.equal(alone[0], answers[3])
    with pytest.raises(ValueError) as error:
        generate_confidently(model, exits, [], threshold=0.0)
    assert "prompts: there are none" in str(error.value) and "threshold 0.0: must be above 0" in str(error.value)


def test_the_generate_script(tmp_path, script, capsys):
    """The text of a trained exit, and of confident ones with their shares; wrong options, all at once."""
    model = write_run(tmp_path)
    exits = trained(model)
    write_exits(tmp_path / "exits", model, exits)
    name = ["--checkpoint", str(tmp_path), "--max-new-tokens", "8", "--prompt", "The sky is"]
    using = [*name, "--exits", str(tmp_path / "exits")]
    texts = {}
    for key, options in (
        ("exit", [*using, "--exit-layer", "1"]),
        ("first", [*using, "--exit-confidence", "1e-9"]),
        ("whole", [*using, "--exit-confidence", "1"]),
        ("plain", name),
    ):
        assert script("generate", *options) == 0
        texts[key] = capsys.readouterr()
    assert texts["exit"].out == texts["first"].out != texts["plain"].out == texts["whole"].out
    assert "written by exit 1: 100.0%, exit 2: 0.0%, whole model: 0.0%" in texts["first"].err
    for wrong, messages in (
        ([*name, "--exit-confidence", "2", "--skip-layers", "1"],
         ["--exit-confidence: needs --exits", "--exit-confidence: not with --skip-layers", "2.0: must be above 0"]),
        (using, ["--exits: needs either --exit-layer or --exit-confidence"]),
        ([*using, "--exit-layer", "0"], ["--exit-layer 0: there are trained exits after 1, 2 layers"]),
        ([*name, "--exits", str(tmp_path), "--exit-layer", "1"], ["--exits: ", "holds no exits"]),
    ):  # fmt: skip
        assert script("generate", *wrong) == 2
        said = capsys.readouterr().err
        assert all(message in said for message in messages), said
    write_exits(tmp_path / "others", model, exits, backbone_sha256="0" * 64)
    using[-1] = str(tmp_path / "others")
    assert script("generate", *using, "--exit-layer", "1") == 2
    assert "exits of another model" in capsys.readouterr().err

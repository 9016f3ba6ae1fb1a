"""Early exit and layer skipping against models that are built without the other layers."""

import dataclasses
import itertools
import json

import pytest
import torch

from regdrop_titan.adapters import Exits, exit_model
from regdrop_titan.evaluation.depth import (
    alternate,
    entry,
    exits,
    families,
    forward_flops,
    residual_streams,
    runs,
    subset_losses,
    trained_exit_entry,
    trained_exit_losses,
    weight_bytes,
)
from regdrop_titan.evaluation.depth_plots import (
    all_entries,
    increase_by_run,
    pareto_front,
    plot_alternate,
    plot_costs,
    plot_exits,
    plot_runs,
)
from regdrop_titan.models import Decoder, build_model

from ..distributed.harness import run_cases

SMALL = {"dim": 32, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}
MAMBA = {"ssm_head_dim": 16, "state_size": 8, "chunk_size": 8}
MODELS = {
    "nape_llama3": ("nape_llama3", {"document_mask": True}),
    "mamba2": ("mamba2", MAMBA),
    "hybrid": ("nape_llama3", {"layers": "mamba,attention", "document_mask": True, **MAMBA}),
    "celerity": (
        "celerity",
        {
            "parametrization": "completep", "base_dim": 8, "base_layers": 2, "eval_scale": [1.0, 0.9, 0.7, 0.5],
            "ffn_dim": 256,
        },
    ),
}  # fmt: skip


def model_of(name: str) -> Decoder:
    """With larger weights than initial ones, so that every layer changes the loss much."""
    family, overrides = MODELS[name]
    model = build_model(family, "debug", **{**SMALL, **overrides}).eval()
    with torch.no_grad():
        for weight in {model.output.weight, *model.layers.parameters()}:
            weight.mul_(5.0 if weight.ndim == 2 else 1.0)
    return model


def only(model: Decoder, layers: tuple[int, ...]) -> Decoder:
    """A model that never had the other layers, with the weights of these."""
    a = model.args
    scale = None if a.eval_scale is None else [a.eval_scale[layer] for layer in layers]
    kept = Decoder(
        dataclasses.replace(
            a, n_layers=len(layers), layers=",".join(a.layer_kinds[layer] for layer in layers), eval_scale=scale,
            base_layers=a.base_layers * len(layers) / a.n_layers,  # CompleteP's multiplier stays the trained one
        )
    )  # fmt: skip
    kept.load_state_dict(model.state_dict(), strict=False)
    for place, layer in enumerate(layers):
        kept.layers[str(place)].load_state_dict(model.layers[str(layer)].state_dict())
    return kept.eval()


def samples(n: int, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Random tokens, among them the end of text."""
    windows = torch.randint(0, 64, (n, length + 1), generator=torch.Generator().manual_seed(0))
    windows[:, 7] = 0
    return [{"input": window[:-1], "labels": window[1:]} for window in windows]


def test_families():
    assert exits(3) == [(), (0,), (0, 1), (0, 1, 2)]
    assert alternate(5, from_last=True) == [(0, 1, 2, 3, 4), (0, 1, 2, 4), (0, 2, 4)]
    assert alternate(5, from_last=False) == [(0, 1, 2, 3, 4), (0, 2, 3, 4), (0, 2, 4)]
    assert alternate(6, from_last=True)[-1] == (0, 2, 4) and alternate(1, from_last=True) == [(0,)]
    assert runs(3) == [(1, 2), (2,), (), (0, 2), (0,), (0, 1)]
    assert list(families(4, ["runs", "exits"])) == ["exits", "runs"] and families(4, []) == {}


@pytest.mark.parametrize("name", MODELS)
def test_every_subset_is_the_models_own_bit_for_bit(name):
    """All exits, both alternate families and all runs against whole forwards. What two begin with is computed once."""
    model = model_of(name)
    calls = []
    for layer, block in model.layers.items():
        block.register_forward_hook(lambda *_, layer=layer: calls.append(int(layer)))
    tokens = torch.stack([sample["input"] for sample in samples(2)])
    wanted = [subset for family in families(4, ["exits", "alternate", "runs"]).values() for subset in family]
    with torch.no_grad():
        at_exits = [model.head(h) for _, h in residual_streams(model, tokens, exits(4))]
        assert calls == [0, 1, 2, 3]
        calls.clear()
        found = {subset: model.head(h) for subset, h in residual_streams(model, tokens, wanted)}
        assert len(calls) == len({subset[:n] for subset in wanted for n in range(1, len(subset) + 1)})
        assert set(found) == set(wanted) and len(found) == 12
        for subset, logits in found.items():
            assert torch.equal(logits, model(tokens, layers=subset)), subset
        for n, logits in enumerate(at_exits):
            assert torch.equal(logits, model(tokens, layers=range(n))), n
        assert torch.equal(at_exits[-1], model(tokens)) and torch.equal(found[0, 1, 2, 3], model(tokens))
        embedding = model.norm(model.tok_embeddings(tokens)) / model.args.width_multiplier
        torch.testing.assert_close(at_exits[0], embedding @ model.output.weight.T)


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_a_model_without_the_other_layers(name):
    """In fp64, a sample at a time; with the standard error from its definition."""
    model, data = model_of(name), samples(5)
    wanted = [(0,), (0, 2), (1, 2, 3), (0, 1, 2, 3)]
    done = []
    found = subset_losses(model, data, wanted, batch_size=2, progress=done.append)
    assert sum(done) == 5 * len(wanted) and set(found) == set(wanted)
    for subset in wanted:
        oracle = only(model, subset).double()
        with torch.no_grad():
            expected = torch.tensor([
                -oracle(sample["input"][None])[0].log_softmax(-1)[torch.arange(24), sample["labels"]].mean()
                for sample in data
            ])  # fmt: skip
        torch.testing.assert_close(found[subset], expected.double(), rtol=1e-5, atol=0)
        each = entry(model.args, 24, subset, found[subset])
        mean = sum(found[subset].tolist()) / 5
        variance = sum((loss - mean) ** 2 for loss in found[subset].tolist()) / 4
        assert each.loss == pytest.approx(mean, rel=1e-12)
        assert each.loss_error == pytest.approx((variance / 5) ** 0.5, rel=1e-9)
    for one, other in itertools.combinations(found.values(), 2):
        assert (one - other).abs().max() > 0.003  # 100 times the tolerance
    if model.args.eval_scale is not None:
        model.args.eval_scale = None
        unscaled = subset_losses(model, data, wanted)
        assert (unscaled[0, 2] - found[0, 2]).abs().max() > 0.003


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_counted_from_the_parameters_that_stay(name):
    """2 bytes and 2 FLOPs a parameter, the embedding's look-up without FLOPs; attention adds 2 S d for its scores and
    as many for its values, a Mamba2 layer 2 d_inner N to write its state and as many to read it."""
    args = model_of(name).args
    model = Decoder(args)
    for layers in [(), (1,), (0, 3), (0, 1, 2, 3)]:
        with torch.device("meta"):
            kept = only(model.to("meta"), layers)
        assert weight_bytes(args, layers) == 2 * sum(p.numel() for p in kept.parameters())
        blocks = sum(p.numel() for p in kept.layers.parameters())
        mixing = sum(
            4 * kept.args.d_inner * args.state_size if block.is_mamba else 4 * 24 * args.dim
            for block in kept.layers.values()
        )
        head = kept.output.weight.numel() + kept.norm.weight.numel()
        assert forward_flops(args, layers, 24) == 2 * (blocks + head) + mixing
    whole = entry(args, 24, (0, 1, 2, 3), torch.tensor([1.0, 2.0]))
    part = entry(args, 24, (0, 3), torch.tensor([1.0, 2.0]))
    assert whole.weight_share == whole.flops_share == 1
    assert part.weight_share == part.weight_bytes / whole.weight_bytes < 1
    assert part.flops_share == part.flops / whole.flops < 1 and part.removed == (1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_trained_exits(name):
    """Their losses are those of the decoders that they are, and their costs count the exit's own layer."""
    model, data = model_of(name), samples(3)
    trained = Exits(model.args, [1, 2])
    trained.copy_from(model)
    done = []
    found = trained_exit_losses(model, trained.eval(), data, batch_size=2, progress=done.append)
    assert set(found) == {1, 2} and sum(done) == 6
    for k, losses in found.items():
        exited = exit_model(model, trained, k)
        with torch.no_grad():
            logits = exited(torch.stack([sample["input"] for sample in data])).double()
        labels = torch.stack([sample["labels"] for sample in data])
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        torch.testing.assert_close(losses, expected.view(3, 24).mean(1), rtol=1e-5, atol=0)
        each = trained_exit_entry(model.args, 24, k, losses)
        assert (each.layers, each.n_layers) == (tuple(range(k)), k)
        assert each.weight_bytes == 2 * sum(p.numel() for p in exited.parameters())
        assert each.weight_share == each.weight_bytes / weight_bytes(model.args, (0, 1, 2, 3))
        # the kinds alternate: the last layer is of the other kind than the first one
        same = forward_flops(model.args, (*range(k), 3), 24)
        assert each.flops == same and each.flops_share == same / forward_flops(model.args, (0, 1, 2, 3), 24)


def result_of(label: str, n_layers: int, losses) -> dict:
    """A result whose loss is a function of the layers that stay."""
    args = build_model("nape_llama3", "debug", **SMALL | {"n_layers": n_layers}).args

    def made(layers):
        return dataclasses.asdict(entry(args, 16, layers, torch.tensor([losses(layers) - 0.1, losses(layers) + 0.1])))

    return {
        "label": label,
        "model_args": {"n_layers": n_layers},
        "full": made(tuple(range(n_layers))),
        "families": {
            name: [made(layers) for layers in family]
            for name, family in families(n_layers, ["exits", "alternate", "runs"]).items()
        },
    }


def test_plots(tmp_path):
    """Of models of different depth; numbers of the heat map, and a front on which a dearer subset must be better."""
    results = [result_of(f"{L} layers", L, lambda layers: 5 - 0.5 * len(layers)) for L in (3, 5, 6, 1)]
    for plot in (plot_exits, plot_alternate, plot_runs, plot_costs):
        plot(results, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    increase = increase_by_run(results[0])
    for length in (1, 2, 3):
        assert increase[length - 1, : 4 - length] == pytest.approx([0.5 * length] * (4 - length))
        assert all(increase[length - 1, 4 - length :] != increase[length - 1, 4 - length :])  # NaN
    assert len(all_entries(results[0])) == 7  # exits 0 to 3, and without 0, 1, 0 1
    points = [
        {"flops": x, "loss": y} for x, y in [(3, 2.0), (1, 4.0), (2, 4.0), (3, 1.5), (4, 1.5), (5, 1.0), (1, 5.0)]
    ]
    assert [(point["flops"], point["loss"]) for point in pareto_front(points, "flops")] == [(1, 4), (3, 1.5), (5, 1)]


def test_the_command(tmp_path, packed, script, capsys):
    """Two runs of different depth in one call, then a third subset beside them; wrong arguments end with status 2."""
    arguments = ["--training.seq_len", "16", "--training.steps", "2", "--checkpoint.enable", "--architecture.n_layers"]
    run_cases(1, tmp_path, packed, {name: {"args": [*arguments, n]} for name, n in (("three", "3"), ("five", "5"))})
    three, five = (str(tmp_path / name / "checkpoint") for name in ("three", "five"))
    data = ["--data", str(packed / "validation"), "--samples", "6", "--batch-size", "4"]
    assert script("evaluate", "depth", "--checkpoint", three, five, *data, "--skip-layers", "0", "2") == 0
    said = capsys.readouterr()
    # 15 runs, all exits but the last among them; the whole model, without 1 and 3, without 0 and 2
    assert "18 subsets of 6 samples" in said.err
    assert "best run of 5: without 0 ... 4" in said.out and "layers 1 3 4" in said.out
    folder = tmp_path / "three/evaluation"
    assert {file.name for file in folder.iterdir()} == {
        "depth.json", "depth_exits.png", "depth_alternate.png", "depth_runs.png", "depth_costs.png"
    }  # fmt: skip
    assert [file.name for file in (tmp_path / "five/evaluation").iterdir()] == ["depth.json"]
    for name, L in (("three", 3), ("five", 5)):
        result = json.loads((tmp_path / name / "evaluation/depth.json").read_text())
        found = result["families"]
        assert [each["layers"] for each in found["exits"]] == [list(range(n)) for n in range(L + 1)]
        assert len(found["runs"]) == L * (L + 1) // 2 and len(found["alternate_last"]) == L // 2 + 1
        assert found["exits"][-1] == found["alternate_first"][0] == result["full"]
        assert found["listed"][0]["removed"] == [0, 2]
        assert result["settings"]["samples"] == 6 and result["settings"]["seq_len"] == 16
        assert result["full"]["weight_bytes"] == 2 * result["parameters"]
    other = tmp_path / "other"
    compare = ["--compare", str(tmp_path / "five/evaluation/depth.json")]
    few = [*data, "--analyses", "--layers", "2", "0", "--output", str(other)]
    assert script("evaluate", "depth", "--checkpoint", three, *few, *compare) == 0
    result = json.loads((other / "depth.json").read_text())
    assert list(result["families"]) == ["listed"] and result["families"]["listed"][0]["layers"] == [0, 2]
    assert (other / "depth_runs.png").exists()  # of the other run

    (tmp_path / "no.json").write_text("{}")
    all_at_once = [
        "--samples 0: must be at least 1", "--seq-len 0: must be at least 1",
        "--skip-layers 1 3: three step-2 has the layers 0 ... 2", "--layers 1 1: names a layer twice",
        "--skip-layers 0 1 2: leaves three step-2 no layer", "no.json: holds no result of depth",
    ]  # fmt: skip
    for args, messages in [
        ([*data[:2], "--samples", "0", "--seq-len", "0", "--skip-layers", "1", "3", "--layers", "1", "1",
          "--skip-layers", "0", "1", "2", "--compare", str(tmp_path / "no.json")], all_at_once),
        ([*data, "--skip-layers", "1", "--layers", "2", "0"], ["--skip-layers 1: leaves three step-2 the same layers"]),
        ([*data[:2], "--samples", "1"], ["--samples 1: a standard error needs at least 2"]),
        ([*data, "--seq-len", "5000"], ["one sample of seq_len 5000 needs 5001"]),
        ([*data, "--analyses"], ["--analyses: names none"]),
        (["--data", str(tmp_path)], ["not a packed set"]),
        ([*data, "--seq-len", "8", *compare], ["depth.json: its loss is of other tokens: 6 samples of 16 from"]),
        ([*data, "--compare", str(folder / "depth.json")], ["several results are called 'three step-2'"]),
    ]:  # fmt: skip
        capsys.readouterr()
        assert script("evaluate", "depth", "--checkpoint", three, *args) == 2
        said = capsys.readouterr().err
        assert [message for message in messages if message not in said] == [], said
        assert len(said.splitlines()) == len(messages)

"""Measured moments against whole-tensor numpy in float64, and against LG's Propositions 1-3 on Gaussian inputs.

Seeds are fixed. Bounds are noise floors, which the measurement gives itself and a test checks, plus what a proposition
neglects; the effect that is looked for is several times its bound.
"""

import json
import math

import numpy as np
import pytest
import torch

from regdrop_titan.config import ConfigError, load_config
from regdrop_titan.evaluation.moments import (
    Mismatch,
    Recorder,
    Run,
    as_metrics,
    input_projections,
    measure_moments,
    plot_moments,
    set_dropout,
    uncompiled,
)
from regdrop_titan.models import build_model
from regdrop_titan.regularization import vpad_coefficients

from ..distributed.harness import run_cases

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}
TOKENS = torch.randint(0, 64, (5, 12), generator=torch.Generator().manual_seed(0))
N, D, P = 2048, 256, 0.3


def small(**overrides):
    return build_model("nape_llama3", "debug", **{**SMALL, **overrides})


def gaussian_model(offset: float, common: float = 0.0):
    """One layer whose tokens' embeddings are x_i = offset + e_i + common s v_i: e, s standard normal, v = +-1 summing
    to zero. Returns it with v."""
    model = build_model(
        "nape_llama3", "debug", dim=D, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=64, vocab_size=N
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    v = torch.ones(D)
    v[D // 2 :] = -1
    with torch.no_grad():
        e, s = torch.randn(N, D, generator=generator), torch.randn(N, 1, generator=generator)
        model.tok_embeddings.weight.copy_(offset + e + common * s * v)
    return model, v


def measured(model, placement: str, seq_len: int = 16, **kwargs):
    """Every token once."""
    set_dropout(model, placement, P)
    return measure_moments(model, torch.arange(N).view(-1, seq_len).split(N // seq_len // 4), **kwargs)


def normed(model) -> torch.Tensor:
    """The first sublayer's normalised inputs x_hat, (N, D) fp64."""
    x = model.tok_embeddings.weight.detach().double()
    return x * (x.square().mean(1, keepdim=True) + model.args.norm_eps).rsqrt()


def whole_tensor_mismatch(evaluation: np.ndarray, training: np.ndarray) -> Mismatch:
    """From all outputs, (sequences, S, C) float64, evaluation's repeated for each draw."""

    def of(y):
        return y.mean((0, 1)), y.var((0, 1))

    (m_e, v_e), (m_t, v_t) = of(evaluation), of(training)
    n = len(training)
    shift = (training - evaluation).mean(1)  # (sequences, C)
    spread = ((training - m_t) ** 2).mean(1) - ((evaluation - m_e) ** 2).mean(1)
    mean_error, variance_error = (x.std(0, ddof=1) / n**0.5 for x in (shift, spread))
    noise = (2 / math.pi) ** 0.5
    return Mismatch(
        variance=abs(v_t - v_e).sum() / v_e.sum(), variance_floor=noise * variance_error.sum() / v_e.sum(),
        variance_ratio=v_t.sum() / v_e.sum(), mean=abs(m_t - m_e).sum() / abs(m_e).sum(),
        mean_floor=noise * mean_error.sum() / abs(m_e).sum(), mean_ratio=(m_t * m_e).sum() / (m_e**2).sum(),
    )  # fmt: skip


@pytest.mark.parametrize("placement", ["pre_norm", "pre_linear", "vpad"])
def test_equals_whole_tensor_statistics(placement):
    """Unequal batches, two draws, and channels whose mean is 10^5 times their standard deviation."""
    model = small(placement=placement, p=P, bias=True).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, layer in input_projections([model]).items():
            # others would leave the later layers nothing but the offset
            if name.endswith(("wq", "wk", "1.feed_forward.w1", "1.feed_forward.w3")):
                layer.bias.copy_(1e5 * torch.randn(len(layer.bias), generator=generator))
    kept: dict[tuple[str, bool], list[torch.Tensor]] = {}
    for name, layer in input_projections([model]).items():
        layer.register_forward_hook(
            lambda layer, inputs, y, name=name: kept.setdefault((name, layer.training), []).append(y)
        )
    moments = measure_moments(model, TOKENS.split(2), draws=2)
    assert len(moments) == 10 and not model.training
    for name, found in moments.items():
        evaluation = torch.cat([y for y in kept[name, False] for _ in range(2)]).numpy()
        training = torch.cat(kept[name, True]).numpy()
        expected = whole_tensor_mismatch(evaluation, training)
        for key, value in vars(expected).items():
            assert getattr(found, key) == pytest.approx(value, rel=1e-4, abs=1e-13), (name, key)


def test_names():
    """Mamba2's in_proj is four projections, a squared-ReLU feed-forward layer has one."""
    hybrid = small(layers="mamba,attention", ffn="relu2", ssm_head_dim=16, state_size=8, dim=32)
    mamba = [f"layers.0.mamba.in_proj.{part}" for part in ("z", "x", "bc", "dt")]
    attention = [f"layers.1.attention.{part}" for part in ("wq", "wk", "wv")]
    assert list(input_projections([hybrid])) == [*mamba, *attention, "layers.1.feed_forward.w1"]
    set_dropout(hybrid, "vpad", P)
    metrics = as_metrics(measure_moments(hybrid, [TOKENS]))
    assert {"moments/variance/layers.0.mamba.in_proj.bc", "moments/mean/layers.1.attention.wq"} < metrics.keys()
    means = [f"moments/{kind}/mamba.in_proj.dt" for kind in ("variance", "variance_floor", "mean", "mean_floor")]
    assert set(means) < metrics.keys() and len(metrics) == 8 * 2 + 8 * 4


@pytest.mark.parametrize("options", [{"p": 0.0}, {"placement": "none", "p": P}], ids=str)
def test_without_dropout_all_is_exactly_zero(options):
    model = small(**{"placement": "vpad", **options})
    for found in measure_moments(model, TOKENS.split(2), draws=2).values():
        assert found == Mismatch(
            variance=0, variance_floor=0, variance_ratio=1, mean=0, mean_floor=0, mean_ratio=1
        )  # fmt: skip


def test_a_projection_that_gives_zero():
    model = small(placement="pre_linear", p=P)
    torch.nn.init.zeros_(model.layers["0"].attention.inner.wk.weight)
    moments = measure_moments(model, [TOKENS])
    assert all(math.isnan(value) for value in vars(moments["layers.0.attention.wk"]).values())
    assert not any(math.isnan(value) for value in vars(moments["layers.0.attention.wq"]).values())


def test_masks_are_a_function_of_the_seed():
    model = small(placement="vpad", p=P)
    one, again, other = (measure_moments(model, [TOKENS], seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert all(one[name] != other[name] for name in one)


def test_layer_dropouts_scale_is_no_part_of_it():
    """r_eval below 1 in both modes: a scale in evaluation alone would be a mismatch of all later layers."""
    scaled = small(placement="vpad", p=0.0, eval_scale=[0.5, 0.5])
    assert all(found.variance == 0 for found in measure_moments(scaled, [TOKENS]).values())


def test_a_scheduled_rate_can_be_set():
    one, other = small(placement="vpad", p=0.5, dropout_schedule="decreasing"), small(placement="vpad", p=P)
    set_dropout(one, "vpad", P)
    found, expected = measure_moments(one, [TOKENS]), measure_moments(other, [TOKENS])
    for name, value in expected.items():
        assert found[name].variance == pytest.approx(value.variance, rel=1e-3)


def test_proposition_1_pre_norm_dropout_shrinks_the_mean():
    """The mean of the second sublayer's y = w . x_hat is (1 + p/(1-p) kappa)^(-1/2) of evaluation's. Sequences of one
    token, so that attention is the linear map u = W_o W_v x_hat of its own token. Neglected: 2/d."""
    model, _ = gaussian_model(offset=1.0)
    attention = model.layers["0"].attention.inner
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (attention.wv.weight, attention.wo.weight):
            weight.copy_(torch.randn(D, D, generator=generator) * (2 / D) ** 0.5)
    x_hat = normed(model)
    u = x_hat @ (attention.wo.weight @ attention.wv.weight).detach().double().T
    x = model.tok_embeddings.weight.detach().double() + u
    kappa = (u.square().mean() / x.square().mean()).item()
    factor = (1 + P / (1 - P) * kappa) ** -0.5
    moments = measured(model, "pre_norm", seq_len=1, draws=2)
    for projection in ("w1", "w3"):
        found = moments[f"layers.0.feed_forward.{projection}"]
        bound = found.mean_floor / 2 + 2 / D
        assert bound < 0.15 * (1 - factor)
        assert abs(found.mean_ratio - factor) < bound
        assert abs(found.mean - (1 - factor)) < bound
    assert moments["layers.0.attention.wq"].mean == 0  # nothing before it is dropped


def test_proposition_2_pre_linear_dropout_adds_variance():
    """The variance of y = w . z grows by p/(1-p) E[x_hat^2] ||w||^2, the mean stays."""
    model, _ = gaussian_model(offset=0.5)
    moments = measured(model, "pre_linear", draws=2)
    x_hat = normed(model)
    for name, layer in model.layers["0"].attention.inner.named_children():
        if name not in ("wq", "wk", "wv"):
            continue
        found, w = moments[f"layers.0.attention.{name}"], layer.weight.detach().double()
        added = P / (1 - P) * (w.square() @ x_hat.square().mean(0)).sum()
        expected = (added / (x_hat @ w.T).var(0, correction=0).sum()).item()
        assert found.variance_floor < 0.1 * expected
        assert abs(found.variance - expected) < found.variance_floor
        assert abs(found.variance_ratio - 1 - expected) < found.variance_floor
        assert found.mean < 1.5 * found.mean_floor < 0.2


def test_proposition_3_vpad_changes_only_the_covariance_term():
    """The variance of y changes by (alpha^2 (1-p)^2 - 1) C, the mean stays. Neglected: that alpha differs from token to
    token (5 %)."""
    model, v = gaussian_model(offset=0.5, common=0.2)
    attention = model.layers["0"].attention.inner
    with torch.no_grad():
        for layer in (attention.wq, attention.wk, attention.wv):
            generator = torch.Generator().manual_seed(4)
            layer.weight.copy_((torch.randn(D, D, generator=generator) + 0.3 * v) / D**0.5)
    moments = measured(model, "vpad", draws=2)
    x_hat = normed(model)
    alpha, _ = vpad_coefficients(x_hat, P)
    for name in ("wq", "wk", "wv"):
        w = getattr(attention, name).weight.detach().double()
        variance = (x_hat @ w.T).var(0, correction=0)
        covariance = variance - w.square() @ x_hat.var(0, correction=0)  # C
        factor = alpha.mean().item() ** 2 * (1 - P) ** 2 - 1
        expected = (factor * covariance / variance.sum()).abs().sum().item()
        found = moments[f"layers.0.attention.{name}"]
        bound = found.variance_floor + 0.05 * expected
        assert bound < 0.2 * expected
        assert abs(found.variance - expected) < bound
        assert abs(found.variance_ratio - 1 - (factor * covariance.sum() / variance.sum()).item()) < bound
        assert found.mean < 1.5 * found.mean_floor < 0.2


@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
def test_the_floor_is_what_noise_alone_gives(placement):
    """The mean does not move in the first layer: its measured mismatch is on average the floor."""
    model, _ = gaussian_model(offset=0.5)
    set_dropout(model, placement, P)
    batches = [torch.arange(128).view(32, 4)]
    model.tok_embeddings.weight.data[:128] += 0.5 - model.tok_embeddings.weight.data[:128].mean(0)
    found = [
        value
        for seed in range(6)
        for name, value in measure_moments(model, batches, seed=seed).items()
        if "attention" in name
    ]
    ratio = sum(value.mean for value in found) / sum(value.mean_floor for value in found)
    assert 0.9 < ratio < 1.1


def test_compiled_blocks_are_measured():
    """torch.compile leaves out hooks that come after it; inside of `uncompiled` they are called, afterwards the
    compiled code runs again."""
    torch._dynamo.reset()
    model = small(placement="vpad", p=P)
    with torch.no_grad(), Recorder([model]) as recorder:
        model.eval()(TOKENS)
        expected = recorder.take(len(TOKENS))
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(1) or graph.forward(*args)

    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, backend=backend, fullgraph=True))
    with torch.no_grad():
        model(TOKENS)
        assert len(calls) == 2
        with Recorder([model]) as recorder, uncompiled([model]):
            model(TOKENS)
            found = recorder.take(len(TOKENS))
        assert len(calls) == 2
        model(TOKENS)
    assert len(calls) == 4
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_plot(tmp_path):
    """Of a stack of two kinds, and values that are exactly zero."""
    model = small(layers="mamba,attention", ssm_head_dim=16, state_size=8, placement="pre_norm", p=P)
    plot_moments([Run("pre_norm", measure_moments(model, [TOKENS]))], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--dropout.p", "0.0"], "nothing to measure with dropout.placement = 'vpad' and dropout.p = 0.0"),
        (["--dropout.placement", "none"], "nothing to measure with dropout.placement = 'none'"),
        (["--metrics.log_freq", "3"], "metrics.log_moments = 4: must be a multiple of metrics.log_freq = 3"),
        (["--metrics.log_moments", "-1"], "metrics.log_moments = -1: must be at least 0"),
        (
            ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule",
             "ZBVZeroBubble", "--training.local_batch_size", "2"],
            "metrics.log_moments = 4: torch's ZBVZeroBubble schedule has no working evaluation",
        ),
    ],
)  # fmt: skip
def test_what_a_run_cannot_log_is_refused(args, fault):
    moments = ["--dropout.placement", "vpad", "--dropout.p", "0.1", "--metrics.log_freq", "2"]
    with pytest.raises(ConfigError) as caught:
        load_config([*moments, "--metrics.log_moments", "4", *args])
    (found,) = caught.value.faults
    assert fault in found
    assert load_config([*moments, "--metrics.log_moments", "4"]).metrics.log_moments == 4
    attention = ["--dropout.placement", "none", "--dropout.attention_p", "0.1"]
    assert load_config([*moments, *attention, "--metrics.log_moments", "4"]).metrics.log_moments == 4


def test_the_command(tmp_path, packed, script, capsys):
    vpad = ["--dropout.placement", "vpad", "--dropout.p", "0.2"]
    run_cases(1, tmp_path, packed, {
        name: {"args": ["--training.steps", "1", "--checkpoint.enable", *args]}
        for name, args in {"dropped": vpad, "dense": []}.items()
    })  # fmt: skip
    dropped, dense = (str(tmp_path / name / "checkpoint") for name in ("dropped", "dense"))
    data = ["--data", str(packed / "validation"), "--samples", "6", "--batch-size", "4"]
    assert script("evaluate", "moments", "--checkpoint", dropped, *data, "--draws", "2") == 0
    result = json.loads((tmp_path / "dropped/evaluation/moments.json").read_text())
    (run,) = result["runs"]
    assert (run["placement"], run["p"], len(run["projections"])) == ("vpad", 0.2, 20)
    assert result["settings"] | {"samples": 6, "seq_len": 32, "draws": 2} == result["settings"]
    mean = sum(run["projections"][f"layers.{layer}.attention.wk"]["variance"] for layer in range(4)) / 4
    assert run["mean_over_layers"]["attention.wk"]["variance"] == pytest.approx(mean) != 0
    everything = ["--placement", "pre_linear", "vpad", "--p", "0.2", "--output", str(tmp_path / "both")]
    compared = ["--compare", str(tmp_path / "dropped/evaluation/moments.json")]
    both = ["--checkpoint", dropped, dense, "--labels", "dropped", "dense"]
    assert script("evaluate", "moments", *both, *data, "--draws", "2", *everything, *compared) == 0
    runs = {
        (label, run["placement"]): run["projections"]
        for label in ("dropped", "dense")
        for run in json.loads((tmp_path / f"both/{label}/moments.json").read_text())["runs"]
    }
    assert len(runs) == 4
    assert runs["dropped", "vpad"] == run["projections"]  # its own setting, and so the same masks
    assert runs["dense", "pre_linear"]["layers.0.attention.wq"]["variance_ratio"] == pytest.approx(1.25, abs=0.1)
    assert (tmp_path / "both/dense/moments.png").exists() and (tmp_path / "both/dropped/moments.png").exists()
    capsys.readouterr()
    (tmp_path / "other.json").write_text('{"verb": "moments", "runs": [{"label": 3}]}')
    for args, messages in [
        ([dense, *data], ["nothing to measure without dropout, the model has placement none and p 0.0"]),
        ([dense, *data, "--p", "0.1"], ["nothing to measure without dropout"]),
        ([dense, *data, "--placement", "vpad"], ["nothing to measure without dropout"]),
        (
            [dropped, *data, "--p", "1.0", "--samples", "1"],
            ["--p 1.0: must be above 0", "--samples 1: must be at least 2"],
        ),
        ([dropped, *data, "--batch-size", "0"], ["--batch-size 0: must be at least 1"]),
        ([dropped, *data, "--seq-len", "700"], ["has one sequence of 700 tokens"]),
        ([dropped, *data, "--compare", str(tmp_path / "other.json")], ["other.json: holds no runs"]),
        ([dropped, *data, "--compare", str(tmp_path / "none.json")], ["none.json: No such file"]),
        ([dropped, "--data", str(tmp_path)], ["not a packed set"]),
    ]:
        assert script("evaluate", "moments", "--checkpoint", *args) == 2
        said = capsys.readouterr().err
        assert all(message in said for message in messages), said

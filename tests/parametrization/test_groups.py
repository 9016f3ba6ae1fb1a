"""The optimizer's groups and the rules for scale, number by number (spec sec. 6)."""

import pytest
import torch

from regdrop_titan.config import ConfigError, load_config, model_args
from regdrop_titan.models import Decoder
from regdrop_titan.parametrization import GROUPS, group_of, group_settings, run_scale, scale_of
from regdrop_titan.plan import parameters_by_group, plan

BASE_DIM, BASE_LAYERS = 64, 4  # celerity debug
ARGS = ["--model.name", "celerity", "--parametrization.base_dim", "64", "--parametrization.base_layers", "4",
        "--optimizer.lr", "4e-3", "--optimizer.eps", "1e-8", "--optimizer.weight_decay", "0.1",
        "--training.steps", "1000", "--training.global_batch_size", "16", "--training.seq_len", "128"]  # fmt: skip
LARGE = ["--architecture.dim", "128", "--architecture.n_layers", "16", "--architecture.ffn_dim", "1024"]


def settings(*extra: str):
    config = load_config([*ARGS, *extra])
    return group_settings(config, run_scale(config, 16 * 128))


def test_twice_the_width_and_four_times_the_depth():
    found = settings(*LARGE, "--parametrization.kind", "completep")
    assert {name: own.lr for name, own in found.items()} == {
        "hidden vectors": 4e-3, "final norm": 4e-3, "state space": 4e-3, "embedding": 4e-3, "unembedding": 4e-3,
        "hidden matrices": 2e-3,
    }  # fmt: skip
    assert {name: own.weight_decay for name, own in found.items()} == {
        "hidden vectors": 0.0, "final norm": 0.0, "state space": 0.0, "embedding": 0.1, "unembedding": 0.1,
        "hidden matrices": 0.2,
    }  # fmt: skip
    assert {name: own.eps for name, own in found.items()} == {
        "hidden vectors": 1e-8 / 8, "final norm": 1e-8 / 2, "state space": 1e-8 / 8, "embedding": 1e-8 / 2,
        "unembedding": 1e-8 / 2, "hidden matrices": 1e-8 / 8,
    }  # fmt: skip
    args = model_args(load_config([*ARGS, *LARGE, "--parametrization.kind", "completep"]))
    assert (args.width_multiplier, args.depth_multiplier) == (2, 4)
    assert args.score_scale == 1 / (128 / 4)


def test_mup_leaves_depth_alone():
    found = settings(*LARGE, "--parametrization.kind", "mup")
    assert found["hidden matrices"].lr == 2e-3
    assert {own.eps for own in found.values()} == {1e-8 / 2}


def test_standard():
    everything = settings(*LARGE)
    assert {(own.lr, own.eps) for own in everything.values()} == {(4e-3, 1e-8)}
    assert {name for name, own in everything.items() if own.weight_decay == 0} == {"state space"}
    matrices = settings(*LARGE, "--parametrization.decay", "matrices")
    at_base = settings("--parametrization.kind", "completep")
    assert matrices == at_base  # where the definitions coincide


def test_weight_decay_from_the_timescale():
    """lambda = B / (eta_group tau D); tau falls with the square root of TPP."""
    extra = ["--parametrization.base_timescale", "0.25", "--parametrization.base_tokens_per_parameter", "5"]
    config = load_config([*ARGS, *LARGE, *extra, "--parametrization.kind", "completep"])
    found = settings(*LARGE, *extra, "--parametrization.kind", "completep")
    B, D = 16 * 128, 16 * 128 * 1000
    with torch.device("meta"):
        n = sum(p.numel() for p in Decoder(model_args(config)).parameters())
    tau = 0.25 * (D / n / 5) ** -0.5
    assert run_scale(config, B).timescale == pytest.approx(tau)
    assert found["hidden matrices"].weight_decay == pytest.approx(B / (2e-3 * tau * D))
    assert found["embedding"].weight_decay == pytest.approx(B / (4e-3 * tau * D))
    assert found["hidden vectors"].weight_decay == 0.0
    # under standard, one lambda for all
    assert settings(*LARGE, *extra)["hidden matrices"].weight_decay == pytest.approx(B / (4e-3 * tau * D))


def test_batch_rule_and_the_printed_row():
    """The printed row has m_D^0.4 for m_D^0.6: at the rule's batch the two differ by m_D^0.2."""
    extra = ["--parametrization.kind", "completep", "--parametrization.base_timescale", "0.25",
             "--parametrization.base_batch_tokens", "1024",
             "--parametrization.base_tokens_per_parameter", "5"]  # fmt: skip
    config = load_config([*ARGS, *LARGE, *extra])
    printed = load_config([*ARGS, *LARGE, *extra, "--parametrization.weight_decay_rule", "printed"])
    base_parameters = sum(p.numel() for p in Decoder(model_args(load_config(ARGS))).parameters())
    tokens = 3e6
    scale = scale_of(config, tokens, steps=1)
    m_D = tokens / (5 * base_parameters)
    assert scale.tokens_multiplier == pytest.approx(m_D)
    assert scale.batch_rule == pytest.approx(1024 * m_D**0.4)
    at_rule = scale_of(config, tokens, steps=1)
    steps = tokens / at_rule.batch_rule
    by_timescale = 1 / (2e-3 * at_rule.timescale * steps)
    found = group_settings(printed, at_rule)["hidden matrices"].weight_decay
    assert found / by_timescale == pytest.approx(m_D**0.2)


def test_every_parameter_has_a_group():
    config = load_config([*ARGS, "--model.name", "mamba2", "--architecture.layers", "mamba,attention",
                          "--architecture.n_layers", "2", "--architecture.bias"])  # fmt: skip
    with torch.device("meta"):
        model = Decoder(model_args(config))
    groups = {name: group_of(name, p.ndim) for name, p in model.named_parameters()}
    assert {name for name, group in groups.items() if group == "hidden matrices"} == {
        *(f"layers.0.mamba.inner.in_proj.{part}.weight" for part in ("z", "x", "bc", "dt")),
        "layers.0.mamba.inner.out_proj.weight",
        *(f"layers.1.attention.inner.w{part}.weight" for part in "qkvo"),
        *(f"layers.1.feed_forward.inner.w{part}.weight" for part in "123"),
    }
    assert {name for name, group in groups.items() if group == "state space"} == {
        f"layers.0.mamba.inner.ssm.{part}" for part in ("A_log", "dt_bias", "D")
    }
    assert groups["layers.0.mamba.inner.conv_x.weight"] == groups["layers.1.attention.inner.wq.bias"] == GROUPS[0]
    assert groups["norm.weight"] == "final norm" and groups["tok_embeddings.weight"] == "embedding"
    with pytest.raises(ValueError, match="no group for the parameter head"):
        group_of("head.weight", 2)
    counts = parameters_by_group(config)
    assert sum(counts.values()) == model_args(config).n_parameters()


def test_the_plan_prints_groups_and_rules():
    config = load_config([*ARGS, *LARGE, "--parametrization.kind", "completep",
                          "--parametrization.base_timescale", "0.25",
                          "--parametrization.base_batch_tokens", "1024"])  # fmt: skip
    text = plan(config, 1, mfu=0.4, peak_tflops=989)
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("hidden matrices")]
    own = group_settings(config, run_scale(config, 16 * 128))["hidden matrices"]
    assert row[3:] == [f"{own.lr:.4g}", f"{own.weight_decay:.4g}", f"{own.eps:.4g}"]
    assert "m_d, m_L           2, 4" in text and "at TPP_base: steps" in text


def test_impossible_settings():
    section = "--parametrization."
    with pytest.raises(ConfigError) as raised:
        load_config(["--model.name", "celerity", section + "kind", "completep", section + "decay", "all",
                     section + "weight_decay_rule", "printed", section + "sigma", "-1.0"])  # fmt: skip
    assert raised.value.faults == [
        "parametrization.sigma = -1.0: must be above 0",
        "parametrization.base_dim = 0: completep needs the base model's",
        "parametrization.base_layers = 0: completep needs the base model's",
        "parametrization.decay = 'all': biases and norms take no weight decay under completep",
        "parametrization.weight_decay_rule = 'printed': needs base_timescale and base_batch_tokens, got 0.0 and 0",
    ]

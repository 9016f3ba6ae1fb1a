"""Every TOML in train_configs/ loads, plans, and is what its name says."""

import tomllib
from pathlib import Path

import pytest

from regdrop_titan.config import load_config, model_args
from regdrop_titan.config.resume import differences
from regdrop_titan.parametrization import run_scale
from regdrop_titan.plan import GIB, default_world_size, learning_rates, memory_bytes, plan
from regdrop_titan.regularization import mean_rate

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


def test_there_are_configs():
    assert {"debug_nape_llama3", "nape_llama3_400m_vpad"} <= {config.stem for config in CONFIGS}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_loads_and_plans(file):
    args = ["--job.config_file", str(file)]
    world_size = default_world_size(load_config(args))
    config = load_config(args, world_size)
    text = plan(config, world_size, mfu=0.4, peak_tflops=989)
    assert f"{config.training.steps:,}" in text and "Learning rate" in text
    # a comment at the top says how to launch it, and names the file itself
    assert f"train.py --job.config_file train_configs/{file.name}" in file.read_text().split("[job]")[0]


@pytest.mark.parametrize(
    ("name", "placement", "p", "weight_decay"),
    [
        ("wd", "none", 0.0, 0.1),
        ("no_wd", "none", 0.0, 0.0),
        ("pre_norm", "pre_norm", 0.1, 0.0),
        ("pre_linear", "pre_linear", 0.1, 0.0),
        ("vpad", "vpad", 0.1, 0.0),
    ],
)
def test_the_five_settings_of_the_paper(name, placement, p, weight_decay):
    """LG table 6: 40 B tokens in steps of 512 Ki, 6e-4 with 2.5 % warm-up and 20 % decay to 6e-5."""
    config = load_config(["--job.config_file", str(ROOT / f"train_configs/nape_llama3_400m_{name}.toml")])
    assert (config.dropout.placement, config.dropout.p) == (placement, p)
    assert config.optimizer.weight_decay == weight_decay
    training = config.training
    assert training.global_batch_size * training.seq_len == 512 * 1024
    assert training.global_batch_size * training.seq_len * training.steps == pytest.approx(40e9, rel=1e-4)
    assert config.lr_scheduler.warmup_steps == pytest.approx(0.025 * training.steps, abs=1)
    assert (config.lr_scheduler.decay_ratio, config.lr_scheduler.decay_type) == (0.2, "linear")
    assert config.optimizer.lr * config.lr_scheduler.min_lr_factor == pytest.approx(6e-5)
    assert (config.model.flavor, config.architecture.position, training.seq_len) == ("400M", "nape", 2048)


@pytest.mark.parametrize(
    ("name", "distribution", "schedule", "p_max", "mean"),
    [
        ("ild_dts_0.2", "increasing", "decreasing", 0.2, 0.05),
        ("ild_dts_0.4", "increasing", "decreasing", 0.4, 0.1),
        ("ild_dts_0.8", "increasing", "decreasing", 0.8, 0.2),
        ("uniform_0.2", "uniform", "constant", 0.2, 0.2),
        ("ald_0.4", "alternating", "constant", 0.4, 0.2),
        ("vpad_ild_dts_0.4", "increasing", "decreasing", 0.4, 0.1),
    ],
)
def test_layer_dropout_configs(name, distribution, schedule, p_max, mean):
    config = load_config(["--job.config_file", str(ROOT / f"train_configs/nape_llama3_400m_{name}.toml")])
    skips = config.layer_dropout
    assert (skips.distribution, skips.schedule, skips.p_max) == (distribution, schedule, p_max)
    assert skips.sampling == "balanced"
    assert mean_rate(distribution, schedule, p_max, 24, config.training.steps) == pytest.approx(mean)
    assert config.dropout.placement == ("vpad" if name.startswith("vpad") else "none")


def test_the_five_settings_differ_in_nothing_else():
    def stripped(name):
        values = tomllib.loads((ROOT / f"train_configs/nape_llama3_400m_{name}.toml").read_text())
        del values["job"], values["dropout"], values["optimizer"]["weight_decay"]
        return values

    first, *others = (stripped(name) for name in ("wd", "no_wd", "pre_norm", "pre_linear", "vpad"))
    assert all(other == first for other in others)


MAMBA2 = {
    # LG table 6: tokens, tokens a step, context, peak learning rate, warm-up share, end over peak
    "85m": (25e9, 512 * 1024, 1024, 1e-3, 0.1, 0.1),
    "1.3b_cpt": (0.5e9, 256 * 1024, 2048, 1e-4, 0.1, 0.1),
    "45m_copy": (5e6 / 2 * 305, 64 * 305, 305, 1e-3, 0.05, 0.0),  # 5 M examples, two a sequence
}
PLACEMENTS = {"wd": "none", "no_wd": "none", "pre_norm": "pre_norm", "pre_linear": "pre_linear", "vpad": "vpad"}


@pytest.mark.parametrize("run", MAMBA2)
def test_mamba2_runs_of_the_paper(run):
    tokens, step, context, lr, warmup, end = MAMBA2[run]
    files = sorted(ROOT.glob(f"train_configs/mamba2_{run}_*.toml"))
    settings = {file.stem.removeprefix(f"mamba2_{run}_") for file in files}
    assert settings == set(PLACEMENTS) - ({"pre_norm"} if run != "1.3b_cpt" else set())
    for file in files:
        setting = file.stem.removeprefix(f"mamba2_{run}_")
        config = load_config(["--job.config_file", str(file)])
        training, schedule = config.training, config.lr_scheduler
        assert config.model.flavor.lower() == run.split("_")[0] and training.seq_len == context
        assert training.global_batch_size * context == step and step * training.steps == pytest.approx(tokens, rel=1e-3)
        assert config.optimizer.lr == lr and schedule.decay_type == "cosine" and schedule.decay_ratio is None
        assert schedule.warmup_steps == pytest.approx(warmup * training.steps, rel=0.01)
        assert schedule.min_lr_factor == end
        assert config.dropout.placement == PLACEMENTS[setting]
        assert config.dropout.p == (0.1 if PLACEMENTS[setting] != "none" else 0.0)
        assert config.optimizer.weight_decay == (0.1 if setting == "wd" else 0.0)


def test_celerity_runs():
    """DD: 20 tokens a parameter, batches by the rule, the rates in the files' names, into 80 GB a GPU."""
    files = sorted(ROOT.glob("train_configs/celerity_*.toml"))
    rates = {size: set() for size in ("271m", "503m", "906m", "1.8b", "3.9b", "8.2b")}
    for file in files:
        _, size, setting = file.stem.split("_", 2)
        config = load_config(["--job.config_file", str(file)])
        args, training = model_args(config), config.training
        world_size = default_world_size(config)
        step = training.global_batch_size * training.seq_len
        scale = run_scale(config, step)
        assert config.model.flavor.lower() == size and training.seq_len == 8192
        assert scale.tokens_per_parameter == pytest.approx(20, rel=1e-4)
        assert step == pytest.approx(scale.batch_rule, rel=0.03)
        assert (args.parametrization, args.base_dim, args.base_layers) == ("completep", 640, 13)
        assert config.layer_dropout.p_max == (0.0 if setting == "dense" else float(setting.removeprefix("ild_dts_")))
        assert sum(memory_bytes(config, world_size, args.n_parameters()).values()) < 0.8 * 80 * GIB
        rates[size].add(config.layer_dropout.p_max)
    assert all(found >= {0.0, 0.2, 0.4, 0.6, 0.8} for found in rates.values()) and 0.99 in rates["8.2b"]


def test_smollm3_runs_of_the_paper():
    """LG table 6: 1 B tokens at context 4096, 1.5 B at 8192, in steps of 1 Mi; 2e-5 after a warm-up of 10 %."""
    files = {file.stem.removeprefix("smollm3_"): file for file in ROOT.glob("train_configs/smollm3_*.toml")}
    dropouts = {f"sw_cpt_{placement}_p{p}" for placement in ("pre_norm", "pre_linear", "vpad") for p in (0.1, 0.2, 0.3)}
    long = {f"8k_sw_{placement}{scaled}" for placement in ("pre_linear", "vpad") for scaled in ("", "_scaled")}
    assert set(files) == {"sw_cpt_wd", "sw_cpt_no_wd", "sw_attention_dropout", *dropouts, *long}
    for name, file in files.items():
        config = load_config(["--job.config_file", str(file)])
        args, training, dropout = model_args(config), config.training, config.dropout
        assert (args.dim, args.sliding_window, training.seq_len) == (2048, 4096, 8192 if name in long else 4096)
        tokens = training.global_batch_size * training.seq_len
        assert tokens == 2**20 and tokens * training.steps == pytest.approx(1.5e9 if name in long else 1e9, rel=1e-3)
        warmup, steps = config.lr_scheduler.warmup_steps, training.steps
        assert warmup == pytest.approx(steps / 10, abs=1)
        assert learning_rates(config, [warmup + 1, steps]) == [2e-5, 2e-5]
        p = 0.3 if name in long else float(name.rsplit("_p", 1)[1]) if name in dropouts else 0.0
        assert dropout.p == p and (dropout.placement == "none") == (p == 0)
        assert dropout.placement in (name, "none") or dropout.placement in name
        assert dropout.attention_p == (0.1 if name == "sw_attention_dropout" else 0.0)
        assert (args.scaling, args.scaling_init) == (
            ("adaptive", "identity") if "scaled" in name else ("none", "default")
        )
        assert config.optimizer.weight_decay == (0.1 if name.endswith("_wd") and "no" not in name else 0.0)
        assert config.checkpoint.initial_load_path == "outputs/smollm3_3b/checkpoint/step-0"


def test_asentmax_runs_differ_from_nape_in_attention_alone():
    """LG table 11."""
    for setting in ("wd", "pre_norm", "pre_linear", "vpad"):
        ours, nape = (
            load_config(["--job.config_file", str(ROOT / f"train_configs/{name}_400m_{setting}.toml")]).to_dict()
            for name in ("nape_asentmax", "nape_llama3")
        )
        changed = differences(nape, ours)
        assert {line.split(":")[0] for line in changed} == {
            "architecture.attention", "architecture.scaling", "training.local_batch_size",
            "validation.local_batch_size", "activation_checkpoint.mode",
        }  # fmt: skip

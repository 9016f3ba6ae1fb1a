"""Every TOML in train_configs/ loads, plans, and is what its name says."""

import tomllib
from pathlib import Path

import pytest

from regdrop_titan.config import load_config
from regdrop_titan.plan import default_world_size, plan
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

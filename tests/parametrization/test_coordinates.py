"""The coordinate check (spec sec. 6): under CompleteP with 1/rho, activations follow neither size nor density."""

import json

import numpy as np
import pytest
import torch

from regdrop_titan.config import ConfigError, load_config
from regdrop_titan.parametrization.coordinates import Curve, groups, measure, plan_curves, spread
from regdrop_titan.parametrization.short_runs import Batches, resized

from ..packed_sets import write_packed

# 32 layers of a two-layer base, so that random masks and updates average out; 2048 tokens a step
ARGS = ["--model.name", "celerity", "--architecture.dim", "32", "--architecture.n_heads", "2",
        "--architecture.n_kv_heads", "2", "--architecture.ffn_dim", "128", "--architecture.vocab_size", "256",
        "--architecture.n_layers", "32", "--parametrization.kind", "completep", "--parametrization.base_dim", "32",
        "--parametrization.base_layers", "2", "--parametrization.sigma", "0.02", "--optimizer.lr", "1e-3",
        "--training.seq_len", "16", "--training.global_batch_size", "128"]  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Text without structure but for its frequent words, which is what the first steps learn."""
    folder = tmp_path_factory.mktemp("zipf")
    frequency = 1 / np.arange(1, 255)
    words = np.random.default_rng(0).choice(np.arange(1, 255), (400, 200), p=frequency / frequency.sum())
    write_packed(folder / "train", words.tolist(), 256)
    return folder


def check(args, packed, **axes):
    config = load_config([*args, "--training.dataset_path", f"{packed}/train"])
    wanted = {"widths": [], "depths": [], "densities": [], "scales": ["inverse_density", "none"]} | axes
    curves = plan_curves(config, **wanted)
    data = Batches(config, 10)
    for curve, sized in curves:
        measure(curve, sized, data, torch.device("cpu"))
    return groups([curve for curve, _ in curves])


def check_completep(args, packed, depths, densities):
    """10 steps at fixed width, the last depth being the configuration's: under 10 % apart over densities, under 15 %
    over depths; without 1/rho far apart. Fixed seeds."""
    found = check(args, packed, depths=depths, densities=densities, scales=["inverse_density"])
    dense = found["depth", "inverse_density"][-1]
    assert spread([dense, *found["density", "inverse_density"]]) < 0.10
    assert spread(found["depth", "inverse_density"]) < 0.15
    assert dense.last[-1] > 3 * dense.activations[0][-1]  # the steps moved what is compared
    (unscaled,) = check(args, packed, densities=[0.4], scales=["none"])["density", "none"]
    assert spread([dense, unscaled]) > 0.5 and unscaled.last[-1] < dense.last[-1]


def test_completep_keeps_activations(packed):
    check_completep(ARGS, packed, depths=[2, 32], densities=[0.5])


@pytest.mark.slow
def test_completep_keeps_activations_over_all_sizes(packed):
    """Twice the batch: what is left of the distance at density 0.4 is mostly the noise of gradients."""
    large = [*ARGS, "--training.global_batch_size", "256"]
    check_completep(large, packed, depths=[2, 4, 8, 16, 32], densities=[0.8, 0.6, 0.4])


def test_standard_does_not(packed):
    """Under the standard parametrization with the same hyperparameters activations grow with depth and with width."""
    small = [*ARGS, "--training.global_batch_size", "32", "--architecture.n_layers", "4"]
    found = check([*small, "--parametrization.kind", "standard"], packed, depths=[2, 32], widths=[32, 128])
    kept = check(small, packed, depths=[2, 32], widths=[32, 128])
    for axis in ("width", "depth"):
        apart, together = spread(found[axis, "inverse_density"]), spread(kept[axis, "inverse_density"])
        assert apart > 2 * together and apart > 0.3, (axis, apart, together)


def test_spread_by_hand():
    def curve(*layers):
        return Curve("density", 1.0, "none", activations=[[9.0] * len(layers), list(layers)])

    assert spread([curve(1.0, 2.0), curve(1.1, 3.0), curve(0.9, 2.5)]) == pytest.approx(0.5)
    assert spread([curve(1.0), curve(5.0, 1.2)]) == pytest.approx(0.2)  # depths: at the end of the stack


def test_sizes_that_cannot_be():
    config = load_config(ARGS)
    wide = resized(config, 64, 8).architecture
    assert (wide.dim, wide.n_heads, wide.n_kv_heads, wide.ffn_dim, wide.n_layers) == (64, 4, 4, 256, 8)
    with pytest.raises(ConfigError, match="width 40: must be a multiple of the head dimension 16"):
        resized(config, 40, 4)


def test_the_script(packed, tmp_path, script, capsys):
    toml = tmp_path / "base.toml"
    toml.write_text("")
    common = ["coord_check", "--config", str(toml), *ARGS, "--training.dataset_path", f"{packed}/train"]
    out = tmp_path / "out"
    sizes = ["--densities", "1.0", "0.5", "--steps", "2"]
    assert script(*common, *sizes, "--output", str(out)) == 0
    result = json.loads((out / "coord_check.json").read_text())
    assert set(result["apart"]) == {"density inverse_density", "density none"}
    assert [len(curve["activations"]) for curve in result["curves"]] == [2] * 4
    assert (out / "coord_check.png").stat().st_size > 10_000
    capsys.readouterr()
    assert script(*common, "--densities", "1.5", "--steps", "0") == 2
    assert "--steps 0: must be at least 1\n  --densities 1.5: must be in (0, 1]" in capsys.readouterr().err
    assert script(*common) == 2
    assert "give --widths, --depths or --densities" in capsys.readouterr().err

"""The coordinate check (spec sec. 6): activations follow neither depth, width nor density under CompleteP with 1/rho."""

import json

import pytest
import torch

from regdrop_titan.config import ConfigError, load_config
from regdrop_titan.parametrization.coordinates import Curve, groups, measure, plan_curves, spread
from regdrop_titan.parametrization.short_runs import Batches, resized

ARGS = ["--model.name", "celerity", "--architecture.dim", "32", "--architecture.n_heads", "2",
        "--architecture.n_kv_heads", "2", "--architecture.ffn_dim", "128", "--architecture.vocab_size", "256",
        "--parametrization.kind", "completep", "--parametrization.base_dim", "32",
        "--parametrization.base_layers", "4", "--parametrization.sigma", "0.1", "--optimizer.lr", "1e-2",
        "--training.seq_len", "16", "--training.global_batch_size", "64"]  # fmt: skip


def check(args, packed, **axes):
    config = load_config([*args, "--training.dataset_path", f"{packed}/train"])
    wanted = {"widths": [], "depths": [], "densities": [], "scales": ["inverse_density", "none"]} | axes
    curves = plan_curves(config, **wanted)
    data = Batches(config, 10)
    for curve, sized in curves:
        measure(curve, sized, data, torch.device("cpu"))
    return groups([curve for curve, _ in curves])


def test_completep_keeps_activations(packed):
    """10 steps; under 10 % over densities 1.0 to 0.4, under 15 % over depths 2 to 32, at fixed width; without 1/rho they
    fall with density. Fixed seed; the masks' share in the first spread is about 3 % (64 sequences)."""
    found = check(ARGS, packed, depths=[2, 4, 8, 16, 32], densities=[1.0, 0.8, 0.6, 0.4])
    assert spread(found["density", "inverse_density"]) < 0.10
    assert spread(found["depth", "inverse_density"]) < 0.15
    unscaled = found["density", "none"]
    assert spread(unscaled) > 0.3
    ends = [curve.last[-1] for curve in unscaled]
    assert ends == sorted(ends, reverse=True)  # fewer updates, smaller stream


def test_standard_does_not(packed):
    """The same sizes under the standard parametrization: activations grow with depth, and with width."""
    standard = [*ARGS, "--parametrization.kind", "standard"]
    found = check(standard, packed, depths=[2, 32], widths=[32, 128])
    assert spread(found["depth", "inverse_density"]) > 1.0
    kept = check(ARGS, packed, widths=[32, 128])
    assert spread(kept["width", "inverse_density"]) < 0.15
    assert spread(found["width", "inverse_density"]) > 2 * spread(kept["width", "inverse_density"])


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

"""Rates and masks of layer dropout: formulas, edges, purity, marginals. Statistical bounds are 4 standard errors."""

import math

import numpy as np
import pytest
import torch

from regdrop_titan.regularization import keep_mask, layer_rates, mean_rate
from regdrop_titan.regularization.layer_dropout import lock_step_time

DISTRIBUTIONS = ["uniform", "increasing", "alternating"]
SCHEDULES = ["constant", "increasing", "decreasing"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_rates_equal_the_formulas(distribution, schedule):
    L, T, p = 6, 11, 0.8
    for t in (0, 3, 10, 11, 500):
        rates = layer_rates(distribution, schedule, p, L, t, T)
        assert rates.dtype == torch.float64 and rates.shape == (L,)
        for layer in range(L):
            depth = {"uniform": 1, "increasing": layer / (L - 1), "alternating": layer % 2}[distribution]
            late = min(t, T - 1) / (T - 1)  # past T-1 the last value holds
            time = {"constant": 1, "increasing": late, "decreasing": 1 - late}[schedule]
            assert rates[layer].item() == pytest.approx(p * depth * time, abs=1e-15)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_edges(distribution):
    """One layer, one step (report S7)."""
    one_layer = layer_rates(distribution, "constant", 0.5, 1, 0, 10).item()
    assert one_layer == (0.5 if distribution == "uniform" else 0.0)
    assert layer_rates("uniform", "decreasing", 0.5, 1, 0, 1).item() == 0.5
    assert layer_rates("uniform", "increasing", 0.5, 1, 0, 1).item() == 0.0
    assert (layer_rates("alternating", "constant", 0.5, 7, 0, 10)[0::2] == 0).all()
    assert layer_rates("uniform", "constant", 0.99, 2, 0, 1).tolist() == [0.99, 0.99]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("L", "T"), [(1, 1), (1, 5), (2, 1), (5, 7), (8, 20)])
def test_mean_rate_is_the_mean_of_the_rates(distribution, schedule, L, T):
    rates = torch.stack([layer_rates(distribution, schedule, 0.6, L, t, T) for t in range(T)])
    assert mean_rate(distribution, schedule, 0.6, L, T) == pytest.approx(rates.mean().item(), abs=1e-12)


def test_mean_rates_of_the_paper():
    assert mean_rate("uniform", "constant", 0.4, 24, 100) == pytest.approx(0.4)
    assert mean_rate("increasing", "constant", 0.4, 24, 100) == pytest.approx(0.2)
    assert mean_rate("alternating", "constant", 0.4, 13, 100) == pytest.approx(6 / 13 * 0.4)
    assert mean_rate("increasing", "decreasing", 0.4, 24, 100) == pytest.approx(0.1)


def test_masks_are_functions_of_seed_step_and_sequence():
    rates = torch.full((5,), 0.5, dtype=torch.float64)
    mask = keep_mask(rates, 64, seed=1, step=7)
    assert mask.shape == (64, 5) and mask.dtype == torch.bool and mask.device.type == "cpu"
    assert torch.equal(mask, keep_mask(rates, 64, seed=1, step=7))
    assert torch.equal(mask[:16], keep_mask(rates, 16, seed=1, step=7))  # however many sequences there are
    assert not torch.equal(mask, keep_mask(rates, 64, seed=1, step=8))
    assert not torch.equal(mask, keep_mask(rates, 64, seed=2, step=7))
    # seeds beyond 32 bits, which torch's CPU generator would not tell apart
    assert not torch.equal(mask, keep_mask(rates, 64, seed=1 + 2**32, step=7))


def test_rates_share_their_randomness():
    """What a lower rate drops, a higher one drops too."""
    masks = [keep_mask(torch.full((4,), p), 256, seed=0, step=3) for p in (0.1, 0.4, 0.8)]
    assert (masks[0] >= masks[1]).all() and (masks[1] >= masks[2]).all()
    assert keep_mask(torch.zeros(4), 256, seed=0, step=3).all()


@pytest.mark.parametrize("sampling", ["bernoulli", "balanced"])
def test_marginals(sampling):
    """Every sequence and layer is kept with probability 1-p, whatever the sampling (20,000 steps)."""
    rates, n = torch.tensor([0.0, 0.13, 0.5, 0.77]), 20_000
    kept = sum(keep_mask(rates, 6, seed=3, step=t, sampling=sampling, group=3).double() for t in range(n)) / n
    error = 4 * (rates * (1 - rates) / n).sqrt()
    assert ((kept - (1 - rates)).abs() <= error.clamp(min=1e-12)).all()


def test_steps_and_layers_are_independent():
    """Neighbouring steps and layers do not correlate (a counter-based generator can overlap its streams)."""
    n = 6000
    masks = torch.stack([keep_mask(torch.full((2,), 0.5), 4, seed=0, step=t) for t in range(n)]).double().numpy()
    series = [masks[:, i, j] for i in range(4) for j in range(2)]
    bound = 4 / n**0.5
    for i, a in enumerate(series):
        for b in series[i + 1 :]:
            assert abs(np.corrcoef(a, b)[0, 1]) < bound
        for lag in (1, 2, 3):
            assert abs(np.corrcoef(a[:-lag], a[lag:])[0, 1]) < bound


def test_balanced_groups_keep_as_many():
    """In a step every group drops the same number of a layer's sequences, floor(pB) or ceil(pB), and the total over
    layers is within one of its expectation; which ones differs by group."""
    rates, B, groups = torch.linspace(0, 0.9, 10, dtype=torch.float64), 8, 5
    differing = 0
    for step in range(200):
        keep = keep_mask(rates, B * groups, seed=0, step=step, sampling="balanced", group=B).view(groups, B, 10)
        dropped = B - keep.sum(1)  # (groups, L)
        assert (dropped == dropped[0]).all()
        assert ((dropped[0] == (rates * B).floor()) | (dropped[0] == (rates * B).ceil())).all()
        assert abs(dropped[0].sum().item() - (rates * B).sum().item()) < 1
        differing += not torch.equal(keep[0], keep[1])
    assert differing > 190


def test_batch_granularity_drops_all_or_none():
    keep = keep_mask(torch.full((6,), 0.5), 32, seed=0, step=1, granularity="batch")
    assert (keep == keep[0]).all() and 0 < keep[0].sum() < 6


def test_sublayers_are_independent():
    keep = keep_mask(torch.full((3, 2), 0.5), 2000, seed=0, step=1)
    assert keep.shape == (2000, 3, 2)
    assert abs((keep[..., 0] == keep[..., 1]).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(6000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rates": torch.tensor([1.0])}, r"rates must be in \[0, 1\)"),
        ({"rates": torch.tensor([math.nan])}, r"rates must be in \[0, 1\)"),
        ({"granularity": "token"}, "granularity must be one of sequence, batch"),
        ({"sampling": "stratified"}, "sampling must be one of bernoulli, balanced"),
        ({"sampling": "balanced", "granularity": "batch", "group": 2}, "sampling must be 'bernoulli'"),
        ({"sampling": "balanced"}, "needs a group"),
        ({"sampling": "balanced", "group": 3}, "group that divides the 4 sequences, got 3"),
    ],
)
def test_bad_arguments_of_masks(arguments, message):
    with pytest.raises(ValueError, match=message):
        keep_mask(**{"rates": torch.tensor([0.5]), "sequences": 4, "seed": 0, "step": 0, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", "constant", 0.5, 2, 0, 1), "distribution must be one of uniform, increasing, alternating"),
        (("uniform", "cosine", 0.5, 2, 0, 1), "schedule must be one of constant, increasing, decreasing"),
        (("uniform", "constant", 1.0, 2, 0, 1), r"p_max must be in \[0, 1\)"),
        (("uniform", "constant", math.nan, 2, 0, 1), r"p_max must be in \[0, 1\)"),
        (("uniform", "constant", 0.5, 0, 0, 1), "must be at least 1"),
    ],
)
def test_bad_arguments_of_rates(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_rates(*arguments)


def test_lock_step_times_of_the_method_card():
    """Ranks that wait for the slowest one at every layer: spec sec. 2's figures, and a simulation."""
    ild = [layer_rates("increasing", "constant", p, 24, 0, 1) for p in (0.4, 0.8)]
    half = torch.tensor([0.5])
    assert lock_step_time(ild[0], 8, 64, "bernoulli") == pytest.approx(0.995, abs=5e-4)
    assert lock_step_time(ild[1], 8, 64, "bernoulli") == pytest.approx(0.888, abs=5e-4)
    assert lock_step_time(half, 16, 64, "bernoulli") == pytest.approx(0.785, abs=5e-4)
    for rates in (*ild, half):
        assert lock_step_time(rates, 8, 1, "bernoulli") == pytest.approx(1 - rates.mean().item())
        assert lock_step_time(rates, 8, 256, "balanced") == pytest.approx(1 - rates.mean().item())
    for sampling in ("bernoulli", "balanced"):
        n, ranks = 3000, 8
        slowest = []
        for step in range(n):
            keep = keep_mask(half, 4 * ranks, seed=0, step=step, sampling=sampling, group=4).view(ranks, 4)
            slowest.append(keep.sum(1).max().item() / 4)
        error = 4 * np.std(slowest) / n**0.5
        assert abs(np.mean(slowest) - lock_step_time(half, 4, ranks, sampling)) < error + 1e-12

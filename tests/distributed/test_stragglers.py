"""Simulated steps against formulas and by hand."""

import math

import numpy as np
import pytest
import torch

from regdrop_titan.distributed.stragglers import LayerTime, masks, simulate, step_seconds
from regdrop_titan.regularization.layer_dropout import lock_step_time


def test_a_step_by_hand():
    """Two ranks, three layers: the slower rank counts; nothing kept costs nothing; two ranks on one device add up."""
    kept = np.array([[4, 0, 2], [1, 0, 3]])
    time = LayerTime(fixed=1.0, sequence=0.5, meeting=0.25)
    assert step_seconds(kept, time) == pytest.approx((1 + 2) + 0 + (1 + 1.5) + 3 * 0.25)
    assert step_seconds(kept, time, devices=1) == pytest.approx((2 + 2.5) + 0 + (2 + 2.5) + 3 * 0.25)
    assert step_seconds(kept, time, devices=2) == pytest.approx(step_seconds(kept, time))


def test_against_the_expectation_of_the_maximum():
    """Independent draws without fixed costs are E[max over ranks of Binomial(B, 1-p)] / B; 300 steps of 4 layers, three
    standard errors of a maximum's mean (below 0.5 sequences) are 0.011 of B = 4. Balanced ones cost 1 - p."""
    p, B, L = 0.3, 4, 4
    for ranks in (1, 8, 64):
        rates = torch.full((L,), p, dtype=torch.float64)
        found = simulate(rates, ranks, B, "bernoulli", LayerTime(0.0, 1.0), steps=300)
        assert found.time == pytest.approx(lock_step_time(rates, B, ranks, "bernoulli"), abs=0.011)
        assert found.computed == pytest.approx(1 - p, abs=3 * math.sqrt(p * (1 - p) / (300 * L * B * ranks)))
        balanced = simulate(rates, ranks, B, "balanced", LayerTime(0.0, 1.0), steps=300)
        assert balanced.time == pytest.approx(balanced.computed) and balanced.time_saved_of_compute_saved == 1
    assert all(each.shape == (3, 2) for each in masks(torch.tensor([0.0, 0.5]), 3, 4, "bernoulli", 2))


def test_fixed_costs_and_meetings_are_not_saved():
    rates = torch.full((6,), 0.5, dtype=torch.float64)
    found = simulate(rates, 4, 8, "balanced", LayerTime(2.0, 0.25, 1.0), steps=10)
    assert found.time == pytest.approx((2 + 1 + 1) / (2 + 2 + 1)) and found.computed == 0.5
    assert found.time_saved_of_compute_saved == pytest.approx(0.4)


def test_the_fit():
    assert LayerTime.fit([1, 2, 4], [1.5, 2.0, 3.0]) == LayerTime(pytest.approx(1.0), pytest.approx(0.5))
    through_zero = LayerTime.fit([1, 2, 4], [0.9, 2.0, 4.2])
    assert through_zero.fixed == 0 and through_zero.sequence == pytest.approx((0.9 + 4 + 16.8) / 21)

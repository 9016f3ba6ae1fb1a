"""Inverted dropout and VPAD against their formulas, and LG's Propositions 1-3 by Monte Carlo.

Monte Carlo tests have fixed seeds; a bound is 4 standard errors, plus what the proposition itself neglects at finite
width (1/d), and each test checks that the effect it looks for is far larger than its bound.
"""

import math

import pytest
import torch

from regdrop_titan.regularization import dropout, inverted_dropout, vpad, vpad_coefficients
from regdrop_titan.regularization.dropout import vpad_each

D = 4096


def reference_vpad(x, p, keep):
    """VPAD in float64, token by token, from the formula."""
    out = torch.empty_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        h = x[token].double().tolist()
        mu = math.fsum(h) / len(h)
        var = math.fsum((v - mu) ** 2 for v in h) / len(h)
        alpha = math.sqrt(var / ((1 - p) * (var + p * mu**2)))
        beta = mu * (1 - alpha * (1 - p))
        out[token] = torch.tensor(
            [alpha * bool(b) * v + beta for v, b in zip(h, keep[token], strict=True)], dtype=torch.float64
        )
    return out


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 40, generator=generator) * 1.7 + torch.linspace(-2, 2, 6)[:, None]


@pytest.fixture
def keep(x):
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) >= 0.3


@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_vpad_equals_the_formula(x, keep, p):
    torch.testing.assert_close(vpad(x, p, keep).double(), reference_vpad(x, p, keep), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vpad(x.double(), p, keep), reference_vpad(x, p, keep), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_inverted_dropout_equals_the_formula(x, keep, p):
    torch.testing.assert_close(inverted_dropout(x, p, keep), keep * x / (1 - p), rtol=1e-6, atol=0)


def test_bf16_keeps_statistics_and_scale_in_fp32(keep):
    x = torch.full((6, 40), 2.0, dtype=torch.bfloat16)
    # 2/0.9 rounded once; a scale rounded to bf16 first would give 2.21875
    assert inverted_dropout(x, 0.1, keep)[keep].unique().item() == torch.tensor(2 / 0.9, dtype=torch.bfloat16)
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).bfloat16() + 8
    alpha, beta = vpad_coefficients(x, 0.1)
    assert alpha.dtype == beta.dtype == torch.float32
    torch.testing.assert_close(alpha, vpad_coefficients(x.double(), 0.1)[0].float(), rtol=1e-4, atol=0)
    assert vpad(x, 0.1, keep).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.999])
def test_constant_and_zero_tokens(dtype, p):
    x = torch.tensor([[0.0] * 8, [3.0] * 8, [-0.5] * 8, [1e-20] * 8, [0, 0, 0, 0, 0, 0, 0, 1e-8]], dtype=dtype)
    x.requires_grad_()
    z = vpad(x, p, torch.tensor([True, False] * 4).expand(5, 8))
    z.sum().backward()
    assert torch.isfinite(z).all() and torch.isfinite(x.grad).all()
    assert torch.equal(z[0], torch.zeros_like(z[0]))  # all-zero token: zeros
    torch.testing.assert_close(z[1:3], x[1:3].detach(), rtol=1e-2, atol=1e-2)  # var = 0: z = mu
    alpha, _ = vpad_coefficients(torch.full((8,), 3.0), p)
    assert alpha.item() == 0.0


def test_gradients_flow_through_the_coefficients_unless_stopped(x, keep):
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda h: vpad(h, 0.3, keep), x)
    through, stopped = torch.autograd.grad(vpad(x, 0.3, keep).square().sum(), x), None
    stopped = torch.autograd.grad(vpad(x, 0.3, keep, stop_gradient=True).square().sum(), x)
    alpha, beta = (c.detach() for c in vpad_coefficients(x, 0.3))
    expected = torch.autograd.grad((alpha * keep * x + beta).square().sum(), x)
    torch.testing.assert_close(stopped[0], expected[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(through[0], stopped[0], rtol=1e-2)


@pytest.mark.parametrize("stop_gradient", [False, True])
def test_masks_of_one_input_share_their_statistics(x, stop_gradient):
    """`vpad_each` is `vpad` under each of its masks, in value and gradient, by the formula's own derivatives."""
    x = x.double().requires_grad_()
    weights = torch.randn(3, *x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(4)
    together = vpad_each(x, 0.3, 3, stop_gradient)
    torch.manual_seed(4)
    keeps = [dropout._draw_keep(x, 0.3) for _ in range(3)]
    alpha, beta = vpad_coefficients(x, 0.3)
    if stop_gradient:
        alpha, beta = alpha.detach(), beta.detach()
    apart = [alpha * keep * x + beta for keep in keeps]
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    got, expected = (
        torch.autograd.grad(sum((z * w).sum() for z, w in zip(out, weights, strict=True)), x)[0]
        for out in (together, apart)
    )
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("drop", [inverted_dropout, vpad])
def test_p_zero_is_the_identity_and_draws_nothing(x, drop):
    before = torch.get_rng_state()
    assert drop(x, 0.0) is x
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("drop", [inverted_dropout, vpad, vpad_coefficients])
@pytest.mark.parametrize("p", [1.0, -0.1, 2.0, math.nan])
def test_rates_outside_of_0_1_are_refused(x, drop, p):
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
        drop(x, p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_drawn_masks_keep_1_minus_p(p):
    torch.manual_seed(3)
    kept = (inverted_dropout(torch.ones(1_000_000), p) != 0).double().mean().item()
    assert abs(kept - (1 - p)) < 4 * math.sqrt(p * (1 - p) / 1e6)


def test_rates_between_the_levels_of_a_draw():
    """1e-5 is 0.655 of the 65536 levels: dropped so often, neither never nor once in 65536. 2000 masks of 10^4: 200
    dropped, with a standard deviation of 14.5 (sqrt 200 within masks, 3.2 from the rounding)."""
    torch.manual_seed(5)
    for rate in (1e-5, torch.tensor(1e-5)):
        dropped = sum((~dropout._draw_keep(torch.empty(10_000), rate)).sum().item() for _ in range(2000))
        assert abs(dropped - 200) < 4 * 14.5


def test_neighbours_of_a_mask_are_independent():
    """Four entries come of one draw of 64 bits: correlations at distances 1 ... 8 within 4 standard errors of 0."""
    torch.manual_seed(6)
    kept = dropout._draw_keep(torch.empty(1_000_003), 0.3).double()
    assert kept.shape == (1_000_003,)
    kept = (kept - 0.7) / math.sqrt(0.21)
    for distance in range(1, 9):
        assert abs((kept[distance:] * kept[:-distance]).mean().item()) < 4e-3


def test_vpad_preserves_mean_and_variance_of_a_token():
    """E[z] = mu and Var[z] = var over the mask and the channels (LG sec. 4)."""
    torch.manual_seed(4)
    p, n = 0.3, 4000
    h = torch.randn(D) * 1.3 + 0.8
    z = torch.stack([vpad(h, p) for _ in range(n)]).double()
    mu, var = h.double().mean(), h.double().var(correction=0)
    token_means = z.mean(1)
    assert abs(token_means.mean() - mu) < 4 * token_means.std() / math.sqrt(n)
    second = (z - mu).square().mean(1)
    assert abs(second.mean() - var) < 4 * second.std() / math.sqrt(n)
    dropped = torch.stack([inverted_dropout(h, p) for _ in range(500)]).double()
    assert (dropped - mu).square().mean() > 1.3 * var  # what plain dropout does instead


def test_proposition_1_pre_norm_dropout_shrinks_the_mean():
    """E[y] after PN-D is (1 + p/(1-p) kappa)^(-1/2) of the dense one."""
    generator = torch.Generator().manual_seed(5)
    p, n = 0.3, 3000
    r, u = torch.randn(D, generator=generator).double(), torch.randn(D, generator=generator).double()
    x = r + u
    kappa = (u.square().mean() / x.square().mean()).item()
    factor = (1 + p / (1 - p) * kappa) ** -0.5

    def normalised(h):
        return h / h.square().mean(-1, keepdim=True).sqrt()

    w = normalised(x)
    torch.manual_seed(6)
    y = torch.stack([normalised(r + inverted_dropout(u, p)) @ w for _ in range(n)]) / (normalised(x) @ w)
    bound = 4 * y.std().item() / math.sqrt(n) + 2 / D
    assert bound < 0.05 * (1 - factor)
    assert abs(y.mean().item() - factor) < bound


def test_proposition_2_pre_linear_dropout_adds_variance():
    """PL-D keeps E[y] and adds p/(1-p) E[x_hat^2] ||w||^2 to Var[y]; |w_i| = 1 makes the formula exact."""
    generator = torch.Generator().manual_seed(7)
    p, n = 0.3, 8000
    x_hat = torch.randn(D, generator=generator).double()
    w = torch.randint(0, 2, (D,), generator=generator).double() * 2 - 1
    torch.manual_seed(8)
    y = torch.stack([inverted_dropout(x_hat, p) @ w for _ in range(n)])
    added = p / (1 - p) * x_hat.square().mean().item() * w.square().sum().item()
    assert abs(y.mean().item() - (x_hat @ w).item()) < 4 * math.sqrt(added / n)
    assert abs(y.var().item() / added - 1) < 4 * math.sqrt(2 / n)


def test_proposition_3_vpad_changes_only_the_covariance_term():
    """Var[y] changes by (alpha^2 (1-p)^2 - 1) C, C the cross-channel covariance term; the mean stays.

    Tokens x_i = m + e_i + c s v_i with e, s standard normal, v = +-1 summing to 0, and w = v: then
    C = c^2 d (d-1), and beta, the same in every channel, leaves y alone.
    """
    p, n, m = 0.3, 24_000, 0.5
    c2 = 1 / D
    v = torch.ones(D)
    v[D // 2 :] = -1
    torch.manual_seed(9)
    dense, dropped, means = [], [], []
    for _ in range(n // 1000):
        x = m + torch.randn(1000, D) + math.sqrt(c2) * torch.randn(1000, 1) * v
        z = vpad(x, p)
        dense.append(x @ v)
        dropped.append(z @ v)
        means.append(z.mean(1) - x.mean(1))
    var = 1 + c2
    alpha2 = var / ((1 - p) * (var + p * m**2))
    C = c2 * D * (D - 1)
    change = (alpha2 * (1 - p) ** 2 - 1) * C
    predicted = var * D + C + change
    got, error = torch.cat(dropped).double().var().item(), 4 * predicted * math.sqrt(2 / n)
    assert error + 2 < 0.3 * abs(change)
    assert abs(got - predicted) < error + predicted / D
    assert abs(torch.cat(dense).double().var().item() - (var * D + C)) < 4 * (var * D + C) * math.sqrt(2 / n)
    mean_shift = torch.cat(means).double()
    assert abs(mean_shift.mean()) < 4 * mean_shift.std() / math.sqrt(n)

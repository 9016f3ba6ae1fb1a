"""Dropout of activations: inverted dropout and VPAD (LG secs 3-4). Where they stand: `models/block.py`.

Both are identities that draw no random number at `p = 0`. A rate that follows a schedule is a 0-d fp32 tensor, since a
float that changes would recompile at every step; it is not checked, and at 0 it gives the identity too.

Both draw from torch's default generator, which the trainer re-seeds before every forward (`trainer.py`), so that a mask
is a function of seed, step, micro-batch and rank.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Below this variance a token counts as constant. The bound keeps every intermediate of alpha's gradient
# finite in fp32; a normalised token is far above it, an all-zero or constant one at or near 0.
_MIN_VARIANCE = 1e-30


def _check_rate(p: float | Tensor) -> None:
    if not isinstance(p, Tensor) and not 0.0 <= p < 1.0:
        raise ValueError(f"drop probability p must be in [0, 1), got {p}")


def _draw_keep(x: Tensor, p: float | Tensor) -> Tensor:
    """An independent keep mask for every sequence, token and channel: bool, shaped like `x`, P(True) = 1-p."""
    if x.device.type != "cpu":  # the compiler draws in the kernel that uses the mask
        return torch.rand(x.shape, dtype=torch.float32, device=x.device) >= p
    fixed, rate = (0.0, p) if isinstance(p, Tensor) else (p, None)
    return _draw_keep_on_cpu(x.shape, fixed, rate, device=x.device)


# One operator, for the compiler too: torch's CPU generator is serial, 16 bits take it a quarter of a float's time, and
# in compiled code the comparison takes longer than the draw. Recomputation under compile asks operators for `device`.
@torch.library.custom_op("regdrop_titan::draw_keep", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_keep_on_cpu(shape: Sequence[int], p: float, rate: Tensor | None, *, device: torch.device) -> Tensor:
    """`rate`, a 0-d tensor, in place of `p`. 65536 p is rounded to one of its neighbours at random, once a mask: so
    every entry's probability is exact."""
    n = math.prod(shape)
    levels = 65536 * (p if rate is None else rate.item())
    dropped = min(math.floor(levels) + int(torch.rand(()).item() < levels % 1), 65535)
    bits = torch.empty((n + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return bits[:n].view(shape) >= dropped - 32768


@_draw_keep_on_cpu.register_fake
def _(shape, p, rate, *, device):
    return torch.empty(shape, dtype=torch.bool, device=device)


def inverted_dropout(x: Tensor, p: float | Tensor, keep: Tensor | None = None) -> Tensor:
    """`b x / (1-p)` (LG sec. 3).

    Args:
        x: activations of any shape.
        p: drop probability in [0, 1), a float or a 0-d tensor.
        keep: bool mask shaped like `x`, True where kept; drawn when None.

    Raises:
        ValueError: `p` is outside [0, 1) (at 1 the scale 1/(1-p) does not exist).
    """
    _check_rate(p)
    if not isinstance(p, Tensor) and p == 0.0:
        return x
    if keep is None:
        keep = _draw_keep(x, p)
    if isinstance(p, Tensor):
        return ((x * keep).to(torch.promote_types(x.dtype, p.dtype)) * (1.0 / (1.0 - p))).to(x.dtype)
    # A Python float multiplies in fp32 before the one rounding: 1/0.9 in bf16 would be 1.109.
    return x * keep * (1.0 / (1.0 - p))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of each token over its channels, (..., 1), in fp32 at least."""
    return torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), -1, correction=0, keepdim=True)


def _alpha(var: Tensor, mu: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """alpha, 0 for constant tokens; and the `var` and `var + p mu^2` to divide by, of which no constant token makes a
    0/0 or 1/0, in the value or in a gradient."""
    varies = var > _MIN_VARIANCE
    safe_var = torch.where(varies, var, 1.0)
    second_moment = safe_var + p * mu.square()
    return torch.where(varies, torch.sqrt(safe_var / ((1.0 - p) * second_moment)), 0.0), safe_var, second_moment


def _coefficients(var: Tensor, mu: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor]:
    alpha, _, _ = _alpha(var, mu, p)
    return alpha, mu * (1.0 - alpha * (1.0 - p))


def vpad_coefficients(x: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor]:
    """VPAD's affine correction of each token (LG eq. of sec. 4).

    With the token's own `mu = mean(x)` and `var = mean((x - mu)^2)` over its channels:
    `alpha = sqrt(var / ((1-p) (var + p mu^2)))`, `beta = mu (1 - alpha (1-p))`.

    Args:
        x: (..., d) activations, any floating dtype.
        p: drop probability in [0, 1).

    Returns:
        alpha and beta, each (..., 1), in fp32 (fp64 for fp64 input). A constant token has alpha 0 and
        beta = mu, so that `z = mu`; an all-zero token has 0 and 0.
    """
    _check_rate(p)
    return _coefficients(*_moments(x), p)


class _Vpad(torch.autograd.Function):
    """`alpha b x + beta` for each of several masks `b`. Written out, forward and backward take half of the passes over
    the activations that autograd takes, and keep the input and the masks only. The compiler fuses either form with the
    norm into one kernel a direction, and then keeps no more than the masks."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float | Tensor, stop_gradient: bool, *keeps: Tensor) -> tuple[Tensor, ...]:
        var, mu = _moments(x)
        alpha, beta = _coefficients(var, mu, p)
        ctx.save_for_backward(x, var, mu, *keeps)
        ctx.p, ctx.stop_gradient = p, stop_gradient
        return tuple((x * keep).to(alpha.dtype).mul_(alpha).add_(beta).to(x.dtype) for keep in keeps)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, var, mu, *keeps = ctx.saved_tensors
        p: float | Tensor = ctx.p
        alpha, safe_var, second_moment = _alpha(var, mu, p)
        grad, total = upstream[0] * keeps[0], upstream[0].sum(-1, keepdim=True, dtype=var.dtype)
        for g, keep in zip(upstream[1:], keeps[1:], strict=True):
            grad = grad + g * keep
            total = total + g.sum(-1, keepdim=True, dtype=var.dtype)
        grad = grad.to(var.dtype)
        if ctx.stop_gradient:
            return (grad * alpha).to(x.dtype), None, None, *(None for _ in keeps)
        of_alpha = (grad * x).sum(-1, keepdim=True) - (1.0 - p) * mu * total
        # d alpha / d var = alpha/2 (1/var - 1/second_moment), and d alpha / d mu = -alpha p mu / second_moment
        of_var = of_alpha * alpha * 0.5 * (p * mu.square() / second_moment) / safe_var
        of_mu = total * (1.0 - alpha * (1.0 - p)) - of_alpha * alpha * p * mu / second_moment
        # d var / d x = 2 (x - mu) / d, d mu / d x = 1 / d
        slope = of_var * (2.0 / x.shape[-1])
        grad = grad.mul_(alpha).addcmul_(slope, x.to(var.dtype)).add_(of_mu / x.shape[-1] - slope * mu)
        return grad.to(x.dtype), None, None, *(None for _ in keeps)


def vpad(x: Tensor, p: float | Tensor, keep: Tensor | None = None, stop_gradient: bool = False) -> Tensor:
    """Variance-preserving affine dropout: `z = alpha b x + beta` (LG sec. 4).

    Over the mask and the channels `E[z] = mean(x)` and `Var[z] = var(x)` for every token.

    Args:
        x: (..., d) activations, the norm's output.
        p: drop probability in [0, 1).
        keep: bool mask shaped like `x`, True where kept; drawn when None.
        stop_gradient: treat alpha and beta as constants in the backward pass.

    Returns:
        (..., d) in the dtype of `x`; statistics in fp32.

    Raises:
        ValueError: `p` is outside [0, 1).
    """
    _check_rate(p)
    if not isinstance(p, Tensor) and p == 0.0:
        return x
    return _Vpad.apply(x, p, stop_gradient, _draw_keep(x, p) if keep is None else keep)[0]


def vpad_each(x: Tensor, p: float | Tensor, n: int, stop_gradient: bool = False) -> tuple[Tensor, ...]:
    """`vpad` of `x` under `n` masks of their own, whose statistics are taken once. Arguments as `vpad`'s."""
    _check_rate(p)
    if not isinstance(p, Tensor) and p == 0.0:
        return (x,) * n
    return _Vpad.apply(x, p, stop_gradient, *(_draw_keep(x, p) for _ in range(n)))

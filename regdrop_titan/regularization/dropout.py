"""Dropout of activations: inverted dropout and VPAD (LG secs 3-4). Where they stand: `models/block.py`.

Both are identities that draw no random number at `p = 0`. A rate that follows a schedule is a 0-d fp32 tensor, since a
float that changes would recompile at every step; it is not checked, and at 0 it gives the identity too.

Both draw from torch's default generator, which the trainer re-seeds before every forward (`trainer.py`), so that a mask
is a function of seed, step, micro-batch and rank.
"""

import torch
from torch import Tensor

# Below this variance a token counts as constant. The bound keeps every intermediate of alpha's gradient
# finite in fp32; a normalised token is far above it, an all-zero or constant one at or near 0.
_MIN_VARIANCE = 1e-30


def _check_rate(p: float | Tensor) -> None:
    if not isinstance(p, Tensor) and not 0.0 <= p < 1.0:
        raise ValueError(f"drop probability p must be in [0, 1), got {p}")


def _draw_keep(x: Tensor, p: float | Tensor) -> Tensor:
    """An independent keep mask for every sequence, token and channel: bool, shaped like `x`, P(True) = 1-p."""
    # twice as fast on CPU as bernoulli_, and exact to the 2^-24 spacing of rand's values
    return torch.rand(x.shape, dtype=torch.float32, device=x.device) >= p


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
    var, mu = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), -1, correction=0, keepdim=True)
    varies = var > _MIN_VARIANCE
    # The masked value 1 keeps sqrt and its gradient away from 0/0 and 1/0 in constant tokens.
    safe_var = torch.where(varies, var, 1.0)
    alpha = torch.sqrt(safe_var / ((1.0 - p) * (safe_var + p * mu.square())))
    alpha = torch.where(varies, alpha, 0.0)
    beta = mu * (1.0 - alpha * (1.0 - p))
    return alpha, beta


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
    if keep is None:
        keep = _draw_keep(x, p)
    alpha, beta = vpad_coefficients(x.detach() if stop_gradient else x, p)
    return torch.addcmul(beta, alpha, (x * keep).to(alpha.dtype)).to(x.dtype)

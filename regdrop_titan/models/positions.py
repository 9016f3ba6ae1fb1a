"""Positions: NAPE and ALiBi slopes, the additive attention bias, causal masks, rotary tables (spec: LG sec. 5).

Everything here depends only on lengths and slopes, so it is built once a length and kept (`lru_cache`); the
caches are keyed by length, window, slopes and device.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

SLOPE_KINDS = ("inverse", "exp2", "press")

# Keys that a query sees, its own included: of all heads, or of each. None: all of them
Window = int | tuple[int | None, ...] | None


def _press_slopes(n: int) -> list[float]:
    """Press et al.'s rule: `2^(-8h/n)` for a power of two `n`; else the slopes of the power of two below,
    then every second slope of the power of two above, as their released code does."""
    if math.log2(n).is_integer():
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]
    below = 2 ** math.floor(math.log2(n))
    return _press_slopes(below) + _press_slopes(2 * below)[0::2][: n - below]


def _alibi(n_heads: int, kind: str) -> list[float]:
    if kind not in SLOPE_KINDS:
        raise ValueError(f"slopes must be one of {', '.join(SLOPE_KINDS)}, got {kind!r}")
    if kind == "press":
        return _press_slopes(n_heads)
    return [1.0 / h if kind == "inverse" else 2.0 ** -(h - 1) for h in range(1, n_heads + 1)]


def _nape(n_heads: int, kind: str) -> list[float]:
    if n_heads < 2 or n_heads % 2:
        raise ValueError(f"NAPE needs an even number of heads (half ALiBi, half NoPE), got {n_heads}")
    return _alibi(n_heads // 2, kind) + [0.0] * (n_heads // 2)


def alibi_slopes(n_heads: int, kind: str = "press") -> Tensor:
    """ALiBi slopes of `n_heads` heads, all of them positional: (n_heads,) fp32.

    `kind`: "inverse" `1/h`, "exp2" `2^-(h-1)`, "press" Press et al., with `h = 1 ... n_heads`.
    """
    return torch.tensor(_alibi(n_heads, kind), dtype=torch.float32)


def nape_slopes(n_heads: int, kind: str = "inverse") -> Tensor:
    """NAPE slopes: ALiBi in the first half of the heads, none in the second (LG sec. 5).

    Args:
        n_heads: number of query heads `H`, even.
        kind: "inverse" `1/h` (the authors' released code), "exp2" `2^-(h-1)`, "press" (over H/2 heads).

    Returns:
        (H,) fp32, by global query head; the second half is 0.

    Raises:
        ValueError: `n_heads` is odd or not positive, or `kind` is unknown.
    """
    return torch.tensor(_nape(n_heads, kind), dtype=torch.float32)


def head_slopes(position: str, slopes: str, n_heads: int) -> tuple[float, ...] | None:
    """The slopes of all query heads of a position kind, None for kinds without a bias (`rope`, `nope`).

    Plain floats: a module that keeps them needs no buffer, which meta init and mixed precision would touch.
    """
    if position == "nape":
        return tuple(_nape(n_heads, slopes))
    if position == "alibi":
        return tuple(_alibi(n_heads, slopes))
    return None


@functools.lru_cache(maxsize=8)
def slope_tensor(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """(H,) fp32 on `device`."""
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def head_window(slope: float, cutoff: float, window: int | None, length: int | None = None) -> int | None:
    """What a head sees: a key at distance d iff `slope d <= cutoff`, and the sliding `window` holds it.

    Args:
        slope: 0 of heads without a bias.
        cutoff: nats, 0: no cut.
        window: the sliding window, None without.
        length: of the sequence; a window that holds all of it is none, so that it changes nothing bit for bit.
    """
    limits = [] if window is None else [window]
    if cutoff > 0 and slope > 0:
        limits.append(math.floor(cutoff / slope) + 1)
    keys = min(limits, default=None)
    return None if keys is None or (length is not None and keys >= length) else keys


def head_windows(
    slopes: tuple[float, ...] | None, cutoff: float, window: int | None, length: int | None = None
) -> Window:
    """What each of the heads sees, or all of them alike; `slopes` None: of kinds without a bias."""
    windows = [head_window(slope, cutoff, window, length) for slope in slopes or (0.0,)]
    return windows[0] if len(set(windows)) == 1 else tuple(windows)


@functools.lru_cache(maxsize=32)
def _limits(window: Window, device: torch.device) -> int | Tensor | None:
    """`window`, that of each head as (H,) int64."""
    if not isinstance(window, tuple):
        return window
    return torch.tensor([2**62 if keys is None else keys for keys in window], device=device)


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): rotary positions for `factor` times the context they were trained on."""

    factor: float  # s, at least 1
    original_context: int  # tokens

    BETA_FAST: ClassVar = 32.0  # turns over the original context from which on a channel is left alone
    BETA_SLOW: ClassVar = 1.0  # below so many it is interpolated

    @property
    def temperature(self) -> float:
        """`0.1 ln(s) + 1`, of cos and sin, so that its square multiplies the scores."""
        return 0.1 * math.log(self.factor) + 1.0


def rotary_frequencies(head_dim: int, theta: float, yarn: Yarn | None, device: torch.device) -> Tensor:
    """Radians a token of each pair of channels c, `theta^(-2c/head_dim)`: (head_dim/2,) fp64.

    With YaRN's NTK-by-parts they are divided by the factor, less so the more turns a pair makes over the original
    context: a ramp over the channels between those of 1 and of 32 turns, its ends rounded outwards to whole channels,
    as in the authors' code.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    if yarn is None:
        return frequencies

    def channel(turns: float) -> float:
        return head_dim * math.log(yarn.original_context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(channel(yarn.BETA_FAST)), 0), min(math.ceil(channel(yarn.BETA_SLOW)), head_dim - 1)
    channels = torch.arange(head_dim // 2, device=device, dtype=torch.float64)
    interpolated = ((channels - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - interpolated + interpolated / yarn.factor)


@functools.lru_cache(maxsize=8)
def rotary_table(
    seq_len: int, head_dim: int, theta: float, device: torch.device, yarn: Yarn | None = None
) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each (S, head_dim) fp32, of the rotary angles `i theta^(-2c/head_dim)`, or YaRN's.

    Both halves of the channels have the same angles; sin is negative in the first half, so that
    `x cos + roll(x, head_dim/2) sin` is the rotation.
    """
    return rotary_at(torch.arange(seq_len, device=device), head_dim, theta, yarn)


def rotary_at(positions: Tensor, head_dim: int, theta: float, yarn: Yarn | None = None) -> tuple[Tensor, Tensor]:
    """The same at any positions (...), each (..., head_dim)."""
    angles = positions.double()[..., None] * rotary_frequencies(head_dim, theta, yarn, positions.device)
    temperature = 1.0 if yarn is None else yarn.temperature
    cos, sin = (angles.cos() * temperature).float(), (angles.sin() * temperature).float()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rotary embedding of x (B, S, H, head_dim) by tables ([B,] S, head_dim), computed in fp32, returned in
    x's dtype."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # ([B,] S, 1, head_dim)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def visible(distance: Tensor, limit: int | Tensor | None) -> Tensor:
    """Which keys a query sees by distance `i - j`: itself and the past, `limit` keys in all when set."""
    seen = distance >= 0
    return seen if limit is None else seen & (distance < limit)


def biased(slopes: tuple[float, ...] | None, window: Window, distance: Tensor) -> Tensor:
    """`-m_h d` at the distances (..., n, K) that head h sees, else -inf: (..., H, n, K) fp32, H = 1 without slopes.

    fp32: bf16 cannot hold distances past 256.
    """
    distance, limit = distance.unsqueeze(-3), _limits(window, distance.device)
    if isinstance(limit, Tensor):
        limit = limit[:, None, None]
    bias = -slope_tensor(slopes or (0.0,), distance.device)[:, None, None] * distance.float()
    return bias.masked_fill(~visible(distance, limit), -torch.inf)


@functools.lru_cache(maxsize=4)
def attention_bias(slopes: tuple[float, ...] | None, window: Window, seq_len: int, device: torch.device) -> Tensor:
    """The additive bias of the scaled scores: (1, H, S, S) fp32, H = 1 without slopes.

    `-m_h (i - j)` where query `i` sees key `j`, -inf elsewhere.
    """
    position = torch.arange(seq_len, device=device)
    return biased(slopes, window, position[:, None] - position).unsqueeze(0)


def cached_bias(
    slopes: tuple[float, ...] | None, window: Window, queries: Tensor, keys: Tensor, same_document: Tensor | None
) -> Tensor:
    """The same for queries at positions (B, n) and keys at positions (B, K), -1 where there is none: (B, 1 or H, n, K)
    fp32. `same_document` (B, n, K) hides the keys of others."""
    hidden = (keys < 0)[:, None, :]
    if same_document is not None:
        hidden = hidden | ~same_document
    bias = biased(slopes, window, queries[:, :, None] - keys[:, None, :])
    return bias.masked_fill(hidden[:, None], -torch.inf)


def document_ids(tokens: Tensor, eos_id: int) -> Tensor:
    """The document each token belongs to: (B, S) int32, counted from 0; end-of-text closes its document."""
    ends = (tokens == eos_id).int()
    return ends.cumsum(dim=1, dtype=torch.int32) - ends


def _mask_mod(window: Window, device: torch.device, documents: Tensor | None = None):
    limits = _limits(window, device)

    def mod(b, h, i, j):
        seen = visible(i - j, limits[h] if isinstance(limits, Tensor) else limits)
        return seen if documents is None else seen & (documents[b, i] == documents[b, j])

    return mod


def _block_mask(window: Window, seq_len: int, device: torch.device, documents: Tensor | None = None) -> BlockMask:
    """Where heads have windows of their own, it is made for one window at a time: torch makes it from a mask of
    (S, S), which for all heads at once would be large."""
    batch = None if documents is None else len(documents)

    def of(keys: int | None) -> BlockMask:
        mod = _mask_mod(keys, device, documents)
        return create_block_mask(mod, B=batch, H=None, Q_LEN=seq_len, KV_LEN=seq_len, device=device)

    if not isinstance(window, tuple):
        return of(window)
    made = {keys: of(keys) for keys in set(window)}
    heads = [made[keys] for keys in window]
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices = (
        torch.cat([getattr(mask, name) for mask in heads], dim=1)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    )
    return BlockMask.from_kv_blocks(
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        BLOCK_SIZE=heads[0].BLOCK_SIZE,
        mask_mod=_mask_mod(window, device, documents),
        seq_lengths=heads[0].seq_lengths,
    )


@functools.lru_cache(maxsize=8)
def causal_block_mask(window: Window, seq_len: int, device: torch.device) -> BlockMask:
    """FlexAttention's block mask of the causal (and windowed) pattern, for any batch, and for any head count where the
    heads do not have windows of their own."""
    return _block_mask(window, seq_len, device)


def document_block_mask(documents: Tensor, window: Window) -> BlockMask:
    """As `causal_block_mask`, keys of other documents hidden too; documents (B, S)."""
    return _block_mask(window, documents.shape[1], documents.device, documents)


def select_block_mask(mask: BlockMask, rows: Tensor, documents: Tensor, window: Window) -> BlockMask:
    """The block mask of some sequences of a batch; `documents` are theirs already.

    A mask made for B sequences and used with fewer is silently wrong: both its blocks and the batch index of its
    mask function have to follow.
    """

    number, indices = mask.full_kv_num_blocks, mask.full_kv_indices
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks.index_select(0, rows),
        mask.kv_indices.index_select(0, rows),
        None if number is None else number.index_select(0, rows),
        None if indices is None else indices.index_select(0, rows),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=_mask_mod(window, documents.device, documents),
        seq_lengths=mask.seq_lengths,
    )

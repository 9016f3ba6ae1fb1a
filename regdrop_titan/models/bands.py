"""Causal attention of heads that see only the nearest keys, in blocks of queries.

Queries of block i, `[i b, (i+1) b)`, see no keys but `[i b - lead, (i+1) b)`. These are K = lead + b for each block, so
that all blocks together are one batch of a plain attention of b queries and K keys: time and memory grow with S K, not
with S^2. The bias of a pair depends on its place in the block alone, so that all blocks share one; documents make it
differ. The first blocks, of which some keys would lie before the sequence, see what there is.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..opaque import opaque, replaced
from .positions import Window, biased

BLOCK = 128  # queries of a block, at least; 64 and 256 are no faster
MAX_FIRST = 8  # blocks before the one from which on all keys lie in the sequence: longer leads have longer blocks


def block_length(lead: int) -> int:
    return BLOCK * max(1, -(-lead // (BLOCK * MAX_FIRST)))


def fits(window: int, seq_len: int) -> bool:
    """Whether heads that see `window` keys are better computed in blocks: these have no more than half of the keys."""
    return window - 1 + block_length(window - 1) <= seq_len // 2


@opaque
class Band:
    """The bias of a pair of a block: query a, key c at distance `a + lead - c`."""

    bias: Tensor  # (1, 1, H, b, K) fp32, -inf where hidden; with documents (B, n, H, b, K)
    lead: int

    def of_rows(self, rows: Tensor) -> "Band":
        """The band of some sequences (n,) of a batch with documents."""
        return replaced(self, bias=self.bias.index_select(0, rows))


@functools.lru_cache(maxsize=8)
def _shared_bias(slopes: tuple[float, ...] | None, window: Window, lead: int, b: int, device: torch.device) -> Tensor:
    queries, keys = torch.arange(b, device=device), torch.arange(-lead, b, device=device)
    return biased(slopes, window, queries[:, None] - keys)[None, None]  # (1, 1, H, b, K)


def band(
    slopes: tuple[float, ...] | None, window: Window, most: int, device: torch.device, documents: Tensor | None
) -> Band:
    """The band of heads that see `window`, `most` keys at the most; documents (B, S) hides other documents' keys."""
    lead = most - 1
    b = block_length(lead)
    bias = _shared_bias(slopes, window, lead, b, device)
    if documents is not None:
        # what is not of the sequence is one document more, so that the queries behind its end have a key to see
        padded = F.pad(documents, (lead, -documents.shape[1] % b), value=-1)
        own = padded[:, lead:].unflatten(1, (-1, b))  # (B, n, b)
        other = own[..., None] != padded.unfold(1, lead + b, b)[:, :, None, :]  # (B, n, b, K)
        bias = bias.masked_fill(other[:, :, None], -torch.inf)
    return Band(bias, lead)


def banded_attention(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """softmax(scale q k^T + bias) v, all (B, H, S, head_dim), of sequences that the band `fits`."""
    B, H, S, D = q.shape
    lead, (b, K) = band.lead, band.bias.shape[-2:]
    n, first = -(-S // b), -(-lead // b)
    # autocast would cast the bias to bf16 too
    with torch.autocast(q.device.type, enabled=False):
        bias = band.bias.to(torch.promote_types(q.dtype, torch.float32))
        out = []
        for i in range(first):
            own = bias[:, i if bias.shape[1] > 1 else 0, :, :, lead - i * b :]
            keys = slice(0, (i + 1) * b)
            queries = q[:, :, i * b : (i + 1) * b]
            out.append(_attention(queries, k[:, :, keys], v[:, :, keys], own, scale, dropout_p))
        own = bias[:, first:] if bias.shape[1] > 1 else bias
        padding = (0, 0, 0, n * b - S)

        def in_blocks(t: Tensor, start: int, length: int) -> Tensor:
            """(B (n - first), H, length, D): the blocks of `t` from `start` on, `b` apart."""
            blocks = F.pad(t[:, :, start:], padding).unfold(2, length, b)  # (B, H, n - first, D, length)
            return blocks.permute(0, 2, 1, 4, 3).reshape(B * (n - first), H, length, D)

        start = first * b
        rest = _attention(
            in_blocks(q, start, b), in_blocks(k, start - lead, K), in_blocks(v, start - lead, K),
            own.flatten(0, 1), scale, dropout_p,
        )  # fmt: skip
        rest = rest.view(B, n - first, H, b, D).transpose(1, 2).reshape(B, H, (n - first) * b, D)
    return torch.cat([*out, rest], dim=2)[:, :, :S]


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None, dropout_p: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, dropout_p=dropout_p)

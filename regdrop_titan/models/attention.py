"""Causal self-attention with rotary, ALiBi, NAPE or no positions, windows, GQA and document masks.

One function, two engines chosen by device: SDPA with an fp32 bias on CPU, compiled FlexAttention with the ALiBi
score_mod and a block mask on CUDA. Plain causal attention (no bias, no mask) is SDPA on both.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .args import DecoderArgs
from .positions import (
    apply_rotary,
    attention_bias,
    causal_block_mask,
    document_block_mask,
    head_slopes,
    rotary_table,
    select_block_mask,
    slope_tensor,
)

# TorchTitan's FlexAttentionWrapper takes a score_mod and does not pass it on: ALiBi would silently vanish.
_compiled_flex_attention = torch.compile(flex_attention)


@dataclass(eq=False)
class AttentionContext:
    """What attention reads beside its input; built outside the compiled blocks, the same for equal layers.

    A plain object, not a tuple or dict: FSDP2's mixed precision casts every floating tensor that it finds in
    a module's arguments to bf16, and the bias must stay fp32.
    """

    rotary: tuple[Tensor, Tensor] | None = None  # cos, signed sin: (S, head_dim) fp32
    bias: Tensor | None = None  # (1 or B, 1 or H, S, S) fp32, -inf where hidden; None: plain causal (CPU)
    slopes: Tensor | None = None  # (H,) fp32 (CUDA)
    block_mask: BlockMask | None = None  # None: plain causal (CUDA)
    window: int | None = None
    documents: Tensor | None = None  # (B, S) where bias and block mask differ by sequence
    parameters: tuple[Tensor, ...] = ()  # none that the block does not hold itself

    def of_rows(self, rows: Tensor | None) -> "AttentionContext":
        """The context of some sequences of the batch: indices (n,), None for all of them."""
        if rows is None or self.documents is None:
            return self
        documents = self.documents.index_select(0, rows)
        kept = AttentionContext(self.rotary, slopes=self.slopes, window=self.window, documents=documents)
        if self.bias is not None:
            kept.bias = self.bias.index_select(0, rows)
        if self.block_mask is not None:
            kept.block_mask = select_block_mask(self.block_mask, rows, documents, self.window)
        return kept


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T + bias) v, with q (B, H, S, head_dim), k and v (B, H_kv, S, head_dim).

    `scale` None: 1/sqrt(head_dim).
    """
    if k.shape[1] != q.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if context.bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    # autocast would cast the bias to bf16 too
    with torch.autocast(q.device.type, enabled=False):
        bias = context.bias.to(torch.promote_types(q.dtype, torch.float32))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def flex_attention_with_slopes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
    scale: float | None = None,
    flex=_compiled_flex_attention,
) -> Tensor:
    """The same by FlexAttention; `flex` is the compiled or the eager function."""
    slopes = context.slopes

    def alibi(score, b, h, i, j):
        return score - slopes[h] * (i - j)

    return flex(
        q,
        k,
        v,
        score_mod=None if slopes is None else alibi,
        block_mask=context.block_mask,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


class Attention(nn.Module):
    """Multi-head attention. (B, S, d) -> (B, S, d)."""

    input_projections = ("wq", "wk", "wv")

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.position = args.position
        self.window = args.sliding_window
        self.rope_theta = args.rope_theta
        self.head_dim = args.dim // args.n_heads
        self.n_heads = args.n_heads  # of this rank, see shard_heads
        self.n_kv_heads = args.n_kv_heads
        self.scale = args.score_scale
        self.slopes = head_slopes(args.position, args.slopes, args.n_heads)
        self.wq = nn.Linear(args.dim, self.n_heads * self.head_dim, bias=args.bias)
        self.wk = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=args.bias)
        self.wv = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=args.bias)
        self.wo = nn.Linear(self.n_heads * self.head_dim, args.dim, bias=args.bias)

    def shard_heads(self, rank: int, size: int) -> None:
        """Keep the heads of tensor-parallel rank `rank` of `size`: counts, and the slopes of *its* heads."""
        self.n_heads //= size
        self.n_kv_heads //= size
        if self.slopes is not None:
            self.slopes = self.slopes[rank * self.n_heads : (rank + 1) * self.n_heads]

    def context(self, seq_len: int, device: torch.device, documents: Tensor | None) -> AttentionContext:
        """The context for full sequences of `seq_len` tokens; documents (B, S) hides other documents' keys."""
        context = AttentionContext(window=self.window, documents=documents)
        if self.position == "rope":
            context.rotary = rotary_table(seq_len, self.head_dim, self.rope_theta, device)
        if self.slopes is None and self.window is None and documents is None:
            return context  # plain causal
        if device.type == "cuda":
            context.slopes = None if self.slopes is None else slope_tensor(self.slopes, device)
            if documents is None:
                context.block_mask = causal_block_mask(self.window, seq_len, device)
            else:
                context.block_mask = document_block_mask(documents, self.window)
        else:
            context.bias = attention_bias(self.slopes, self.window, seq_len, device)
            if documents is not None:
                other = documents[:, None, :, None] != documents[:, None, None, :]  # (B, 1, S, S)
                context.bias = context.bias.masked_fill(other, -torch.inf)
        return context

    def forward(self, *inputs: Tensor, context: AttentionContext) -> Tensor:
        """One input (B, S, d) for all three projections, or one each for q, k, v (`mask = "per_linear"`)."""
        q_input, k_input, v_input = inputs if len(inputs) == 3 else inputs * 3
        B, S, _ = q_input.shape
        q = self.wq(q_input).view(B, S, self.n_heads, self.head_dim)
        k = self.wk(k_input).view(B, S, self.n_kv_heads, self.head_dim)
        v = self.wv(v_input).view(B, S, self.n_kv_heads, self.head_dim)
        if context.rotary is not None:
            q, k = apply_rotary(q, *context.rotary), apply_rotary(k, *context.rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, head_dim)
        if context.block_mask is not None:
            out = flex_attention_with_slopes(q, k, v, context, self.scale)
        else:
            out = sdpa_attention(q, k, v, context, self.scale)
        out = out.transpose(1, 2).reshape(B, S, self.n_heads * self.head_dim)
        return self.wo(out)

"""Causal self-attention with rotary, ALiBi, NAPE or no positions, windows, GQA and document masks.

One function, two engines chosen by device: SDPA with an fp32 bias on CPU, compiled FlexAttention with the ALiBi
score_mod and a block mask on CUDA. Plain causal attention (no bias, no mask) is SDPA on both.

With `alibi_cutoff` ALiBi heads see only near keys. FlexAttention's block mask leaves the others out. SDPA takes the
heads in groups: those with few keys in bands (`bands.py`), those without a slope plain causal, others with their bias;
and a cache keeps few keys of the first.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from entmax import entmax15
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..opaque import opaque, replaced
from .args import DecoderArgs
from .bands import Band, band, banded_attention, fits
from .cache import Cache, KeyValues, Place
from .positions import (
    Window,
    apply_rotary,
    attention_bias,
    cached_bias,
    causal_block_mask,
    document_block_mask,
    head_slopes,
    head_window,
    head_windows,
    rotary_at,
    rotary_table,
    select_block_mask,
    slope_tensor,
)
from .sharded import local

# TorchTitan's FlexAttentionWrapper takes a score_mod and does not pass it on: ALiBi would silently vanish.
_compiled_flex_attention = torch.compile(flex_attention)


@opaque
class AttentionContext:
    """What attention reads beside its input; built outside the compiled blocks, the same for equal layers."""

    rotary: tuple[Tensor, Tensor] | None = None  # cos, signed sin: (S, head_dim) fp32, with a cache ([B,] S, head_dim)
    bias: Tensor | None = None  # (1 or B, 1 or H, S, S or K) fp32, -inf where hidden; None: plain causal (CPU)
    band: Band | None = None  # in place of a bias
    groups: tuple["HeadGroup", ...] = ()  # where heads are computed apart; they have biases and bands, places and keys
    slopes: Tensor | None = None  # (H,) fp32 (CUDA)
    block_mask: BlockMask | None = None  # None: plain causal (CUDA)
    window: Window = None
    documents: Tensor | None = None  # (B, S) where bias and block mask differ by sequence
    log_n: Tensor | None = None  # ([B,] S) fp32, ln(i + 2), of layers that scale their queries
    scaled_heads: Tensor | None = None  # (H,) bool; None: all
    parameters: tuple[Tensor, ...] = ()  # none that the block does not hold itself
    kept: KeyValues | None = None  # of this layer, of the tokens before; takes up those of the input
    place: Place | None = None  # of the input in the cache
    stores: tuple["HeadGroup", ...] = ()  # where the input's keys and values are kept, and not read again now

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v (B, H_kv, n, head_dim); returns all that a query may see."""
        assert self.kept is not None and self.place is not None
        return self.kept.store(k, v, self.place)

    def of_rows(self, rows: Tensor | None) -> "AttentionContext":
        """The context of some sequences of the batch: indices (n,), None for all of them."""
        if rows is None or self.documents is None:
            return self
        documents = self.documents.index_select(0, rows)
        kept = replaced(self, documents=documents, bias=None, block_mask=None)
        if self.bias is not None:
            kept.bias = self.bias.index_select(0, rows)
        if self.band is not None:
            kept.band = self.band.of_rows(rows)
        kept.groups = tuple([replaced(group, context=group.context.of_rows(rows)) for group in self.groups])
        if self.block_mask is not None:
            kept.block_mask = select_block_mask(self.block_mask, rows, documents, self.window)
        return kept


@opaque
class HeadGroup:
    """Heads that are computed together, and what they read."""

    heads: range  # query heads
    kv_heads: range
    window: int | None  # the most keys that one of them sees
    context: AttentionContext

    @property
    def of_q(self) -> slice:
        return slice(self.heads.start, self.heads.stop)

    @property
    def of_kv(self) -> slice:
        return slice(self.kv_heads.start, self.kv_heads.stop)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """softmax(scale q k^T + bias) v, with q (B, H, S, head_dim), k and v (B, H_kv, S, head_dim).

    `scale` None: 1/sqrt(head_dim). `dropout_p` of the weights are dropped, in evaluation too: it is the caller's.
    """
    k, v = _repeat_kv(q, k, v)
    if context.band is not None:
        return banded_attention(q, k, v, context.band, scale, dropout_p)
    if context.bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, dropout_p=dropout_p)
    # autocast would cast the bias to bf16 too
    with torch.autocast(q.device.type, enabled=False):
        bias = context.bias.to(torch.promote_types(q.dtype, torch.float32))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, dropout_p=dropout_p)


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


def entmax15_attention(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """The same with 1.5-entmax in place of softmax (Vasylenko et al., arXiv 2506.16640), by the `entmax` package's
    exact form, which sorts each query's scores: `p = [z/2 - tau]_+^2`."""
    k, v = _repeat_kv(q, k, v)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    bias = context.bias
    if bias is None:
        bias = attention_bias(None, None, q.shape[2], q.device)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale) + bias.to(scores.dtype)
    # finite, and out of reach: the largest score is the support's bound from above, tau lies within 2 below it
    scores = scores.clamp_min(scores.detach().amax(-1, keepdim=True) - 100.0)
    weights = _entmax15(scores).to(v.dtype)
    return F.dropout(weights, dropout_p) @ v


# An operator of its own: torch.compile cannot trace the package's autograd function.
@torch.library.custom_op("regdrop_titan::entmax15", mutates_args=())
def _entmax15(scores: Tensor) -> Tensor:
    return entmax15(scores, dim=-1)


@_entmax15.register_fake
def _(scores):
    return torch.empty_like(scores)


def _save_weights(ctx, inputs, output):
    ctx.save_for_backward(output)


def _entmax15_backward(ctx, gradient):
    """The Jacobian is `diag(s) - s s^T / sum(s)` with `s = sqrt(p)` (Peters et al., arXiv 1905.05702)."""
    (weights,) = ctx.saved_tensors
    s = weights.sqrt()
    g = gradient * s
    return g - g.sum(-1, keepdim=True) / s.sum(-1, keepdim=True) * s


_entmax15.register_autograd(_entmax15_backward, setup_context=_save_weights)


def _repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of every query head."""
    if k.shape[1] == q.shape[1]:
        return k, v
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


class QueryScaling(nn.Module):
    """The factor of each query, by position and head (spec sec. 3): (B, S, d) -> (B, S, H) fp32.

    "adaptive" (S x): `delta + beta (ln n)^gamma`, `n = i + 2`, `beta = softplus(W_b x + b_b)`, `gamma = 2 tanh(W_g x +
    b_g)`, delta = 1. "ssmax": `s ln n`, s one number a head.

    With `scaling_init = "identity"` all starts at zero and delta is `1 - softplus(0)` (chosen), so that the factor is 1
    bit for bit and its gradients live; a beta of zero would be the end of softplus, where they do not.
    """

    RANGE = 2.0  # r of gamma

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.adaptive = args.scaling == "adaptive"
        if self.adaptive:
            self.beta = nn.Linear(args.dim, args.n_heads)
            self.gamma = nn.Linear(args.dim, args.n_heads)
        else:
            self.s = nn.Parameter(torch.empty(args.n_heads))
        self.identity = args.scaling_init == "identity"

    def forward(self, x: Tensor, log_n: Tensor) -> Tensor:
        log_n = log_n[..., None]  # ([B,] S, 1)
        if not self.adaptive:
            s = local(self.s)
            factor = s.to(torch.promote_types(s.dtype, torch.float32)) * log_n
            return factor if factor.dim() == 3 else factor.unsqueeze(0)
        beta, gamma = self.beta(x), self.gamma(x)  # (B, S, H)
        with torch.autocast(beta.device.type, enabled=False):
            wide = torch.promote_types(beta.dtype, torch.float32)
            beta, gamma = F.softplus(beta.to(wide)), self.RANGE * torch.tanh(gamma.to(wide))
            delta = 1 - F.softplus(beta.new_zeros(())) if self.identity else 1.0
            return delta + beta * log_n**gamma


def uses_flex_attention(entmax: bool, attention_p: float, device_type: str) -> bool:
    """Whether layers with slopes, a window or documents do: on a GPU, but it has neither dropout nor entmax."""
    return device_type == "cuda" and not entmax and attention_p == 0


def engine(args: DecoderArgs, device_type: str) -> str:
    """What computes attention, in words."""
    entmax = args.attention == "entmax15"
    if entmax:
        return "1.5-entmax by sorting, which holds all scores"
    biased = args.position in ("alibi", "nape") or args.sliding_window is not None or args.document_mask
    if not biased:
        return "SDPA, plain causal"
    cut = args.alibi_cutoff > 0 and args.position in ("alibi", "nape")
    if uses_flex_attention(entmax, args.attention_p, device_type):
        plain = " (SDPA for heads without a slope)" if args.position == "nape" and args.sliding_window is None else ""
        return f"FlexAttention{plain}, ALiBi cut at {args.alibi_cutoff:g} nats" if cut else "FlexAttention"
    why = " (FlexAttention has no dropout)" if device_type == "cuda" else ""
    if cut:
        return f"SDPA by groups of heads, ALiBi cut at {args.alibi_cutoff:g} nats{why}"
    return f"SDPA with a bias of (heads, S, S){why}"


class Attention(nn.Module):
    """Multi-head attention. (B, S, d) -> (B, S, d). A layer of `kind` "nope" has neither positions nor a window."""

    input_projections = ("wq", "wk", "wv")

    def __init__(self, args: DecoderArgs, kind: str) -> None:
        super().__init__()
        self.position = "nope" if kind == "nope" else args.position
        self.window = None if kind == "nope" else args.sliding_window
        self.rope_theta = args.rope_theta
        self.yarn = args.yarn
        self.head_dim = args.dim // args.n_heads
        self.n_heads = args.n_heads  # of this rank, see shard_heads
        self.n_kv_heads = args.n_kv_heads
        self.scale = args.score_scale
        self.entmax = args.attention == "entmax15"
        self.attention_p = args.attention_p
        self.slopes = head_slopes(self.position, args.slopes, args.n_heads)
        self.cutoff = args.alibi_cutoff
        self.wq = nn.Linear(args.dim, self.n_heads * self.head_dim, bias=args.bias)
        self.wk = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=args.bias)
        self.wv = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=args.bias)
        self.wo = nn.Linear(self.n_heads * self.head_dim, args.dim, bias=args.bias)
        self.scaling = QueryScaling(args) if args.scales_queries(kind) else None
        self.scaled_heads_only_nope = args.scaled_heads == "nope"

    def shard_heads(self, rank: int, size: int) -> None:
        """Keep the heads of tensor-parallel rank `rank` of `size`: counts, and the slopes of *its* heads."""
        self.n_heads //= size
        self.n_kv_heads //= size
        if self.slopes is not None:
            self.slopes = self.slopes[rank * self.n_heads : (rank + 1) * self.n_heads]

    def context(self, seq_len: int, device: torch.device, documents: Tensor | None) -> AttentionContext:
        """The context for full sequences of `seq_len` tokens; documents (B, S) hides other documents' keys."""
        window = head_windows(self.slopes, self.cutoff, self.window, seq_len)
        context = AttentionContext(window=window, documents=documents)
        if self.position == "rope":
            context.rotary = rotary_table(seq_len, self.head_dim, self.rope_theta, device, self.yarn)
        if self.scaling is not None:
            context.log_n = torch.arange(2, seq_len + 2, device=device, dtype=torch.float32).log()
            if self.slopes is not None and self.scaled_heads_only_nope:
                context.scaled_heads = slope_tensor(self.slopes, device) == 0
        if self.slopes is None and window is None and documents is None:
            return context  # plain causal
        flex = uses_flex_attention(self.entmax, self.attention_p, device.type)
        if self.slopes is not None and self.cutoff > 0 and not self.entmax:  # entmax sorts whole rows of scores
            context.groups = tuple(self._groups(seq_len, device, documents, flex))
        elif flex:
            self._use_flex_attention(context, self.slopes, seq_len, device)
        else:
            context.bias = self._bias(self.slopes, window, seq_len, device, documents)
        return context

    @staticmethod
    def _use_flex_attention(
        context: AttentionContext, slopes: tuple[float, ...] | None, seq_len: int, device: torch.device
    ) -> None:
        """Give `context`, which has its window and documents, what FlexAttention reads."""
        context.slopes = None if slopes is None else slope_tensor(slopes, device)
        if context.documents is None:
            context.block_mask = causal_block_mask(context.window, seq_len, device)
        else:
            context.block_mask = document_block_mask(context.documents, context.window)

    def _bias(
        self,
        slopes: tuple[float, ...] | None,
        window: Window,
        seq_len: int,
        device: torch.device,
        documents: Tensor | None,
    ) -> Tensor:
        bias = attention_bias(slopes, window, seq_len, device)
        if documents is None:
            return bias
        other = documents[:, None, :, None] != documents[:, None, None, :]  # (B, 1, S, S)
        return bias.masked_fill(other, -torch.inf)

    def _runs(self, length: int | None, kind: Callable[[int | None, bool], Any]) -> Iterator[HeadGroup]:
        """Neighbouring heads of one kind in what they see of `length` tokens (None: of any number), with empty
        contexts. All query heads of a key head go together.

        `kind` tells it by the most keys that one of them sees, and whether one has a slope.
        """
        assert self.slopes is not None
        queries = self.n_heads // self.n_kv_heads
        # the smallest slope sees most
        slopes = [min(self.slopes[first : first + queries]) for first in range(0, self.n_heads, queries)]
        sloped = [any(self.slopes[first : first + queries]) for first in range(0, self.n_heads, queries)]
        most = [head_window(slope, self.cutoff, self.window, length) for slope in slopes]
        for _, same in itertools.groupby(range(self.n_kv_heads), lambda head: kind(most[head], sloped[head])):
            members = list(same)
            kv_heads = range(members[0], members[-1] + 1)
            window = head_window(min(slopes[head] for head in members), self.cutoff, self.window, length)
            heads = range(kv_heads.start * queries, kv_heads.stop * queries)
            yield HeadGroup(heads, kv_heads, window, AttentionContext())

    def _seen(self, heads: range, length: int | None) -> tuple[tuple[float, ...] | None, Window]:
        """The slopes of some heads, None where they have none, and what they see of `length` tokens."""
        assert self.slopes is not None
        slopes = self.slopes[heads.start : heads.stop]
        return slopes if any(slopes) else None, head_windows(slopes, self.cutoff, self.window, length)

    def _groups(self, seq_len: int, device: torch.device, documents: Tensor | None, flex: bool) -> Iterator[HeadGroup]:
        """The heads for full sequences: those without a slope, which need no bias, and others; with SDPA those in bands
        apart."""

        def kind(most: int | None, sloped: bool) -> str | bool:
            return "band" if not flex and most and fits(most, seq_len) else sloped

        for group in self._runs(seq_len, kind):
            slopes, window = self._seen(group.heads, seq_len)
            context = group.context
            context.documents, context.window = documents, window
            if slopes is None and window is None and documents is None:
                pass  # plain causal
            elif flex:
                self._use_flex_attention(context, slopes, seq_len, device)
            elif group.window is not None and fits(group.window, seq_len):
                context.band = band(slopes, window, group.window, device, documents)
            else:
                context.bias = self._bias(slopes, window, seq_len, device, documents)
            yield group

    def cached_context(self, cache: Cache) -> AttentionContext:
        """The context for the forward that `cache` has begun.

        With nothing before it, that of full sequences, else with a bias, on SDPA.
        """
        reading = cache.reading
        assert reading is not None
        groups = self._cached_groups(cache)
        if reading.first:
            context = self.context(reading.positions.shape[1], reading.positions.device, reading.documents)
            whole = HeadGroup(range(self.n_heads), range(self.n_kv_heads), self.window, AttentionContext())
            context.stores = tuple(groups or [whole])
            for group in context.stores:
                group.context.place = cache.place(group.window)
            return context
        context = AttentionContext()
        if self.position == "rope":
            context.rotary = rotary_at(reading.positions, self.head_dim, self.rope_theta, self.yarn)
        if self.scaling is not None:
            context.log_n = (reading.positions + 2).float().log()
            if self.slopes is not None and self.scaled_heads_only_nope:
                context.scaled_heads = slope_tensor(self.slopes, reading.positions.device) == 0
        if not groups:
            window = head_windows(self.slopes, self.cutoff, self.window)
            self._read_from(context, cache, self.window, self.slopes, window)
        for group in groups:
            self._read_from(group.context, cache, group.window, *self._seen(group.heads, None))
        context.groups = tuple(groups)
        return context

    def _cached_groups(self, cache: Cache) -> list[HeadGroup]:
        """Those heads apart that see at most half of what a sequence may have; empty where there are none."""
        if self.slopes is None or self.cutoff == 0:
            return []

        def is_local(most: int | None, sloped: bool = True) -> bool:
            return most is not None and most <= cache.max_length // 2

        groups = list(self._runs(None, is_local))
        return groups if any(is_local(group.window) for group in groups) else []

    @staticmethod
    def _read_from(
        context: AttentionContext,
        cache: Cache,
        kept_window: int | None,
        slopes: tuple[float, ...] | None,
        window: Window,
    ) -> None:
        """Give `context` its place in the last `kept_window` keys, which `cache` keeps, and their bias."""
        place, reading = cache.place(kept_window), cache.reading
        assert reading is not None
        same = None
        if reading.documents is not None:
            same = reading.documents[:, :, None] == place.documents[:, None, :]
        context.place = place
        context.bias = cached_bias(slopes, window, reading.positions, place.positions, same)

    def own_context(self, shared: AttentionContext, layer: str, cache: Cache | None) -> AttentionContext:
        """`shared`, with what `cache` keeps of this layer."""
        if cache is None:
            return shared

        def with_kept(context: AttentionContext, heads: range, window: int | None) -> AttentionContext:
            kept = cache.keys_values(layer, heads, window, self.head_dim, self.wk.weight)
            return replaced(context, kept=kept)

        def of_layer(groups: Iterable[HeadGroup]) -> tuple[HeadGroup, ...]:
            return tuple(
                [replaced(group, context=with_kept(group.context, group.kv_heads, group.window)) for group in groups]
            )

        if shared.stores:
            return replaced(shared, stores=of_layer(shared.stores))
        if shared.groups:
            return replaced(shared, groups=of_layer(shared.groups))
        return with_kept(shared, range(self.n_kv_heads), self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """q (B, H, S, head_dim), k and v (B, H_kv, S, head_dim) -> (B, H, S, head_dim)."""
        for group in context.stores:
            group.context.store(k[:, group.of_kv], v[:, group.of_kv])
        if context.groups:
            parts = [
                self.attend(q[:, group.of_q], k[:, group.of_kv], v[:, group.of_kv], group.context)
                for group in context.groups
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if context.kept is not None:
            k, v = context.store(k, v)
        dropout_p = self.attention_p if self.training else 0.0
        if self.entmax:
            return entmax15_attention(q, k, v, context, self.scale, dropout_p)
        if context.block_mask is not None:
            return flex_attention_with_slopes(q, k, v, context, self.scale)
        return sdpa_attention(q, k, v, context, self.scale, dropout_p)

    def forward(self, *inputs: Tensor, context: AttentionContext) -> Tensor:
        """One input (B, S, d) for all three projections, or one each for q, k, v (`mask = "per_linear"`)."""
        q_input, k_input, v_input = inputs if len(inputs) == 3 else inputs * 3
        B, S, _ = q_input.shape
        q = self.wq(q_input).view(B, S, self.n_heads, self.head_dim)
        k = self.wk(k_input).view(B, S, self.n_kv_heads, self.head_dim)
        v = self.wv(v_input).view(B, S, self.n_kv_heads, self.head_dim)
        if context.rotary is not None:
            q, k = apply_rotary(q, *context.rotary), apply_rotary(k, *context.rotary)
        if self.scaling is not None:
            factor = self.scaling(q_input, context.log_n)  # (B, S, H)
            if context.scaled_heads is not None:
                factor = torch.where(context.scaled_heads, factor, 1.0)
            q = (q * factor[..., None]).to(q.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, S, head_dim)
        out = self.attend(q, k, v, context)
        out = out.transpose(1, 2).reshape(B, S, self.n_heads * self.head_dim)
        return self.wo(out)

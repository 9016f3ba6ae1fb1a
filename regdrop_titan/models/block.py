"""A block is one or two residual sublayers, and a residual sublayer is where every dropout placement stands.

Layer dropout acts on the block (or on each sublayer) from outside: it chooses the rows that go in.
"""

import torch
from torch import Tensor, nn

from ..regularization.dropout import inverted_dropout, vpad_each
from ..regularization.layer_dropout import Kept, scaled, skip
from .args import DecoderArgs
from .attention import Attention, AttentionContext
from .cache import Cache
from .feed_forward import FeedForward
from .mamba2 import Mamba2, MambaContext, Passed
from .norm import build_norm

Context = AttentionContext | MambaContext

SUBLAYERS = ("attention", "feed_forward")  # of a layer with two


class Residual(nn.Module):
    """The update `inner(norm(x))` of a residual sublayer, with dropout at the place named by `placement`
    (LG secs 3-4). The block adds it to `x`.

    In evaluation, and at `p = 0`, every placement is bit for bit the dense sublayer and draws nothing.
    """

    inner: Attention | FeedForward | Mamba2
    rate: Tensor

    def __init__(self, args: DecoderArgs, inner: Attention | FeedForward | Mamba2) -> None:
        super().__init__()
        self.norm = build_norm(args)
        self.inner = inner
        self.multiplier = 1 / args.depth_multiplier  # CompleteP's m_L^-1, in training and evaluation
        self.placement = args.placement
        self.p = args.p
        self.scheduled = args.dropout_schedule != "constant"
        if self.scheduled:  # the trainer sets it at every step; a changing float would recompile each time
            self.register_buffer("rate", torch.tensor(args.p, dtype=torch.float32), persistent=False)
        self.stop_gradient = args.vpad_stop_gradient
        # mask = "per_linear": an independent mask for each projection that reads the norm's output
        self.n_masks = len(inner.input_projections) if args.mask == "per_linear" else 1

    def forward(self, x: Tensor, **context) -> Tensor:  # (B, S, d) -> (B, S, d)
        update = self.update(x, **context)
        return update if self.multiplier == 1.0 else update * self.multiplier

    def update(self, x: Tensor, **context) -> Tensor:
        h = self.norm(x)
        p: float | Tensor = self.rate if self.scheduled else self.p
        match self.placement if self.training and self.p > 0.0 else "none":
            case "none":
                return self.inner(h, **context)
            case "pre_norm":
                return inverted_dropout(self.inner(h, **context), p)
            case "pre_linear":
                return self.inner(*(inverted_dropout(h, p) for _ in range(self.n_masks)), **context)
            case "vpad":
                return self.inner(*vpad_each(h, p, self.n_masks, self.stop_gradient), **context)
            case unknown:
                raise ValueError(f"unknown dropout placement {unknown!r}")


class Block(nn.Module):
    """One layer, and layer dropout around it: attention and feed-forward sublayers, or a single Mamba2 sublayer.
    (B, S, d) -> (B, S, d)."""

    def __init__(self, args: DecoderArgs, kind: str) -> None:
        super().__init__()
        self.is_mamba = kind == "mamba"
        if self.is_mamba:
            self.mamba = Residual(args, Mamba2(args))
        else:
            self.attention = Residual(args, Attention(args, kind))
            self.feed_forward = Residual(args, FeedForward(args))
        self.scale_whole_update = args.scale_placement == "block"

    @property
    def mixer(self) -> Residual:
        """The first sublayer, which looks at other tokens and reads the context."""
        return self.mamba if self.is_mamba else self.attention

    def context(self, seq_len: int, device: torch.device, documents: Tensor | None) -> Context:
        """What all layers of this kind read beside their input."""
        return self.mixer.inner.context(seq_len, device, documents)

    def cached_context(self, cache: Cache) -> Context:
        """The same for the forward that `cache` has begun."""
        return self.mixer.inner.cached_context(cache)

    def own_context(
        self, shared: Context, layer: str, passed: Passed | None = None, cache: Cache | None = None
    ) -> Context:
        """`shared`, with what this layer, called `layer`, reads outside of its block."""
        inner = self.mixer.inner
        if isinstance(shared, MambaContext):
            assert isinstance(inner, Mamba2)
            return inner.own_context(shared, layer, passed)
        assert isinstance(inner, Attention)
        return inner.own_context(shared, layer, cache)

    def forward(self, x: Tensor, context: Context, kept: tuple[Kept, ...] = (), sublayer: str | None = None) -> Tensor:
        """`kept`: nothing (dense), one for the whole block, or one each for attention and feed-forward (of which a
        Mamba2 layer reads the first). `sublayer`: one of SUBLAYERS alone, of all sequences. None: all."""
        if sublayer is not None:
            residual: Residual = getattr(self, sublayer)
            arguments = {"context": context} if residual is self.mixer else {}
            return x + scaled(residual(x, **arguments), kept[0].scale if kept else None)
        if not kept:
            x = x + self.mixer(x, context=context)
            return x if self.is_mamba else x + self.feed_forward(x)
        if len(kept) == 1 or self.is_mamba:
            return skip(
                lambda rows_of_x, rows: self.update(rows_of_x, context.of_rows(rows), kept[0].scale),
                x,
                kept[0],
                [*self.parameters(), *context.parameters],
            )
        for residual, own in zip((self.attention, self.feed_forward), kept, strict=True):

            def update(rows_of_x: Tensor, rows: Tensor | None, residual=residual, own=own) -> Tensor:
                arguments = {"context": context.of_rows(rows)} if residual is self.attention else {}
                return scaled(residual(rows_of_x, **arguments), own.scale)

            x = skip(update, x, own, residual.parameters())
        return x

    def update(self, x: Tensor, context: Context, scale: Tensor | None) -> Tensor:
        """What the block adds to `x`: `Z - X` and `X' - Z` of DD eq. 6, each scaled by r, or `r (X' - X)`."""
        inside = None if self.scale_whole_update else scale
        update = scaled(self.mixer(x, context=context), inside)
        if not self.is_mamba:
            update = update + scaled(self.feed_forward(x + update), inside)
        return scaled(update, scale) if self.scale_whole_update else update

"""The decoder: embedding, blocks, norm, head. Every model family is arguments of this one class."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchtitan.protocols.model import ModelProtocol

from ..regularization.layer_dropout import Kept, kept_rows
from .args import DecoderArgs
from .block import SUBLAYERS, Block, Context
from .cache import Cache
from .head import Head
from .initialization import initialize
from .mamba2 import Passed
from .norm import build_norm
from .positions import document_ids

Part = int | tuple[int, str]  # a layer, or one of its SUBLAYERS: (5, "attention")


class Decoder(ModelProtocol):
    """A decoder-only language model.

    Its children are those that TorchTitan's pipeline split expects (`tok_embeddings`, `layers`, `norm`,
    `output`); a pipeline stage has None for the ones it does not hold.
    """

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.args = args
        self.sequence_shards = 1  # tensor-parallel ranks that a sequence is split over between blocks
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): Block(args, kind) for i, kind in enumerate(args.layer_kinds)})
        self.norm = build_norm(args)
        self.output = Head(args.dim, args.vocab_size)
        self.tie_embeddings()

    def tie_embeddings(self) -> None:
        """Make the head read the embedding's own weight, where the flavor ties them."""
        if self.args.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw the initial weights from `args.seed`: the same for every parallel layout."""
        self.tie_embeddings()
        initialize(self, self.args)
        self.set_dropout_rate(self.args.p)  # meta-device initialisation leaves buffers without values

    @torch.no_grad()
    def set_dropout_rate(self, p: float) -> None:
        """Set the activation-dropout rate of every sublayer, where it follows a schedule."""
        for name, buffer in self.named_buffers():
            if name.endswith(".rate"):
                buffer.fill_(p)

    def keep_on_cpu(self) -> None:
        """Read `keep` before FSDP2 moves it to the GPU, where finding the kept rows would wait for the device.
        Call after `fully_shard`, so that this hook comes before its own."""

        def read(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if isinstance(kwargs.get("keep"), Tensor):
                kwargs["keep"] = self.check_keep(kwargs["keep"], len(args[0]))
            return args, kwargs

        self.register_forward_pre_hook(read, prepend=True, with_kwargs=True)

    def check_keep(self, keep: Tensor, B: int) -> tuple[tuple[int, ...], ...]:
        """The kept rows of each column of `keep`: (B, L), or (B, L, 2) for `unit = "sublayer"`."""
        L, sublayers = self.args.n_layers, self.args.unit == "sublayer"
        if keep.dtype != torch.bool or keep.shape[1:] != ((L, 2) if sublayers else (L,)):
            wanted = f"(B, {L}, 2)" if sublayers else f"(B, {L})"
            raise ValueError(f"keep must be bool of shape {wanted}, got {keep.dtype} of {tuple(keep.shape)}")
        if keep.device.type != "cpu":
            raise ValueError(f"keep must be on the CPU (reading it from {keep.device} would wait for the device)")
        if len(keep) != B:
            raise ValueError(f"keep has {len(keep)} rows, the batch {B}")
        return kept_rows(keep.flatten(1))

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        keep: Tensor | tuple[tuple[int, ...], ...] | None = None,
        scale: Sequence[float] | None = None,
        layers: Sequence[Part] | None = None,
        passed: Passed | None = None,
        cache: Cache | None = None,
        counts: Sequence[int] | None = None,
        at: Tensor | None = None,
        labels: Tensor | None = None,
        loss_pieces: int = 1,
    ) -> Tensor:
        """Logits of every position, or the loss.

        Args:
            tokens: (B, S) int64; on later pipeline stages the activations (B, S, d) of the stage before.
            documents: (B, S) int32, the document of each token, for `document_mask`; found from the tokens'
                end-of-text ids when None (a later pipeline stage must be given it).
            keep: which sequences each layer computes, bool on the CPU: (B, L), or (B, L, 2) for attention and
                feed-forward apart. None: all.
            scale: L Python floats, the factor r of each layer's update. None: 1, in evaluation `args.eval_scale`.
            layers: only these layers, in this order: `range(n)` exits early. In place of a layer, one of its sublayers:
                `(5, "attention")`. None: all.
            passed: the states that Mamba2 layers start from, and where they leave theirs. None: zeros.
            cache: of the tokens before these; takes these up. Of whole models in evaluation.
            counts: with a cache, how many of each row's tokens are real, the others being padding on its right; what is
                returned for those means nothing. None: all.
            at: (B, n) int64, the positions in `tokens` whose logits are wanted. None: all.
            labels: (B, S) int64, with `at` (B, n): the loss is wanted in place of logits. IGNORE_INDEX counts nothing.
            loss_pieces: of the tokens, at least 1, one after another, that the head and the loss take.

        Returns:
            (B, S, vocab_size), with `at` (B, n, vocab_size); with `labels` the cross-entropy summed over them, a
            scalar; activations (B, S, d) on a pipeline stage without the head.

        Raises:
            ValueError: `keep` of another shape, dtype or device, `scale` of another length, an unknown layer, or more
                tokens than the cache takes.
        """
        chosen = [int(name) for name in self.layers] if layers is None else list(layers)
        if unknown := [str(part) for part in chosen if not self.has(part)]:
            raise ValueError(f"no layer {', '.join(unknown)}: there are 0 ... {self.args.n_layers - 1}")
        if keep is not None and any(isinstance(part, tuple) for part in chosen):
            raise ValueError("keep drops sequences of whole layers: it cannot be with single sublayers")
        if cache is not None:
            cache.begin(tokens, counts, self.args.eos_id if self.args.document_mask else None)
            passed = Passed(cache.states)
        h, through = self.begin(tokens, documents, keep, scale, passed, cache)
        for part in chosen:
            h = through(part, h)
        if cache is not None and passed is not None:
            cache.states |= passed.final
        if at is not None:
            h = h.gather(1, at[..., None].expand(-1, -1, h.shape[2]))
        return self.head(h, labels, loss_pieces)

    def has(self, part: Part) -> bool:
        """Whether this stage has the layer, or a layer with that sublayer. A Mamba2 layer has none beside itself."""
        layer, sublayer = part if isinstance(part, tuple) else (part, None)
        if str(layer) not in self.layers:
            return False
        return sublayer is None or (sublayer in SUBLAYERS and not self.layers[str(layer)].is_mamba)

    def begin(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        keep: Tensor | tuple[tuple[int, ...], ...] | None = None,
        scale: Sequence[float] | None = None,
        passed: Passed | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Callable[[Part, Tensor], Tensor]]:
        """The residual stream (B, S, d) before the first layer, and `through(part, h)`, which takes it through one
        layer of this stage, or one sublayer. Arguments as `forward`'s, the cache having begun with these tokens.

        For evaluation, which looks at it between layers: hooks of the whole model, FSDP2's for one, act in `forward`.
        """
        if self.tok_embeddings is not None:
            seq_len = tokens.shape[1]
            if self.args.document_mask and documents is None:
                documents = document_ids(tokens, self.args.eos_id)
            h = self.tok_embeddings(tokens)
        else:
            h = tokens
            seq_len = h.shape[1] * self.sequence_shards
        device = h.device
        kept = self.kept(h, keep, scale if self.training or scale is not None else self.args.eval_scale)
        # one context for all layers of a kind, which are alike: with document masks it is as large as the batch
        contexts: dict[str, Context] = {}
        kinds = self.args.layer_kinds

        def through(part: Part, h: Tensor) -> Tensor:
            layer, sublayer = part if isinstance(part, tuple) else (part, None)
            name, kind = str(layer), kinds[layer]
            block = self.layers[name]
            if kind not in contexts:
                contexts[kind] = (
                    block.context(seq_len, device, documents) if cache is None else block.cached_context(cache)
                )
            own = block.own_context(contexts[kind], name, passed, cache)
            return block(h, own, kept[layer]) if sublayer is None else block(h, own, kept[layer], sublayer)

        return h, through

    def head(self, h: Tensor, labels: Tensor | None = None, loss_pieces: int = 1) -> Tensor:
        """Logits (B, S, vocab_size) of the residual stream `h` (B, S, d) after any layer: final norm and head; or the
        loss, as `forward` says. On a pipeline stage without them, `h`."""
        h = self.norm(h) if self.norm is not None else h
        if self.output is None:
            return h
        m_d = self.args.width_multiplier  # the logits are divided by it, here before they are many
        h = h if m_d == 1.0 else h / m_d
        # tensor parallel's hooks take the first argument for all that there is, and leave keywords alone
        return self.output(h) if labels is None else self.output(h, labels=labels, pieces=loss_pieces)

    def kept(self, h: Tensor, keep, scale: Sequence[float] | None) -> list[tuple[Kept, ...]]:
        """For every layer, what its block keeps of `h` (B, S, d) and by what its update is multiplied."""
        L = self.args.n_layers
        if keep is None and scale is None:
            return [()] * L
        width = 2 if self.args.unit == "sublayer" else 1
        if scale is not None and len(scale) != L:
            raise ValueError(f"scale must have one factor for each of the {L} layers, got {len(scale)}")
        # one transfer for all layers' rows, one for their scales
        dtype = torch.promote_types(h.dtype, torch.float32)
        scales = [None] * L if scale is None else list(sent(scale, dtype, h.device).unbind())
        B = h.shape[0]
        columns = [tuple(range(B))] * (L * width) if keep is None else keep
        if isinstance(columns, Tensor):
            columns = self.check_keep(columns, B)
        flat = sent([row for rows in columns for row in rows], torch.int64, h.device)
        found = []
        for column, rows in enumerate(flat.split([len(rows) for rows in columns])):
            own = Kept(scale=scales[column // width])
            if not self.args.skip_compute:
                own.keep = torch.zeros(B, dtype=torch.bool, device=h.device).index_fill(0, rows, True)
            elif len(rows) < B:
                # one graph for all counts above 1; a copy, since a view's offset would be one more reason to recompile
                own.rows = rows.clone()
                torch._dynamo.maybe_mark_dynamic(own.rows, 0)
            found.append(own)
        return [tuple(found[layer * width : (layer + 1) * width]) for layer in range(L)]


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` (n,) on the device, without waiting for it. A tensor that is made there, or copied from memory that is
    not pinned, may wait for all work that the device was given before, and leave it idle at every forward's start."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)

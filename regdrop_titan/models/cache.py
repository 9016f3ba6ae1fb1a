"""What a decoder keeps of the tokens that it has read, so that it reads only new ones: keys and values of attention
layers, states of Mamba2 layers.

Every sequence of the batch has its own length: there is no padding on the left, position i of each is its token i. Keys
and values lie in slots, position i in slot i mod C. Layers with a window of W keys have C = W + n slots, where n is the
most tokens that one forward reads: when a forward has written its own, the last W before each of them are still there.
Other layers have room for every position. Where heads of a layer have windows of their own, so it is with groups of
heads. A slot knows its position; a query sees those at its own position and before.

So nothing needs to be deleted: padding to the right of a sequence that has less to read than others is written to
positions that its next tokens write again before any query sees them. Mamba2 layers pass it over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .args import DecoderArgs
from .positions import document_ids

PIECE_BYTES = 2**28  # what the attention bias and the logits of one forward may take
MAX_PIECE = 1024  # tokens; more are no faster


def piece_length(args: DecoderArgs, batch: int, length: int) -> int:
    """Tokens that one forward may read of `batch` sequences that get `length` tokens long."""
    bias = 2 * 4 * args.n_heads * length * batch  # bytes a token, and a copy
    logits = 2 * 4 * batch * args.vocab_size
    return max(1, min(MAX_PIECE, length, PIECE_BYTES // (bias + logits)))


@dataclass
class Place:
    """Where the tokens of a forward go in the layers of one window, and what lies in the first K slots."""

    slots: Tensor  # (B or 1, n) int64
    positions: Tensor  # (B or 1, K) int64, -1 where empty
    documents: Tensor  # (B, K) int32
    rows: Tensor  # (B, 1) int64, 0 ... B-1


@dataclass(eq=False)
class KeyValues:
    """Keys and values of an attention layer, or of some of its heads, (B, H_kv, C, head_dim) each."""

    keys: Tensor
    values: Tensor

    def store(self, k: Tensor, v: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Keep k and v (B, H_kv, n, head_dim); returns those of the first K slots."""
        for kept, new in ((self.keys, k.to(self.keys.dtype)), (self.values, v.to(self.values.dtype))):
            if len(place.slots) == 1:  # the same for all rows
                kept.index_copy_(2, place.slots[0], new)
            else:
                kept[place.rows, :, place.slots] = new.transpose(1, 2)
        K = place.positions.shape[1]
        return self.keys[:, :, :K].to(k.dtype), self.values[:, :, :K].to(v.dtype)


@dataclass(eq=False)
class State:
    """What a Mamba2 layer hands on behind its last token, without gradient; tensors of this rank's heads."""

    conv_x: Tensor  # (B, width-1, d_in), the last inputs of the convolutions
    conv_bc: Tensor  # (B, width-1, 2 G N)
    scan: Tensor  # (B, H, P, N) fp32


@dataclass
class Slots:
    """Which position lies in each slot of the layers of one window, and of which document its token is."""

    positions: Tensor  # (B, C) int64, -1 where empty
    documents: Tensor  # (B, C) int32, 0 without document masks


@dataclass
class Reading:
    """The forward at hand: n tokens of each sequence, the first `counts` of which are real."""

    positions: Tensor  # (B or 1, n) int64: 1 where all sequences are equally long
    end: int  # above every position
    first: bool  # nothing was read before
    counts: Tensor | None  # (B,) int64; None: all n
    documents: Tensor | None = None  # (B, n) int32
    document_before: Tensor | None = None  # (B,) int32, of the token before


@dataclass(frozen=True)
class Mark:
    """Where a cache was: what has been read since can be taken back."""

    lengths: list[int]
    states: dict[str, State]
    document: Tensor | None
    next_document: Tensor | None


class Cache:
    """What B sequences of at most `max_length` tokens leave, read at most `chunk` tokens at a time.

    `lengths` are the tokens read of each.
    """

    def __init__(self, batch: int, max_length: int, chunk: int) -> None:
        if min(batch, max_length, chunk) < 1:
            raise ValueError(f"batch {batch}, max_length {max_length}, chunk {chunk}: each must be at least 1")
        self.batch, self.max_length, self.chunk = batch, max_length, chunk
        self.lengths = [0] * batch
        self.layers: dict[tuple[str, int], KeyValues] = {}  # by the layer and the first of the heads
        self.slots: dict[int | None, Slots] = {}  # by the window
        self.states: dict[str, State] = {}  # of Mamba2 layers
        self.document: Tensor | None = None  # (B,) int32, of the last token read
        self.next_document: Tensor | None = None  # (B,) int32
        self.reading: Reading | None = None

    def begin(self, tokens: Tensor, counts: Sequence[int] | None, eos_id: int | None) -> Reading:
        """Make ready for a forward over `tokens` (B, n), of each row the first `counts` (None: all). With `eos_id`,
        which ends documents, those are told apart.

        Raises ValueError where a sequence would get longer than `max_length`, or n is above `chunk`.
        """
        n, device = tokens.shape[1], tokens.device
        real = [n] * self.batch if counts is None else list(counts)
        if n > self.chunk:
            raise ValueError(f"{n} tokens at once: this cache takes {self.chunk}")
        if any(not 0 <= count <= n for count in real):
            raise ValueError(f"counts {real}: each must be in 0 ... {n}")
        longest = max(length + more for length, more in zip(self.lengths, real, strict=True))
        if longest > self.max_length:
            raise ValueError(f"a sequence of {longest} tokens: this cache has room for {self.max_length}")
        lengths = self.lengths if len(set(self.lengths)) > 1 else self.lengths[:1]
        reading = Reading(
            positions=torch.tensor(lengths, device=device)[:, None] + torch.arange(n, device=device),
            end=max(lengths) + n,
            first=not any(self.lengths),
            counts=torch.tensor(real, device=device) if min(real) < n else None,
        )
        if eos_id is not None:
            self._number_documents(reading, tokens, eos_id)
        self.lengths = [length + more for length, more in zip(self.lengths, real, strict=True)]
        self.reading = reading
        return reading

    def _number_documents(self, reading: Reading, tokens: Tensor, eos_id: int) -> None:
        if self.document is None or self.next_document is None:
            self.document = self.next_document = tokens.new_zeros(self.batch, dtype=torch.int32)
        reading.documents = document_ids(tokens, eos_id) + self.next_document[:, None]
        reading.document_before = self.document
        after = reading.documents + (tokens == eos_id).int()  # of the token behind each
        last = torch.full_like(self.document, tokens.shape[1]) if reading.counts is None else reading.counts
        at = (last.long() - 1).clamp(min=0)[:, None]
        self.document = torch.where(last > 0, reading.documents.gather(1, at)[:, 0], self.document)
        self.next_document = torch.where(last > 0, after.gather(1, at)[:, 0], self.next_document)

    def capacity(self, window: int | None) -> int:
        """C of layers with this window."""
        return min(self.max_length, window or self.max_length) + self.chunk

    def place(self, window: int | None) -> Place:
        """Note the tokens of the forward at hand in the slots of layers with this window."""
        reading = self.reading
        assert reading is not None
        C, device = self.capacity(window), reading.positions.device
        if window not in self.slots:
            empty = torch.full((self.batch, C), -1, device=device)
            self.slots[window] = Slots(empty, torch.zeros_like(empty, dtype=torch.int32))
        kept, slots = self.slots[window], reading.positions % C
        rows = torch.arange(self.batch, device=device)[:, None]
        kept.positions[rows, slots] = reading.positions
        if reading.documents is not None:
            kept.documents[rows, slots] = reading.documents
        K = min(C, reading.end)
        # where all are equally long, one row says it for all
        return Place(slots, kept.positions[: len(slots), :K], kept.documents[:, :K], rows)

    def keys_values(self, layer: str, heads: range, window: int | None, head_dim: int, like: Tensor) -> KeyValues:
        """What it keeps of a layer's key and value `heads`, made at the first call with the type and device of
        `like`."""
        key = layer, heads.start
        if key not in self.layers:
            shape = self.batch, len(heads), self.capacity(window), head_dim
            self.layers[key] = KeyValues(like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[key]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all sequences but these, in this order."""
        kept = list(rows)
        if kept == list(range(self.batch)):
            return
        self.batch, self.lengths = len(kept), [self.lengths[row] for row in kept]
        for layer in self.layers.values():
            layer.keys, layer.values = layer.keys[kept], layer.values[kept]
        for slots in self.slots.values():
            slots.positions, slots.documents = slots.positions[kept], slots.documents[kept]
        for name, state in self.states.items():
            self.states[name] = State(state.conv_x[kept], state.conv_bc[kept], state.scan[kept])
        if self.document is not None and self.next_document is not None:
            self.document, self.next_document = self.document[kept], self.next_document[kept]

    @property
    def has_states(self) -> bool:
        """Whether it holds more than positions: Mamba2 layers' states, or numbers of documents."""
        return bool(self.states) or self.document is not None

    def mark(self) -> Mark:
        return Mark(list(self.lengths), dict(self.states), self.document, self.next_document)

    def rewind(self, mark: Mark) -> None:
        """Take back all that was read since `mark`, which was made at most `chunk` tokens ago."""
        if any(not 0 <= now - then <= self.chunk for now, then in zip(self.lengths, mark.lengths, strict=True)):
            raise ValueError(
                f"from {self.lengths} back to {mark.lengths}: at most {self.chunk} tokens can be taken back"
            )
        self.lengths, self.states = list(mark.lengths), dict(mark.states)
        self.document, self.next_document = mark.document, mark.next_document

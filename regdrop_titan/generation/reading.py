"""Batches of sequences of different lengths through a decoder with a cache.

Sequences are padded on the right, where no layer reads the padding (`models/cache.py`): a sequence's results do not
depend on what is beside it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..models import Decoder
from ..models.cache import Cache, piece_length


def padded(sequences: Sequence[Tensor], device: torch.device) -> Tensor:
    """(B, longest) int64; zeros behind each."""
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(device)


def read(
    model: Decoder,
    tokens: Tensor,
    lengths: Sequence[int],
    cache: Cache,
    at: Tensor,
    layers: Sequence[int] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read `tokens` (B, S), of each row the first `lengths`, in pieces that `cache` takes.

    Yields for each piece the logits (B, m, vocab) at the positions `at` (B, m), and which of them are of this piece
    (B, m) bool; the others mean nothing.
    """
    for start in range(0, tokens.shape[1], cache.chunk):
        piece = tokens[:, start : start + cache.chunk]
        n = piece.shape[1]
        counts = [min(max(length - start, 0), n) for length in lengths]
        here = (at >= start) & (at < start + n)
        yield model(piece, layers=layers, cache=cache, counts=counts, at=(at - start).clamp(0, n - 1)), here


@torch.no_grad()
def logits_at(model: Decoder, sequences: Sequence[Tensor], at: Tensor, layers: Sequence[int] | None = None) -> Tensor:
    """The logits of sequences, each (n,) int64, at positions `at` (B, m) of each: (B, m, vocab) fp32."""
    device = next(model.parameters()).device
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    cache = Cache(len(sequences), longest, piece_length(model.args, len(sequences), longest))
    at = at.to(device)
    found = torch.zeros(*at.shape, model.args.vocab_size, device=device)
    for logits, here in read(model, padded(sequences, device), lengths, cache, at, layers):
        found = torch.where(here[..., None], logits.float(), found)
    return found

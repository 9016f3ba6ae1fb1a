"""The copying task: `$ s | s .`, a random string and its copy (LG; spec sec. 7).

Vocabulary, 30 ids: the letters a-z, `$`, `|`, `.` and padding. The loss counts on the answer alone: the letters after
`|` and the closing `.`.

Nothing is stored: example e is a function of (seed, e), so any sequence is found in O(1), on any rank, and a resumed
run goes on exactly. For that, how many examples a sequence holds must not depend on what was drawn before. So examples
come in pairs, of source lengths l and lo + hi - l with l uniform in lo ... hi (chosen): each length is uniform, and a
pair always has 2 (lo + hi) + 6 tokens. A sequence holds as many whole pairs as fit; none straddles two sequences.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from ..seeds import derive_seed
from .packed import DataError

LETTERS = 26  # ids 0 ... 25
START, SEPARATOR, END, PADDING = 26, 27, 28, 29  # $ | .
VOCAB_SIZE = 30

Stream = Literal["training", "held out", "evaluation"]  # each with keys of its own


def source(stream: Stream, seed: int, index: int, length: int) -> Tensor:
    """The letters of example `index`: (length,) int64 in 0 ... 25. A shorter source is the beginning of a longer one.

    Raw Philox output, which numpy keeps the same over versions; its distributions it may change.
    """
    philox = np.random.Philox(key=derive_seed("copying letters", stream, seed, index))
    return torch.from_numpy((philox.random_raw(length) % LETTERS).astype(np.int64))


def copy_example(sources: Tensor) -> Tensor:
    """`$ s | s .` of every source: (..., n) to (..., 2n + 3). The answer starts at n + 2."""
    start, separator, end = (sources.new_full((*sources.shape[:-1], 1), token) for token in (START, SEPARATOR, END))
    return torch.cat([start, sources, separator, sources, end], dim=-1)


class CopyingDataset:
    """Sequences of the copying task, without end: `dataset[j]` for any j >= 0.

    `dataset[j]` is `{"input": (S,), "labels": (S,)}`, int64, `labels` the input shifted by one, IGNORE_INDEX
    everywhere but on the answers. It holds the examples j k ... j k + k - 1, `k = examples_per_sequence`, then padding.

    Args:
        seq_len: S, at least one token short of a pair: the last token is only a label.
        lengths: (lo, hi), the shortest and the longest source.
        held_out: other examples than training's, for validation.

    Raises:
        DataError: lengths that are not 1 <= lo <= hi, or a `seq_len` too short for one pair.
    """

    def __init__(self, seq_len: int, *, seed: int, lengths: Sequence[int] = (50, 100), held_out: bool = False) -> None:
        if len(lengths) != 2 or not 1 <= lengths[0] <= lengths[1]:
            raise DataError(f"copying lengths {list(lengths)}: expected [lo, hi] with 1 <= lo <= hi")
        self.lo, self.hi = lengths
        pair_tokens = 2 * (self.lo + self.hi) + 6
        if seq_len + 1 < pair_tokens:
            raise DataError(
                f"seq_len {seq_len}: a pair of copying examples with sources of {self.lo} to {self.hi} letters has "
                f"{pair_tokens} tokens, seq_len must be at least {pair_tokens - 1}"
            )
        self.seq_len = seq_len
        self.seed = seed
        self.stream: Stream = "held out" if held_out else "training"
        self.examples_per_sequence = 2 * ((seq_len + 1) // pair_tokens)

    def source_length(self, index: int) -> int:
        """The number of letters of example `index`, in lo ... hi."""
        pair, second = divmod(index, 2)
        choices = self.hi - self.lo + 1
        length = self.lo + derive_seed("copying length", self.stream, self.seed, pair) % choices
        return self.lo + self.hi - length if second else length

    def __getitem__(self, j: int) -> dict[str, Tensor]:
        if j < 0:
            raise IndexError(f"sequence {j}: they are numbered from 0 and have no end")
        tokens = torch.full((self.seq_len + 1,), PADDING)  # (S+1,)
        labels = torch.full((self.seq_len + 1,), IGNORE_INDEX)
        at = 0
        for index in range(j * self.examples_per_sequence, (j + 1) * self.examples_per_sequence):
            n = self.source_length(index)
            example = copy_example(source(self.stream, self.seed, index, n))
            end = at + len(example)
            tokens[at:end] = example
            labels[at + n + 2 : end] = example[n + 2 :]
            at = end
        return {"input": tokens[:-1], "labels": labels[1:]}

"""Position loss: the mean cross-entropy at each token position over long documents (LG; spec sec. 7).

How well a model that was trained on short contexts uses long ones: its curve should go on falling, or at least stay
flat, past the training context.

Documents are read in pieces with a cache, so that memory grows with the length and not with its square.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import Decoder
from ..models.cache import Cache, piece_length


@dataclass
class PositionLoss:
    """`loss[i]` is the mean over `n_documents` documents of the cross-entropy of token i+1 given tokens 0 ... i, in
    nats; `average[i]` that of the last `window` positions, fewer at the start. Errors are standard errors over
    documents, NaN for one document: tokens of one document are not independent, documents are.
    """

    loss: Tensor  # (S,) fp64
    error: Tensor  # (S,) fp64
    average: Tensor  # (S,) fp64
    average_error: Tensor  # (S,) fp64
    window: int
    n_documents: int


class Mean:
    """The mean over documents, and its standard error, of values that come in batches."""

    def __init__(self, length: int) -> None:
        self.n = 0
        self.mean = torch.zeros(length, dtype=torch.float64)
        self.squares = torch.zeros(length, dtype=torch.float64)  # of deviations from the mean, summed

    def add(self, values: Tensor) -> None:  # (B, length)
        for row in values:
            self.n += 1
            deviation = row - self.mean
            self.mean += deviation / self.n
            self.squares += deviation * (row - self.mean)

    @property
    def error(self) -> Tensor:
        if self.n < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self.squares / (self.n - 1) / self.n).sqrt()


def moving_average(values: Tensor, window: int) -> Tensor:
    """Means over the last `window` values, fewer at the start: (..., S) -> (..., S)."""
    S = values.shape[-1]
    total = F.pad(values.cumsum(-1), (1, 0))
    end = torch.arange(1, S + 1)
    start = (end - window).clamp(min=0)
    return (total[..., end] - total[..., start]) / (end - start)


@torch.no_grad()
def position_loss(
    model: Decoder,
    documents: Iterable[Tensor],
    length: int,
    batch_size: int = 1,
    progress: Callable[[int], None] = lambda tokens: None,
    window: int = 512,
) -> PositionLoss:
    """The position loss of `model` (in evaluation mode, on its device) over `length` positions.

    Args:
        documents: token ids, each (>= length + 1,); the first `length + 1` are read.
        batch_size: documents read side by side.
        progress: called with the number of tokens read since the last call.
        window: positions of the moving average.

    Raises:
        ValueError: no documents, or one that is too short.
    """
    device = next(model.parameters()).device
    single, averaged = Mean(length), Mean(length)
    remaining = iter(documents)
    while chosen := list(islice(remaining, batch_size)):
        if (shortest := min(len(document) for document in chosen)) < length + 1:
            raise ValueError(f"a document has {shortest} tokens, {length} positions need {length + 1}")
        tokens = torch.stack([document[: length + 1] for document in chosen]).to(device)
        piece = piece_length(model.args, len(chosen), length)
        cache = Cache(len(chosen), length, piece)
        losses = []
        for start in range(0, length, piece):
            at = slice(start, min(start + piece, length))
            logits = model(tokens[:, at], cache=cache).float()  # (B, n, vocab)
            targets = tokens[:, at.start + 1 : at.stop + 1]
            losses.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").double().cpu())
            progress(targets.numel())
        loss = torch.cat(losses, dim=1)  # (B, length)
        single.add(loss)
        averaged.add(moving_average(loss, window))
    if single.n == 0:
        raise ValueError(f"no document has {length + 1} tokens")
    return PositionLoss(single.mean, single.error, averaged.mean, averaged.error, window, single.n)


def plot_position_loss(results: dict[str, PositionLoss], train_contexts: dict[str, int], path: Path) -> None:
    """Moving averages of one or more runs by position with their standard errors, the training contexts marked, as a
    PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    longest = max(len(result.loss) for result in results.values())
    for label, result in results.items():
        # the first positions average over too few others to be comparable
        first = min(result.window, train_contexts[label]) // 2
        position = torch.arange(first + 1, len(result.average) + 1)
        average, error = result.average[first:], result.average_error[first:]
        (line,) = axes.plot(position, average, label=f"{label} ({result.n_documents} documents)", linewidth=1.2)
        if result.n_documents > 1:
            axes.fill_between(
                position, average - error, average + error, color=line.get_color(), alpha=0.2, linewidth=0
            )
    for context in sorted(set(train_contexts.values())):
        axes.axvline(context, color="black", linestyle="--", linewidth=1, label=f"training context {context}")
    if longest > 8 * max(train_contexts.values()):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    windows = sorted({result.window for result in results.values()})
    axes.set(
        xlabel="token position",
        ylabel=f"loss (nats a token, moving average of {' or '.join(map(str, windows))})",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)

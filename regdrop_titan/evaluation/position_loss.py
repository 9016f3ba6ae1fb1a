"""Position loss: the mean cross-entropy at each token position over long documents (LG; spec sec. 7).

How well a model that was trained on short contexts uses long ones: its curve should go on falling, or at least stay
flat, past the training context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import Decoder


@dataclass
class PositionLoss:
    """`loss[i]` is the mean over `n_documents` documents of the cross-entropy of token i+1 given tokens 0 ... i."""

    loss: Tensor  # (S,) fp64, nats
    n_documents: int

    def moving_average(self, window: int) -> Tensor:
        """Means over the last `window` positions, fewer at the start: (S,)."""
        total = F.pad(self.loss.cumsum(0), (1, 0))
        end = torch.arange(1, len(self.loss) + 1)
        start = (end - window).clamp(min=0)
        return (total[end] - total[start]) / (end - start)


@torch.no_grad()
def position_loss(
    model: Decoder,
    documents: Sequence[Tensor],
    length: int,
    batch_size: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> PositionLoss:
    """The position loss of `model` (in evaluation mode, on its device) over `length` positions.

    Args:
        documents: token ids, each (>= length + 1,); the first `length + 1` are read.
        progress: called with the number of documents done.

    Raises:
        ValueError: no documents, or one that is too short.
    """
    if not documents:
        raise ValueError(f"no document has {length + 1} tokens")
    if (shortest := min(len(document) for document in documents)) < length + 1:
        raise ValueError(f"a document has {shortest} tokens, {length} positions need {length + 1}")
    device = next(model.parameters()).device
    total = torch.zeros(length, dtype=torch.float64)
    for start in range(0, len(documents), batch_size):
        chosen = documents[start : start + batch_size]
        tokens = torch.stack([document[: length + 1] for document in chosen]).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        total += loss.view(len(chosen), length).double().sum(0).cpu()
        progress(start + len(chosen))
    return PositionLoss(total / len(documents), len(documents))


def plot_position_loss(results: dict[str, PositionLoss], train_context: int, window: int, path: Path) -> None:
    """Moving averages of one or more runs by position, the training context marked, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, result in results.items():
        averages = result.moving_average(window)
        # the first positions average over too few others to be comparable
        first = min(window, train_context) // 2
        axes.plot(range(first + 1, len(averages) + 1), averages[first:], label=label)
    axes.axvline(train_context, color="black", linestyle="--", linewidth=1, label=f"training context {train_context}")
    axes.set(xlabel="token position", ylabel=f"loss (nats a token, moving average of {window})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)

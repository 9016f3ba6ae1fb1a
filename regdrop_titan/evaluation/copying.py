"""The copying task's scores at any source length, past those of training too (LG; spec sec. 7).

EMA-n is the share of wholly right answers at source length n, CLA-n the share of right letters. LG reports EMA-150 and
CLA-300 after training on lengths 50 to 100.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.copying import copy_example, source
from ..generation import generate
from ..models import Decoder


@dataclass
class CopyingScore:
    """Scores over `n_samples` examples with sources of `length` letters; errors are standard errors."""

    length: int
    ema: float  # share of answers with all letters and the closing `.` right
    ema_error: float  # binomial: 0 where all answers are right, or none
    cla: float  # share of right letters
    cla_error: float  # over samples: letters of one answer are not independent
    n_samples: int


@torch.no_grad()
def evaluate_copying(
    model: nn.Module,
    length: int,
    n_samples: int,
    *,
    seed: int = 0,
    batch_size: int = 50,
    write: Callable[[Tensor, int], Tensor] | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> CopyingScore:
    """The scores of `model` (in evaluation mode, on its device): tokens (B, S) to logits (B, S, vocab).

    The model's choice is the argmax over its whole vocabulary. Sample i is a function of (seed, i), drawn by
    another key than training's and validation's.

    Args:
        write: what writes n tokens behind each question (B, n + 2), as the model reads its own answer: (B, n). None: it
            reads the right answer, by one forward. EMA is the same in both: an answer is wholly right only if every
            token before was.
        progress: called after each batch with the number of its samples.

    Raises:
        ValueError: `length` or `n_samples` below 1.
    """
    if min(length, n_samples) < 1:
        raise ValueError(f"length {length} and n_samples {n_samples} must be at least 1")
    device = next(model.parameters()).device
    right = []
    for start in range(0, n_samples, batch_size):
        indices = range(start, min(start + batch_size, n_samples))
        sources = torch.stack([source("evaluation", seed, i, length) for i in indices])
        tokens = copy_example(sources).to(device)  # (B, 2n + 3)
        question, answer = tokens.split([length + 2, length + 1], dim=1)
        given = forced_answer(model, tokens, length) if write is None else write(question, length + 1)
        right.append((given == answer).cpu())
        progress(len(indices))
    per_token = torch.cat(right)  # (n_samples, n + 1) bool
    whole = per_token.all(1).double()
    letters = per_token[:, :length].double().mean(1)
    ema, ema_error = mean_and_error(whole)
    cla, cla_error = mean_and_error(letters)
    return CopyingScore(length, ema, ema_error, cla, cla_error, n_samples)


def forced_answer(model: nn.Module, tokens: Tensor, length: int) -> Tensor:
    """The model's choice at every token of the answer, the tokens before it being right: (B, n + 1)."""
    return model(tokens[:, :-1])[:, length + 1 :].argmax(-1)


def greedy_answer(model: Decoder, question: Tensor, n_tokens: int) -> Tensor:
    """What the model writes behind `question` (B, n + 2), greedily: (B, n_tokens)."""
    answers, _ = generate(model, list(question), n_tokens)
    return torch.stack(answers).to(question.device)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of `values` (N,) and its standard error; for zeros and ones the binomial `sqrt(p (1-p) / N)`."""
    return values.mean().item(), (values.std(correction=0) / len(values) ** 0.5).item()


def plot_copying(scores_by_label: dict[str, list[CopyingScore]], train_lengths: Sequence[int], path: Path) -> None:
    """EMA and CLA of one or more runs by source length with their standard errors, the lengths of training (lo, hi)
    shaded, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, name, title in zip(
        figure.subplots(1, 2, sharex=True, sharey=True), ("ema", "cla"), ("whole answers (EMA)", "letters (CLA)"),
        strict=True,
    ):  # fmt: skip
        for label, scores in scores_by_label.items():
            by_length = sorted(scores, key=lambda score: score.length)
            axes.errorbar(
                [score.length for score in by_length],
                [getattr(score, name) for score in by_length],
                [getattr(score, f"{name}_error") for score in by_length],
                marker="o", markersize=4, capsize=3, label=label,
            )  # fmt: skip
        lo, hi = train_lengths
        axes.axvspan(lo, hi, color="black", alpha=0.1, linewidth=0, label=f"training lengths {lo} to {hi}")
        axes.set(title=title, xlabel="source length (letters)", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("share right")
    figure.savefig(path, dpi=150)

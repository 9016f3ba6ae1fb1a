"""What a draft is worth: how often it is right, what it costs, and what is gained.

A pass of the model takes the time 1, one of the draft c. With a rate of acceptance alpha a token, drafts of gamma
tokens make writing `(1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1))` times as fast (Leviathan et al., arXiv
2211.17192, theorem 3.8), if a pass over gamma + 1 tokens takes no longer than one over a token. With the share of all
drafted tokens that were accepted in place of alpha it is `(1 + gamma alpha) / (gamma c + 1)`, by the definition of
that share.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import Decoder, Part
from ..models.cache import Cache, piece_length
from .drafts import Draft
from .generate import generate
from .reading import padded, read


def speed_up_by_tokens(alpha: float, gamma: float, c: float) -> float:
    """Leviathan's formula; `alpha` is the rate of acceptance a token."""
    written = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return written / (gamma * c + 1)


def speed_up_by_share(accepted_share: float, gamma: float, c: float) -> float:
    """The same of the share of drafted tokens that were accepted."""
    return (1 + gamma * accepted_share) / (gamma * c + 1)


@dataclass(frozen=True)
class Acceptance:
    """What `generate`'s statistics say of a draft."""

    accepted_share: float  # of all drafted tokens
    alpha: float  # of the tokens that were tested: those before which all were accepted
    draft_length: float  # tokens, mean
    tokens_a_pass: float

    @classmethod
    def of(cls, stats: dict[str, float]) -> "Acceptance":
        """0 where nothing was drafted."""
        return cls(
            accepted_share=stats["accepted"] / max(stats["drafted"], 1),
            alpha=stats["accepted"] / max(stats["tested"], 1),
            draft_length=stats["drafted"] / stats["verified"],
            tokens_a_pass=stats["tokens"] / stats["verified"],
        )

    def speed_up(self, c: float) -> float:
        """By these counts: tokens a pass, and what a pass and its drafts cost."""
        return self.tokens_a_pass / (1 + self.draft_length * c)


def spent(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of `work`, on a GPU with what it has started, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    done = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, done


@torch.no_grad()
def relative_cost(model: Decoder, prompts: Sequence[Tensor], parts: Sequence[Part], rounds: int = 15) -> float:
    """`c = T_draft / T_target`: a token of the draft to one of the model behind the prompts, the median of paired
    timings."""
    device = next(model.parameters()).device
    lengths = [len(prompt) for prompt in prompts]
    cache = Cache(len(prompts), max(lengths) + 1, piece_length(model.args, len(prompts), max(lengths)))
    for _ in read(model, padded(prompts, device), lengths, cache, torch.zeros(len(prompts), 0, device=device)):
        pass
    token = torch.stack([prompt[-1:] for prompt in prompts]).to(device)  # (B, 1)
    mark = cache.mark()
    ratios = []
    for round_ in range(rounds + 2):
        seconds = []
        for layers in (parts, None):
            cache.rewind(mark)
            seconds.append(spent(device, functools.partial(model.__call__, token, layers=layers, cache=cache))[0])
        if round_ >= 2:
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


@dataclass(frozen=True)
class Comparison:
    """A draft against plain decoding."""

    acceptance: Acceptance
    c: float
    tokens_per_second: float  # median
    plain_tokens_per_second: float
    speed_up: float  # median of paired rounds
    speed_up_quartiles: tuple[float, float]
    speed_up_by_tokens: float  # what the formulas expect
    speed_up_by_share: float
    same_tokens: bool  # of greedy answers; they must be
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(
    model: Decoder,
    prompts: Sequence[Tensor],
    draft: Draft,
    max_new_tokens: int,
    rounds: int = 5,
    progress: Callable[[], object] = lambda: None,
    **options: Any,
) -> Comparison:
    """Write the same answers plainly and with the draft, in turns.

    Args:
        rounds: at least 2 that count; one more comes before.
        progress: called after each round.
        options: of `generate`: temperature, top_k, top_p, seed, finished.
    """
    device = next(model.parameters()).device
    plainly = functools.partial(generate, model, prompts, max_new_tokens, **options)
    with_draft = functools.partial(plainly, **draft.options())
    plain_rates, rates = [], []
    for round_ in range(rounds + 1):
        plain_seconds, (plain, counts) = spent(device, plainly)
        seconds, (answers, stats) = spent(device, with_draft)
        if round_:
            plain_rates.append(counts["tokens"] / plain_seconds)
            rates.append(stats["tokens"] / seconds)
        progress()
    acceptance = Acceptance.of(stats)
    c = relative_cost(model, prompts, draft.parts)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(rates, plain_rates, strict=True)], n=4)
    return Comparison(
        acceptance=acceptance,
        c=c,
        tokens_per_second=statistics.median(rates),
        plain_tokens_per_second=statistics.median(plain_rates),
        speed_up=middle,
        speed_up_quartiles=(low, high),
        speed_up_by_tokens=speed_up_by_tokens(acceptance.alpha, acceptance.draft_length, c),
        speed_up_by_share=speed_up_by_share(acceptance.accepted_share, acceptance.draft_length, c),
        same_tokens=all(torch.equal(a, b) for a, b in zip(answers, plain, strict=True)),
        rounds=rounds,
    )

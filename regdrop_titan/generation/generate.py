"""Text from a decoder, alone or with a draft of its own layers (Draft & Verify, arXiv 2309.08168).

One loop writes all of it. A pass reads the last token of each row and the drafted tokens behind it, by which every
drafted token is accepted or not; without a draft there are none, and a pass writes one token. A drafted token x is
accepted with probability min(1, p(x)/q(x)), p being the model's distribution and q the draft's; in place of the first
that is not, a token is drawn from max(0, p - q), normalised. What is written has the model's own distribution
(Leviathan et al., arXiv 2211.17192); greedy answers are the case of all probability on one token.

The draft reads the model's own cache, and what it adds to it is taken back.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models import Decoder
from ..models.cache import Cache, piece_length
from ..seeds import derive_seed
from .reading import padded, read
from .sampling import distribution, draw


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, as `distribution` takes it."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def of(self, logits: Tensor) -> Tensor:
        return distribution(logits, self.temperature, self.top_k, self.top_p)


def chosen_layers(n_layers: int, exit_layer: int | None, skip_layers: Sequence[int]) -> list[int] | None:
    """The layers that are computed, None for all. Raises ValueError for indices that there are not, a line each."""
    faults = []
    if exit_layer is not None and not 0 <= exit_layer <= n_layers:
        faults.append(f"exit_layer {exit_layer}: must be in 0 ... {n_layers}")
    if wrong := [layer for layer in skip_layers if not 0 <= layer < n_layers]:
        faults.append(f"skip_layers {' '.join(map(str, wrong))}: there are 0 ... {n_layers - 1}")
    if faults:
        raise ValueError("\n".join(faults))
    if exit_layer is None and not skip_layers:
        return None
    return [layer for layer in range(n_layers if exit_layer is None else exit_layer) if layer not in skip_layers]


def faults_of(
    model: Decoder,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    draft_layers: Sequence[int] | None,
    draft_length: int,
) -> list[str]:
    """What cannot be done, a line each."""
    V, L = model.args.vocab_size, model.args.n_layers
    found = []
    if not prompts:
        found.append("prompts: there are none")
    found += [f"prompt {i}: is empty" for i, prompt in enumerate(prompts) if not len(prompt)]
    found += [
        f"prompt {i}: has ids outside of 0 ... {V - 1}"
        for i, prompt in enumerate(prompts)
        if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < V
    ]
    if max_new_tokens < 1:
        found.append(f"max_new_tokens {max_new_tokens}: must be at least 1")
    if not sampling.temperature >= 0:
        found.append(f"temperature {sampling.temperature}: must be at least 0")
    if sampling.top_k is not None and sampling.top_k < 1:
        found.append(f"top_k {sampling.top_k}: must be at least 1")
    if not 0 < sampling.top_p <= 1:
        found.append(f"top_p {sampling.top_p}: must be above 0 and at most 1")
    if draft_layers is not None:
        if wrong := [layer for layer in draft_layers if not 0 <= layer < L]:
            found.append(f"draft_layers {' '.join(map(str, wrong))}: there are 0 ... {L - 1}")
        if not draft_layers:
            found.append("draft_layers: there are none; a draft needs at least one layer")
        if draft_length < 1:
            found.append(f"draft_length {draft_length}: must be at least 1")
    return found


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Tensor],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    exit_layer: int | None = None,
    skip_layers: Sequence[int] = (),
    draft_layers: Sequence[int] | None = None,
    draft_length: int = 5,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    finished: Callable[[int, list[int]], bool] = lambda row, new: False,
    wrote: Callable[[int, list[int]], object] = lambda row, new: None,
) -> tuple[list[Tensor], dict[str, float]]:
    """What `model` (in evaluation mode) writes behind each prompt.

    Args:
        prompts: each (n,) int64, at least one token; of any lengths, which do not touch each other's answers.
        max_new_tokens: of each answer, at most.
        temperature, top_k, top_p: as `distribution` takes them; temperature 0 is greedy.
        exit_layer, skip_layers: only a part of the model writes.
        draft_layers: the layers that draft, in their order. None: no draft.
        draft_length: tokens that are drafted before each pass of the model, gamma.
        seed: of the draws; each row has its own stream.
        finished: called with a row and all ids it has written, after each; True ends the row there.
        wrote: called with a row and the ids that it has written since the last call.

    Returns:
        The new ids of each prompt, (n,) int64, and statistics: "accepted" and "drafted" tokens, "passes" of the model
        (without those that read the prompts), "tokens" written, "seconds".

    Raises:
        ValueError: arguments that cannot be used, a line a fault.
    """
    sampling = Sampling(temperature, top_k, top_p)
    gamma = 0 if draft_layers is None else draft_length
    if faults := faults_of(model, prompts, max_new_tokens, sampling, draft_layers, draft_length):
        raise ValueError("\n".join(faults))
    layers = chosen_layers(model.args.n_layers, exit_layer, skip_layers)
    began = time.perf_counter()
    device = next(model.parameters()).device
    B, longest = len(prompts), max(map(len, prompts))
    room = longest + max_new_tokens + gamma
    cache = Cache(B, room, max(piece_length(model.args, B, room), gamma + 1))
    before = [len(prompt) - 1 for prompt in prompts]
    for _ in read(model, padded(prompts, device)[:, :-1], before, cache, torch.zeros(B, 0, device=device), layers):
        pass
    last = torch.stack([prompt[-1] for prompt in prompts]).to(device)[:, None]  # (B, 1), not read yet
    generators = [torch.Generator(device).manual_seed(derive_seed("generation", seed, row)) for row in range(B)]
    written: list[list[int]] = [[] for _ in prompts]
    writing = list(range(B))
    stats = {"accepted": 0, "drafted": 0, "passes": 0}
    while writing:
        n_drafts = min(gamma, max_new_tokens - 1 - min(len(written[row]) for row in writing))
        mark = cache.mark()
        drafts, q = draft(model, last, n_drafts, cache, draft_layers or (), sampling, generators)
        cache.rewind(mark)
        tokens = torch.cat([last, drafts], dim=1)  # (B, n_drafts + 1)
        p = sampling.of(model(tokens, layers=layers, cache=cache))  # (B, n_drafts + 1, V)
        accepted, following = verify(p, q, drafts, generators)
        taken = [count + 1 for count in accepted]
        if not cache.has_states:
            cache.lengths = [n + count for n, count in zip(mark.lengths, taken, strict=True)]
        elif min(taken) <= n_drafts:  # what is not accepted is in the states: read the others alone
            cache.rewind(mark)
            model(tokens, layers=layers, cache=cache, counts=taken)
        last = following[:, None]
        stats["passes"] += 1
        for row in list(writing):
            new = [*drafts[row, : accepted[row]].tolist(), int(following[row])]
            n_new = len(written[row])
            ended = write(row, new, written[row], max_new_tokens, finished)
            n_new = len(written[row]) - n_new
            wrote(row, written[row][-n_new:])
            stats["drafted"] += n_drafts
            stats["accepted"] += min(accepted[row], n_new)
            if ended:
                writing.remove(row)
    found: dict[str, float] = {**stats, "tokens": sum(map(len, written)), "seconds": time.perf_counter() - began}
    return [torch.tensor(ids, dtype=torch.int64) for ids in written], found


def draft(
    model: Decoder,
    last: Tensor,
    n: int,
    cache: Cache,
    layers: Sequence[int],
    sampling: Sampling,
    generators: list[torch.Generator],
) -> tuple[Tensor, Tensor]:
    """`n` tokens that these layers write behind `last` (B, 1): (B, n), and the distributions that they are drawn from,
    (B, n, V)."""
    tokens, distributions = [last], []
    for _ in range(n):
        q = sampling.of(model(tokens[-1], layers=layers, cache=cache))[:, 0]  # (B, V)
        distributions.append(q)
        tokens.append(draw(q, generators)[:, None])
    nothing = torch.zeros(len(last), 0, model.args.vocab_size, device=last.device)
    return torch.cat([last[:, :0], *tokens[1:]], dim=1), torch.stack(distributions, dim=1) if n else nothing


def verify(p: Tensor, q: Tensor, drafts: Tensor, generators: list[torch.Generator]) -> tuple[list[int], Tensor]:
    """How many of the first drafted tokens of each row are accepted, and the token behind them, (B,).

    Args:
        p: (B, n + 1, V), of the model behind the last token and each drafted one.
        q: (B, n, V), of the draft.
        drafts: (B, n), drawn from q.
    """
    B, n = drafts.shape
    draws = torch.stack([torch.rand(n, generator=g, device=p.device) for g in generators])  # (B, n), in [0, 1)
    p_x, q_x = (of.gather(2, drafts[..., None])[..., 0] for of in (p[:, :n], q))  # (B, n)
    accepted = (draws * q_x < p_x).long().cumprod(1).sum(1)  # (B,)
    rows = torch.arange(B, device=p.device)
    rest = p[rows, accepted]  # (B, V)
    if n:
        refused = (accepted < n)[:, None]
        rest = torch.where(refused, (rest - q[rows, accepted.clamp(max=n - 1)]).clamp(min=0), rest)
    return accepted.tolist(), draw(rest, generators)


def write(
    row: int, new: Sequence[int], written: list[int], max_new_tokens: int, finished: Callable[[int, list[int]], bool]
) -> bool:
    """Put new ids behind those that a row has `written`, to its end at most. Returns whether it has ended."""
    for i in new:
        written.append(i)
        if finished(row, written) or len(written) == max_new_tokens:
            return True
    return False

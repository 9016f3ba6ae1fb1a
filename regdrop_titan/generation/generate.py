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

from ..models import Decoder, Part
from ..models.cache import Cache, piece_length
from ..seeds import derive_seed
from .compiled import compiled_blocks
from .drafts import Draft, DraftExit, faults_of_parts
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

    def faults(self) -> list[str]:
        found = []
        if not self.temperature >= 0:
            found.append(f"temperature {self.temperature}: must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            found.append(f"top_k {self.top_k}: must be at least 1")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p {self.top_p}: must be above 0 and at most 1")
        return found


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
    draft: Draft | None,
    max_length: int | None,
) -> list[str]:
    """What cannot be done, a line each."""
    V = model.args.vocab_size
    found = []
    if not prompts:
        found.append("prompts: there are none")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            found.append(f"prompt {i}: is empty")
        elif not 0 <= int(prompt.min()) <= int(prompt.max()) < V:
            found.append(f"prompt {i}: has ids outside of 0 ... {V - 1}")
        if max_length is not None and len(prompt) + max_new_tokens > max_length:
            found.append(
                f"prompt {i}: {len(prompt)} tokens and {max_new_tokens} new ones: the cache has room for {max_length} "
                "(max_length)"
            )
    if max_new_tokens < 1:
        found.append(f"max_new_tokens {max_new_tokens}: must be at least 1")
    found += sampling.faults()
    if draft is not None:
        found += faults_of_parts(model.args, draft.parts) + DraftExit.faults(draft.exit)
        if draft.length < 1:
            found.append(f"draft_length {draft.length}: must be at least 1")
    return found


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Tensor],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    exit_layer: int | None = None,
    skip_layers: Sequence[int] = (),
    draft_layers: Sequence[Part] | None = None,
    draft_length: int = 5,
    *,
    draft_exit: float | str | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    max_length: int | None = None,
    compile: bool | None = None,
    finished: Callable[[int, list[int]], bool] = lambda row, ids: False,
    wrote: Callable[[int, list[int]], None] = lambda row, ids: None,
) -> tuple[list[Tensor], dict[str, float]]:
    """Go on from each prompt.

    Args:
        model: in evaluation mode, on its device.
        prompts: (n,) int64 each, at least one token, of any lengths.
        max_new_tokens: of each answer.
        temperature: 0 is greedy; else `top_k` and `top_p` also count, as in `sampling.distribution`.
        exit_layer: only the first so many layers write.
        skip_layers: these do not.
        draft_layers: these draft for those that write, in this order; in place of a layer, one of its sublayers,
            `(5, "attention")`. None: no draft.
        draft_length: tokens that are drafted at a time, at most.
        draft_exit: the draft stops behind a token of which it was less sure than this, in [0, 1]; "adaptive": a
            threshold that follows what was accepted (`drafts.DraftExit`). None: never.
        seed: of the draws; every row has a stream of its own.
        max_length: tokens of a prompt with its answer that there is room for. None: as many as are asked for.
        compile: the blocks, while they decode. None: on a GPU.
        finished: whether a row ends behind these new ids.
        wrote: called with a row and the ids that it has written since the last call.

    Returns:
        The new ids of each prompt, (n,) int64, and statistics: "tokens" written, "seconds", "passes" of the model
        (without those that read the prompts), "verified" (the rows of all passes: tokens / verified is what a pass
        writes of a row), "drafted" tokens, those "accepted", and those "tested" (accepted, and the first of each row
        and pass that was not: accepted / tested is the rate of acceptance a token).

    Raises:
        ValueError: arguments that cannot be used, a line a fault.
    """
    sampling = Sampling(temperature, top_k, top_p)
    drafting = None if draft_layers is None else Draft(tuple(draft_layers), draft_length, draft_exit)
    if faults := faults_of(model, prompts, max_new_tokens, sampling, drafting, max_length):
        raise ValueError("\n".join(faults))
    layers = chosen_layers(model.args.n_layers, exit_layer, skip_layers)
    began = time.perf_counter()
    device = next(model.parameters()).device
    B, longest = len(prompts), max(map(len, prompts))
    gamma = 0 if drafting is None else drafting.length
    room = longest + max_new_tokens + gamma
    cache = Cache(B, room, max(piece_length(model.args, B, room), gamma + 1))
    before = [len(prompt) - 1 for prompt in prompts]
    for _ in read(model, padded(prompts, device)[:, :-1], before, cache, torch.zeros(B, 0, device=device), layers):
        pass
    decoding = Decoding(
        model, cache, layers, drafting, sampling, DraftExit(draft_exit),
        last=torch.stack([prompt[-1] for prompt in prompts]).to(device)[:, None],
        generators=[torch.Generator(device).manual_seed(derive_seed("generation", seed, row)) for row in range(B)],
    )  # fmt: skip
    written: list[list[int]] = [[] for _ in prompts]
    rows = list(range(B))  # that are being written, in the order of the decoding's
    stats = dict.fromkeys(("tokens", "passes", "verified", "drafted", "accepted", "tested"), 0)
    with compiled_blocks(model, device.type == "cuda" if compile is None else compile):
        while rows:
            most = max_new_tokens - 1 - min(len(written[row]) for row in rows)
            drafts, accepted, following = decoding.step(min(gamma, most))
            n_drafts = drafts.shape[1]
            stats["passes"] += 1
            going = []
            for i, (row, new, next_id) in enumerate(zip(rows, drafts.tolist(), following.tolist(), strict=True)):
                n = len(written[row])
                if not write(row, [*new[: accepted[i]], next_id], written[row], max_new_tokens, finished):
                    going.append(i)
                n_new = len(written[row]) - n
                wrote(row, written[row][n:])
                stats["tokens"] += n_new
                stats["verified"] += 1
                stats["drafted"] += n_drafts
                stats["accepted"] += min(accepted[i], n_new)
                stats["tested"] += min(accepted[i] + 1, n_drafts, n_new)
            decoding.keep_rows(going)
            rows = [rows[i] for i in going]
    found: dict[str, float] = {**stats, "seconds": time.perf_counter() - began}
    return [torch.tensor(ids, dtype=torch.int64) for ids in written], found


@dataclass
class Decoding:
    """Rows that are being written: what was read of them lies in the cache, `last` (B, 1) was not read yet."""

    model: Decoder
    cache: Cache
    layers: Sequence[int] | None  # that write
    drafting: Draft | None
    sampling: Sampling
    stop: DraftExit
    last: Tensor
    generators: list[torch.Generator]

    def step(self, n: int) -> tuple[Tensor, list[int], Tensor]:
        """One pass of the model behind a draft of up to `n` tokens: the drafted tokens (B, m), how many of each row's
        first are accepted, and the token behind them (B,), which becomes its `last`."""
        cache, mark = self.cache, self.cache.mark()
        drafts, q = self.draft(n)
        cache.rewind(mark)
        tokens = torch.cat([self.last, drafts], dim=1)  # (B, m + 1)
        p = self.sampling.of(self.model(tokens, layers=self.layers, cache=cache))  # (B, m + 1, V)
        accepted, following = verify(p, q, drafts, self.generators)
        taken = [count + 1 for count in accepted]
        if not cache.has_states:
            cache.lengths = [n + count for n, count in zip(mark.lengths, taken, strict=True)]
        elif min(taken) < tokens.shape[1]:  # what is not accepted is in the states: read the others alone
            cache.rewind(mark)
            self.model(tokens, layers=self.layers, cache=cache, counts=taken)
        self.stop.learn(sum(accepted), drafts.numel())
        self.last = following[:, None]
        return drafts, accepted, following

    def draft(self, n: int) -> tuple[Tensor, Tensor]:
        """Up to `n` tokens behind `last`, until all rows were unsure: (B, m), and the distributions that they are drawn
        from, (B, m, V)."""
        tokens: list[Tensor] = [self.last]
        distributions: list[Tensor] = []
        unsure = torch.zeros(len(self.last), dtype=torch.bool, device=self.last.device)
        while self.drafting is not None and len(distributions) < n and not (distributions and unsure.all()):
            logits = self.model(tokens[-1], layers=self.drafting.parts, cache=self.cache)[:, 0]  # (B, V)
            distributions.append(self.sampling.of(logits))
            tokens.append(draw(distributions[-1], self.generators)[:, None])
            # whether to go on is decided by what was written before, so that it does not bend what is written
            if (now := self.stop.unsure(logits)) is not None:
                unsure |= now
        if not distributions:
            return self.last[:, :0], torch.zeros(len(self.last), 0, self.model.args.vocab_size, device=unsure.device)
        return torch.cat(tokens[1:], dim=1), torch.stack(distributions, dim=1)

    def keep_rows(self, rows: list[int]) -> None:
        """Forget all but these."""
        if rows:
            self.cache.keep_rows(rows)
        self.last = self.last[rows]
        self.generators = [self.generators[row] for row in rows]


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

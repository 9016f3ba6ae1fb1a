"""Text whose tokens each come from the shallowest trained exit that is confident of them (Balcony, arXiv 2503.05005),
or from the whole model.

The layers are cut at the exits into stages. A stage takes the residual stream from where the one before left it,
through its own layers, and what lies at its end says a token: an exit's layer, norm and the head, or the last norm and
the head. A token that an exit has written has not gone through the later stages: its residual stream waits before the
next one. When a later token of the row needs that stage, it reads all that waits, in order and together with that
token. So every layer reads every token that it must know, once, and what it then knows is what it would have known
without exits: keys and values of attention and states of Mamba2 layers alike, each stage with a cache of its own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..adapters.balcony import Exit, Exits, assembled, exit_args
from ..models import Decoder
from ..models.cache import Cache, piece_length
from ..models.mamba2 import Passed
from ..seeds import derive_seed
from .generate import Sampling, faults_of, write
from .sampling import draw


class Stage:
    """Some layers in a row and what says a token behind them.

    Args:
        decoder: its `layers` are this stage's and, of an exit, the exit's own one last; only the first stage's has
            `tok_embeddings`.
        exit_layer: k of its exit; None: it ends with the whole model.
        rows: of the batch.
        room, chunk: of the cache.
    """

    def __init__(self, decoder: Decoder, exit_layer: int | None, rows: int, room: int, chunk: int) -> None:
        self.decoder, self.exit_layer = decoder, exit_layer
        self.cache = Cache(rows, room, chunk)
        self.device = next(decoder.parameters()).device
        self.tokens: list[list[int]] = [[] for _ in range(rows)]  # that wait, of each row
        self.streams: list[list[Tensor]] = [
            [] for _ in range(rows)
        ]  # (n, d) each, of the same tokens; not in the first

    def read(self, rows: Sequence[int], following: "Stage | None") -> Tensor:
        """Read all that waits of these rows, which is something of each. Returns the logits behind the last token of
        each, (len(rows), V), and lets the tokens wait before the `following` stage."""
        args, B = self.decoder.args, len(self.tokens)
        counts = [len(self.tokens[row]) if row in rows else 0 for row in range(B)]
        n = max(counts)
        tokens = torch.zeros(B, n, dtype=torch.int64)
        for row in rows:
            tokens[row, : counts[row]] = torch.tensor(self.tokens[row])
        tokens = tokens.to(self.device)
        inputs = tokens
        if self.decoder.tok_embeddings is None:
            inputs = torch.zeros(B, n, args.dim, dtype=self.streams[rows[0]][0].dtype, device=self.device)
            for row in rows:
                inputs[row, : counts[row]] = torch.cat(self.streams[row])
        ends: dict[int, Tensor] = {}  # (d,), what the head reads
        for start in range(0, n, self.cache.chunk):
            piece = slice(start, start + self.cache.chunk)
            length = tokens[:, piece].shape[1]
            here = [min(max(count - start, 0), length) for count in counts]
            self.cache.begin(tokens[:, piece], here, args.eos_id if args.document_mask else None)
            passed = Passed(self.cache.states)
            h, through = self.decoder.begin(inputs[:, piece], passed=passed, cache=self.cache)
            own = [int(name) for name in self.decoder.layers]
            for layer in own if self.exit_layer is None else own[:-1]:
                h = through(layer, h)
            last = h if self.exit_layer is None else through(self.exit_layer, h)
            self.cache.states |= passed.final
            for row in rows:
                if following is not None and here[row]:
                    following.streams[row].append(h[row, : here[row]])
                if 0 < counts[row] - start <= length:
                    ends[row] = last[row, counts[row] - start - 1]
        for row in rows:
            if following is not None:
                following.tokens[row] += self.tokens[row]
            self.tokens[row], self.streams[row] = [], []
        return self.decoder.head(torch.stack([ends[row] for row in rows])[:, None])[:, 0]


def stages(model: Decoder, exits: Exits, rows: int, room: int) -> list[Stage]:
    """Of `rows` rows that get at most `room` tokens long."""
    found: list[Stage] = []
    chunk, first = piece_length(model.args, rows, room), 0
    for k in [*exits.places, None]:
        layers: dict[str, Any] = {str(i): model.layers[str(i)] for i in range(first, k or model.args.n_layers)}
        args, norm = model.args, model.norm
        if k is not None:
            own = exits[str(k)]
            assert isinstance(own, Exit)
            layers[str(k)] = own.block
            args, norm, first = exit_args(args, k), own.norm, k
        embeddings = None if found else model.tok_embeddings
        decoder = assembled(args, layers, embeddings, norm, model.output, training=model.training)
        found.append(Stage(decoder, k, rows, room, chunk))
    return found


@torch.no_grad()
def generate_confidently(
    model: Decoder,
    exits: Exits,
    prompts: Sequence[Tensor],
    max_new_tokens: int = 64,
    threshold: float = 0.9,
    temperature: float = 0.0,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    max_length: int | None = None,
    finished: Callable[[int, list[int]], bool] = lambda row, new: False,
    wrote: Callable[[int, list[int]], object] = lambda row, new: None,
) -> tuple[list[Tensor], dict[str, float]]:
    """What `model` and its trained exits (in evaluation mode) write behind each prompt.

    Args:
        threshold: in (0, 1]. A token is of the shallowest exit whose largest probability, at temperature 1 and of all
            tokens, is at least this, and of the whole model where there is none. At 1 it is the whole model's: a
            probability that is rounded to 1 does not count.
        prompts, max_new_tokens, temperature, top_k, top_p, seed, max_length, finished, wrote: as `generate` takes
            them. A row does not depend on the others.

    Returns:
        The new ids of each prompt, (n,) int64, and statistics: "tokens" written, "seconds", and the share of the tokens
        that each exit wrote and the whole model did, "exit 3", ..., "whole model".

    Raises:
        ValueError: arguments that cannot be used, a line a fault.
    """
    sampling = Sampling(temperature, top_k, top_p)
    faults = faults_of(model, prompts, max_new_tokens, sampling, None, max_length)
    if not 0 < threshold <= 1:
        faults.append(f"threshold {threshold}: must be above 0 and at most 1")
    if faults:
        raise ValueError("\n".join(faults))
    began = time.perf_counter()
    B, device = len(prompts), next(model.parameters()).device
    parts = stages(model, exits, B, max(map(len, prompts)) + max_new_tokens)
    names = ["whole model" if part.exit_layer is None else f"exit {part.exit_layer}" for part in parts]
    generators = [torch.Generator(device).manual_seed(derive_seed("generation", seed, row)) for row in range(B)]
    written: list[list[int]] = [[] for _ in prompts]
    by_name = dict.fromkeys(names, 0)
    parts[0].tokens = [prompt.tolist() for prompt in prompts]
    writing = list(range(B))
    while writing:
        undecided = list(writing)
        for name, part, following in zip(names, parts, [*parts[1:], None], strict=True):
            logits = part.read(undecided, following)
            sure = logits.float().softmax(-1).amax(-1) >= threshold
            decided = [following is None or (threshold < 1 and is_sure) for is_sure in sure.tolist()]
            at = [i for i, chosen in enumerate(decided) if chosen]
            if at:
                rows = [undecided[i] for i in at]
                new = draw(sampling.of(logits[at]), [generators[row] for row in rows])
                for row, token in zip(rows, new.tolist(), strict=True):
                    by_name[name] += 1
                    if write(row, [token], written[row], max_new_tokens, finished):
                        writing.remove(row)
                    parts[0].tokens[row].append(token)
                    wrote(row, [token])
            undecided = [row for row, chosen in zip(undecided, decided, strict=True) if not chosen]
            if not undecided:
                break
    n = sum(map(len, written))
    shares = {name: count / n for name, count in by_name.items()}
    stats: dict[str, float] = {"tokens": n, "seconds": time.perf_counter() - began, **shares}
    return [torch.tensor(ids, dtype=torch.int64) for ids in written], stats

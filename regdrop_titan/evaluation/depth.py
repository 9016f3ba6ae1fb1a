"""Early exit and layer skipping without training for it: the loss of subsets of a model's layers (DD; spec sec. 7).

A subset of layers is the embedding, these layers in their order, the final norm and the head. Early exit at l' keeps
the layers 0 ... l'-1. Skipping removes layers from anywhere: every second one, a contiguous run, or any others.

Balcony exits, which are trained, stand beside the zero-shot ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapters.balcony import Exits, exit_args, exit_model
from ..data.loader import Sample
from ..models import Decoder, DecoderArgs

Layers = tuple[int, ...]  # those that stay, in their order

BYTES_PER_PARAMETER = 2  # bf16


def exits(n_layers: int) -> list[Layers]:
    """The exits 0 (embedding, norm and head alone) ... L (the whole model)."""
    return [tuple(range(n)) for n in range(n_layers + 1)]


def alternate(n_layers: int, from_last: bool) -> list[Layers]:
    """Without k = 0 ... floor(L/2) of the odd layers, which are those that ALD drops in training.

    Args:
        from_last: the k deepest of them; else the k first.
    """
    odd = list(range(1, n_layers, 2))
    order = odd[::-1] if from_last else odd
    return [without(n_layers, order[:k]) for k in range(len(odd) + 1)]


def runs(n_layers: int) -> list[Layers]:
    """Without the layers i ... j, for all L(L+1)/2 pairs i <= j."""
    return [without(n_layers, range(i, j + 1)) for i in range(n_layers) for j in range(i, n_layers)]


def without(n_layers: int, removed: Iterable[int]) -> Layers:
    return tuple(sorted(set(range(n_layers)) - set(removed)))


def families(n_layers: int, analyses: Iterable[str]) -> dict[str, list[Layers]]:
    """The subsets of each family of some of the analyses "exits", "alternate" and "runs"."""
    found = {}
    if "exits" in analyses:
        found["exits"] = exits(n_layers)
    if "alternate" in analyses:
        found["alternate_last"] = alternate(n_layers, from_last=True)
        found["alternate_first"] = alternate(n_layers, from_last=False)
    if "runs" in analyses:
        found["runs"] = runs(n_layers)
    return found


def weight_bytes(args: DecoderArgs, layers: Layers) -> int:
    """Memory of the weights that stay, in bf16: embedding, `layers`, final norm and head, a tied one once."""
    kinds = args.layer_kinds
    gone = sum(args.layer_parameters(kinds[layer]) for layer in without(args.n_layers, layers))
    return BYTES_PER_PARAMETER * (args.n_parameters() - gone)


def forward_flops(args: DecoderArgs, layers: Layers, seq_len: int) -> int:
    """Executed forward FLOPs a token of `layers`, counted as in `flops_per_token`, of which forward is a third."""
    of_layers = args.sublayer_flops(seq_len)
    gone = sum(sum(of_layers[layer]) for layer in without(args.n_layers, layers))
    return (args.flops_per_token(seq_len) - gone) // 3


def residual_streams(model: Decoder, tokens: Tensor, subsets: Iterable[Layers]) -> Iterator[tuple[Layers, Tensor]]:
    """Each different subset of layers with the residual stream (B, S, d) that it leaves, before the final norm.

    Subsets that begin alike share the computation of what they begin with: all exits together cost one forward. At
    most L + 1 streams are held.

    Args:
        tokens: (B, S) int64.
    """
    h, through = model.begin(tokens)
    path: Layers = ()
    streams = [h]  # after each layer of `path`
    for subset in sorted(set(subsets)):
        while subset[: len(path)] != path:
            path = path[:-1]
            streams.pop()
        for layer in subset[len(path) :]:
            streams.append(through(layer, streams[-1]))
        path = subset
        yield subset, streams[-1]


@torch.no_grad()
def subset_losses(
    model: Decoder,
    samples: Sequence[Sample],
    subsets: Iterable[Layers],
    batch_size: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[Layers, Tensor]:
    """The mean cross-entropy in nats of each sample under each different subset of layers, (N,) fp64.

    Args:
        model: in evaluation mode, on its device.
        samples: `{"input": (S,), "labels": (S,)}`, all of one length.
        progress: called after each batch and subset with the number of samples in it.
    """
    wanted = set(subsets)
    device = next(model.parameters()).device
    losses: dict[Layers, list[Tensor]] = {subset: [] for subset in sorted(wanted)}
    for start in range(0, len(samples), batch_size):
        batch = [samples[i] for i in range(start, min(start + batch_size, len(samples)))]
        tokens = torch.stack([sample["input"] for sample in batch]).to(device)  # (B, S)
        labels = torch.stack([sample["labels"] for sample in batch]).to(device)
        for subset, h in residual_streams(model, tokens, wanted):
            logits = model.head(h)  # (B, S, vocab), one subset's at a time
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
            losses[subset].append(loss.view_as(labels).double().mean(1).cpu())
            progress(len(batch))
    return {subset: torch.cat(parts) for subset, parts in losses.items()}


@dataclass
class Entry:
    """A subset of layers: its loss, and what it costs, shares being those of the whole model."""

    layers: Layers  # that stay
    removed: Layers
    n_layers: int  # that stay
    loss: float  # nats a token
    loss_error: float  # standard error over samples
    weight_bytes: int
    weight_share: float
    flops: int  # forward, a token
    flops_share: float


def entry(args: DecoderArgs, seq_len: int, layers: Layers, losses: Tensor) -> Entry:
    """`losses`: of at least 2 samples of `seq_len` tokens, (N,) fp64."""
    whole = tuple(range(args.n_layers))
    n_bytes, flops = weight_bytes(args, layers), forward_flops(args, layers, seq_len)
    return Entry(
        layers=layers,
        removed=without(args.n_layers, layers),
        n_layers=len(layers),
        loss=losses.mean().item(),
        loss_error=(losses.std() / len(losses) ** 0.5).item(),
        weight_bytes=n_bytes,
        weight_share=n_bytes / weight_bytes(args, whole),
        flops=flops,
        flops_share=flops / forward_flops(args, whole, seq_len),
    )


def trained_exit_entry(args: DecoderArgs, seq_len: int, k: int, losses: Tensor) -> Entry:
    """Of the trained exit after k layers of a model of `args`. What it costs counts the exit's own layer, which is none
    of the model's `layers`. Losses as `entry` takes them."""
    whole, whole_flops = weight_bytes(args, tuple(range(args.n_layers))), args.flops_per_token(seq_len) // 3
    own = entry(exit_args(args, k), seq_len, tuple(range(k + 1)), losses)
    return replace(
        own,
        layers=tuple(range(k)),
        removed=without(args.n_layers, range(k)),
        n_layers=k,
        weight_share=own.weight_bytes / whole,
        flops_share=own.flops / whole_flops,
    )


def trained_exit_losses(
    model: Decoder,
    exits: Exits,
    samples: Sequence[Sample],
    batch_size: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[int, Tensor]:
    """The mean cross-entropy in nats of each sample at each trained exit k, (N,) fp64; arguments as `subset_losses`."""
    found = {}
    for k in exits.places:
        layers = tuple(range(k + 1))
        found[k] = subset_losses(exit_model(model, exits, k), samples, [layers], batch_size, progress)[layers]
    return found

"""`benchmark.py attention`: ALiBi heads that are cut, in one attention layer."""

import argparse
from pathlib import Path
from typing import cast

import torch
from tqdm import tqdm

from ..checkpoints import load_model
from ..checkpoints.loading import model_args_of, resolve_checkpoint
from ..data import PackedDataset
from ..models import Decoder, build_model
from ..models.attention import Attention
from ..models.cache import Cache, piece_length
from .timing import Step, add_sizes, default_device, row, synchronize, time_rounds

NAME = "attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, dim=768, seq_len=2048, batch_size=2, rounds=11, warmup=1)
    parser.add_argument("--compile", action="store_true", help="compile the layer")
    parser.add_argument("--cutoff", type=float, default=40.0, help="nats, of time and memory")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 65536], help="of memory and error")
    parser.add_argument("--checkpoint", type=Path, help="a trained model, for the error")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib/long"), help="packed set, for the error")
    parser.add_argument("--cutoffs", type=float, nargs="+", default=[40.0], help="nats, of the error")


def measure(arguments: argparse.Namespace) -> dict:
    """Attention layers whose ALiBi heads are cut (architecture.alibi_cutoff) beside those with the whole bias and plain
    causal ones: time, the cache's memory, and with --checkpoint the error of its logits."""
    errors = {}
    notes = []
    if arguments.checkpoint is not None:  # first, since it may not be there
        for length in arguments.lengths:
            errors[length] = cut_error(arguments.checkpoint, arguments.data, length, arguments.cutoffs)
            for cutoff, (error, largest) in errors[length].items():
                notes.append(
                    f"{length} tokens, cut at {cutoff:g} nats: logits of up to {largest:.1f} differ by {error:.1e}"
                )
    device = default_device()
    d, S = arguments.dim, arguments.seq_len
    x = torch.randn(arguments.batch_size, S, d, device=device, requires_grad=True)
    gradient = torch.randn_like(x)

    def model_of(**overrides) -> Decoder:
        model = build_model(
            "nape_llama3", "debug", dim=d, n_layers=1, n_heads=d // 64, n_kv_heads=d // 64, vocab_size=64, **overrides
        )
        return model.to(device)

    def step_of(**overrides) -> Step:
        layer = cast(Attention, model_of(**overrides).get_submodule("layers.0.attention.inner"))
        context = layer.context(S, device, None)
        forward = torch.compile(layer, fullgraph=True) if arguments.compile else layer

        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                out = forward(x, context=context)
            out.backward(gradient.to(out.dtype))
            x.grad = None
            for parameter in layer.parameters():
                parameter.grad = None
            synchronize()

        return step

    alibi = {"position": "alibi", "slopes": "press"}
    steps = {
        "causal": step_of(position="nope"),
        "nape, whole": step_of(alibi_cutoff=0.0),
        "nape, cut": step_of(alibi_cutoff=arguments.cutoff),
        "alibi, whole": step_of(**alibi, alibi_cutoff=0.0),
        "alibi, cut": step_of(**alibi, alibi_cutoff=arguments.cutoff),
    }
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {}
    for name in steps:
        uncut = name.replace("cut", "whole")
        for base in ["causal"] + [uncut] * (uncut != name):
            rows[f"{name} / {base}"] = row(seconds, name, base)
    memory = {}
    for position, options in {"nape": {}, "alibi": alibi}.items():
        for length in arguments.lengths:
            sizes = []
            for cutoff in (0.0, arguments.cutoff):
                cache = Cache(1, length, min(1024, length))
                with torch.no_grad():
                    model = model_of(**options, alibi_cutoff=cutoff)
                    model(torch.zeros(1, 1, dtype=torch.int64, device=device), cache=cache)
                sizes.append(sum(2 * kept.keys.numel() * kept.keys.element_size() for kept in cache.layers.values()))
            memory[f"{position} {length}"] = sizes
            whole, cut = (size / 2**20 for size in sizes)
            notes.append(
                f"cache of a layer, {position}, {length} tokens: whole {whole:.1f} MiB, cut {cut:.1f} MiB, "
                f"{cut / whole:.3f} of it"
            )
    return {"rows": rows, "seconds": seconds, "cache_bytes": memory, "errors": errors, "notes": notes}


@torch.no_grad()
def cut_error(checkpoint: Path, data: Path, length: int, cutoffs: list[float]) -> dict[float, tuple[float, float]]:
    """The largest difference of a logit of the first `length` tokens of a packed set to those without a cut, and the
    largest logit, by cutoff; in fp64, read in pieces with a cache."""
    tokens = PackedDataset(data, length, seed=0, shuffle=False)[0]["input"][None]
    models = {}
    for cutoff in [0.0, *cutoffs]:
        args = model_args_of(resolve_checkpoint(checkpoint))
        args.alibi_cutoff = cutoff
        models[cutoff] = load_model(checkpoint, args).double()
    piece = piece_length(models[0.0].args, 1, length)
    caches = {cutoff: Cache(1, length, piece) for cutoff in models}
    found = dict.fromkeys(cutoffs, 0.0)
    largest = 0.0
    for start in tqdm(range(0, length, piece), desc=f"{length} tokens", unit="piece"):
        of = tokens[:, start : start + piece]
        logits = {cutoff: model(of, cache=caches[cutoff]) for cutoff, model in models.items()}
        largest = max(largest, logits[0.0].abs().max().item())
        for cutoff in cutoffs:
            found[cutoff] = max(found[cutoff], (logits[cutoff] - logits[0.0]).abs().max().item())
    return {cutoff: (error, largest) for cutoff, error in found.items()}

"""`benchmark.py layer-dropout`: stacks of blocks that skip sequences."""

import argparse
import itertools
import os
import statistics
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..models import Decoder, build_model
from ..regularization import keep_mask
from .overlap import profiled
from .timing import Step, add_sizes, compile_blocks, row, synchronize, time_rounds

NAME = "layer-dropout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, dim=512, layers=6, seq_len=512, batch_size=8, rounds=7, warmup=2)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75], help="drop rates")
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER",
        help="profile one more step of each variant: Chrome traces there, and how much communication is hidden",
    )  # fmt: skip
    parser.add_argument("--position", choices=("nape", "rope"), default="nape", help="positions")


def stack_of_blocks(d: int, n_layers: int, position: str, **overrides) -> Decoder:
    """A decoder whose embedding and head are next to nothing."""
    return build_model(
        "nape_llama3", "debug", dim=d, n_layers=n_layers, n_heads=d // 64, n_kv_heads=d // 64, ffn_dim=4 * d,
        vocab_size=64, position=position, **overrides,
    )  # fmt: skip


def shard(model: Decoder, device: torch.device) -> None:
    """FSDP2 as in training: gathered block by block, in the backward pass again."""
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    model.keep_on_cpu()
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def measure(arguments: argparse.Namespace) -> dict:
    """A stack of blocks: dense, masked and skipped, by rate and sampling; several ranks run under FSDP2."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
    device = device or torch.device("cpu")
    d, L, S, B = arguments.dim, arguments.layers, arguments.seq_len, arguments.batch_size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def stack(**overrides) -> Decoder:
        model = stack_of_blocks(d, L, arguments.position, **overrides).to(device, dtype)
        if arguments.compile:
            compile_blocks(model)
        if world_size > 1:
            shard(model, device)
        return model

    if world_size > 1:
        torch.distributed.init_process_group()
    skipping, masking = stack(), stack(skip_compute=False)
    tokens = torch.randint(0, skipping.args.vocab_size, (B, S), device=device)
    kept_rows: dict[str, list[float]] = {}

    def step(name: str, model: Decoder, rate: float | None, sampling: str) -> Step:
        kept_rows[name] = []
        rounds = itertools.count()

        def run() -> None:
            keep = None
            if rate is not None:
                rates = torch.full((L,), rate, dtype=torch.float64)
                keep = keep_mask(rates, B * world_size, seed=0, step=next(rounds), sampling=sampling, group=B)
                keep = keep[rank * B : (rank + 1) * B]
                kept_rows[name].append(keep.double().mean().item())
            scale = None if rate is None else [1 / (1 - rate)] * L
            model(tokens, keep=keep, scale=scale).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
            if world_size > 1:
                torch.distributed.barrier()
            synchronize()

        return run

    steps = {"dense": step("dense", skipping, None, "")}
    for rate in arguments.rates:
        if rate == 0.5:
            steps["masked 0.5"] = step("masked 0.5", masking, rate, "bernoulli")
        for sampling in ("bernoulli", "balanced") if rate else ("bernoulli",):
            name = f"skipped {rate} {sampling}"
            steps[name] = step(name, skipping, rate, sampling)
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    overlaps = {}
    for name in steps if arguments.profile is not None else ():
        overlaps[name] = profiled(steps[name], arguments.profile / f"{name.replace(' ', '_')}_rank{rank}.json")
    rows = {}
    for name in steps:
        computed = statistics.fmean(kept_rows[name][arguments.warmup :]) if kept_rows[name] else 1.0
        rows[name] = row(seconds, name, "dense", computed=computed)
        if computed < 1:
            rows[name]["time_saved_of_compute_saved"] = (1 - rows[name]["ratio"]) / (1 - computed)
    notes = [
        f"{name}, one more step: collectives {1000 * overlap['communication']:.1f} ms, exposed "
        f"{1000 * overlap['exposed']:.1f} ms"
        for name, overlap in overlaps.items()
    ]
    if world_size > 1:
        torch.distributed.destroy_process_group()
    sizes = {"dim": d, "layers": L, "seq_len": S, "batch_size": B, "position": arguments.position}
    return {"rows": rows, "seconds": seconds, "ranks": world_size, "sizes": sizes, "overlaps": overlaps,
            "notes": notes}  # fmt: skip

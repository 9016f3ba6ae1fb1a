"""`benchmark.py mamba2`: Mamba2 layers."""

import argparse
from collections.abc import Callable

import torch

from ..models import build_model
from .timing import Step, add_sizes, default_device, row, synchronize, time_rounds

NAME = "mamba2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, dim=768, layers=1, seq_len=1024, batch_size=2, rounds=7, warmup=1)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 128, 256], help="tokens a chunk")


def measure(arguments: argparse.Namespace) -> dict:
    """transformers' Mamba2 layers, on its torch path, beside ours at several chunk sizes; forward and backward."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Block

    device = default_device()
    d, L = arguments.dim, arguments.layers
    x = torch.randn(arguments.batch_size, arguments.seq_len, d, device=device)

    def step_of(layers: Callable[[torch.Tensor], torch.Tensor], parameters: list[torch.nn.Parameter]) -> Step:
        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                out = layers(x)
            out.float().square().mean().backward()
            for parameter in parameters:
                parameter.grad = None
            synchronize()

        return step

    config = Mamba2Config(
        hidden_size=d, num_hidden_layers=L, vocab_size=64, head_dim=64, num_heads=2 * d // 64, state_size=128,
        n_groups=1, chunk_size=256,
    )  # fmt: skip
    theirs = torch.nn.Sequential(*(Mamba2Block(config, i) for i in range(L))).to(device)
    steps = {"transformers": step_of(theirs, list(theirs.parameters()))}
    for chunk in arguments.chunks:
        model = build_model("mamba2", "debug", dim=d, n_layers=L, vocab_size=64, chunk_size=chunk).to(device)
        blocks = list(model.layers.values())
        run = [torch.compile(block, fullgraph=True) if arguments.compile else block for block in blocks]

        def layers(h: torch.Tensor, blocks=blocks, run=run) -> torch.Tensor:
            for block, forward in zip(blocks, run, strict=True):
                h = forward(h, block.own_context(block.context(h.shape[1], h.device, None), ""))
            return h

        steps[f"ours, chunk {chunk}"] = step_of(layers, list(model.parameters()))
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    return {"rows": {name: row(seconds, name, "transformers") for name in steps}, "seconds": seconds}

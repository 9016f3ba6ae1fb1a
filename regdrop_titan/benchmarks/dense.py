"""`benchmark.py dense`: training steps of whole models."""

import argparse

import torch
import torch.nn.functional as F

from ..models import build_model
from .timing import Step, add_sizes, compile_blocks, default_device, row, synchronize, time_rounds

NAME = "dense"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, dim=768, layers=4, seq_len=512, batch_size=4, vocab_size=2048, rounds=21, warmup=2)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--attention", action="store_true", help="attention variants in place of dropout placements")
    parser.add_argument("--p", type=float, default=0.1, help="drop probability")


def measure(arguments: argparse.Namespace) -> dict:
    """TorchTitan's Llama-3 beside our decoder at equal sizes, then NAPE, and beside that each dropout placement, with
    `--attention` each attention variant."""
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    device = default_device()
    d, layers, heads, S = arguments.dim, arguments.layers, arguments.dim // 64, arguments.seq_len
    tokens = torch.randint(0, arguments.vocab_size, (arguments.batch_size, S + 1), device=device)
    titan_args = TransformerModelArgs(
        dim=d, n_layers=layers, n_heads=heads, vocab_size=arguments.vocab_size, max_seq_len=S, rope_theta=500000
    )
    titan = Transformer(titan_args)
    with torch.no_grad():
        titan.init_weights()
    ffn_dim = titan.layers["0"].feed_forward.w1.out_features

    def ours(position: str, placement: str = "none", **overrides) -> torch.nn.Module:
        return build_model(
            "nape_llama3", "debug", dim=d, n_layers=layers, n_heads=heads, n_kv_heads=heads, ffn_dim=ffn_dim,
            vocab_size=arguments.vocab_size, position=position, placement=placement, p=arguments.p, **overrides,
        )  # fmt: skip

    models = {
        "torchtitan llama3": titan,
        "rope": ours("rope"),
        "nape": ours("nape"),
    }
    if arguments.attention:
        models |= {
            "nape adaptive": ours("nape", scaling="adaptive"),
            "nape ssmax": ours("nape", scaling="ssmax"),
            "nape entmax15": ours("nape", attention="entmax15"),
            "nape attention_p": ours("nape", attention_p=arguments.p),
        }
    else:
        models |= {
            "nape pre_norm": ours("nape", "pre_norm"),
            "nape pre_linear": ours("nape", "pre_linear"),
            "nape vpad": ours("nape", "vpad"),
            "nape vpad per_linear": ours("nape", "vpad", mask="per_linear"),
        }
    steps = {name: make_step(model, tokens, arguments.compile) for name, model in models.items()}
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {}
    for name in models:
        base = "torchtitan llama3" if name in ("torchtitan llama3", "rope", "nape") else "nape"
        rows[name] = row(seconds, name, base)
        rows[name]["tokens_per_second"] = arguments.batch_size * S / rows[name]["seconds"]
    return {"rows": rows, "seconds": seconds}


def make_step(model: torch.nn.Module, tokens: torch.Tensor, compiled: bool) -> Step:
    """One training step of `model` on a fixed batch; bf16 autocast on CUDA, fp32 on CPU."""
    device = tokens.device
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if compiled:
        compile_blocks(model)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    def step() -> None:
        with autocast:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()

    return step

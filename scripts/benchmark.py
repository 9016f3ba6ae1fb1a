"""Paired step timings, as ratios.

    python scripts/benchmark.py dense [--compile] [--output outputs/benchmark_dense.json]

Variants take turns, one step each a round, so that a drift of the machine's speed meets all of them alike; a ratio is
the median over rounds of the pairwise ratios. A step is forward, loss, backward and a fused AdamW update.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from regdrop_titan.models import build_model

Step = Callable[[], None]


def make_step(model: torch.nn.Module, tokens: torch.Tensor, compiled: bool) -> Step:
    """One training step of `model` on a fixed batch; bf16 autocast on CUDA, fp32 on CPU."""
    device = tokens.device
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if compiled:
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    def step() -> None:
        with autocast:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def time_rounds(steps: dict[str, Step], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each variant's step, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in tqdm(range(warmup + rounds), desc="rounds", unit="round"):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Median, lower and upper quartile over rounds of variant `name`'s time over `base`'s."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def dense(arguments: argparse.Namespace) -> dict:
    """TorchTitan's Llama-3 beside our decoder at equal sizes, then NAPE and each dropout placement."""
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
        "nape pre_norm": ours("nape", "pre_norm"),
        "nape pre_linear": ours("nape", "pre_linear"),
        "nape vpad": ours("nape", "vpad"),
        "nape vpad per_linear": ours("nape", "vpad", mask="per_linear"),
    }
    steps = {name: make_step(model, tokens, arguments.compile) for name, model in models.items()}
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    tokens_a_step = arguments.batch_size * S
    rows = {}
    print(f"{'variant':<22}{'ms a step':>11}{'tokens/s':>11}   ratio [quartiles] to")
    for name in models:
        base = "torchtitan llama3" if name in ("torchtitan llama3", "rope", "nape") else "nape"
        middle, low, high = ratio(seconds, name, base)
        median = statistics.median(seconds[name])
        rows[name] = {"seconds": median, "ratio": middle, "quartiles": [low, high], "base": base}
        figures = f"{1000 * median:>11.1f}{tokens_a_step / median:>11,.0f}   {middle:.3f} [{low:.3f}, {high:.3f}]"
        print(f"{name:<22}{figures} {base}")
    return {"rows": rows, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dense", help=dense.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in (
        ("--dim", 768), ("--layers", 4), ("--seq-len", 512), ("--batch-size", 4), ("--vocab-size", 2048),
        ("--rounds", 15), ("--warmup", 3),
    ):  # fmt: skip
        command.add_argument(name, type=int, default=default, help=" ")
    command.add_argument("--p", type=float, default=0.1, help="drop probability")
    command.add_argument("--compile", action="store_true", help="compile each block")
    command.add_argument("--output", type=Path, default=Path("outputs/benchmark_dense.json"), help="result file")
    command.set_defaults(run=dense)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    if arguments.dim % 128:
        parser.error("--dim: must be a multiple of 128 (an even number of heads of 64)")
    result = arguments.run(arguments)
    result |= {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

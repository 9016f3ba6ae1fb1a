"""`benchmark.py generation`: greedy answers with a cache."""

import argparse
import tempfile
from pathlib import Path

import torch

from ..checkpoints.huggingface import export_huggingface
from ..generation import generate
from ..models import FAMILIES, build_model
from ..models.cache import Cache, piece_length
from .timing import Step, add_sizes, default_device, row, time_rounds

NAME = "generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, dim=256, layers=4, seq_len=1024, batch_size=4, rounds=7, warmup=1)
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--family", choices=FAMILIES, default="nape_llama3", help=" ")


def measure(arguments: argparse.Namespace) -> dict:
    """transformers' greedy generation from our export beside ours, and a prompt read in pieces beside one forward."""
    from transformers import AutoModelForCausalLM

    d = arguments.dim
    model = build_model(
        arguments.family, "debug", dim=d, n_layers=arguments.layers, n_heads=d // 64, n_kv_heads=d // 64, ffn_dim=3 * d
    ).eval()  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        export_huggingface(model, Path(temporary) / "model")
        theirs = AutoModelForCausalLM.from_pretrained(
            Path(temporary) / "model", trust_remote_code=True, dtype=torch.float32
        ).eval()
    device = default_device()
    model, theirs = model.to(device), theirs.to(device)
    B, S, N = arguments.batch_size, arguments.seq_len, arguments.new_tokens
    prompts = torch.randint(1, model.args.vocab_size, (B, S), device=device)
    mask = torch.ones_like(prompts)
    options = {"max_new_tokens": N, "min_new_tokens": N, "do_sample": False, "pad_token_id": 0}

    @torch.no_grad()
    def pieces() -> None:
        cache = Cache(B, S, piece_length(model.args, B, S))
        for start in range(0, S, cache.chunk):
            model(prompts[:, start : start + cache.chunk], cache=cache)

    steps: dict[str, Step] = {
        "transformers": lambda: theirs.generate(prompts, attention_mask=mask, **options),
        "ours": lambda: generate(model, list(prompts), N),
        "one forward": torch.no_grad()(lambda: model(prompts)),
        "in pieces": pieces,
    }
    answers = theirs.generate(prompts, attention_mask=mask, **options)[:, S:]
    same = torch.equal(answers.cpu(), torch.stack(generate(model, list(prompts), N)[0]))
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {
        "ours / transformers": row(seconds, "ours", "transformers", same_tokens=same),
        "in pieces / one forward": row(seconds, "in pieces", "one forward"),
    }
    return {"rows": rows, "seconds": seconds}

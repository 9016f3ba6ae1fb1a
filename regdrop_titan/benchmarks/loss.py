"""`benchmark.py loss`: head and cross-entropy, whole and in pieces."""

import argparse
import multiprocessing
from pathlib import Path

import torch

from ..config.sections import PIECE_OF_LOGITS
from ..models.head import Head
from .timing import Step, add_sizes, default_device, row, synchronize, time_rounds

NAME = "loss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, dim=768, seq_len=512, batch_size=8, vocab_size=128256, rounds=3, warmup=1)
    parser.add_argument("--pieces", type=int, nargs="+", default=[0], help="as training.loss_chunks")
    parser.add_argument("--skip-whole", action="store_true", help="where whole logits do not fit")


def measure(arguments: argparse.Namespace) -> dict:
    """Head and loss whole and in pieces: time, and peak memory, each in a process of its own."""
    tokens = arguments.batch_size * arguments.seq_len
    by_size = max(1, -(-tokens * arguments.vocab_size // PIECE_OF_LOGITS))
    pieces = {} if arguments.skip_whole else {"whole": 1}
    pieces |= {f"{n or by_size} pieces": n or by_size for n in arguments.pieces}
    spawn = multiprocessing.get_context("spawn")
    peaks: dict[str, float] = {}
    for name, n in pieces.items():
        result = spawn.Value("q", 0)
        process = spawn.Process(target=loss_peak, args=(arguments, n, result), daemon=True)  # not to outlive this one
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: its process ended with {process.exitcode}; too little memory? See --skip-whole")
        peaks[name] = result.value / 2**20
    seconds = time_rounds(
        {name: loss_step(arguments, n, tokens) for name, n in pieces.items()}, arguments.rounds, arguments.warmup
    )
    base = next(iter(pieces))
    rows = {
        name: row(seconds, name, base, peak_mib=peak, peak_ratio=peak / peaks[base]) for name, peak in peaks.items()
    }
    return {"rows": rows, "seconds": seconds}


def loss_step(arguments: argparse.Namespace, pieces: int, tokens: int) -> Step:
    """Forward and backward of head and loss; 1 piece: whole, by TorchTitan's loss. fp32, on CUDA bf16."""
    from torchtitan.components.loss import cross_entropy_loss

    device = default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = Head(arguments.dim, arguments.vocab_size).to(device, dtype)
    h = torch.randn(1, tokens, arguments.dim, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, arguments.vocab_size, (1, tokens), device=device)

    def step() -> None:
        loss = cross_entropy_loss(head(h), labels) if pieces == 1 else head(h, labels=labels, pieces=pieces)
        (loss / tokens).backward()
        h.grad = head.weight.grad = None
        synchronize()

    return step


def resident_bytes(name: str) -> int:
    """Of this process, now (VmRSS) or at most (VmHWM; rusage's is the parent's where that had more)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def loss_peak(arguments: argparse.Namespace, pieces: int, result) -> None:
    """Into `result` the bytes that a step adds at most to what is held before it: on the CPU the process's own peak,
    so once a process."""
    loss_step(arguments, pieces, 16)()  # the libraries' own buffers
    step = loss_step(arguments, pieces, arguments.batch_size * arguments.seq_len)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        result.value = torch.cuda.max_memory_allocated() - before
    else:
        before = resident_bytes("VmRSS")
        step()
        result.value = resident_bytes("VmHWM") - before

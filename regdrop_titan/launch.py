"""The command line of `train.py`: check everything before a process group exists, then train; or print the plan.

Exit status: 0 done, 2 the user's input is wrong (one message on stderr, from one rank), 1 anything else.
"""

import argparse
import logging
import os
import socket
import sys
import time
from pathlib import Path

from torchtitan.tools.logging import init_logger, logger

from .config import ConfigError, JobConfig, load_config
from .data.packed import DataError


def fail(message: str) -> int:
    """Print a user's error once, whatever the number of ranks, and return exit status 2."""
    if int(os.environ.get("RANK", "0")):
        # torchrun ends the other ranks as soon as one has failed: let rank 0 speak first
        time.sleep(5)
        return 2
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


def as_single_process() -> None:
    """Make plain `python train.py` what `torchrun --nproc_per_node=1 train.py` is."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def log_on_one_rank(config: JobConfig) -> None:
    """Only the rank that knows the loss logs: the first of the last pipeline stage, or rank 0."""
    init_logger()
    parallel = config.parallelism
    world_size = int(os.environ["WORLD_SIZE"])
    pp = parallel.pipeline_parallel_degree
    loss_rank = 0 if parallel.pipeline_parallel_schedule == "ZBVZeroBubble" else world_size // pp * (pp - 1)
    os.environ["LOG_RANK"] = str(loss_rank)
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)  # TorchTitan sets its own, and warns of torchrun's
    if int(os.environ["RANK"]) != loss_rank:
        logger.setLevel(logging.WARNING)


def train(config: JobConfig) -> None:
    import torch

    from .trainer import Trainer

    trainer = None
    try:
        trainer = Trainer(config)
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    torch.distributed.destroy_process_group()


def main(args: list[str]) -> int:
    """Run `train.py` with `args`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Every key of the TOML can be overridden: --section.key value. See docs/config.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--plan", action="store_true", help="print what the run would be, and stop")
    parser.add_argument(
        "--gpus", type=int, help="with --plan: number of GPUs (default: what the degrees say, or one node of 8)"
    )
    parser.add_argument("--mfu", type=float, default=0.4, help="with --plan: model FLOPs utilisation (default 0.4)")
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="with --plan: a GPU's bf16 peak (default 989, H100 SXM)"
    )
    own, overrides = parser.parse_known_args(args)
    for name, value in (("--gpus", own.gpus or 1), ("--mfu", own.mfu), ("--peak-tflops", own.peak_tflops)):
        if not value > 0:
            parser.error(f"{name} {value}: must be above 0")
    try:
        if own.plan:
            from .plan import default_world_size, plan

            world_size = own.gpus or default_world_size(load_config(overrides))
            print(plan(load_config(overrides, world_size), world_size, own.mfu, own.peak_tflops))
            return 0
        as_single_process()
        config = load_config(overrides, int(os.environ["WORLD_SIZE"]), inputs=True)
        log_on_one_rank(config)
        if config.training.dataset_source == "stdlib":
            from .data.stdlib_corpus import build_stdlib_corpus

            build_stdlib_corpus(Path(config.training.dataset_path or "").parent)
    except ConfigError as error:
        return fail(f"the configuration cannot run:\n{error}")
    except DataError as error:
        return fail(str(error))
    train(config)
    return 0

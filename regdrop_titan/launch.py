"""The command line of `train.py`: check everything before a process group exists, then train; or print the plan.

Exit status: 0 done, 2 the user's input is wrong, 75 stopped by a signal after saving (run it again to go on), 1
anything else. Of all ranks that fail, the first one speaks: the others' errors follow from it.
"""

import argparse
import datetime
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torchtitan.tools.logging import init_logger, logger

from .checkpoints.safety import CheckpointError, SaveError
from .config import ConfigError, JobConfig, load_config
from .data.packed import DataError
from .signals import STOPPED, StopSignals

if TYPE_CHECKING:
    from .trainer import Trainer


def first_to_fail() -> bool:
    """Whether no other rank has failed before. torchrun keeps a store for its ranks, which is there before a process
    group and after it; without torchrun every rank speaks for itself."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=datetime.timedelta(seconds=10)
        )
        return store.add(f"regdrop_titan failed, start {os.environ['TORCHELASTIC_RESTART_COUNT']}", 1) == 1
    except Exception:  # the store went with the launcher: better too many words than none
        return True


def fail(message: str, status: int = 2) -> int:
    """Print an error once, whatever the number of ranks; returns the exit status."""
    if first_to_fail():
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # torchrun reports the rank that ends first, and ends the others: let it be the one that spoke
    return status


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
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)  # else torchrun prints an error once more, with its traceback
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)  # TorchTitan sets its own, and warns of torchrun's
    if int(os.environ["RANK"]) != loss_rank:
        logger.setLevel(logging.WARNING)


def make_ready(config: JobConfig) -> None:
    """What comes between a configuration and its training: the log, and a corpus that is still to be built. Raises
    DataError."""
    log_on_one_rank(config)
    if config.training.dataset_source == "stdlib":
        from .data.stdlib_corpus import build_stdlib_corpus

        build_stdlib_corpus(Path(config.training.dataset_path or "").parent)


def train(config: JobConfig, build: "Callable[[JobConfig, StopSignals], Trainer] | None" = None) -> int:
    """Train by the trainer that `build` makes, `Trainer` itself by default; returns the exit status."""
    from .trainer import Trainer

    will = "stopping at the end of this step" + (", with a checkpoint" if config.checkpoint.enable else "")
    with StopSignals(will) as signals:
        trainer = None
        try:
            trainer = (build or Trainer)(config, signals)
            trainer.train()
        finally:
            if trainer is not None:
                trainer.close()
        torch.distributed.barrier()  # the log of the last rank is closed
        signals.finish()
        torch.distributed.destroy_process_group()
        if not trainer.stopped_by:
            return 0
        name = signal.Signals(trainer.stopped_by).name
        if not trainer.saved:
            logger.error(f"Stopped by {name} behind step {trainer.step}; nothing is saved, checkpoints are off")
            return 1
        logger.info(
            f"Stopped by {name} behind step {trainer.step}, which is saved: the same command goes on from there"
        )
        return STOPPED


def train_or_tell(config: JobConfig, build: "Callable[[JobConfig, StopSignals], Trainer] | None" = None) -> int:
    """`train`; what ends it is told in one message by one rank. Returns the exit status."""
    from .startup import RanksDisagree
    from .trainer import NonFiniteError

    try:
        return train(config, build)
    except (SaveError, NonFiniteError) as error:
        return fail(str(error), 1)
    except (CheckpointError, DataError, RanksDisagree) as error:
        return fail(str(error))
    except torch.OutOfMemoryError as error:
        return fail(
            f"out of memory: {error}\nLower training.local_batch_size (accumulation keeps the global batch), shard "
            "over more GPUs, or recompute: activation_checkpoint.mode = 'full'",
            1,
        )
    except Exception as error:
        if first_to_fail():
            traceback.print_exc()
        else:
            last = str(error).strip().splitlines()[-1:]
            print(f"rank {os.environ['RANK']}: then {type(error).__name__}: {' '.join(last)}", file=sys.stderr)
            time.sleep(5)
        return 1


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
        make_ready(config)
    except ConfigError as error:
        return fail(f"the configuration cannot run:\n{error}")
    except DataError as error:
        return fail(str(error))
    return train_or_tell(config)

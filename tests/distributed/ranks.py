"""Ranks as plain processes. They are forked from a server that has imported torch, so a start takes a second; and they
can be killed one by one. As torchrun does, the others are ended when one has failed."""

import atexit
import contextlib
import functools
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")


@functools.cache
def start_server() -> None:
    """There is one server a process: one that other code has started has not imported what ranks need, and may block
    signals, as that of `prepare` does."""
    forkserver._forkserver._stop()
    CONTEXT.set_forkserver_preload(["regdrop_titan.launch", "regdrop_titan.trainer", "matplotlib.figure"])
    forkserver.ensure_running()


def _run(rank: int, world_size: int, port: int, target: Callable[[int], int], output: str, limit: int | None) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    file = os.open(f"{output}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if limit is not None:  # the kernel writes so many bytes of a file, then fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    import torch

    torch.set_num_threads(1)
    status = 1
    try:
        status = target(rank)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.exit(status)


def train(rank: int, args: list[str]) -> int:
    """`train.py`, as a target of `Ranks`."""
    from regdrop_titan.launch import main

    return main(args)


class Ranks:
    """`world_size` ranks of one run; what rank r prints is appended to `OUTPUT.r`.

    Args:
        target: called in each rank with its number; returns the exit status. Picklable.
        file_limit: bytes that a file may have, as if the disk were full then.
    """

    def __init__(
        self, world_size: int, target: Callable[[int], int], output: Path, file_limit: int | None = None
    ) -> None:
        start_server()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.output = output
        self.processes = [
            CONTEXT.Process(target=_run, args=(rank, world_size, port, target, str(output), file_limit))
            for rank in range(world_size)
        ]
        atexit.register(self.signal, signal.SIGKILL)  # a test that fails may leave them running
        for process in self.processes:
            process.start()

    def signal(self, number: int, rank: int | None = None) -> None:
        """To one rank, or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait(self, seconds: float = 120) -> list[int]:
        """The exit status of each rank; negative: the signal that ended it. Once one has failed, the others have 20
        seconds; ranks that then, or after `seconds`, are still there are killed."""
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            if any(process.exitcode not in (None, 0) for process in self.processes):
                end = min(end, time.monotonic() + 20)
            time.sleep(0.02)
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]

    def said(self) -> str:
        """All that the ranks have printed so far."""
        return "".join(path.read_text() for path in sorted(self.output.parent.glob(f"{self.output.name}.*")))

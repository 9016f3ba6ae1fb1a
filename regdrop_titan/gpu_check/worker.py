"""The process that runs parts: it reads their names, a line each, and answers with their rows as JSON.

A CUDA error can leave a process that does nothing more on the device. The answer then says so, and the one that asks
starts another for the parts that are left.
"""

import argparse
import dataclasses
import gc
import json
import os
import platform
import sys
import traceback
from pathlib import Path

import torch

from ..startup import versions
from .kernels import has_fla
from .parts import PARTS, Part
from .rows import FAILED, Machine, Row


def greeting(machine: Machine) -> dict[str, str]:
    """What the results are of."""
    found = {"device": f"CPU {platform.machine()}", **versions(), "cuda": str(torch.version.cuda)}
    if machine.cuda:
        found["device"] = torch.cuda.get_device_name(machine.device)
    return found | {"fla-core": "there" if has_fla() else "missing"}


def run(part: Part, machine: Machine) -> list[Row]:
    """Its rows; an exception is one of them."""
    try:
        return part.run(machine)
    except Exception as error:
        traceback.print_exc()
        return [Row(part.name, FAILED, message=f"{type(error).__name__}: {error}")]


def device_lives(machine: Machine) -> bool:
    """Whether it does anything more; leaves what a part held."""
    gc.collect()
    torch._dynamo.reset()
    if machine.cuda:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        torch.cuda.empty_cache()
    return True


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed belongs to the log
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    machine = Machine(device, arguments.output, arguments.rehearse)
    torch.backends.cudnn.allow_tf32 = False  # of convolutions, the one kind of product that has it by default
    parts = {part.name: part for part in PARTS}
    print(json.dumps(greeting(machine)), file=answers)
    for line in sys.stdin:
        part = parts[line.strip()]
        print(f"\n{part.name}", file=sys.stderr, flush=True)
        rows = run(part, machine)
        lives = device_lives(machine)
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows], "lives": lives}), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

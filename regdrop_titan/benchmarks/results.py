"""Results of the verbs: where they were measured, how they are printed, and how a file of one is read again."""

import json
import os
import platform
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..evaluation.subjects import InputError

Line = dict[str, str]
ROW = ("seconds", "ratio", "quartiles", "base")  # what every row has


def machine() -> dict[str, Any]:
    """What a result was measured on."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
              ] if info.exists() else []  # fmt: skip
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in ("torch", "torchtitan", "transformers")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def table(rows: dict[str, dict]) -> list[Line]:
    """A line a row: its seconds, its ratio to another, and whatever else rows hold."""
    extras = list(dict.fromkeys(key for row in rows.values() for key in row if key not in ROW))
    return [
        {
            "variant": name.removesuffix(f" / {row['base']}"),
            "seconds": cell(row["seconds"]),
            "ratio [quartiles]": with_quartiles(row["ratio"], row["quartiles"]),
            "to": row["base"],
            **{key.replace("_", " "): cell(row.get(key)) for key in extras},
        }
        for name, row in rows.items()
    ]


def with_quartiles(middle: float, quartiles: list[float] | None) -> str:
    return f"{middle:.3f}" + (f" [{quartiles[0]:.3f}, {quartiles[1]:.3f}]" if quartiles else "")


def cell(value: float | bool | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_table(lines: list[Line]) -> None:
    """In columns; nothing where there are no lines."""
    for line in [{name: name for name in lines[0]}, *lines] if lines else []:
        widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in line}
        print("  ".join(text.ljust(widths[name]) for name, text in line.items()).rstrip())


def read_result(file: Path, *needed: str) -> dict[str, Any]:
    """The result of a verb in a file. Raises InputError where there is none, or one without what is `needed`:
    paths of keys as "sizes.dim"."""
    try:
        result = json.loads(file.read_text())
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{file}: is not JSON ({error}); expected a result of scripts/benchmark.py") from error
    missing = [path for path in needed if not _holds(result, path)]
    if missing:
        raise InputError(
            f"{file}: has no {', '.join(missing)}; is it a result of another verb, or of an older version?"
        )
    return result


def _holds(result: Any, path: str) -> bool:
    try:
        reduce(lambda part, key: part[key], path.split("."), result)
    except (KeyError, TypeError, IndexError):
        return False
    return True

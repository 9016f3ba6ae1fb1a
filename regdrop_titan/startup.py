"""What all ranks must have in common before they train together."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torchtitan

from . import __version__
from .config import JobConfig
from .config.resume import flat, manifest_hash
from .data.mixture import parse_mixture

SHOWN = 10  # differences in a message


class RanksDisagree(Exception):
    """The ranks were started with different configurations, code or data; the message names what differs."""


def versions() -> dict[str, str]:
    return {
        "regdrop_titan": __version__,
        "torchtitan": torchtitan.__version__,
        "torch": torch.__version__,
    }


def code_hash() -> str:
    """Of this package's sources."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint(config: JobConfig) -> dict[str, Any]:
    """What must be the same on every rank: every setting, the versions, this package's code, the packed sets."""
    found = flat(config.to_dict()) | flat({"versions": versions()}) | {"code of regdrop_titan": code_hash()}
    paths: list[str | None] = []
    if config.training.dataset == "packed":
        paths += [path for path, _ in parse_mixture(config.training.dataset_path or "")]
    if config.validation.enable:
        paths += [config.validation.dataset_path] if config.validation.dataset == "packed" else []
        paths += [config.validation.context_dataset_path] if config.validation.context_multiples else []
    return found | {f"manifest of {path}": manifest_hash(path) for path in paths if path}


def check_ranks_agree(config: JobConfig) -> None:
    """Raise RanksDisagree on every rank where one has another fingerprint, naming what differs and on which ranks."""
    own = fingerprint(config)
    world_size = torch.distributed.get_world_size()
    digests: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(digests, hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, own)
    lines = []
    for key in sorted(set().union(*everyone)):
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(everyone):
            ranks.setdefault(json.dumps(found.get(key, "absent"), default=str), []).append(rank)
        if len(ranks) > 1:
            lines.append(f"  {key}: " + ", ".join(f"{value} on rank {_shortly(at)}" for value, at in ranks.items()))
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise RanksDisagree("the ranks were not started alike:\n" + "\n".join(lines[:SHOWN] + more))


def _shortly(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")

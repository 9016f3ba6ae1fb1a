"""Drafts: the parts of a model that write ahead of all of it (Draft & Verify, arXiv 2309.08168). What they are called,
when they stop, what they cost, and the file that holds one.

A part is a layer, written `5`, or one of its two sublayers, `5a` (attention) or `5f` (feed-forward).
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files import write_json
from ..models import DecoderArgs, Part

LETTERS = {"attention": "a", "feed_forward": "f"}


@dataclass(frozen=True)
class Draft:
    """What drafts, how many tokens at a time at most, and when it stops before (a threshold, or "adaptive")."""

    parts: tuple[Part, ...]
    length: int = 5
    exit: float | str | None = None

    def options(self) -> dict[str, Any]:
        """As `generate` takes it."""
        return {"draft_layers": self.parts, "draft_length": self.length, "draft_exit": self.exit}


def part_text(part: Part) -> str:
    return f"{part[0]}{LETTERS[part[1]]}" if isinstance(part, tuple) else str(part)


def parse_part(text: str) -> Part:
    """Raises ValueError where `text` is no layer or sublayer."""
    found = re.fullmatch(r"(\d+)([af]?)", text)
    if not found:
        raise ValueError(f"{text!r} is neither a layer (5) nor a sublayer (5a, 5f)")
    layer, letter = int(found[1]), found[2]
    return (layer, next(name for name, its in LETTERS.items() if its == letter)) if letter else layer


def parse_exit(text: str) -> float | str:
    """A draft's exit on a command line: `none`, which is 0, `adaptive` or a number."""
    if text in ("none", "adaptive"):
        return 0.0 if text == "none" else text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be none, adaptive or a number in [0, 1]") from None


def sublayers_of(args: DecoderArgs, part: Part) -> set[Part]:
    """What cannot be divided: the two sublayers of a layer with attention; itself otherwise."""
    if isinstance(part, tuple) or args.layer_kinds[part] == "mamba":
        return {part}
    return {(part, name) for name in LETTERS}


def in_order(args: DecoderArgs, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts by depth; two sublayers of one layer are that layer."""
    having = set().union(*(sublayers_of(args, part) for part in parts))
    found: list[Part] = []
    for layer in range(args.n_layers):
        own = sublayers_of(args, layer) & having
        found += [layer] if own == sublayers_of(args, layer) else sorted(own, key=str)
    return tuple(found)


def faults_of_parts(args: DecoderArgs, parts: Sequence[Part]) -> list[str]:
    """Why a model cannot draft with these, a line each."""
    L = args.n_layers
    if not parts:
        return ["draft_layers: there are none; a draft needs at least one layer"]
    numbers = [part[0] if isinstance(part, tuple) else part for part in parts]
    if wrong := [part_text(part) for part, layer in zip(parts, numbers, strict=True) if not 0 <= layer < L]:
        return [f"draft_layers {' '.join(wrong)}: there are 0 ... {L - 1}"]
    found = []
    whole = [
        part_text(part)
        for part, layer in zip(parts, numbers, strict=True)
        if isinstance(part, tuple) and args.layer_kinds[layer] == "mamba"
    ]
    if whole:
        found.append(f"draft_layers {' '.join(whole)}: a Mamba2 layer has no sublayers")
    each = [sublayer for part in parts for sublayer in sorted(sublayers_of(args, part), key=str)]
    if len(set(each)) < len(each):
        found.append("draft_layers: one is named twice")
    return found


def flops_share(args: DecoderArgs, parts: Sequence[Part], context: int) -> float:
    """Forward FLOPs of the parts with final norm and head, as a share of the whole model's, at `context` tokens: the
    `c = T_draft / T_target` of a device that does nothing else."""
    of_layers = args.sublayer_flops(context)
    kept = 0
    for part in parts:
        layer, sublayer = part if isinstance(part, tuple) else (part, None)
        kept += sum(of_layers[layer]) if sublayer is None else of_layers[layer][list(LETTERS).index(sublayer)]
    total = args.flops_per_token(context)
    return (total - sum(map(sum, of_layers)) + kept) / total


class DraftExit:
    """When a draft stops before its full length: behind a token of which it was less sure than `threshold`, the largest
    probability of its distribution at temperature 1. What a draft does not know it guesses wrong mostly.

    "adaptive" moves the threshold after each pass so that a share `TARGET` of what is drafted is accepted, by Draft &
    Verify's rule: `AR <- B1 AR + (1 - B1) AR_pass`, then `t <- B2 t + (1 - B2) (t +- STEP)`, up where AR is at most
    TARGET. START and STEP are ours (chosen: theirs need thousands of passes).
    """

    START, TARGET, STEP, B1, B2 = 0.6, 0.9, 0.1, 0.5, 0.9

    def __init__(self, rule: float | str | None) -> None:
        self.adaptive = rule == "adaptive"
        self.threshold = self.START if isinstance(rule, str) else rule or 0.0
        self.accepted_share = self.TARGET

    @staticmethod
    def faults(rule: float | str | None) -> list[str]:
        if rule is None or rule == "adaptive" or (isinstance(rule, int | float) and 0 <= rule <= 1):
            return []
        return [f"draft_exit {rule}: must be in [0, 1], or 'adaptive'"]

    def unsure(self, logits: Tensor) -> Tensor | None:
        """Of each row of logits (B, V), (B,) bool. None: no draft stops early."""
        if self.threshold == 0.0:
            return None
        return logits.float().softmax(-1).amax(-1) < self.threshold

    def learn(self, accepted: int, drafted: int) -> None:
        """Of a pass."""
        if not self.adaptive or not drafted:
            return
        self.accepted_share = self.B1 * self.accepted_share + (1 - self.B1) * accepted / drafted
        step = self.STEP if self.accepted_share <= self.TARGET else -self.STEP
        self.threshold = min(max(self.threshold + (1 - self.B2) * step, 0.01), 0.99)


def write_draft(file: Path, draft: Draft, about: dict[str, Any]) -> None:
    """`about`: what it was found for, and how."""
    parts = [part_text(part) for part in draft.parts]
    write_json(file, {"layers": parts, "length": draft.length, "exit": draft.exit, "about": about})


def read_draft(file: Path) -> Draft:
    """Raises ValueError where `file` holds none."""
    try:
        found = json.loads(file.read_text())
        return Draft(tuple(map(parse_part, found["layers"])), int(found["length"]), found["exit"])
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: holds no draft as search_draft.py writes it: {error}") from None

"""Reading a run's checkpoint without a process group and without its TOML."""

import json
import re
import warnings
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ..models import Decoder, DecoderArgs


class CheckpointError(Exception):
    """A checkpoint that cannot be read; the message names the folder and what was expected."""


def complete_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder` (…/checkpoint) that were written to their end, ascending."""
    found = []
    for child in folder.iterdir():
        match = re.fullmatch(r"step-(\d+)", child.name)
        # DCP writes .metadata last, when every rank has written its part
        if match and (child / ".metadata").is_file():
            found.append(int(match.group(1)))
    return sorted(found)


def resolve_checkpoint(path: str | Path) -> Path:
    """`…/checkpoint/step-N` itself, or the newest complete one of `…/checkpoint` or of a dump folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder (expected …/checkpoint/step-N or …/checkpoint)")
    if re.fullmatch(r"step-\d+", folder.name):
        if not (folder / ".metadata").is_file():
            raise CheckpointError(f"{folder}: incomplete, it has no .metadata; others: {complete_steps(folder.parent)}")
        return folder
    if (folder / "checkpoint").is_dir():
        folder = folder / "checkpoint"
    steps = complete_steps(folder)
    if not steps:
        raise CheckpointError(f"{folder}: no complete checkpoint (step-N with .metadata) in it")
    return folder / f"step-{steps[-1]}"


def run_config(checkpoint: Path) -> dict:
    """The `config.json` of the run that wrote `checkpoint`: in its dump folder, at most three levels up."""
    for parent in list(checkpoint.absolute().parents)[:3]:
        file = parent / "config.json"
        if file.is_file():
            try:
                return json.loads(file.read_text())
            except ValueError as error:
                raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    raise CheckpointError(f"{checkpoint}: no config.json in the run's folder above it")


def load_model(path: str | Path) -> Decoder:
    """The model of a checkpoint, on the CPU, in evaluation mode, fp32.

    Args:
        path: `…/checkpoint/step-N`, or `…/checkpoint` for the newest complete one.

    Raises:
        CheckpointError: there is none, or it does not fit its `config.json`.
    """
    checkpoint = resolve_checkpoint(path)
    saved = run_config(checkpoint).get("model_args")
    if saved is None:
        raise CheckpointError(f"{checkpoint}: the run's config.json has no model_args")
    known = {field.name for field in fields(DecoderArgs)}
    if unknown := set(saved) - known:
        raise CheckpointError(f"{checkpoint}: config.json has unknown model arguments {', '.join(sorted(unknown))}")
    model = Decoder(DecoderArgs(**saved))
    state = model.state_dict()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # what no_dist asks for
    try:
        dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    except (Exception, CheckpointException) as error:  # DCP's own kind is a BaseException
        raise CheckpointError(f"{checkpoint}: cannot be read: {error}") from error
    model.load_state_dict(state)
    return model.to(torch.float32).eval()

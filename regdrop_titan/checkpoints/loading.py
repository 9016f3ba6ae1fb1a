"""Reading a run's checkpoint without a process group and without its TOML."""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..models import Decoder, DecoderArgs
from .formats import args_from_json
from .safety import CheckpointError, check_complete, load_state, survey


def resolve_checkpoint(path: str | Path) -> Path:
    """`…/checkpoint/step-N` itself, or the newest whole one of `…/checkpoint` or of a dump folder.

    Raises CheckpointError where there is none, saying why others are not whole.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder (expected …/checkpoint/step-N or …/checkpoint)")
    if re.fullmatch(r"step-\d+", folder.name):
        try:
            check_complete(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; whole checkpoints beside it: {survey(folder.parent)[0]}") from None
        return folder
    if (folder / "checkpoint").is_dir():
        folder = folder / "checkpoint"
    complete, faults = survey(folder)
    if not complete:
        reasons = "".join(f"\n  {fault}" for fault in faults.values())
        raise CheckpointError(f"{folder}: no whole checkpoint (a folder step-N with .metadata) in it{reasons}")
    return folder / f"step-{complete[-1]}"


def run_config(checkpoint: Path) -> dict:
    """The `config.json` of the run that wrote `checkpoint`: in its dump folder, at most three levels up."""
    for parent in list(checkpoint.absolute().parents)[:3]:
        file = parent / "config.json"
        if file.is_file():
            try:
                config = json.loads(file.read_text())
            except ValueError as error:
                raise CheckpointError(f"{file}: not valid JSON: {error}") from None
            if not isinstance(config, dict):
                raise CheckpointError(f"{file}: holds no settings")
            return config
    raise CheckpointError(f"{checkpoint}: no config.json in the run's folder above it")


def model_args_of(checkpoint: Path) -> DecoderArgs:
    """The arguments of the model in `checkpoint`, from its run's `config.json`. Raises CheckpointError."""
    saved = run_config(checkpoint).get("model_args")
    if saved is None:
        raise CheckpointError(f"{checkpoint}: the run's config.json has no model_args")
    return args_from_json(saved, f"{checkpoint}: config.json")


def load_model(path: str | Path, args: DecoderArgs | None = None) -> Decoder:
    """The model of a checkpoint, on the CPU, in evaluation mode, fp32.

    Args:
        path: `…/checkpoint/step-N`, or `…/checkpoint` for the newest complete one.
        args: of the model, where it shall compute otherwise with the same weights. None: its `config.json`'s.

    Raises:
        CheckpointError: there is none, or it does not fit its `config.json`.
    """
    checkpoint = resolve_checkpoint(path)
    model = Decoder(model_args_of(checkpoint) if args is None else args)
    state = model.state_dict()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # what no_dist asks for
    load_state(state, checkpoint, no_dist=True)
    model.load_state_dict(state)
    return model.to(torch.float32).eval()


def state_sha256(state: Mapping[str, Tensor]) -> str:
    """Of weights with their names, dtypes and shapes: the same for every layout and folder of one model. Sharded ones
    are gathered, one at a time, on all ranks."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

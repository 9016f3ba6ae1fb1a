"""What a weight format of Hugging Face is: how its configuration and tensors read in ours, and back."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models import DecoderArgs
from ..safety import CheckpointError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """One `model_type`, or an original format beside it.

    Args:
        family: ours.
        reads: whether a `config.json` is of this format.
        args: our arguments of a configuration. Raises CheckpointError for what it has and we do not.
        fault: why a model of ours cannot be written in this format, None where it can.
        to_theirs, to_ours: the tensors under the other names; a tied head is left out of theirs.
        config: their configuration of our arguments: every field that our model fixes, whatever their default is.
        embedding: their name of the embedding.
        renames: whether the tensors are the same under other names, so that sharded ones can be read in place.
        older: names in older files, to be replaced.
        code: the modelling file that goes beside the weights, where transformers has no class of its own.
    """

    family: str
    reads: Callable[[dict[str, Any]], bool]
    args: Callable[[dict[str, Any], Path], DecoderArgs]
    fault: Callable[[DecoderArgs], str | None]
    to_theirs: Callable[[Tensors, DecoderArgs], Tensors]
    to_ours: Callable[[Tensors, DecoderArgs], Tensors]
    config: Callable[[DecoderArgs, torch.dtype], dict[str, Any]]
    embedding: str
    renames: bool = False
    older: tuple[str, str] = ("", "")
    code: Path | None = None


def ids_and_dtype(args: DecoderArgs, dtype: torch.dtype) -> dict[str, Any]:
    """What every configuration ends with. We have one special token, which ends a document."""
    return {
        "bos_token_id": args.eos_id, "eos_token_id": args.eos_id, "pad_token_id": args.eos_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def fault_of_factors(args: DecoderArgs) -> str | None:
    """The factors of a model that formats of transformers' own classes have no place for."""
    if (args.width_multiplier, args.depth_multiplier) != (1, 1):
        return (
            f"the multipliers of {args.parametrization}: m_d = {args.width_multiplier:g}, "
            f"m_L = {args.depth_multiplier:g}"
        )
    if any(factor != 1 for factor in args.eval_scale or []):
        return "each layer's own factor in evaluation (layer_dropout.scale = 'eval_density')"
    return None


def refuse(refused: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError naming the keys whose value is true."""
    if wrong := [key for key, bad in refused.items() if bad]:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")


def args_from_json(saved: dict[str, Any], where: str) -> DecoderArgs:
    """Our arguments as a JSON file holds them, fields that it lacks at their defaults. Raises CheckpointError."""
    known = {field.name for field in fields(DecoderArgs)}
    if unknown := set(saved) - known:
        raise CheckpointError(f"{where}: unknown model arguments: {', '.join(sorted(unknown))}")
    return DecoderArgs(**saved)


def check_args(args: DecoderArgs, where: Path) -> DecoderArgs:
    """`args`, if they are possible; else CheckpointError."""
    if faults := args.faults():
        raise CheckpointError(f"{where}: {'; '.join(faults)}")
    return args

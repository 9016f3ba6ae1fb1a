"""Initial weights as functions of (seed, parameter name): the same for every parallel layout and device.

DTensor's random generator does not support the CPU, so TorchTitan's own initialisation would give every rank's
shard the same numbers there. Here each parameter is drawn whole on the CPU, from its own stream, and each rank
keeps its shard.
"""

import re

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..seeds import derive_seed
from . import mamba2
from .args import DecoderArgs

SSMAX_INIT = 0.43  # s of `s ln n` (chosen)

# names that activation checkpointing and torch.compile put into a parameter's path
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


def canonical_name(name: str) -> str:
    """A parameter's name without the wrappers of checkpointing and compile."""
    return _WRAPPERS.sub("", name)


def weight_std(name: str, args: DecoderArgs) -> tuple[float, float]:
    """Standard deviation and cut-off (both absolute) of a weight matrix's truncated normal distribution.

    With `args.sigma`: sigma^2 for embedding and head, sigma^2 / m_d for matrices of the blocks (spec sec. 6). Without:
    as TorchTitan's Llama-3, depth-scaled.
    """
    embedding, head = name == "tok_embeddings.weight", name == "output.weight"
    if embedding and args.embedding_std is not None:
        return args.embedding_std, torch.inf
    if args.sigma is not None:
        return args.sigma / (1.0 if embedding or head else args.width_multiplier**0.5), torch.inf
    if head or (embedding and args.tied_embeddings):
        return args.dim**-0.5, 3 * args.dim**-0.5
    if embedding:
        return 1.0, torch.inf
    _, layer, *_, matrix, _ = name.split(".")  # layers.3.attention.inner.wq.weight
    # matrices that write to the residual stream shrink with depth; Llama-3 treats w3 as one of them
    return (0.02 / (2 * (int(layer) + 1)) ** 0.5 if matrix in ("wo", "w2", "w3") else 0.02), 2.0


def initial_value(name: str, shape: torch.Size, args: DecoderArgs) -> Tensor:
    """The whole initial value of the parameter called `name`, fp32 on the CPU."""
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(derive_seed("weights", args.seed, name))
    if ".mamba.inner." in name:
        return mamba2.initial_value(name.split(".mamba.inner.")[1], value, generator, args)
    if name.endswith("norm.weight"):
        return value.fill_(1.0)
    if name.endswith(".bias") or (".scaling." in name and args.scaling_init == "identity"):
        return value.zero_()
    if name.endswith(".scaling.s"):
        return value.fill_(SSMAX_INIT)
    std, cut = weight_std(name, args)
    if cut == torch.inf:
        return value.normal_(0.0, std, generator=generator)
    return nn.init.trunc_normal_(value, 0.0, std, -cut, cut, generator=generator)


@torch.no_grad()
def initialize(model: nn.Module, args: DecoderArgs) -> None:
    """Set every parameter of `model` (whole, sharded or a pipeline stage) to its initial value."""
    for name, parameter in model.named_parameters():
        value = initial_value(canonical_name(name), parameter.shape, args)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank drew the same whole tensor, so none has to send it
            value = distribute_tensor(
                value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(value)

"""TorchTitan's optimizers, with a group of their own for parameters that take no weight decay."""

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as build_titan_optimizers
from torchtitan.config import Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from .models.mamba2 import StateSpace


def build_optimizers(
    model_parts: list[nn.Module], optimizer_config: Optimizer, parallel_dims: ParallelDims, *args
) -> OptimizersContainer:
    """Takes TorchTitan's arguments. Mamba2's `A_log`, `dt_bias` and `D` are not decayed (spec sec. 4): zero is no
    neutral value for them."""
    optimizers = build_titan_optimizers(model_parts, optimizer_config, parallel_dims, *args)
    for part, optimizer in zip(model_parts, optimizers, strict=True):
        undecayed = {p for module in part.modules() if isinstance(module, StateSpace) for p in module.parameters()}
        if not undecayed:
            continue
        (group,) = optimizer.param_groups
        everything, group["params"] = group["params"], [p for p in group["params"] if p not in undecayed]
        mine = [p for p in everything if p in undecayed]
        optimizer.add_param_group({**group, "params": mine, "weight_decay": 0.0})
        logger.info(f"No weight decay on {len(mine)} parameters: A_log, dt_bias and D of the Mamba2 layers")
    return optimizers

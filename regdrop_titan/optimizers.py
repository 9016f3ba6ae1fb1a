"""TorchTitan's optimizers, with the groups of the parametrization."""

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as build_titan_optimizers
from torchtitan.config import Optimizer
from torchtitan.distributed import ParallelDims

from .config import JobConfig, global_batch
from .models.initialization import canonical_name
from .parametrization import GROUPS, Settings, group_of, group_settings, run_scale


def build_optimizers(
    config: JobConfig, model_parts: list[nn.Module], _: Optimizer, parallel_dims: ParallelDims
) -> OptimizersContainer:
    """Takes the job's configuration and TorchTitan's arguments. Each optimizer has a group for every setting that a
    parameter of its model part has."""
    optimizers = build_titan_optimizers(model_parts, config.optimizer, parallel_dims)
    sequences = global_batch(config, parallel_dims.dp_replicate * parallel_dims.dp_shard)
    set_groups(optimizers, config, sequences * config.training.seq_len)
    return optimizers


def set_groups(optimizers: OptimizersContainer, config: JobConfig, tokens_per_step: int) -> None:
    """Divide each optimizer's single group."""
    settings = group_settings(config, run_scale(config, tokens_per_step))
    for part, optimizer in zip(optimizers.model_parts, optimizers, strict=True):
        by_settings: dict[Settings, list[nn.Parameter]] = {settings[name]: [] for name in GROUPS}
        for name, parameter in part.named_parameters():
            by_settings[settings[group_of(canonical_name(name), parameter.ndim)]].append(parameter)
        (group,) = optimizer.param_groups
        common = {key: value for key, value in group.items() if key not in ("params", "lr", "weight_decay", "eps")}
        optimizer.param_groups.clear()
        for own, parameters in by_settings.items():
            if parameters:  # a checkpoint cannot hold a group without any
                optimizer.add_param_group({**common, **vars(own), "params": parameters})

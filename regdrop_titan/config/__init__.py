"""The job configuration: its sections, how it is read, and what it is refused for.

`load_config` raises one `ConfigError` that lists every fault: unknown keys (with the nearest right one), wrong types
(TorchTitan takes `lr = "6e-4"` from a TOML), values out of range, and combinations that cannot run. Nothing here
starts a process group or reads data, unless `inputs=True` asks for the data paths to be looked at.
"""

from .reading import ConfigError, key_fault, load_config
from .sections import Architecture, JobConfig, forward_tokens, global_batch, loss_pieces, model_args

__all__ = [
    "Architecture",
    "ConfigError",
    "JobConfig",
    "forward_tokens",
    "global_batch",
    "key_fault",
    "load_config",
    "loss_pieces",
    "model_args",
]

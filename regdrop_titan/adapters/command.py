"""The command line of `scripts/train_exits.py`: from a checkpoint to the configuration of its exits, and training.

Model, data, batch and precision are the run's, by its config.json; the rest is at TorchTitan's defaults but for what
`exits_config` sets. Exit statuses as train.py's.
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Iterable
from pathlib import Path

from torchtitan.tools.logging import logger

from ..checkpoints.loading import model_args_of, resolve_checkpoint, run_config
from ..checkpoints.safety import CheckpointError
from ..config import Architecture, ConfigError, JobConfig, load_config
from ..config.reading import overridden, saved_sections
from ..config.resume import previous_config
from ..data.packed import DataError
from ..launch import as_single_process, fail, make_ready, train_or_tell
from ..models import FAMILIES, DecoderArgs
from .balcony import KEY, default_exits, exit_faults

STEPS = 1000
SECTIONS = ("model", "training", "validation", "metrics", "comm")  # taken over from the run
OF_THE_MODEL = ("architecture", "parametrization", "layer_dropout")  # sections that would make it another one


def base_config(checkpoint: Path, args: DecoderArgs) -> JobConfig:
    """What overrides act on: the run's sections, and AdamW at 5e-4 with a cosine to 0, no dropout and no weight decay.
    Raises CheckpointError, ConfigError."""
    config = saved_sections(run_config(checkpoint), SECTIONS)
    family = config.model.name
    if family in FAMILIES and config.model.flavor not in FAMILIES[family]:  # of imported weights: the sizes say it all
        config.model.flavor = next(iter(FAMILIES[family]))
    for field in dataclasses.fields(Architecture):
        setattr(config.architecture, field.name, getattr(args, field.name))
    rules = config.parametrization
    rules.kind, rules.base_dim, rules.base_layers = args.parametrization, args.base_dim, args.base_layers
    rules.attention_scale, rules.sigma = args.attention_scale, args.init_std
    for name in ("unit", "scale_placement", "skip_compute"):
        setattr(config.layer_dropout, name, getattr(args, name))
    training = config.training
    training.steps, training.dtype = STEPS, "float32"
    training.state_passing = training.enable_cpu_offload = False
    training.loss_chunks = 0
    config.validation.context_multiples, config.metrics.log_moments = [], 0
    config.optimizer.lr, config.optimizer.weight_decay = 5e-4, 0.0
    config.lr_scheduler.decay_type, config.lr_scheduler.min_lr_factor = "cosine", 0.0
    config.activation_checkpoint.mode = "none"
    config.checkpoint.enable = True
    config.job.dump_folder = str(checkpoint.parent.parent / "exits")
    return config


def not_to_be_overridden(keys: Iterable[str]) -> list[str]:
    """Those of some overridden keys that would make another model, a line each."""
    faults = [
        f"--{key}: is the checkpoint's, and stays as it is"
        for key in sorted(keys)
        if key.split(".")[0] in OF_THE_MODEL or key in ("model.name", "model.flavor")
    ]
    if "job.config_file" in keys:
        faults.append("--job.config_file: the settings are those of the run's config.json; override single ones")
    return faults


def unusable(config: JobConfig) -> list[str]:
    """What train.py can and exits cannot, a line each."""
    parallel, checkpoint = config.parallelism, config.checkpoint
    refused = [
        (parallel.tensor_parallel_degree > 1, "parallelism.tensor_parallel_degree",
         "not for exits; all ranks shard (FSDP2), or replicate"),
        (parallel.pipeline_parallel_degree > 1, "parallelism.pipeline_parallel_degree",
         "not for exits, which lie beside all stages; all ranks shard (FSDP2), or replicate"),
        (config.compile.enable, "compile.enable", "not for exits"),
        (config.activation_checkpoint.mode != "none", "activation_checkpoint.mode",
         "not for exits: the backbone keeps no activations, and an exit is one layer"),
        (config.training.dtype != "float32", "training.dtype", "must be float32: another would change the backbone"),
        (config.training.enable_cpu_offload, "training.enable_cpu_offload", "not for exits"),
        (config.training.state_passing, "training.state_passing", "not for exits"),
        (config.training.loss_chunks > 0, "training.loss_chunks", "not for exits, whose loss has its own"),
        (bool(config.validation.context_multiples), "validation.context_multiples",
         "not for exits, whose validation loss is the KL"),
        (config.metrics.log_moments > 0, "metrics.log_moments", "not for exits"),
        (config.training.dataset not in ("packed", "copying"), "training.dataset",
         "must be packed or copying for exits"),
        (not checkpoint.enable, "checkpoint.enable", "must be on: the exits are what is left of a run"),
        (checkpoint.initial_load_path is not None, "checkpoint.initial_load_path",
         "not for exits: they begin as copies of the last layer"),
        (checkpoint.last_save_in_hf, "checkpoint.last_save_in_hf", "no format there has exits"),
        (bool(checkpoint.exclude_from_loading), "checkpoint.exclude_from_loading", "not for exits"),
    ]  # fmt: skip
    return [f"{key}: {reason}" for wrong, key, reason in refused if wrong]


def exits_config(
    path: str | Path, layers: list[int] | None, overrides: list[str], world_size: int
) -> tuple[JobConfig, Path, DecoderArgs, tuple[int, ...]]:
    """The configuration of a training of exits, the backbone's checkpoint and arguments, and the exits.

    Args:
        path: `…/checkpoint/step-N`, or `…/checkpoint` for the newest whole one.
        layers: k of each exit; None: `default_exits`.
        overrides: `["--section.key", "value", ...]`.

    Raises ConfigError with every fault.
    """
    try:
        checkpoint = resolve_checkpoint(path)
        saved = run_config(checkpoint)
        if KEY in saved:
            raise CheckpointError(f"{checkpoint}: holds exits, not a model")
        args = model_args_of(checkpoint)
        base = base_config(checkpoint, args)
    except CheckpointError as error:
        raise ConfigError([f"--checkpoint: {error}"]) from None
    chosen = default_exits(base.model.name, base.model.flavor, args.n_layers) if layers is None else tuple(layers)
    faults = [f"--exits: {fault}" for fault in exit_faults(chosen, args.n_layers)]
    chosen = tuple(sorted(chosen))
    given = overridden(overrides)
    faults += not_to_be_overridden(given)
    base.job.description = f"exits {' '.join(map(str, chosen))} of {checkpoint}"  # ranks compare it
    try:
        config = load_config(overrides, base=base)
        faults += unusable(config)
        if "lr_scheduler.warmup_steps" not in given:
            config.lr_scheduler.warmup_steps = max(1, round(0.01 * config.training.steps))
            overrides = [*overrides, "--lr_scheduler.warmup_steps", str(config.lr_scheduler.warmup_steps)]
        if not faults:
            config = load_config(overrides, world_size, inputs=True, base=base)
    except ConfigError as error:
        faults += error.faults
    if not faults:
        before = previous_config(config) or {}
        trained = before.get(KEY, {}).get("layers", list(chosen))
        if trained != list(chosen):
            faults.append(
                f"--exits {' '.join(map(str, chosen))}: {config.job.dump_folder} has checkpoints of the exits "
                f"{' '.join(map(str, trained))}; name those, or another job.dump_folder"
            )
    if faults:
        raise ConfigError(faults)
    return config, checkpoint, args, chosen


def main(args: list[str], description: str) -> int:
    """Run `train_exits.py` with `args`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="train_exits.py",
        description=description,
        epilog="Any key of a run's configuration can be overridden as in train.py: --section.key value.",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", required=True, help="…/checkpoint/step-N, or …/checkpoint for the newest")
    parser.add_argument(
        "--exits", type=int, nargs="+", metavar="K",
        help="exits after so many layers; default: the published ones of Celerity 271M, 503M and 906M, else a quarter, "
        "half and three quarters of the depth",
    )  # fmt: skip
    own, overrides = parser.parse_known_args(args)
    try:
        as_single_process()
        world_size = int(os.environ["WORLD_SIZE"])
        config, checkpoint, model, layers = exits_config(own.checkpoint, own.exits, overrides, world_size)
        make_ready(config)
    except ConfigError as error:
        return fail(f"exits cannot be trained so:\n{error}")
    except DataError as error:
        return fail(str(error))
    from .training import ExitsTrainer, Setup

    logger.info(f"Exits after {', '.join(map(str, layers))} of {model.n_layers} layers, into {config.job.dump_folder}")
    return train_or_tell(config, functools.partial(ExitsTrainer, setup=Setup(checkpoint, model, layers)))

"""The job configuration: TorchTitan's sections, those this package adds, and their validation.

`load_config` reads a TOML file and `--section.key value` overrides, and raises one `ConfigError` that lists every
fault: unknown keys (with the nearest right one), wrong types (TorchTitan takes `lr = "6e-4"` from a TOML), values
out of range, and combinations that cannot run. Nothing here starts a process group or reads data, unless
`inputs=True` asks for the data paths to be looked at.
"""

import contextlib
import difflib
import io
import os
import tomllib
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torchtitan.config as titan
import tyro
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.config.manager import custom_registry
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.hf_datasets.text_datasets import DATASETS

from .data.packed import DataError, PackedDataset, read_manifest
from .models.args import FAMILIES, DecoderArgs, flavor_args
from .platform import has_accelerator
from .regularization.layer_dropout import layer_rates, time_factor

# TorchTitan inspects these classes' annotations: no `from __future__ import annotations` here.


class ConfigError(Exception):
    """A configuration that cannot run; `faults` has one sentence each, naming key, value and what is allowed."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"  {fault}" for fault in faults))


@dataclass
class Model(titan.Model):
    name: str = "nape_llama3"
    """Model family: nape_llama3."""

    flavor: str = "debug"
    """Size of the family: debug, 150M, 400M, 1B, 3B."""


@dataclass
class Architecture:
    """Overrides of the flavor. A field left out keeps the flavor's value."""

    position: Literal["rope", "nope", "alibi", "nape"] | None = None
    """Positions: rotary, none, ALiBi in all heads, or NAPE (ALiBi in the first half of the heads; LG sec. 5)."""

    slopes: Literal["inverse", "exp2", "press"] | None = None
    """ALiBi slopes by head h = 1, 2, ...: 1/h, 2^-(h-1), or Press et al.'s rule."""

    rope_theta: float | None = None
    """Base of the rotary frequencies, above 0."""

    sliding_window: int | None = None
    """Keys a query sees, its own included, at least 1. Absent: all of them."""

    document_mask: bool | None = None
    """Hide the keys of other documents in a packed sequence."""

    dim: int | None = None
    """Model width d, a multiple of n_heads."""

    n_layers: int | None = None
    """Number of blocks, at least 1."""

    n_heads: int | None = None
    """Query heads, even for nape."""

    n_kv_heads: int | None = None
    """Key and value heads; must divide n_heads."""

    ffn_dim: int | None = None
    """Width of the feed-forward layer."""

    vocab_size: int | None = None
    """Vocabulary of embedding and head; at least the tokenizer's."""

    norm_eps: float | None = None
    """Epsilon of the norms, above 0."""

    tied_embeddings: bool | None = None
    """One matrix for embedding and head."""


@dataclass
class Dropout:
    placement: Literal["none", "pre_norm", "pre_linear", "vpad"] = "none"
    """Where dropout stands in every residual sublayer (LG secs 3-4)."""

    p: float = 0.0
    """Drop probability in [0, 1). The papers use 0.1 to 0.3. Read by every placement but none."""

    mask: Literal["per_sublayer", "per_linear"] = "per_sublayer"
    """One mask on the norm's output for all projections that read it (the paper's), or one each.
    Of effect for pre_linear and vpad."""

    vpad_stop_gradient: bool = False
    """Treat VPAD's alpha and beta as constants in the backward pass (default: gradients flow)."""

    schedule: Literal["constant", "increasing", "decreasing"] = "constant"
    """The rate over time: p, p t/(T-1), or p (1 - t/(T-1)), t the 0-based step."""

    total_steps: int = 0
    """T of the schedule, in steps. 0: training.steps."""

    def rate(self, config, t: int) -> float:
        """The drop rate at 0-based step `t`."""
        return self.p * time_factor(self.schedule, t, self.total_steps or config.training.steps)


@dataclass
class LayerDropout:
    p_max: float = 0.0
    """Highest drop rate of a layer, in [0, 1); 0: none (DD sec. 4)."""

    distribution: Literal["uniform", "increasing", "alternating"] = "increasing"
    """Rates over depth: p_max in every layer, p_max l/(L-1) (ILD), or p_max in odd layers (ALD)."""

    schedule: Literal["constant", "increasing", "decreasing"] = "decreasing"
    """Rates over time: constant, t/(T-1) (ITS), or 1 - t/(T-1) (DTS) of them."""

    unit: Literal["layer", "sublayer"] = "layer"
    """Drop whole blocks, or attention and feed-forward independently."""

    granularity: Literal["sequence", "batch"] = "sequence"
    """Every sequence draws its own mask, or one draw holds for the whole global batch."""

    scale: Literal["inverse_density", "none", "eval_density"] = "inverse_density"
    """Factor of a layer's update in training and evaluation: 1/(1-p) and 1, 1 and 1, or 1 and the final density."""

    scale_placement: Literal["per_sublayer", "block"] = "per_sublayer"
    """With unit = layer: scale each sublayer's update (DD eq. 6), or the block's whole update once."""

    sampling: Literal["bernoulli", "balanced"] = "bernoulli"
    """Independent draws (the paper's), or the same count in every micro-batch of every rank, so none waits."""

    skip_compute: bool = True
    """false: compute every sequence and mask the update (for comparison; it saves nothing)."""

    total_steps: int = 0
    """T of the schedule, in steps. 0: training.steps."""

    def steps(self, config) -> int:
        """T."""
        return self.total_steps or config.training.steps

    def rates(self, config, n_layers: int, t: int) -> Tensor:
        """The drop rate of every layer at 0-based step `t`: (L,) fp64."""
        return layer_rates(self.distribution, self.schedule, self.p_max, n_layers, t, self.steps(config))


@dataclass
class Training(titan.Training):
    dataset: str = "packed"
    """packed, or one of TorchTitan's names (c4, c4_test, c4_validation)."""

    dataset_source: Literal["prepared", "stdlib"] = "prepared"
    """prepared: dataset_path holds a packed set. stdlib: the folder above it is built on first use, with the
    sets train, validation and long, from the sources of Python's standard library."""

    seed: int = 42
    """Of initial weights, data order and dropout masks; at least 0."""


@dataclass
class Validation(titan.Validation):
    dataset: str = "packed"
    """packed, or one of TorchTitan's names."""

    local_batch_size: int = 0
    """Sequences a rank and batch. 0: training.local_batch_size."""

    seq_len: int = 0
    """Tokens a sequence. 0: training.seq_len."""


@dataclass
class Checkpoint(titan.Checkpoint):
    last_save_model_only: bool = False
    """Whether the last checkpoint holds the model alone. TorchTitan's default, true, makes a finished run
    impossible to extend."""


@dataclass
class JobConfig(titan.JobConfig):
    model: Model = field(default_factory=Model)
    architecture: Architecture = field(default_factory=Architecture)
    dropout: Dropout = field(default_factory=Dropout)
    layer_dropout: LayerDropout = field(default_factory=LayerDropout)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def model_args(config: JobConfig) -> DecoderArgs:
    """The model's arguments after `[architecture]`, `[dropout]` and `[training]`; name and flavor must exist."""
    args = flavor_args(config.model.name, config.model.flavor)
    args.update_from_config(config)
    return args


# --------------------------------------------------------------------------------------------------------------
# Reading


def _describe(annotation: Any) -> str:
    """A field's type in words for an error message."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(annotation))
    if get_args(annotation) and get_origin(annotation) not in (list, dict):
        return " or ".join(_describe(a) for a in get_args(annotation) if a is not type(None))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(annotation, str(annotation).replace("typing.", ""))


def _matches(annotation: Any, value: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _keys(cls: Any, prefix: str = "") -> list[str]:
    """Every `section.key` of a configuration class."""
    found = []
    for f in fields(cls):
        found += _keys(f.type, f"{prefix}{f.name}.") if is_dataclass(f.type) else [prefix + f.name]
    return found


def _nearest(key: str, known: list[str]) -> str:
    """A hint at the key that was meant: the same last word in another section, else the closest spelling."""
    near = [k for k in known if "." in key and k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _from_dict(cls: Any, values: dict, prefix: str, faults: list[str]) -> Any:
    """An instance of the dataclass `cls` with `values`; what is wrong is left at its default and listed."""
    types = {f.name: f.type for f in fields(cls)}
    kept = {}
    for name, value in values.items():
        key = prefix + name
        if name not in types:
            known = _keys(JobConfig) if prefix else [f.name for f in fields(JobConfig)]
            faults.append(f"{key}: unknown {'key' if prefix else 'section'}{_nearest(key, known)}")
        elif is_dataclass(types[name]):
            if isinstance(value, dict):
                kept[name] = _from_dict(types[name], value, f"{key}.", faults)
            else:
                faults.append(f"{key} = {value!r}: is a section, write [{key}]")
        elif _matches(types[name], value):
            kept[name] = value
        else:
            faults.append(f"{key} = {value!r}: must be {_describe(types[name])}")
    try:
        return cls(**kept)
    except (AssertionError, ValueError) as error:  # TorchTitan's own checks, in its classes' __post_init__
        faults.append(f"[{prefix.rstrip('.')}]: {error}")
        return cls()


def _read_toml(path: str, faults: list[str]) -> dict | None:
    """The file's values; None when it cannot be read, with the reason in `faults`."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        faults.append(f"job.config_file = {path!r}: no such file")
    except tomllib.TOMLDecodeError as error:
        faults.append(f"job.config_file = {path!r}: not valid TOML: {error}")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"job.config_file = {path!r}: unreadable: {error}")
    return None


@dataclass
class Override:
    """One command-line override: `--section.key value`."""

    key: str
    values: list[str]

    def tyro_args(self) -> list[str]:
        """As tyro reads it: a bool is a flag, `--section.key` or `--section.no-key`; an optional one has a value."""
        section, _, name = self.key.rpartition(".")
        flag = f"--{self.key}"
        kind = _field_type(self.key)
        if kind not in (bool, bool | None):
            return [flag, *self.values]
        word = self.values[0].lower() if len(self.values) == 1 else "" if self.values else "true"
        if word not in ("true", "false"):
            return [flag, *self.values]  # tyro refuses it
        if kind is bool:
            return [flag if word == "true" else f"--{section}.no-{name}"]
        return [flag, word.capitalize()]


def _field_type(key: str) -> Any:
    cls: Any = JobConfig
    for name in key.split("."):
        cls = {f.name: f.type for f in fields(cls)}[name]
    return cls


def _read_overrides(args: list[str], faults: list[str]) -> list[Override]:
    """The overrides in `args`; what is not one is listed in `faults`.

    `--a.b 1`, `--a.b=1`, `--a.b-c 1`, and for bools `--a.b`, `--a.b true`, `--a.no-b` and `--no-a.b`.
    """
    overrides: list[Override] = []
    known = _keys(JobConfig)
    for arg in args:
        if not arg.startswith("--"):
            if overrides:
                overrides[-1].values.append(arg)
            else:
                faults.append(f"{arg!r}: unexpected argument; write --section.key value")
            continue
        written, has_value, value = arg[2:].partition("=")
        key = written.replace("-", "_")
        section, _, name = key.rpartition(".")
        negated = [f"{section}.{name.removeprefix('no_')}", key.removeprefix("no_")]
        overrides.append(Override(key, [value] if has_value else []))
        if key not in known:
            off = next((k for k in negated if k in known and _field_type(k) in (bool, bool | None)), None)
            if off is not None:
                overrides[-1] = Override(off, ["false"])
    for override in overrides:
        if override.key not in known:
            faults.append(f"--{override.key}: unknown key{_nearest(override.key, known)}")
    return [override for override in overrides if override.key in known]


def _apply_overrides(config: JobConfig, overrides: list[Override], faults: list[str]) -> JobConfig:
    """`config` with command-line overrides, read by tyro as TorchTitan does."""

    def read(chosen: list[Override]) -> JobConfig | None:
        args = [arg for override in chosen for arg in override.tyro_args()]
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                return tyro.cli(JobConfig, args=args, default=config, registry=custom_registry)
            except SystemExit:
                return None

    titan.ConfigManager.register_tyro_rules(custom_registry)
    if (result := read(overrides)) is not None:
        return result
    # tyro stops at its first error: find every override that it refuses, keep the rest
    refused = [override for override in overrides if read([override]) is None]
    for override in refused:
        written = " ".join([f"--{override.key}", *override.values])
        faults.append(f"{written}: must be {_describe(_field_type(override.key))}")
    return read([override for override in overrides if override not in refused]) or config


def load_config(args: list[str], world_size: int | None = None, inputs: bool = False) -> JobConfig:
    """The validated configuration of a run.

    Args:
        args: command line, as `["--job.config_file", "F.toml", "--dropout.p", "0.2"]`.
        world_size: number of processes, where known; degrees and batch sizes are checked against it.
        inputs: look at tokenizer and data paths too.

    Raises:
        ConfigError: listing every fault that was found.
    """
    faults: list[str] = []
    overrides = _read_overrides(args, faults)
    path = next((" ".join(o.values) for o in overrides if o.key == "job.config_file"), None)
    values = _read_toml(path, faults) if path else {}
    if values is None:
        raise ConfigError(faults)  # defaults in place of the file would only add misleading faults
    config = _from_dict(JobConfig, values, "", faults)
    config = _apply_overrides(config, overrides, faults)
    if not config.validation.local_batch_size:
        config.validation.local_batch_size = config.training.local_batch_size
    if not config.validation.seq_len:
        config.validation.seq_len = config.training.seq_len
    faults += validate(config, world_size)
    if inputs:
        faults += input_faults(config)
    if faults:
        raise ConfigError(faults)
    return config


# --------------------------------------------------------------------------------------------------------------
# Ranges and combinations


def validate(config: JobConfig, world_size: int | None = None) -> list[str]:
    """Every value out of range and every impossible combination, one sentence each."""
    faults = _range_faults(config)
    if config.model.name not in FAMILIES:
        return [*faults, f"model.name = {config.model.name!r}: must be one of {', '.join(FAMILIES)}"]
    flavors = FAMILIES[config.model.name]
    if config.model.flavor not in flavors:
        return [*faults, f"model.flavor = {config.model.flavor!r}: must be one of {', '.join(flavors)}"]
    args = model_args(config)
    model_faults = [f for f in args.faults() if not f.startswith("p = ")]  # p: dropout.p, named by its range
    faults += [f"architecture.{fault}" for fault in model_faults]
    if not model_faults:
        faults += _parallel_faults(config, args, world_size)
    return faults + _unsupported(config) + _combination_faults(config)


def _range_faults(config: JobConfig) -> list[str]:
    """Values outside of their range. NaN fails every comparison, and so every bound."""
    at_least_one = [
        "training.steps", "training.seq_len", "training.local_batch_size", "training.gc_freq",
        "metrics.log_freq", "checkpoint.interval", "validation.freq", "validation.seq_len",
        "validation.local_batch_size", "parallelism.data_parallel_replicate_degree",
        "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree",
        "parallelism.context_parallel_degree", "parallelism.pipeline_parallel_microbatch_size",
    ]  # fmt: skip
    at_least_zero = [
        "layer_dropout.total_steps",
        "dropout.total_steps",
        "lr_scheduler.warmup_steps",
        "optimizer.weight_decay",
        "checkpoint.keep_latest_k",
        "training.seed",
    ]
    above_zero = ["optimizer.lr", "optimizer.eps", "training.max_norm"]
    unit = ["optimizer.beta1", "optimizer.beta2", "dropout.p", "layer_dropout.p_max"]

    def value(key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(config, section), name)

    faults = [f"{key} = {value(key)}: must be at least 1" for key in at_least_one if not value(key) >= 1]
    faults += [f"{key} = {value(key)}: must be at least 0" for key in at_least_zero if not value(key) >= 0]
    faults += [f"{key} = {value(key)}: must be above 0" for key in above_zero if not value(key) > 0]
    faults += [f"{key} = {value(key)}: must be in [0, 1)" for key in unit if not 0 <= value(key) < 1]
    schedule = config.lr_scheduler
    for key in ("decay_ratio", "min_lr_factor"):
        ratio = getattr(schedule, key)
        if ratio is not None and not 0 <= ratio <= 1:
            faults.append(f"lr_scheduler.{key} = {ratio}: must be in [0, 1]")
    if schedule.total_steps is not None and schedule.total_steps < 1:
        faults.append(f"lr_scheduler.total_steps = {schedule.total_steps}: must be at least 1")
    shard = config.parallelism.data_parallel_shard_degree
    if shard != -1 and shard < 1:
        faults.append(f"parallelism.data_parallel_shard_degree = {shard}: must be at least 1, or -1 for all the rest")
    batch = config.training.global_batch_size
    if batch != -1 and batch < 1:
        faults.append(f"training.global_batch_size = {batch}: must be at least 1, or -1 for no accumulation")
    if config.optimizer.name not in ("Adam", "AdamW"):
        faults.append(f"optimizer.name = {config.optimizer.name!r}: must be one of Adam, AdamW")
    if wrong := set(config.compile.components) - {"model", "loss"}:
        faults.append(f"compile.components: unknown {', '.join(sorted(wrong))}; there are model, loss")
    for key in ("training.dataset", "validation.dataset"):
        if value(key) != "packed" and value(key) not in DATASETS:
            faults.append(f"{key} = {value(key)!r}: must be one of packed, {', '.join(DATASETS)}")
    if config.checkpoint.keep_latest_k == 1:
        faults.append("checkpoint.keep_latest_k = 1: must be 0 (keep all) or at least 2, one may be half written")
    if config.checkpoint.load_step < -1:
        faults.append(f"checkpoint.load_step = {config.checkpoint.load_step}: must be a step, or -1 for the newest")
    return faults


def _parallel_faults(config: JobConfig, args: DecoderArgs, world_size: int | None) -> list[str]:
    """Degrees that do not divide the model, the batch or the number of processes."""
    parallel, training = config.parallelism, config.training
    tp, pp = parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree
    replicate, shard = parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree
    if min(tp, pp, replicate) < 1 or shard == 0 or shard < -1:
        return []
    faults = []
    tp_key = f"parallelism.tensor_parallel_degree = {tp}"
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        if getattr(args, name) % tp:
            faults.append(f"{tp_key}: must divide the model's {name} = {getattr(args, name)}")
    for key, seq_len in (("training", training.seq_len), ("validation", config.validation.seq_len)):
        if seq_len % tp and (key == "training" or config.validation.enable):
            faults.append(f"{tp_key}: must divide {key}.seq_len = {seq_len} (sequence parallel)")
    if world_size is not None:
        others = replicate * tp * pp
        data_parallel = replicate * shard
        if shard == -1:
            data_parallel = world_size // (tp * pp)
        if (shard == -1 and world_size % others) or (shard != -1 and others * shard != world_size):
            faults.append(
                f"parallelism: data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard} x "
                f"tensor_parallel_degree {tp} x pipeline_parallel_degree {pp} does not fit {world_size} processes"
            )
        elif training.global_batch_size > 0 and training.global_batch_size % (
            training.local_batch_size * data_parallel
        ):
            faults.append(
                f"training.global_batch_size = {training.global_batch_size}: must be a multiple of "
                f"local_batch_size {training.local_batch_size} x data-parallel degree {data_parallel}"
            )
        elif replicate > 1 and data_parallel == replicate and tp * pp > 1:
            faults.append("parallelism: pure data-parallel replication (DDP) cannot be combined with TP or PP; shard")
    if pp > 1:
        faults += _pipeline_faults(config, args)
    return faults


def _pipeline_faults(config: JobConfig, args: DecoderArgs) -> list[str]:
    parallel, training = config.parallelism, config.training
    name, pp = parallel.pipeline_parallel_schedule, parallel.pipeline_parallel_degree
    try:
        schedule = get_schedule_class(name)
    except ValueError:
        return [f"parallelism.pipeline_parallel_schedule = {name!r}: no such schedule in torch"]
    faults = []
    microbatch = parallel.pipeline_parallel_microbatch_size
    single = issubclass(schedule, PipelineScheduleSingle)
    if microbatch >= 1 and training.local_batch_size % microbatch:
        faults.append(
            f"parallelism.pipeline_parallel_microbatch_size = {microbatch}: must divide "
            f"training.local_batch_size = {training.local_batch_size}"
        )
    elif microbatch >= 1 and single and training.local_batch_size // microbatch < pp:
        faults.append(
            f"training.local_batch_size = {training.local_batch_size}: makes fewer pipeline micro-batches (of "
            f"{microbatch}) than the {pp} stages of {name}"
        )
    if parallel.module_fqns_per_model_part is None and parallel.pipeline_parallel_layers_per_stage is None:
        try:
            generate_llm_fqn_per_model_part(
                pp * (1 if single else 2),
                args.n_layers,
                parallel.pipeline_parallel_first_stage_less_layers,
                parallel.pipeline_parallel_last_stage_less_layers,
            )
        except ValueError as error:
            faults.append(f"parallelism.pipeline_parallel_degree = {pp}: {error}")
    if args.tied_embeddings:
        faults.append("architecture.tied_embeddings = true: embedding and head lie on different pipeline stages")
    if config.validation.enable:
        if name == "ZBVZeroBubble":
            faults.append("validation.enable = true: torch's ZBVZeroBubble schedule has no working evaluation")
        if (config.validation.local_batch_size, config.validation.seq_len) != (
            training.local_batch_size,
            training.seq_len,
        ):
            faults.append(
                "validation.local_batch_size, validation.seq_len: must equal training's under pipeline parallel, "
                "whose buffers have one shape"
            )
    return faults


def _unsupported(config: JobConfig) -> list[str]:
    """TorchTitan's options that do nothing, or not the right thing, with these models."""
    faults = []
    refused = [
        (config.parallelism.context_parallel_degree > 1, "parallelism.context_parallel_degree",
         "not supported: its load balancer permutes keys, and ALiBi, windows and document masks need their places"),
        (config.parallelism.expert_parallel_degree > 1, "parallelism.expert_parallel_degree", "no model has experts"),
        (bool(config.model.converters), "model.converters", "quantized training is not supported"),
        (config.model.tokenizer_path is not None, "model.tokenizer_path", "replaced by model.hf_assets_path"),
        (config.optimizer.early_step_in_backward, "optimizer.early_step_in_backward",
         "not supported: clipping and accumulation need the whole gradient"),
        (config.checkpoint.initial_load_in_hf or config.checkpoint.last_save_in_hf,
         "checkpoint.initial_load_in_hf, checkpoint.last_save_in_hf", "no Hugging Face conversion for this family yet"),
        (config.checkpoint.create_seed_checkpoint, "checkpoint.create_seed_checkpoint",
         "not needed: the initial weights of a seed are the same for every layout"),
        (config.fault_tolerance.enable, "fault_tolerance.enable", "TorchFT is not supported"),
        (config.memory_estimation.enable, "memory_estimation.enable",
         "does nothing in TorchTitan 0.2.2; `train.py --plan` estimates memory"),
        (config.comm.mode != "default", "comm.mode", "only 'default' is supported"),
        (bool(config.parallelism.pipeline_parallel_schedule_csv), "parallelism.pipeline_parallel_schedule_csv",
         "not supported"),
    ]  # fmt: skip
    if not has_accelerator():
        refused += [
            (config.training.enable_cpu_offload, "training.enable_cpu_offload", "needs a GPU"),
            (config.checkpoint.async_mode == "async_with_pinned_mem", "checkpoint.async_mode",
             "'async_with_pinned_mem' needs a GPU; 'async' does not"),
            (config.profiling.enable_profiling or config.profiling.enable_memory_snapshot,
             "profiling.enable_profiling, profiling.enable_memory_snapshot", "TorchTitan's profiler needs a GPU"),
        ]  # fmt: skip
    for wrong, key, reason in refused:
        if wrong:
            faults.append(f"{key}: {reason}")
    return faults


def _combination_faults(config: JobConfig) -> list[str]:
    faults = []
    ac = config.activation_checkpoint
    drops = config.dropout.placement != "none" and config.dropout.p > 0
    skips = config.layer_dropout
    if skips.granularity == "batch" and skips.sampling == "balanced":
        faults.append(
            "layer_dropout.sampling = 'balanced': cannot be with granularity = 'batch', which drops all sequences "
            "alike; use sampling = 'bernoulli' or granularity = 'sequence'"
        )
    if skips.unit == "sublayer" and skips.scale_placement == "block":
        faults.append("layer_dropout.scale_placement = 'block': needs unit = 'layer', got 'sublayer'")
    if skips.p_max > 0 and ac.mode == "memory_budget" and not drops:
        faults.append(
            "activation_checkpoint.mode = 'memory_budget': not with layer dropout; use full, selective or none, or "
            f"layer_dropout.p_max = 0 (now {skips.p_max})"
        )
    if drops and ac.mode != "none" and not ac.preserve_rng_state:
        faults.append(
            "activation_checkpoint.preserve_rng_state = false: recomputation would draw other dropout masks than "
            f"the forward did; set it true, or dropout.p = 0 (now {config.dropout.p})"
        )
    if drops and ac.mode == "memory_budget":
        faults.append(
            "activation_checkpoint.mode = 'memory_budget': its partitioner may recompute random masks; use full, "
            f"selective or none, or dropout.p = 0 (now {config.dropout.p})"
        )
    if ac.mode == "memory_budget" and not (config.compile.enable and "model" in config.compile.components):
        faults.append("activation_checkpoint.mode = 'memory_budget': needs compile.enable and component model")
    option = ac.selective_ac_option
    if ac.mode == "selective" and option != "op" and not (option.isdigit() and int(option) >= 1):
        faults.append(f"activation_checkpoint.selective_ac_option = {option!r}: must be 'op' or a number of layers")
    if config.parallelism.enable_async_tensor_parallel and not config.compile.enable:
        faults.append("parallelism.enable_async_tensor_parallel = true: needs compile.enable")
    if config.debug.seed not in (None, config.training.seed):
        faults.append(f"debug.seed = {config.debug.seed}: set training.seed instead (now {config.training.seed})")
    if config.validation.enable and config.validation.dataset != "packed" and config.validation.steps == -1:
        faults.append("validation.steps = -1: a streamed validation set has no common end over ranks; set a number")
    if config.training.dataset_source == "stdlib" and config.training.dataset != "packed":
        faults.append(f"training.dataset_source = 'stdlib': needs dataset = 'packed', got {config.training.dataset!r}")
    if config.training.dataset_source == "stdlib" and Path(config.training.dataset_path or "").name not in (
        "train", "validation", "long",
    ):  # fmt: skip
        faults.append(
            f"training.dataset_path = {config.training.dataset_path!r}: must end in train, validation or long with "
            "dataset_source = 'stdlib'"
        )
    return faults


# --------------------------------------------------------------------------------------------------------------
# Files


def _packed_faults(key: str, path: str | None, seq_len: int, vocab_size: int) -> list[str]:
    if path is None:
        return [f"{key}: must name a packed set"]
    try:
        manifest = read_manifest(path)
        PackedDataset(path, seq_len, seed=0)
    except (DataError, KeyError, TypeError) as error:
        return [f"{key}: {error}"]
    if manifest["vocab_size"] > vocab_size:
        return [
            f"{key}: the tokenizer of {path} has {manifest['vocab_size']} tokens, the model a vocabulary of "
            f"{vocab_size}; set architecture.vocab_size"
        ]
    return []


def _tokenizer_faults(config: JobConfig, args: DecoderArgs) -> list[str]:
    folder = Path(config.model.hf_assets_path)
    if not folder.is_dir():
        return [f"model.hf_assets_path = {str(folder)!r}: no such folder (it must hold the tokenizer's files)"]
    from torchtitan.components.tokenizer import build_hf_tokenizer

    try:
        size = build_hf_tokenizer(config).get_vocab_size()
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        return [f"model.hf_assets_path = {str(folder)!r}: no usable tokenizer: {error}"]
    if size > args.vocab_size:
        return [
            f"model.hf_assets_path = {str(folder)!r}: the tokenizer has {size} tokens, the model a vocabulary of "
            f"{args.vocab_size}; set architecture.vocab_size"
        ]
    return []


def input_faults(config: JobConfig) -> list[str]:
    """Data, tokenizer and output paths that cannot be used. A stdlib corpus still to be built is no fault."""
    faults = []
    dump_folder = Path(config.job.dump_folder)
    existing = next(p for p in [dump_folder, *dump_folder.absolute().parents] if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        faults.append(f"job.dump_folder = {config.job.dump_folder!r}: {existing} is not a writable folder")
    initial = config.checkpoint.initial_load_path
    if initial is not None and not Path(initial).is_dir():
        faults.append(f"checkpoint.initial_load_path = {initial!r}: no such folder")
    if config.model.name not in FAMILIES or config.model.flavor not in FAMILIES[config.model.name]:
        return faults
    args = model_args(config)
    to_be_built = set()
    if config.training.dataset_source == "stdlib":
        from .data.stdlib_corpus import SETS

        to_be_built = {Path(config.training.dataset_path or "").parent / name for name in SETS}
    sets = [("training.dataset_path", config.training)]
    if config.validation.enable:
        sets.append(("validation.dataset_path", config.validation))
    for key, section in sets:
        path = section.dataset_path
        missing = path is None or not Path(path).exists()
        if section.dataset == "packed" and not (missing and Path(path or "") in to_be_built):
            faults += _packed_faults(key, path, section.seq_len, args.vocab_size)
        elif section.dataset != "packed" and path is not None and missing:
            faults.append(f"{key} = {path!r}: no such file or folder")
    if any(section.dataset != "packed" for _, section in sets):
        faults += _tokenizer_faults(config, args)
    return faults

"""What cannot run: values out of range, degrees that do not divide, options that do not go together.

Everything here is arithmetic on the configuration; `inputs` looks at files.
"""

from pathlib import Path
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.hf_datasets.text_datasets import DATASETS

from ..checkpoints.huggingface import export_format
from ..checkpoints.safety import CheckpointError
from ..data.copying import VOCAB_SIZE, CopyingDataset
from ..data.mixture import parse_mixture
from ..data.packed import DataError
from ..models.args import FAMILIES, DecoderArgs
from ..platform import has_accelerator
from .sections import JobConfig, forward_tokens, model_args


def validate(config: JobConfig, world_size: int | None = None) -> list[str]:
    """Every value out of range and every impossible combination, one sentence each."""
    faults = _range_faults(config)
    if config.model.name not in FAMILIES:
        return [*faults, f"model.name = {config.model.name!r}: must be one of {', '.join(FAMILIES)}"]
    flavors = FAMILIES[config.model.name]
    if config.model.flavor not in flavors:
        return [*faults, f"model.flavor = {config.model.flavor!r}: must be one of {', '.join(flavors)}"]
    args = model_args(config)
    # p and attention_p: dropout's, named by their ranges
    model_faults = [f for f in args.faults() if not f.startswith(("p = ", "attention_p = "))]
    faults += [_named(fault) for fault in model_faults]
    if not model_faults:
        faults += _parallel_faults(config, args, world_size)
    if config.checkpoint.last_save_in_hf and not model_faults:
        faults += _export_faults(args)
    if config.training.state_passing and "mamba" not in args.layer_kinds:
        faults.append(f"training.state_passing = true: needs Mamba2 layers, the model has {args.layers!r}")
    faults += _moments_faults(config)
    return faults + _copying_faults(config, args) + _unsupported(config) + _combination_faults(config)


def _export_faults(args: DecoderArgs) -> list[str]:
    key = "checkpoint.last_save_in_hf"
    if "mamba" in args.layer_kinds:
        return [f"{key}: Mamba2's tensors are put together for it; use scripts/export_hf.py on the last checkpoint"]
    try:
        export_format(args)
    except CheckpointError as error:
        return [f"{key}: {error}"]
    return []


def _named(fault: str) -> str:
    """A fault of the model's arguments under the key that sets it."""
    if fault.startswith(("base_dim", "base_layers")):
        return f"parametrization.{fault}"
    if fault.startswith("init_std"):
        return f"parametrization.{fault.replace('init_std', 'sigma')}"
    return f"architecture.{fault}"


def _copying_faults(config: JobConfig, args: DecoderArgs) -> list[str]:
    faults = []
    lengths = tuple(config.training.copying_lengths)
    for name, section in (("training", config.training), ("validation", config.validation)):
        if section.dataset == "copying" and (name == "training" or config.validation.enable):
            try:
                CopyingDataset(section.seq_len, seed=0, lengths=lengths)
            except DataError as error:
                faults.append(f"training.copying_lengths = {list(lengths)}, {name}.seq_len: {error}")
    if config.training.dataset == "copying" and args.vocab_size < VOCAB_SIZE:
        faults.append(f"architecture.vocab_size = {args.vocab_size}: the copying task has {VOCAB_SIZE} tokens")
    return faults


def _moments_faults(config: JobConfig) -> list[str]:
    every, log_freq, dropout = config.metrics.log_moments, config.metrics.log_freq, config.dropout
    if every < 1:
        return []
    faults = []
    if (dropout.placement == "none" or dropout.p == 0) and dropout.attention_p == 0:
        faults.append(
            f"metrics.log_moments = {every}: there is nothing to measure with dropout.placement = "
            f"{dropout.placement!r} and dropout.p = {dropout.p}"
        )
    if log_freq >= 1 and every % log_freq:
        faults.append(
            f"metrics.log_moments = {every}: must be a multiple of metrics.log_freq = {log_freq}, at whose steps the "
            "logs are written"
        )
    pipeline = config.parallelism
    if pipeline.pipeline_parallel_degree > 1 and pipeline.pipeline_parallel_schedule == "ZBVZeroBubble":
        faults.append(f"metrics.log_moments = {every}: torch's ZBVZeroBubble schedule has no working evaluation")
    return faults


def _range_faults(config: JobConfig) -> list[str]:
    """Values outside of their range. NaN fails every comparison, and so every bound."""
    at_least_one = [
        "training.steps", "training.seq_len", "training.local_batch_size", "training.gc_freq",
        "training.max_skips", "metrics.log_freq", "checkpoint.interval", "validation.freq", "validation.seq_len",
        "validation.local_batch_size", "validation.context_documents", "parallelism.data_parallel_replicate_degree",
        "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree",
        "parallelism.context_parallel_degree", "parallelism.pipeline_parallel_microbatch_size",
    ]  # fmt: skip
    at_least_zero = [
        "layer_dropout.total_steps",
        "dropout.total_steps",
        "lr_scheduler.warmup_steps",
        "optimizer.weight_decay",
        "checkpoint.keep_latest_k",
        "checkpoint.keep_every",
        "training.seed",
        "training.prefetch",
        "training.loss_chunks",
        "metrics.log_moments",
    ]
    at_least_zero += ["parametrization.base_batch_tokens", "parametrization.base_timescale"]
    above_zero = [
        "optimizer.lr", "optimizer.eps", "training.max_norm", "parametrization.base_tokens_per_parameter"
    ]  # fmt: skip
    unit = ["optimizer.beta1", "optimizer.beta2", "dropout.p", "dropout.attention_p", "layer_dropout.p_max"]

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
        if value(key) not in ("packed", "copying", *DATASETS):
            faults.append(f"{key} = {value(key)!r}: must be one of packed, copying, {', '.join(DATASETS)}")
    if config.training.dataset == "packed" and config.training.dataset_path is not None:
        try:
            parse_mixture(config.training.dataset_path)
        except DataError as error:
            faults.append(f"training.dataset_path: {error}")
    tokens = forward_tokens(config)
    if config.training.loss_chunks > tokens >= 1:
        faults.append(
            f"training.loss_chunks = {config.training.loss_chunks}: must be at most the {tokens} tokens of a forward"
        )
    multiples = config.validation.context_multiples
    if any(multiple < 1 for multiple in multiples) or len(set(multiples)) < len(multiples):
        faults.append(f"validation.context_multiples = {multiples}: must be different integers of at least 1")
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
    kinds = args.layer_kinds
    sharded = ["n_heads", "n_kv_heads", "ffn_dim"] * (set(kinds) != {"mamba"}) + ["ssm_heads"] * ("mamba" in kinds)
    for name in (*sharded, "vocab_size"):
        if getattr(args, name) % tp:
            shown = f"{name} = {getattr(args, name)}"
            if name == "ssm_heads":
                shown = f"Mamba2 heads, {args.expand} x {args.dim} / {args.ssm_head_dim} = {args.ssm_heads}"
            faults.append(f"{tp_key}: must divide the model's {shown}")
    if tp > 1 and "mamba" in kinds and args.n_groups > 1:
        faults.append(f"{tp_key}: Mamba2 layers need architecture.n_groups = 1, got {args.n_groups}")
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
    if config.validation.context_multiples:
        faults.append(
            f"validation.context_multiples = {config.validation.context_multiples}: not under pipeline parallel, "
            "whose buffers have one shape; use scripts/evaluate.py position-loss on a checkpoint"
        )
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
        (config.checkpoint.initial_load_in_hf and config.checkpoint.initial_load_path is None,
         "checkpoint.initial_load_in_hf", "needs checkpoint.initial_load_path, the folder"),
        (config.checkpoint.initial_load_in_hf_quantized, "checkpoint.initial_load_in_hf_quantized",
         "quantized weights are not supported"),
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
    drops = config.dropout.attention_p > 0 or (config.dropout.placement != "none" and config.dropout.p > 0)
    skips = config.layer_dropout
    if config.training.state_passing:
        if config.layer_dropout.p_max > 0:
            faults.append(
                f"training.state_passing = true: not with layer dropout (layer_dropout.p_max = {skips.p_max}): a layer "
                "that drops a sequence leaves no state of it"
            )
        if config.parallelism.pipeline_parallel_degree > 1:
            faults.append("training.state_passing = true: not under pipeline parallel, whose micro-batches overlap")
    rules = config.parametrization
    if rules.kind != "standard" and rules.decay == "all":
        faults.append(f"parametrization.decay = 'all': biases and norms take no weight decay under {rules.kind}")
    if rules.weight_decay_rule == "printed" and not (rules.base_timescale > 0 and rules.base_batch_tokens > 0):
        faults.append(
            "parametrization.weight_decay_rule = 'printed': needs base_timescale and base_batch_tokens, got "
            f"{rules.base_timescale} and {rules.base_batch_tokens}"
        )
    if rules.weight_decay_rule == "printed" and rules.kind == "standard":
        faults.append("parametrization.weight_decay_rule = 'printed': is a rule of mup and completep, not of standard")
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
            "the forward did; set it true, or dropout.p and dropout.attention_p = 0 (now "
            f"{config.dropout.p} and {config.dropout.attention_p})"
        )
    if drops and ac.mode == "memory_budget":
        faults.append(
            "activation_checkpoint.mode = 'memory_budget': its partitioner may recompute random masks; use full, "
            "selective or none, or dropout.p and dropout.attention_p = 0 (now "
            f"{config.dropout.p} and {config.dropout.attention_p})"
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
        faults.append(
            f"validation.steps = -1: {config.validation.dataset} has no end that is common to all ranks; set a number"
        )
    copying = {config.training.dataset, *([config.validation.dataset] if config.validation.enable else [])}
    if "copying" in copying and copying != {"copying"}:
        faults.append(
            f"validation.dataset = {config.validation.dataset!r}: has other tokens than training.dataset = "
            f"{config.training.dataset!r}; the copying task validates on copying"
        )
    if config.validation.context_multiples and config.training.dataset != "packed":
        faults.append(
            f"validation.context_multiples = {config.validation.context_multiples}: needs training.dataset = 'packed', "
            f"got {config.training.dataset!r}"
        )
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

"""`train.py --plan`: what a run would be, by arithmetic, before it costs anything."""

from pathlib import Path

import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer

from .config import JobConfig, forward_tokens, global_batch, loss_pieces, model_args
from .data.mixture import Source, parse_mixture
from .data.packed import DataError, PackedDataset
from .models import Decoder
from .parametrization import GROUPS, group_of, group_settings, run_scale, scale_of
from .regularization.layer_dropout import lock_step_time

GIB = 1024**3


def data_parallel_degree(config: JobConfig, world_size: int) -> int:
    parallel = config.parallelism
    return world_size // (parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree)


def default_world_size(config: JobConfig) -> int:
    """The processes that the parallel degrees ask for; with a free sharding degree, as many of one node's 8 as the
    global batch can be divided over."""
    parallel, training = config.parallelism, config.training
    fixed = (
        parallel.data_parallel_replicate_degree * parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree
    )
    if parallel.data_parallel_shard_degree != -1:
        return fixed * parallel.data_parallel_shard_degree
    shards = max(1, 8 // fixed)
    local = training.local_batch_size * parallel.data_parallel_replicate_degree
    while training.global_batch_size > 0 and shards > 1 and training.global_batch_size % (local * shards):
        shards -= 1
    return fixed * shards


def learning_rates(config: JobConfig, steps: list[int]) -> list[float]:
    """The learning rate of each of `steps` (1-based), from TorchTitan's own schedule."""
    weight = torch.nn.Linear(1, 1)
    optimizers = OptimizersContainer([weight], torch.optim.SGD, {"lr": config.optimizer.lr})
    (scheduler,) = build_lr_schedulers(optimizers, config.lr_scheduler, config.training.steps).schedulers
    (factor,) = scheduler.lr_lambdas
    return [config.optimizer.lr * factor(step - 1) for step in steps]


def memory_bytes(config: JobConfig, world_size: int, n_parameters: int) -> dict[str, float]:
    """A rough estimate of a GPU's memory by part, in bytes.

    fp32 weights, gradients and two Adam moments, over the ranks that share them; activations at about 34 d + 5 S H
    bytes a token and layer without recomputation (Korthikanti et al. 2205.05198, attention fused: no S H term, and
    the width of the feed-forward layer's middle), for Mamba2 what the chunked scan keeps; 2 d with full recomputation;
    logits and their gradient in fp32 and bf16; in pieces, one piece's, and the head's gradient in fp32 and bf16.
    """
    args, parallel, training = model_args(config), config.parallelism, config.training
    tp, pp = parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree
    shards = data_parallel_degree(config, world_size) // parallel.data_parallel_replicate_degree
    tokens = training.local_batch_size * training.seq_len
    width = 2 if training.mixed_precision_param == "bfloat16" else 4
    kinds = args.layer_kinds
    largest = max(args.layer_parameters(kind) for kind in kinds)
    attention = width * tokens * (16 * args.dim + (5 if args.ffn == "swiglu" else 3) * args.ffn_dim) / tp
    by_kind = {
        "attention": attention,
        "nope": attention,
        # a row of each head's decay matrix, in fp32 and twice in the working precision, beside the channels
        "mamba": tokens
        * (width * (3 * args.dim + 8 * args.d_inner) + args.ssm_heads * args.chunk_size * (4 + 2 * width))
        / tp,
    }
    block = sum(by_kind[kind] for kind in kinds) / len(kinds)
    kept = {"none": 1.0, "selective": 0.5, "memory_budget": config.activation_checkpoint.memory_budget, "full": 0.0}
    share = kept[config.activation_checkpoint.mode]
    layers = -(-args.n_layers // pp)
    boundary = width * tokens * args.dim / tp
    pieces = loss_pieces(config, forward_tokens(config))
    logits = tokens * args.vocab_size / tp * (2 * 4 + width)
    if pieces > 1:
        head = args.vocab_size * args.dim / tp
        logits = forward_tokens(config) / pieces * args.vocab_size / tp * (2 * 4 + width) + head * (4 + width)
    return {
        "weights, gradients, optimizer": 16 * n_parameters / (shards * tp * pp),
        "gathered block": width * largest / tp,
        "activations": layers * (share * block + boundary) + (1 - share) * block,
        "logits": logits,
    }


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def sampled_rates(config: JobConfig) -> torch.Tensor:
    """The layers' drop rates at 101 steps spread over the run (all of a shorter one): (steps, L)."""
    steps = config.training.steps
    sampled = [round(i * (steps - 1) / 100) for i in range(101)] if steps > 101 else list(range(steps))
    n_layers = model_args(config).n_layers
    return torch.stack([config.layer_dropout.rates(config, n_layers, t) for t in sampled])


def executed_share(config: JobConfig) -> float:
    """FLOPs after layer dropout over dense ones."""
    skips = config.layer_dropout
    if skips.p_max == 0 or not skips.skip_compute:
        return 1.0
    layers = torch.tensor(model_args(config).layer_flops_shares(config.training.seq_len), dtype=torch.float64)  # (L,)
    return 1 - (sampled_rates(config).mean(0) * layers).sum().item()


def planned_flops(config: JobConfig, tokens_per_step: int) -> dict[str, float]:
    """Training FLOPs of the whole run: dense, executed after layer dropout, and the share of the layers' saved."""
    args = model_args(config)
    dense = args.flops_per_token(config.training.seq_len) * tokens_per_step * config.training.steps
    executed = dense * executed_share(config)
    layers = dense * sum(args.layer_flops_shares(config.training.seq_len))
    return {"dense": dense, "executed": executed, "saved_share_of_layers": (dense - executed) / layers}


def layer_dropout_rows(config: JobConfig, dp: int, flops: float) -> list[tuple[str, str]]:
    """Rates over depth and time, FLOPs after layer dropout, and the step time that each sampling would give."""
    args, skips, training = model_args(config), config.layer_dropout, config.training
    steps = training.steps
    by_step = sampled_rates(config)
    mean = by_step.mean().item()
    layers = sum(args.layer_flops_shares(training.seq_len))
    executed = flops * executed_share(config)
    method = f"{skips.distribution} over depth, {skips.schedule} over time, p_max = {skips.p_max}, {skips.sampling}"
    rows = [
        ("method", method),
        ("mean rate", f"{mean:.4f} of the layers' FLOPs saved (they are {100 * layers:.1f} % of all)"),
        ("FLOPs executed", f"{executed:.3e} of {flops:.3e} dense"),
    ]
    for t in sorted({0, steps // 2, steps - 1}):
        rates = skips.rates(config, args.n_layers, t).tolist()
        shown = ", ".join(f"{rate:.3f}" for rate in (rates[0], rates[len(rates) // 2], rates[-1]))
        rows.append((f"rates at step {t + 1:,}", f"first, middle, last layer {shown}"))
    for sampling in ("bernoulli", "balanced"):
        time = sum(lock_step_time(r, training.local_batch_size, dp, sampling) for r in by_step) / len(by_step)
        rows.append((f"layers' time, {sampling}", f"{time:.3f} of dense (the slowest of {dp} ranks at every layer)"))
    return rows


def parametrization_sections(config: JobConfig, tokens_per_step: int) -> list[str]:
    """The optimizer's groups, and what the rules for scale make of this run and of one at TPP_base."""
    args, rules = model_args(config), config.parametrization
    scale = run_scale(config, tokens_per_step)
    header = ("group", "parameters", "peak learning rate", "weight decay", "eps")
    counts = parameters_by_group(config)
    lines = [f"  {header[0]:<16}" + "".join(f"{name:>20}" for name in header[1:])]
    for name, own in group_settings(config, scale).items():
        if counts[name]:
            values = (f"{counts[name]:,}", f"{own.lr:.4g}", f"{own.weight_decay:.4g}", f"{own.eps:.4g}")
            lines.append(f"  {name:<16}" + "".join(f"{value:>20}" for value in values))
    rows = [
        ("m_d, m_L", f"{args.width_multiplier:.4g}, {args.depth_multiplier:.4g}"),
        ("residual branches", f"x {1 / args.depth_multiplier:.4g}, and over their density in training"),
        ("logits", f"x {1 / args.width_multiplier:.4g}"),
        ("attention scores", "q.k / sqrt(head_dim)" if args.score_scale is None else "q.k / head_dim"),
        ("initial matrices", "as Llama-3's, depth-scaled" if args.sigma is None else
            f"{args.sigma / args.width_multiplier**0.5:.4g}, embedding and head {args.sigma:.4g} (standard deviation)"),
    ]  # fmt: skip
    sections = [f"Parametrization: {rules.kind}\n" + _table(rows) + "\n\n" + "\n".join(lines)]
    if rules.base_timescale or rules.base_batch_tokens:
        tokens = rules.base_tokens_per_parameter * scale.parameters
        target = scale_of(config, tokens, scale.steps)
        batch = target.batch_rule or tokens_per_step
        target = scale_of(config, tokens, max(1, round(tokens / batch)))
        rows = []
        for name, found, step in (("this run", scale, tokens_per_step), ("at TPP_base", target, batch)):
            rows.append((f"{name}: TPP", f"{found.tokens_per_parameter:.4g}, D = {found.tokens / 1e9:,.4g} B tokens, "
                                         f"m_D = {found.tokens_multiplier:.4g}"))  # fmt: skip
            by_rule = f"; by the rule {found.batch_rule:,.0f}" if found.batch_rule and found is scale else ""
            rows.append(
                (f"{name}: B", f"{step:,.0f} tokens ({step / config.training.seq_len:,.1f} sequences){by_rule}")
            )
            rows.append((f"{name}: steps", f"{found.steps:,}"))
            if found.timescale:
                settings = group_settings(config, found)
                decay = ", ".join(f"{settings[g].weight_decay:.4g} ({g})" for g in ("hidden matrices", "embedding"))
                rows.append((f"{name}: tau", f"{found.timescale:.4g} epochs, so lambda = {decay}"))
        sections.append("Batch size, timescale, weight decay by the rules\n" + _table(rows))
    return sections


def parameters_by_group(config: JobConfig) -> dict[str, int]:
    """How many parameters each of the optimizer's groups has."""
    with torch.device("meta"):
        model = Decoder(model_args(config))
    counts = dict.fromkeys(GROUPS, 0)
    for name, parameter in model.named_parameters():
        counts[group_of(name, parameter.ndim)] += parameter.numel()
    return counts


def data_rows(config: JobConfig, n_samples: int) -> list[tuple[str, str]]:
    """What each packed set holds, and how often a run of `n_samples` reads it."""
    training = config.training
    if training.dataset != "packed" or training.dataset_path is None:
        return [("data", training.dataset)]
    rows = []
    for path, weight in parse_mixture(training.dataset_path):
        try:
            source = Source(path, weight, PackedDataset(path, training.seq_len, seed=training.seed))
        except DataError as error:
            to_be_built = training.dataset_source == "stdlib" and not Path(path).exists()
            rows.append(("data", f"{path}: built on first use" if to_be_built else f"not usable yet: {error}"))
            continue
        tokens, passes = len(source.dataset.tokens), source.epochs(n_samples)
        share = f"{100 * float(weight):.4g} % of the samples, " if weight != 1 else ""
        rows.append(("data", f"{path}: {tokens / 1e9:,.3g} B tokens, {share}{passes:.2f} passes"))
    return rows


def plan(config: JobConfig, world_size: int, mfu: float, peak_tflops: float) -> str:
    """The plan of a run on `world_size` GPUs as text.

    Args:
        mfu: share of `peak_tflops` (TFLOP/s a GPU) that the run is assumed to reach.
    """
    args, training = model_args(config), config.training
    dp = data_parallel_degree(config, world_size)
    n_parameters, flops_per_token = args.n_parameters(), args.flops_per_token(training.seq_len)
    embeddings = args.vocab_size * args.dim * (1 if args.tied_embeddings else 2)
    sequences = global_batch(config, dp)
    tokens_per_step = sequences * training.seq_len
    tokens = tokens_per_step * training.steps
    flops = flops_per_token * tokens
    hours = flops * executed_share(config) / (world_size * peak_tflops * 1e12 * mfu) / 3600

    positions = args.position + (f", {args.slopes} slopes" if args.position in ("nape", "alibi") else "")
    if set(args.layer_kinds) == {"mamba"}:
        positions = "none but the state's"

    rows = [
        ("model", f"{config.model.name} {config.model.flavor}, {args.n_layers} layers, width {args.dim}"),
        ("layers", ", ".join(f"{args.layer_kinds.count(k)} {k}" for k in sorted(set(args.layer_kinds)))),
        ("positions", positions),
        ("parameters", f"{n_parameters / 1e6:,.1f} M, {(n_parameters - embeddings) / 1e6:,.1f} M without embeddings"),
        ("dropout", "none" if args.placement == "none" or args.p == 0 else f"{args.placement}, p = {args.p}"),
        ("steps", f"{training.steps:,}"),
        ("tokens a step", f"{tokens_per_step:,} ({sequences} sequences of {training.seq_len})"),
        ("tokens", f"{tokens / 1e9:,.2f} B" if tokens >= 1e9 else f"{tokens / 1e6:,.2f} M"),
        ("GPUs", f"{world_size} (data parallel {dp}, TP {config.parallelism.tensor_parallel_degree}, "
                 f"PP {config.parallelism.pipeline_parallel_degree})"),
        ("micro-batches a step", f"{sequences // (training.local_batch_size * dp)} of {training.local_batch_size} "
                                 "sequences a rank"),
        ("dense FLOPs", f"{flops:.3e} ({flops_per_token / 1e9:,.4g} G a token)"),
        ("hours", f"{hours:,.1f} at an MFU of {mfu} and {peak_tflops:g} TFLOP/s a GPU"),
    ]  # fmt: skip
    rows += data_rows(config, sequences * training.steps)
    parts = memory_bytes(config, world_size, n_parameters)
    memory = [(name, f"{value / GIB:8.2f} GiB") for name, value in parts.items()]
    memory.append(("in all, about", f"{sum(parts.values()) / GIB:8.2f} GiB"))

    sections = [_table(rows), "Memory a GPU (estimate)\n" + _table(memory)]
    if config.layer_dropout.p_max > 0:
        sections.append("Layer dropout\n" + _table(layer_dropout_rows(config, dp, flops)))

    sections += parametrization_sections(config, tokens_per_step)
    total = training.steps
    marks = sorted({1, *(max(1, round(total * share)) for share in (0.01, 0.025, 0.1, 0.25, 0.5, 0.75, 0.9)), total})
    rates = [(f"step {step:,}", f"{lr:.3e}") for step, lr in zip(marks, learning_rates(config, marks), strict=True)]
    sections.append("Learning rate\n" + _table(rates))
    return "\n\n".join(sections)

"""The TOML sections of a run: TorchTitan's, and those this package adds."""

from dataclasses import dataclass, field
from typing import Literal

import torchtitan.config as titan
from torch import Tensor

from ..models.args import DecoderArgs, flavor_args
from ..regularization.layer_dropout import keep_mask, layer_rates, time_factor

# TorchTitan inspects these classes' annotations: no `from __future__ import annotations` here.

PIECE_OF_LOGITS = 2**27  # elements on a rank, beyond which training.loss_chunks = 0 makes more pieces


@dataclass
class Model(titan.Model):
    name: str = "nape_llama3"
    """Model family: nape_llama3, mamba2, smollm3, celerity."""

    flavor: str = "debug"
    """Size of the family. nape_llama3: debug, 150M, 400M, 1B, 3B; mamba2: debug, 45M, 85M, 1.3B; smollm3: debug, 3B;
    celerity: debug, 271M, 503M, 906M, 1.8B, 3.9B, 8.2B."""


@dataclass
class Architecture:
    """Overrides of the flavor. A field left out keeps the flavor's value."""

    layers: str | None = None
    """Kinds of the layers from the first on, a pattern that repeats, as "mamba,mamba,attention": "attention", "nope"
    (attention without positions and window; both with a feed-forward layer) or "mamba"."""

    position: Literal["rope", "nope", "alibi", "nape"] | None = None
    """Positions: rotary, none, ALiBi in all heads, or NAPE (ALiBi in the first half of the heads; LG sec. 5)."""

    slopes: Literal["inverse", "exp2", "press"] | None = None
    """ALiBi slopes by head h = 1, 2, ...: 1/h, 2^-(h-1), or Press et al.'s rule."""

    alibi_cutoff: float | None = None
    """Nats, at least 0: an ALiBi head of slope m sees keys up to cutoff/m tokens back, behind which their weight is
    below exp(-cutoff) of the nearest one's at equal scores. 0: all of them. Absent: 40 (docs/attention.md)."""

    rope_theta: float | None = None
    """Base of the rotary frequencies, above 0."""

    rope_scaling: Literal["none", "yarn"] | None = None
    """Rotary positions as they are, or YaRN's for a longer context than they were trained on (arXiv 2309.00071)."""

    rope_factor: float | None = None
    """Of YaRN: the longer context over the original one, at least 1."""

    rope_original_context: int | None = None
    """Of YaRN: tokens of the context that the rotary positions were trained on, at least 7."""

    sliding_window: int | None = None
    """Keys a query sees, its own included, at least 1. Absent: all of them."""

    document_mask: bool | None = None
    """Hide the keys of other documents in a packed sequence."""

    attention: Literal["softmax", "entmax15"] | None = None
    """Attention weights by softmax, or by 1.5-entmax, which can be exactly zero (ASEntmax with scaling = adaptive)."""

    scaling: Literal["none", "adaptive", "ssmax"] | None = None
    """Factor of each query: none, S x (delta + beta (ln n)^gamma, of input and position n), or SSMax (s ln n)."""

    scaled_layers: Literal["nope", "all"] | None = None
    """Which layers scale their queries: those of the kind "nope" where the model has some, or all."""

    scaled_heads: Literal["nope", "all"] | None = None
    """Of position = nape: the heads without a position, or all."""

    scaling_init: Literal["default", "identity"] | None = None
    """Initial S x: as drawn, or a factor of 1, for continual pre-training."""

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

    ffn: Literal["swiglu", "relu2"] | None = None
    """Feed-forward layer: SwiGLU, or a squared ReLU without a gate."""

    bias: bool | None = None
    """Biases in the linear layers of attention and feed-forward."""

    norm: Literal["rmsnorm", "layernorm"] | None = None
    """Norm before each sublayer and before the head."""

    vocab_size: int | None = None
    """Vocabulary of embedding and head; at least the tokenizer's."""

    norm_eps: float | None = None
    """Epsilon of the norms, above 0."""

    tied_embeddings: bool | None = None
    """One matrix for embedding and head."""

    embedding_std: float | None = None
    """Standard deviation of the initial embedding, above 0. Absent: the flavor's, or parametrization.sigma."""

    expand: int | None = None
    """Mamba2: inner width over d."""

    ssm_head_dim: int | None = None
    """Mamba2: channels of a head P; must divide expand d."""

    state_size: int | None = None
    """Mamba2: state channels N."""

    n_groups: int | None = None
    """Mamba2: groups G of B and C; must divide the heads, 1 under tensor parallel."""

    conv_width: int | None = None
    """Mamba2: tokens that the convolution sees, its own included."""

    chunk_size: int | None = None
    """Mamba2: tokens of a chunk of the scan. Changes speed and memory, not the result."""


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

    attention_p: float = 0.0
    """Drop probability of attention weights after the softmax, in [0, 1), scaled by 1/(1-p). Beside any placement."""

    schedule: Literal["constant", "increasing", "decreasing"] = "constant"
    """The rate p over time: p, p t/(T-1), or p (1 - t/(T-1)), t the 0-based step. attention_p stays."""

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

    def keep(self, rates: Tensor, sequences: int, seed: int, t: int, group: int) -> Tensor:
        """The keep mask of a global batch at 0-based step `t`: (sequences, L) bool, or (sequences, L, 2) by sublayer;
        `group` sequences are a micro-batch of a rank."""
        return keep_mask(
            rates[:, None].expand(-1, 2) if self.unit == "sublayer" else rates, sequences,
            seed=seed, step=t, granularity=self.granularity, sampling=self.sampling, group=group,
        )  # fmt: skip

    def train_scale(self, rates: Tensor) -> list[float] | None:
        """r_train of each layer; None: 1."""
        return (1 / (1 - rates)).tolist() if self.scale == "inverse_density" else None


@dataclass
class Parametrization:
    kind: Literal["standard", "mup", "completep"] = "standard"
    """How initial weights, learning rates, weight decay, eps and multipliers follow width and depth: not at all, with
    width, or with width, depth and layer density (DD sec. 5, table A.1). optimizer.lr and eps are the base model's."""

    base_dim: int = 0
    """d_base, width of the model on which the hyperparameters were found. Of mup and completep, which need it."""

    base_layers: int = 0
    """L_base, its layers. Of completep, which needs it."""

    sigma: float | None = None
    """Standard deviation of the initial matrices at base width, above 0 (Mamba2's matrices keep PyTorch's). Absent:
    the flavor's; where it has none, TorchTitan's Llama-3 under standard, 0.02 under mup and completep."""

    attention_scale: Literal["inverse_sqrt", "inverse"] | None = None
    """Attention scores: q.k / sqrt(head_dim) or q.k / head_dim. Absent: the first under standard, else the second."""

    decay: Literal["all", "matrices"] | None = None
    """What optimizer.weight_decay acts on: every parameter, as in TorchTitan, or matrices only: no biases and norms.
    Absent: all under standard, matrices (which is all that they allow) under mup and completep."""

    base_timescale: float = 0.0
    """tau_base, of AdamW's moving average of updates in epochs of the run, above 0: weight decay then is
    B / (eta tau D), whatever optimizer.weight_decay says. 0: optimizer.weight_decay is the base model's."""

    base_tokens_per_parameter: float = 20.0
    """TPP_base, above 0: tau = tau_base (TPP/TPP_base)^-0.5."""

    base_batch_tokens: int = 0
    """B_base, tokens a step of the base model, for --plan's batch rule B_base (D/D_base)^0.4. 0: no rule."""

    weight_decay_rule: Literal["timescale", "printed"] = "timescale"
    """With base_timescale: the decay of this run's own B, eta, tau and D, or the row that the paper printed, whose
    m_D^0.4 should be m_D^0.6 by its own definitions; that needs base_batch_tokens."""


@dataclass
class Training(titan.Training):
    dataset: str = "packed"
    """packed, copying (synthetic; docs/copying.md), or one of TorchTitan's names (c4, c4_test, c4_validation)."""

    dataset_path: str | None = None
    """Of packed: the folder of a packed set, or a mixture of several, "a:0.7,b:0.3", by shares of the samples."""

    copying_lengths: list[int] = field(default_factory=lambda: [50, 100])
    """Of copying: the shortest and the longest source string, in characters, at least 1."""

    dataset_source: Literal["prepared", "stdlib"] = "prepared"
    """prepared: dataset_path holds a packed set. stdlib: the folder above it is built on first use, with the
    sets train, validation and long, from the sources of Python's standard library."""

    prefetch: int = 1
    """Of packed and copying: steps whose micro-batches a thread builds ahead, while the device computes, at least 0. 0:
    each is built when it is asked for. The batches are the same."""

    seed: int = 42
    """Of initial weights, data order and dropout masks; at least 0."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or the gradient norm is not finite on any rank: end the run, or leave that step's update out on all
    of them. Neither reaches the weights."""

    loss_chunks: int = 0
    """Pieces of a forward's tokens, at least 1, that head and loss take one after another, in training and validation:
    no more than one piece's logits are held. 1: whole, by TorchTitan's loss. 0: 1 up to 2^27 logits a rank (512 MiB in
    fp32), above that as many as keep to them. At most the tokens of a forward."""

    state_passing: bool = False
    """Start each micro-batch's Mamba2 states from those that the one before left, without gradient (docs/mamba2.md)."""

    max_skips: int = 10
    """Of skip: end the run after so many skipped steps in a row, at least 1."""


@dataclass
class Validation(titan.Validation):
    dataset: str = "packed"
    """packed, copying (strings that training never sees), or one of TorchTitan's names."""

    local_batch_size: int = 0
    """Sequences a rank and batch. 0: training.local_batch_size."""

    seq_len: int = 0
    """Tokens a sequence. 0: training.seq_len."""

    context_multiples: list[int] = field(default_factory=list)
    """Log the loss at these multiples m of the training context C, as validation/loss_2x for m = 2: the mean over
    the positions (m-1)C ... mC-1 of long documents (LG fig. 1). Empty: none. Not under pipeline parallel."""

    context_dataset_path: str | None = None
    """Packed set with documents of at least max(context_multiples) C + 1 tokens. Absent: validation.dataset_path."""

    context_documents: int = 16
    """Number of long documents that are read, at least 1: the first ones that are long enough."""


@dataclass
class Checkpoint(titan.Checkpoint):
    last_save_model_only: bool = False
    """Whether the last checkpoint holds the model alone. TorchTitan's default, true, makes a finished run
    impossible to extend."""

    keep_every: int = 0
    """Keep the checkpoints of steps that are multiples of it for ever, beside keep_latest_k. 0: none."""


@dataclass
class Metrics(titan.Metrics):
    log_moments: int = 0
    """Every so many steps log how far activation dropout moves mean and variance of each input projection's outputs,
    as moments/variance/layers.3.attention.wq (LG fig. 3; docs/moments.md). A multiple of log_freq. 0: never."""


@dataclass
class JobConfig(titan.JobConfig):
    model: Model = field(default_factory=Model)
    architecture: Architecture = field(default_factory=Architecture)
    dropout: Dropout = field(default_factory=Dropout)
    layer_dropout: LayerDropout = field(default_factory=LayerDropout)
    parametrization: Parametrization = field(default_factory=Parametrization)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)


def model_args(config: JobConfig) -> DecoderArgs:
    """The model's arguments after `[architecture]`, `[dropout]` and `[training]`; name and flavor must exist."""
    args = flavor_args(config.model.name, config.model.flavor)
    args.update_from_config(config)
    return args


def global_batch(config: JobConfig, dp_degree: int) -> int:
    """Sequences of an optimizer step on `dp_degree` data-parallel ranks."""
    training = config.training
    return training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * dp_degree


def forward_tokens(config: JobConfig) -> int:
    """Tokens that one forward of a rank takes: a micro-batch, under pipeline parallel the pipeline's."""
    training, parallel = config.training, config.parallelism
    pipelined = parallel.pipeline_parallel_degree > 1
    return training.seq_len * (parallel.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size)


def loss_pieces(config: JobConfig, tokens: int) -> int:
    """The pieces of a forward of `tokens` tokens that head and loss take; 1: whole, from logits."""
    if config.training.loss_chunks:
        return config.training.loss_chunks
    logits = tokens * model_args(config).vocab_size // config.parallelism.tensor_parallel_degree
    return max(1, -(-logits // PIECE_OF_LOGITS))

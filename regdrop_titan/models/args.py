"""What a model is: the arguments of the decoder, and the flavors of each family."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn
from torchtitan.protocols.model import BaseModelArgs

from .positions import Yarn

# Kinds of layers: attention, attention without positions and window (both with a feed-forward layer), Mamba2
KINDS = ("attention", "nope", "mamba")


@dataclass
class DecoderArgs(BaseModelArgs):
    """Arguments of `Decoder`. Sizes of the flavor, then what `[architecture]`, `[dropout]` and the run set."""

    dim: int = 768
    n_layers: int = 24
    n_heads: int = 12
    n_kv_heads: int = 12
    ffn_dim: int = 3072
    vocab_size: int = 128256  # Llama-3's
    ffn: Literal["swiglu", "relu2"] = "swiglu"
    bias: bool = False  # of the linear layers of attention and feed-forward
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    layers: str = "attention"  # kinds of the layers, a pattern that repeats: "mamba,attention"; see KINDS
    init_std: float | None = None  # sigma of every initial matrix but Mamba2's; None: as TorchTitan's Llama-3
    embedding_std: float | None = None  # of the initial embedding; None: `init_std`

    # CompleteP (DD sec. 5, tables A.1, A.2; spec sec. 6); the bases are read by mup and completep
    parametrization: Literal["standard", "mup", "completep"] = "standard"
    base_dim: int = 0
    base_layers: int = 0
    attention_scale: Literal["inverse_sqrt", "inverse"] | None = None  # of head_dim; None: inverse_sqrt, mup's: inverse

    position: Literal["rope", "nope", "alibi", "nape"] = "nape"
    slopes: Literal["inverse", "exp2", "press"] = "inverse"
    alibi_cutoff: float = 40.0  # nats; a head of slope m sees keys up to cutoff/m tokens back. 0: all of them
    rope_theta: float = 500_000.0
    rope_scaling: Literal["none", "yarn"] = "none"
    rope_factor: float = 1.0  # s of YaRN: the context over the original one
    rope_original_context: int = 0  # tokens, of YaRN
    sliding_window: int | None = None
    document_mask: bool = False
    eos_id: int = 0
    attention: Literal["softmax", "entmax15"] = "softmax"
    scaling: Literal["none", "adaptive", "ssmax"] = "none"  # of queries with their position (spec sec. 3, S x)
    scaled_layers: Literal["nope", "all"] = "nope"  # "nope" layers where there are some
    scaled_heads: Literal["nope", "all"] = "nope"  # of nape, the heads without a position
    scaling_init: Literal["default", "identity"] = "default"
    attention_p: float = 0.0  # drop probability of attention weights

    # Mamba2 layers
    expand: int = 2  # d_inner = expand d
    ssm_head_dim: int = 64
    state_size: int = 128
    n_groups: int = 1  # of B and C
    conv_width: int = 4
    chunk_size: int = 256  # of the scan; changes its speed and memory, not its result

    placement: Literal["none", "pre_norm", "pre_linear", "vpad"] = "none"
    p: float = 0.0
    mask: Literal["per_sublayer", "per_linear"] = "per_sublayer"
    vpad_stop_gradient: bool = False
    dropout_schedule: Literal["constant", "increasing", "decreasing"] = "constant"

    unit: Literal["layer", "sublayer"] = "layer"
    scale_placement: Literal["per_sublayer", "block"] = "per_sublayer"
    skip_compute: bool = True
    eval_scale: list[float] | None = None  # r_eval of each layer; None: 1

    seed: int = 42  # of the initial weights

    @property
    def d_inner(self) -> int:
        return self.expand * self.dim

    @property
    def ssm_heads(self) -> int:
        return self.d_inner // self.ssm_head_dim

    @property
    def width_multiplier(self) -> float:
        """`m_d = d/d_base`, 1 under the standard parametrization."""
        return 1.0 if self.parametrization == "standard" else self.dim / self.base_dim

    @property
    def depth_multiplier(self) -> float:
        """`m_L = L/L_base`, 1 but under CompleteP."""
        return self.n_layers / self.base_layers if self.parametrization == "completep" else 1.0

    @property
    def sigma(self) -> float | None:
        """The initial standard deviation of matrices at base width; None: as TorchTitan's Llama-3."""
        return 0.02 if self.init_std is None and self.parametrization != "standard" else self.init_std

    @property
    def score_scale(self) -> float | None:
        """The factor of attention scores. None: 1/sqrt(head_dim), attention's own."""
        default = "inverse_sqrt" if self.parametrization == "standard" else "inverse"
        return self.n_heads / self.dim if (self.attention_scale or default) == "inverse" else None

    @property
    def layer_kinds(self) -> list[str]:
        """One of KINDS, layer by layer."""
        pattern = [kind.strip() for kind in self.layers.split(",")]
        return [pattern[layer % len(pattern)] for layer in range(self.n_layers)]

    @property
    def yarn(self) -> Yarn | None:
        """What scales the rotary positions, if anything."""
        return Yarn(self.rope_factor, self.rope_original_context) if self.rope_scaling == "yarn" else None

    def faults(self) -> list[str]:
        """What is impossible about these arguments, one sentence each, beginning with the field's name."""
        found = [
            f"{name} = {getattr(self, name)}: must be at least 1"
            for name in (
                "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "expand", "ssm_head_dim",
                "state_size", "n_groups", "conv_width", "chunk_size",
            )
            if getattr(self, name) < 1
        ]  # fmt: skip
        pattern = [kind.strip() for kind in self.layers.split(",")]
        if unknown := [kind for kind in pattern if kind not in KINDS]:
            found.append(f"layers = {self.layers!r}: {unknown[0]!r} is none of {', '.join(KINDS)}")
        if found:
            return found
        kinds = self.layer_kinds
        found += self._attention_faults() if set(kinds) != {"mamba"} else []
        found += self._mamba_faults() if "mamba" in kinds else []
        found += self._yarn_faults()
        if not self.norm_eps > 0:
            found.append(f"norm_eps = {self.norm_eps}: must be above 0")
        for name in ("init_std", "embedding_std"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                found.append(f"{name} = {getattr(self, name)}: must be above 0")
        needed = {"standard": (), "mup": ("base_dim",), "completep": ("base_dim", "base_layers")}
        for name in needed[self.parametrization]:
            if getattr(self, name) < 1:
                found.append(f"{name} = {getattr(self, name)}: {self.parametrization} needs the base model's")
        if not 0.0 <= self.p < 1.0:
            found.append(f"p = {self.p}: must be in [0, 1)")
        return found

    def _attention_faults(self) -> list[str]:
        found = []
        if self.dim % self.n_heads:
            found.append(f"dim = {self.dim}: must be a multiple of n_heads = {self.n_heads}")
        elif self.position == "rope" and (self.dim // self.n_heads) % 2:
            found.append(f"position = 'rope': needs an even head dimension, got {self.dim // self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            found.append(f"n_kv_heads = {self.n_kv_heads}: must divide n_heads = {self.n_heads}")
        if self.position == "nape" and self.n_heads % 2:
            found.append(f"position = 'nape': needs an even number of heads, got n_heads = {self.n_heads}")
        if self.sliding_window is not None and self.sliding_window < 1:
            found.append(
                f"sliding_window = {self.sliding_window}: must be at least 1 (a query's own key counts); "
                "leave it out for global attention"
            )
        if not 0 <= self.alibi_cutoff < math.inf:
            found.append(f"alibi_cutoff = {self.alibi_cutoff}: must be a number of nats of at least 0; 0 is off")
        if not self.rope_theta > 0:
            found.append(f"rope_theta = {self.rope_theta}: must be above 0")
        if not 0.0 <= self.attention_p < 1.0:
            found.append(f"attention_p = {self.attention_p}: must be in [0, 1)")
        if self.scaling == "ssmax" and self.scaling_init == "identity":
            found.append("scaling_init = 'identity': ssmax's factor s ln(n) cannot be 1 at every position")
        return found

    def _yarn_faults(self) -> list[str]:
        if self.yarn is None:
            unused = {"rope_factor": self.rope_factor != 1, "rope_original_context": self.rope_original_context != 0}
            return [
                f"{name} = {getattr(self, name)}: needs rope_scaling = 'yarn'" for name, has in unused.items() if has
            ]
        if self.position != "rope" or "attention" not in self.layer_kinds:
            return ["rope_scaling = 'yarn': needs attention layers with position = 'rope'"]
        found = []
        if not self.rope_theta > 1:
            found.append(f"rope_theta = {self.rope_theta}: must be above 1 for rope_scaling = 'yarn'")
        if not 1 <= self.rope_factor < math.inf:
            found.append(f"rope_factor = {self.rope_factor}: must be a number of at least 1")
        if self.rope_original_context < 7:
            found.append(
                f"rope_original_context = {self.rope_original_context}: must be at least 7 tokens, in which the "
                "fastest channel turns once"
            )
        return found

    def scales_queries(self, kind: str) -> bool:
        """Whether the attention layers of a kind scale their queries."""
        chosen = self.scaled_layers == "all" or kind == "nope" or "nope" not in self.layer_kinds
        return self.scaling != "none" and chosen

    def _mamba_faults(self) -> list[str]:
        inner = f"{self.expand} x {self.dim} = {self.d_inner}"
        if self.d_inner % self.ssm_head_dim:
            return [f"dim = {self.dim}: d_inner = {inner} must be a multiple of ssm_head_dim = {self.ssm_head_dim}"]
        if self.ssm_heads % self.n_groups:
            return [
                f"n_groups = {self.n_groups}: must divide the {inner} / {self.ssm_head_dim} = {self.ssm_heads} heads"
            ]
        return []

    def update_from_config(self, job_config, **kwargs) -> None:
        """Take over the `[architecture]`, `[dropout]`, `[layer_dropout]`, `[parametrization]` and `[training]` keys
        of a job."""
        for field in fields(job_config.architecture):
            value = getattr(job_config.architecture, field.name)
            if value is not None:
                setattr(self, field.name, value)
        for name in ("placement", "p", "mask", "vpad_stop_gradient", "attention_p"):
            setattr(self, name, getattr(job_config.dropout, name))
        self.dropout_schedule = job_config.dropout.schedule
        parametrization = job_config.parametrization
        self.parametrization = parametrization.kind
        for name in ("base_dim", "base_layers", "attention_scale"):
            setattr(self, name, getattr(parametrization, name))
        if parametrization.sigma is not None:
            self.init_std = parametrization.sigma
        layer_dropout = job_config.layer_dropout
        for name in ("unit", "scale_placement", "skip_compute"):
            setattr(self, name, getattr(layer_dropout, name))
        self.eval_scale = None
        if layer_dropout.scale == "eval_density" and layer_dropout.p_max > 0:
            last = layer_dropout.steps(job_config) - 1
            self.eval_scale = (1.0 - layer_dropout.rates(job_config, self.n_layers, last)).tolist()
        self.seed = job_config.training.seed

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters of `model`, and `flops_per_token`: what TorchTitan asks of model arguments."""
        return sum(p.numel() for p in model.parameters()), self.flops_per_token(seq_len)

    def flops_per_token(self, seq_len: int) -> int:
        """Dense training FLOPs a token (forward and backward, no recomputation).

        6 a weight of every matrix multiplication (a tied head counts, the embedding look-up does not) and
        12 H head_dim S an attention layer for scores and values; causal sparsity and windows are not deducted, as in
        TorchTitan's and PaLM's count. A Mamba2 layer's scan counts as the recurrence: 12 d_inner N to write and read
        the state, whatever the chunk size.
        """
        return sum(map(sum, self.sublayer_flops(seq_len))) + 6 * (self.vocab_size * self.dim + self.dim)

    def sublayer_flops(self, seq_len: int) -> list[tuple[int, int]]:
        """Training FLOPs a token of each block's first and second sublayer, attention and feed-forward, or Mamba2 and
        nothing; counted as in `flops_per_token`."""
        flops = {"mamba": (6 * self.layer_parameters("mamba") + 12 * self.d_inner * self.state_size, 0)}
        for kind in ("attention", "nope"):
            attention = 6 * self.attention_parameters(kind) + 12 * self.dim * seq_len
            flops[kind] = attention, 6 * self.feed_forward_parameters()
        return [flops[kind] for kind in self.layer_kinds]

    def layer_flops_shares(self, seq_len: int) -> list[float]:
        """Each layer's share of all training FLOPs: the part of which layer dropout saves its rate."""
        total = self.flops_per_token(seq_len)
        return [sum(layer) / total for layer in self.sublayer_flops(seq_len)]

    def n_parameters(self) -> int:
        """Parameters in all, by arithmetic (a test compares it with the built model)."""
        embeddings = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        return embeddings + sum(self.layer_parameters(kind) for kind in self.layer_kinds) + self.norm_parameters()

    def norm_parameters(self) -> int:
        return self.dim * (2 if self.norm == "layernorm" else 1)

    def attention_parameters(self, kind: str) -> int:
        """Of an attention sublayer, its norm included."""
        kv_dim = self.dim * self.n_kv_heads // self.n_heads
        biases = 2 * self.dim + 2 * kv_dim if self.bias else 0
        of_head = {"none": 0, "adaptive": 2 * (self.dim + 1), "ssmax": 1}[self.scaling]
        scaling = self.n_heads * of_head if self.scales_queries(kind) else 0
        return 2 * self.dim * self.dim + 2 * self.dim * kv_dim + biases + scaling + self.norm_parameters()

    def feed_forward_parameters(self) -> int:
        """Of a feed-forward sublayer, its norm included."""
        inputs = 2 if self.ffn == "swiglu" else 1
        biases = inputs * self.ffn_dim + self.dim if self.bias else 0
        return (inputs + 1) * self.dim * self.ffn_dim + biases + self.norm_parameters()

    def layer_parameters(self, kind: str) -> int:
        """Parameters of one block of a kind."""
        if kind == "mamba":
            bc = 2 * self.n_groups * self.state_size
            projections = self.dim * (2 * self.d_inner + bc + self.ssm_heads) + self.d_inner * self.dim
            convolutions = (self.d_inner + bc) * (self.conv_width + 1)
            return projections + convolutions + 3 * self.ssm_heads + self.d_inner + self.norm_parameters()
        return self.attention_parameters(kind) + self.feed_forward_parameters()


def _mamba2(dim: int, n_layers: int, vocab_size: int) -> dict:
    """A Mamba2 flavor. Heads and feed-forward are those of attention layers that `layers` may put among its own."""
    heads = dim // 64
    return {
        "dim": dim, "n_layers": n_layers, "vocab_size": vocab_size, "layers": "mamba", "tied_embeddings": True,
        "embedding_std": 0.02, "n_heads": heads, "n_kv_heads": heads, "ffn_dim": 4 * dim,
    }  # fmt: skip


def _celerity(dim: int, n_layers: int, n_heads: int, vocab_size: int = 128256) -> dict:
    """A Celerity flavor (DD table A.2, and the co-authors' published configurations; spec secs. 4 and 6)."""
    return {
        "dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_heads, "ffn_dim": 8 * dim,
        "vocab_size": vocab_size, "ffn": "relu2", "bias": True, "norm": "layernorm", "position": "alibi",
        "slopes": "press", "init_std": 0.02,
    }  # fmt: skip


# RoPE but in every fourth layer, which has no position and sees all keys
_SMOLLM3 = {
    "layers": "attention,attention,attention,nope", "position": "rope", "rope_theta": 50_000.0,
    "tied_embeddings": True, "norm_eps": 1e-6, "embedding_std": 0.02,
}  # fmt: skip

# Sizes of LG (spec sec. 4): nape_llama3 400M, whose shape 150M, 1B and 3B keep (head dimension 64, SwiGLU of 4 d,
# untied), mamba2 45M (for the copying task's characters), 85M, 1.3B, and the published SmolLM3; of DD, celerity.
FAMILIES: dict[str, dict[str, dict]] = {
    "nape_llama3": {
        "debug": {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 384, "vocab_size": 2048},
        "150M": {"dim": 512, "n_layers": 6, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 2048},
        "400M": {"dim": 768, "n_layers": 24, "n_heads": 12, "n_kv_heads": 12, "ffn_dim": 3072},
        "1B": {"dim": 1536, "n_layers": 16, "n_heads": 24, "n_kv_heads": 24, "ffn_dim": 6144},
        "3B": {"dim": 2560, "n_layers": 22, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 10240},
    },
    "mamba2": {
        "debug": _mamba2(128, 4, 2048),
        "45M": _mamba2(768, 12, 30),
        "85M": _mamba2(768, 12, 50288),
        "1.3B": _mamba2(2048, 48, 50288),
    },
    "smollm3": {
        "debug": {
            "dim": 128,
            "n_layers": 4,
            "n_heads": 4,
            "n_kv_heads": 2,
            "ffn_dim": 384,
            "vocab_size": 2048,
            **_SMOLLM3,
        },
        "3B": {
            "dim": 2048,
            "n_layers": 36,
            "n_heads": 16,
            "n_kv_heads": 4,
            "ffn_dim": 11008,
            **_SMOLLM3,
        },
    },
    "celerity": {
        "debug": _celerity(64, 4, 4, vocab_size=2048),
        "271M": _celerity(640, 13, 10),
        "503M": _celerity(896, 17, 14),
        "906M": _celerity(1152, 23, 9),
        "1.8B": _celerity(1536, 30, 12),
        "3.9B": _celerity(2048, 40, 16),
        "8.2B": _celerity(2688, 52, 21),
    },
}


def flavor_args(name: str, flavor: str, **overrides) -> DecoderArgs:
    """Fresh arguments of a flavor with some fields replaced; whether they fit together, `faults()` tells.

    Raises ValueError naming what there is for an unknown family, flavor or field.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(FAMILIES)}")
    if flavor not in FAMILIES[name]:
        raise ValueError(f"unknown flavor {flavor!r} of {name}; there are {', '.join(FAMILIES[name])}")
    known = {field.name for field in fields(DecoderArgs)}
    if unknown := set(overrides) - known:
        raise ValueError(f"unknown model argument {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return DecoderArgs(**{**FAMILIES[name][flavor], **overrides})


class Flavors(Mapping[str, DecoderArgs]):
    """The flavors of a family as TorchTitan looks them up. Each look-up makes fresh arguments: TorchTitan changes
    them in place, so that a second trainer in one process would inherit the first one's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, flavor: str) -> DecoderArgs:
        return flavor_args(self.name, flavor)

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES[self.name])

    def __len__(self) -> int:
        return len(FAMILIES[self.name])

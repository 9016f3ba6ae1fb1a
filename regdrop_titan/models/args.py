"""What a model is: the arguments of the decoder, and the flavors of each family."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn
from torchtitan.protocols.model import BaseModelArgs


@dataclass
class DecoderArgs(BaseModelArgs):
    """Arguments of `Decoder`. Sizes of the flavor, then what `[architecture]`, `[dropout]` and the run set."""

    dim: int = 768
    n_layers: int = 24
    n_heads: int = 12
    n_kv_heads: int = 12
    ffn_dim: int = 3072
    vocab_size: int = 128256  # Llama-3's
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    position: Literal["rope", "nope", "alibi", "nape"] = "nape"
    slopes: Literal["inverse", "exp2", "press"] = "inverse"
    rope_theta: float = 500_000.0
    sliding_window: int | None = None
    document_mask: bool = False
    eos_id: int = 0

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

    def faults(self) -> list[str]:
        """What is impossible about these arguments, one sentence each, beginning with the field's name."""
        found = []
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
            if getattr(self, name) < 1:
                found.append(f"{name} = {getattr(self, name)}: must be at least 1")
        if found:
            return found
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
        if not self.norm_eps > 0:
            found.append(f"norm_eps = {self.norm_eps}: must be above 0")
        if not self.rope_theta > 0:
            found.append(f"rope_theta = {self.rope_theta}: must be above 0")
        if not 0.0 <= self.p < 1.0:
            found.append(f"p = {self.p}: must be in [0, 1)")
        return found

    def update_from_config(self, job_config, **kwargs) -> None:
        """Take over the `[architecture]`, `[dropout]`, `[layer_dropout]` and `[training]` keys of a job."""
        for field in fields(job_config.architecture):
            value = getattr(job_config.architecture, field.name)
            if value is not None:
                setattr(self, field.name, value)
        for name in ("placement", "p", "mask", "vpad_stop_gradient"):
            setattr(self, name, getattr(job_config.dropout, name))
        self.dropout_schedule = job_config.dropout.schedule
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
        12 H head_dim S a layer for scores and values; causal sparsity and windows are not deducted, as in
        TorchTitan's and PaLM's count.
        """
        return self.n_layers * sum(self.sublayer_flops(seq_len)) + 6 * (self.vocab_size * self.dim + self.dim)

    def sublayer_flops(self, seq_len: int) -> tuple[int, int]:
        """Training FLOPs a token of one block's attention and feed-forward, counted as in `flops_per_token`."""
        norm = self.dim
        feed_forward = 3 * self.dim * self.ffn_dim + norm
        attention = self.layer_parameters() - feed_forward
        return 6 * attention + 12 * self.dim * seq_len, 6 * feed_forward

    def layer_flops_share(self, seq_len: int) -> float:
        """The layers' share of all training FLOPs: the part of which layer dropout saves its mean rate."""
        return self.n_layers * sum(self.sublayer_flops(seq_len)) / self.flops_per_token(seq_len)

    def n_parameters(self) -> int:
        """Parameters in all, by arithmetic (a test compares it with the built model)."""
        embeddings = self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)
        return embeddings + self.n_layers * self.layer_parameters() + self.dim

    def layer_parameters(self) -> int:
        """Parameters of one block."""
        kv_dim = self.n_kv_heads * (self.dim // self.n_heads)
        attention = 2 * self.dim * self.dim + 2 * self.dim * kv_dim
        return attention + 3 * self.dim * self.ffn_dim + 2 * self.dim


# Sizes: 400M is LG's (spec sec. 4); 150M, 1B and 3B keep its shape (head dimension 64, SwiGLU of 4 d, untied).
FAMILIES: dict[str, dict[str, dict]] = {
    "nape_llama3": {
        "debug": {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 384, "vocab_size": 2048},
        "150M": {"dim": 512, "n_layers": 6, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 2048},
        "400M": {"dim": 768, "n_layers": 24, "n_heads": 12, "n_kv_heads": 12, "ffn_dim": 3072},
        "1B": {"dim": 1536, "n_layers": 16, "n_heads": 24, "n_kv_heads": 24, "ffn_dim": 6144},
        "3B": {"dim": 2560, "n_layers": 22, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 10240},
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

"""The optimizer's groups: learning rate, weight decay and eps of each kind of parameter (DD table A.1; spec sec. 6)."""

from dataclasses import dataclass

from ..config import JobConfig, model_args
from .rules import Scale, weight_decay

# The first is on every pipeline stage and has the learning rate of the schedule, which is what logs show
GROUPS = ("hidden vectors", "final norm", "state space", "embedding", "unembedding", "hidden matrices")


@dataclass(frozen=True)
class Settings:
    """What AdamW does to a group."""

    lr: float
    weight_decay: float
    eps: float


def group_of(name: str, ndim: int) -> str:
    """The group of the parameter called `name`, as "layers.0.attention.inner.wq.weight"; one of GROUPS."""
    match name.split("."):
        case ["tok_embeddings", _]:
            return "embedding"
        case ["output", _]:
            return "unembedding"
        case ["norm", _]:
            return "final norm"
        case ["layers", *_, "ssm", _]:
            return "state space"
        case ["layers", *_, "conv_x" | "conv_bc", _]:
            return "hidden vectors"  # a filter a channel: its fan-in does not grow with width
        case ["layers", *_]:
            return "hidden matrices" if ndim == 2 else "hidden vectors"
    raise ValueError(f"no group for the parameter {name}")


def group_settings(config: JobConfig, scale: Scale) -> dict[str, Settings]:
    """The settings of every group.

    Mamba2's `A_log`, `dt_bias` and `D` are never decayed (spec sec. 4): zero is no neutral value for them. Embedding
    and head are decayed at their own learning rate (chosen: the table is silent).
    """
    args, rules = model_args(config), config.parametrization
    eta, eps = config.optimizer.lr, config.optimizer.eps
    m_d, m_L = args.width_multiplier, args.depth_multiplier
    matrices_only = (rules.decay or ("all" if rules.kind == "standard" else "matrices")) == "matrices"
    found = {}
    for name in GROUPS:
        lr = eta / m_d if name == "hidden matrices" else eta
        inside = name in ("hidden matrices", "hidden vectors", "state space")
        decayed = name != "state space" and not (matrices_only and name in ("hidden vectors", "final norm"))
        found[name] = Settings(
            lr=lr,
            weight_decay=weight_decay(config, scale, lr) if decayed else 0.0,
            eps=eps / m_d / (m_L if inside else 1.0),
        )
    return found

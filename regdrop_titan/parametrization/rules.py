"""Batch size, AdamW's timescale and weight decay as functions of a run's scale (DD sec. 5; spec sec. 6).

    m_D = D / D_base,   B = B_base m_D^0.4,   tau = tau_base (TPP / TPP_base)^-0.5,   lambda = B / (eta tau D)

D: tokens of the run, B: tokens of a step, TPP: tokens a parameter. D_base are TPP_base tokens for each parameter of the
base model.
"""

import dataclasses
from dataclasses import dataclass

from ..config import JobConfig, model_args
from ..models.args import DecoderArgs


@dataclass(frozen=True)
class Scale:
    """A run's size, and what the rules make of it."""

    parameters: int
    tokens: int  # D
    base_tokens: float  # D_base
    steps: int
    batch_rule: float  # B_base m_D^0.4, tokens; 0 where there is no B_base
    timescale: float  # tau, in epochs of the run; 0 where there is no tau_base

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    @property
    def tokens_multiplier(self) -> float:
        """m_D."""
        return self.tokens / self.base_tokens


def base_args(args: DecoderArgs) -> DecoderArgs:
    """The base model: `args` at base width and depth, where they are set."""
    dim = args.base_dim or args.dim
    return dataclasses.replace(
        args, dim=dim, n_layers=args.base_layers or args.n_layers, ffn_dim=round(args.ffn_dim * dim / args.dim)
    )


def scale_of(config: JobConfig, tokens: float, steps: int) -> Scale:
    """What the rules say of a run of `config`'s model over `tokens` tokens in `steps` steps."""
    args, rules = model_args(config), config.parametrization
    n = args.n_parameters()
    base_tokens = rules.base_tokens_per_parameter * base_args(args).n_parameters()
    return Scale(
        parameters=n,
        tokens=round(tokens),
        base_tokens=base_tokens,
        steps=steps,
        batch_rule=rules.base_batch_tokens * (tokens / base_tokens) ** 0.4,
        timescale=rules.base_timescale * (tokens / n / rules.base_tokens_per_parameter) ** -0.5,
    )


def run_scale(config: JobConfig, tokens_per_step: int) -> Scale:
    """The scale of the run that `config` describes. D is what the learning rate's schedule is planned for: a run that
    is extended under the same schedule keeps its weight decay."""
    steps = config.lr_scheduler.total_steps or config.training.steps
    return scale_of(config, steps * tokens_per_step, steps)


def weight_decay(config: JobConfig, scale: Scale, lr: float) -> float:
    """lambda of a group with the learning rate `lr`: from the timescale where there is one, else so that lr lambda is
    the base model's."""
    rules, eta = config.parametrization, config.optimizer.lr
    if not rules.base_timescale:
        return config.optimizer.weight_decay * (eta / lr)
    if rules.weight_decay_rule == "printed":
        base = rules.base_batch_tokens / (eta * rules.base_timescale * scale.base_tokens)
        tpp = scale.tokens_per_parameter / rules.base_tokens_per_parameter
        return base * (eta / lr) * tpp**0.5 / scale.tokens_multiplier**0.4
    return 1 / (lr * scale.timescale * scale.steps)  # D = B steps

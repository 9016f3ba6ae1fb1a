"""Training of Balcony exits: the trainer of a run, with a frozen backbone under it.

Only the exits are in the optimizer and in the checkpoints. The loss of a token is the mean over exits of
KL(whole model || exit), the whole model's logits being constants.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpoint import MODEL, ModelWrapper
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as build_titan_optimizers
from torchtitan.config import Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger

from ..checkpoints.loading import state_sha256
from ..checkpoints.safety import CheckpointError
from ..config import JobConfig
from ..models import DecoderArgs
from ..signals import StopSignals
from ..trainer import TokenLoss, Trainer
from .balcony import KEY, DecoderWithExits


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is trained on what.

    Args:
        checkpoint: of the backbone, a whole `step-N`.
        args: of the backbone.
        layers: k of each exit, ascending.
    """

    checkpoint: Path
    args: DecoderArgs
    layers: tuple[int, ...]


class ExitsArgs(DecoderArgs):
    """The backbone's arguments, with the dropout of the exits. Not a dataclass of its own: config.json has no more
    fields than any model's."""

    exits: tuple[int, ...] = ()

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        scale = self.eval_scale  # follows from the layer dropout of the backbone's run
        super().update_from_config(job_config)
        self.eval_scale = scale

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return sum(p.numel() for p in model.parameters()), self.exit_training_flops(seq_len)

    def exit_training_flops(self, seq_len: int) -> int:
        """FLOPs a token, counted as in `flops_per_token`: the backbone forward, each exit's layer forward and backward,
        and the head at each exit forward and backward to its input."""
        head = 4 * (self.vocab_size * self.dim + self.dim)
        return self.flops_per_token(seq_len) // 3 + len(self.exits) * (sum(self.sublayer_flops(seq_len)[-1]) + head)


class ExitLoss(TokenLoss):
    """The mean over exits of the KL, summed over tokens that have a label, divided by `denominator` while one is set:
    `by_exit` then gets the same of each exit, (E,), of every micro-batch."""

    def __init__(self) -> None:
        self.denominator: Tensor | float | None = None
        self.by_exit: list[Tensor] = []

    def __call__(self, kl: Tensor, labels: Tensor) -> Tensor:
        sums = (kl * (labels != IGNORE_INDEX)).sum((1, 2))  # (E,)
        if self.denominator is not None:
            sums = sums / self.denominator
            self.by_exit.append(sums.detach())
        return sums.mean()


def build_optimizers(
    config: JobConfig, model_parts: list[nn.Module], _: Optimizer, parallel_dims: ParallelDims
) -> OptimizersContainer:
    """One learning rate for all parameters of the exits, `optimizer.lr`; weight decay, if any, of matrices only."""
    optimizers = build_titan_optimizers(model_parts, config.optimizer, parallel_dims)
    for optimizer in optimizers:
        (group,) = optimizer.param_groups
        parameters = group["params"]
        group["params"] = [p for p in parameters if p.ndim == 2]
        others = {**group, "params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0}
        optimizer.add_param_group(others)
    return optimizers


class ExitsState(ModelWrapper):
    """Of the model, what a checkpoint of exits holds."""

    def _get_state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super()._get_state_dict().items() if name.startswith(f"{KEY}.")}


class ExitsTrainer(Trainer):
    """Trains exits. Arguments as `Trainer`'s; `config` as `exits_config` makes it."""

    def __init__(self, job_config: JobConfig, signals: StopSignals | None = None, *, setup: Setup) -> None:
        self.setup = setup
        super().__init__(job_config, signals)
        self.checkpointer.states[MODEL] = ExitsState(self.model_parts)

    @property
    def train_spec(self) -> TrainSpec:
        return self._train_spec

    @train_spec.setter
    def train_spec(self, spec: TrainSpec) -> None:
        args = ExitsArgs(**dataclasses.asdict(self.setup.args))
        args.exits = self.setup.layers
        model = functools.partial(DecoderWithExits, exits=self.setup.layers, checkpoint=self.setup.checkpoint)
        self._train_spec = dataclasses.replace(
            spec,
            model_cls=model,
            model_args={self.job_config.model.flavor: args},
            build_optimizers_fn=functools.partial(build_optimizers, self.job_config),
            build_loss_fn=lambda job_config, parallel_dims: ExitLoss(),
        )

    def backbone_sha256(self) -> str:
        """Of the frozen weights, on all ranks."""
        return state_sha256(self.model_parts[0].backbone_state())

    def config_record(self) -> dict[str, Any]:
        """Raises CheckpointError where the exits to go on with are of other weights."""
        self.backbone_before = self.backbone_sha256()
        logger.info(f"The backbone is {self.setup.checkpoint}, sha256 of its weights {self.backbone_before}")
        before = (self.config_before or {}).get(KEY, {}).get("backbone_sha256")
        if before not in (None, self.backbone_before):
            raise CheckpointError(
                f"{self.job_config.job.dump_folder}: has exits of other weights (sha256 {before[:12]}) than those of "
                f"{self.setup.checkpoint} ({self.backbone_before[:12]}); name another job.dump_folder"
            )
        training = self.job_config.training
        tokens = self.sequences * training.seq_len * training.steps
        flops = float(self.model_args.exit_training_flops(training.seq_len) * tokens)
        return {
            **super().config_record(),
            "flops": {"dense": flops, "executed": flops, "saved_share_of_layers": 0.0},
            KEY: {
                "layers": list(self.setup.layers),
                "backbone": str(self.setup.checkpoint),
                "backbone_sha256": self.backbone_before,
            },
        }

    def loss_pieces(self, tokens: int) -> int:
        """1: the model gives KLs, which it makes in pieces of its own."""
        return 1

    def train_step(self, data_iterator) -> None:
        self.loss_fn.by_exit.clear()
        super().train_step(data_iterator)

    def check_finite(self, grad_norm: Tensor) -> None:
        """All micro-batches of the step are done: what the record needs of each exit."""
        super().check_finite(grad_norm)
        if self.metrics_processor.should_log(self.step):
            sums = torch.stack(self.loss_fn.by_exit).sum(0) / self.replicas
            dist.all_reduce(sums)
            names = (f"exit_kl/{k}" for k in self.setup.layers)
            self.metrics_processor.extra |= dict(zip(names, sums.tolist(), strict=True))

    def train(self) -> None:
        """As `Trainer.train`; a run that comes to its end has looked whether the backbone is what it was."""
        super().train()
        if self.stopped_by:
            return
        after = self.backbone_sha256()
        if after != self.backbone_before:
            raise RuntimeError(f"the backbone has changed: sha256 {self.backbone_before} before, {after} after")
        logger.info(f"The backbone is unchanged, sha256 of its weights {after}")

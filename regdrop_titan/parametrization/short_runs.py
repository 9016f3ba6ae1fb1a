"""Short training runs in this process, which check a parametrization: no parallelism, no checkpoints, no logs."""

import copy
from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer

from ..config import ConfigError, JobConfig, model_args
from ..data.loader import Batch, build_dataloader, eos_id
from ..models import Decoder
from ..optimizers import set_groups
from ..seeds import derive_seed


def resized(config: JobConfig, dim: int, n_layers: int) -> JobConfig:
    """A copy of `config` with a model of this width and depth. The head dimension stays, so heads follow the width; so
    does the feed-forward layer.

    Raises ConfigError for a width that the head dimension does not divide.
    """
    args, config = model_args(config), copy.deepcopy(config)
    head_dim = args.dim // args.n_heads
    heads, kv_heads = dim // head_dim, dim * args.n_kv_heads // args.dim
    if dim % head_dim or kv_heads * args.dim != dim * args.n_kv_heads:
        raise ConfigError(
            [f"width {dim}: must be a multiple of the head dimension {head_dim} that keeps whole kv heads"]
        )
    architecture = config.architecture
    architecture.dim, architecture.n_layers = dim, n_layers
    architecture.n_heads, architecture.n_kv_heads, architecture.ffn_dim = (
        heads,
        kv_heads,
        args.ffn_dim * dim // args.dim,
    )
    if faults := model_args(config).faults():
        raise ConfigError(faults)
    return config


class Batches:
    """The first global batches of a run's data, the same for every model: ({"input": (B, S)}, labels (B, S)) each."""

    def __init__(self, config: JobConfig, steps: int) -> None:
        if config.training.dataset not in ("packed", "copying"):
            raise ConfigError([f"training.dataset = {config.training.dataset!r}: must be packed or copying here"])
        whole = copy.deepcopy(config)
        whole.training.local_batch_size = max(config.training.global_batch_size, config.training.local_batch_size)
        loader = build_dataloader(1, 0, None, whole)
        self.batches: list[Batch] = list(islice(loader, steps))
        self.eos_id = eos_id(loader, None)

    def model(self, config: JobConfig, device: torch.device) -> Decoder:
        """A fresh model of `config` for these data."""
        args = model_args(config)
        args.eos_id = self.eos_id
        model = Decoder(args)
        model.init_weights()
        return model.to(device).train()


def train_briefly(model: Decoder, config: JobConfig, batches: list[Batch], *, constant_lr: bool) -> Iterator[float]:
    """Train `model` in fp32, a step on each of `batches`; yields each step's loss. `constant_lr`: without the
    schedule of `config`."""
    skips, seed = config.layer_dropout, config.training.seed
    inputs, _ = batches[0]
    B, S = inputs["input"].shape
    own = config.optimizer
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": own.lr, "betas": (own.beta1, own.beta2)})
    set_groups(optimizers, config, B * S)
    schedulers = None if constant_lr else build_lr_schedulers(optimizers, config.lr_scheduler, len(batches))
    device = next(model.parameters()).device
    for step, (inputs, labels) in enumerate(batches):
        keep = scale = None
        if skips.p_max > 0:
            rates = skips.rates(config, model.args.n_layers, step)
            keep, scale = skips.keep(rates, B, seed, step, B), skips.train_scale(rates)
        torch.manual_seed(derive_seed("dropout", seed, step))
        logits = model(inputs["input"].to(device), keep=keep, scale=scale)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten())
        optimizers.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizers.step()
        if schedulers is not None:
            schedulers.step()
        yield loss.item()

"""TorchTitan's trainer, with gradients that are the same in every layout and dropout masks that resume exactly."""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import torchtitan
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan import train as titan_train
from torchtitan.components.loss import LossFunction, build_cross_entropy_loss, cross_entropy_loss
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from . import __version__
from .checkpoints.manager import CheckpointManager
from .config import JobConfig
from .data import copying
from .data.loader import TrainingLoader
from .data.mixture import Mixture
from .models.positions import document_ids
from .plan import planned_flops
from .regularization import keep_mask
from .seeds import derive_seed


class TokenLoss:
    """Cross-entropy summed over tokens, divided by `denominator` while one is set.

    TorchTitan 0.2.2 divides the loss outside of the pipeline schedule, after the gradients are made: under PP they
    are too large by the number of tokens, and under pure DDP too small by the number of replicas. Dividing where
    the loss is made is right for both. Validation, which shares this object, sees the sum.
    """

    def __init__(self, cross_entropy: LossFunction) -> None:
        self.cross_entropy = cross_entropy
        self.denominator: torch.Tensor | float | None = None

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.cross_entropy(logits, labels)
        return loss if self.denominator is None else loss / self.denominator


def build_loss(job_config: JobConfig, parallel_dims: ParallelDims) -> TokenLoss:
    if parallel_dims.tp_enabled and not job_config.parallelism.disable_loss_parallel:
        # Compiled over logits that are sharded by vocabulary, the loss comes out wrong, without an error (torch 2.13)
        return TokenLoss(cross_entropy_loss)
    return TokenLoss(build_cross_entropy_loss(job_config))


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer | None:
    """The tokenizer of TorchTitan's own data sets; packed sets and the copying task are tokens already."""
    ours = job_config.training.dataset in ("packed", "copying")
    return None if ours else build_hf_tokenizer(job_config)


class Trainer(titan_train.Trainer):
    """One training run. `train()` resumes from the newest checkpoint in `job.dump_folder`, if there is one."""

    def __init__(self, job_config: JobConfig) -> None:
        job_config.debug.seed = job_config.training.seed
        titan_train.CheckpointManager = CheckpointManager  # TorchTitan's trainer builds the one its module names
        super().__init__(job_config)
        self.stepped = self.masks_agreed = False
        self.micro_batch = -1  # of the step's accumulation, 0-based
        dims = self.parallel_dims
        self.dp_degree = dims.dp_replicate * dims.dp_shard
        # of the global batch
        self.sequences = self.gradient_accumulation_steps * self.dp_degree * job_config.training.local_batch_size
        batch_mesh = dims.get_optional_mesh("batch")
        self.dp_rank = 0 if batch_mesh is None else batch_mesh.get_local_rank()
        self.replicas = dims.dp_replicate if dims.dp_replicate_enabled and not dims.fsdp_enabled else 1
        if job_config.training.mixed_precision_param == "float32":
            self.maybe_enable_amp = contextlib.nullcontext()  # torch warns of autocast to fp32 on CPU
            if job_config.validation.enable:
                self.validator.maybe_enable_amp = self.maybe_enable_amp
        self.samples = self.dataloader.samples if isinstance(self.dataloader, TrainingLoader) else None
        for part in self.model_parts:
            part.args.eos_id = self.eos_id()
        self.model_args.eos_id = self.eos_id()
        if dims.pp_enabled:
            self.seed_pipeline_forwards()
        if torch.distributed.get_rank() == 0:
            self.write_config()
        if job_config.layer_dropout.p_max > 0:
            rates = job_config.layer_dropout.rates(job_config, self.model_args.n_layers, 0).tolist()
            logger.info("Layer dropout at the first step, by layer: " + " ".join(f"{rate:.3f}" for rate in rates))
        if isinstance(self.samples, Mixture):
            self.samples.log(job_config.training.steps * self.sequences)

    def eos_id(self) -> int:
        """The end-of-text id of the training data."""
        if self.tokenizer is not None:
            return self.tokenizer.eos_id or 0
        if self.job_config.training.dataset == "copying":
            return copying.END
        return self.data_manifest()["eos_id"]

    def data_manifest(self) -> dict[str, Any]:
        """Of the packed training set; of a mixture's first, whose tokenizer the others share."""
        return self.samples.sources[0].dataset.tokens.manifest

    def write_config(self) -> None:
        """Leave the resolved configuration in the dump folder: it names the model for every later command."""
        folder = Path(self.job_config.job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            **self.job_config.to_dict(),
            "model_args": dataclasses.asdict(self.model_args),
            # evaluation refuses data of another tokenizer
            "tokenizer": self.data_manifest()["tokenizer"] if self.job_config.training.dataset == "packed" else None,
            "flops": planned_flops(self.job_config, self.sequences * self.job_config.training.seq_len),
            "versions": {
                "regdrop_titan": __version__,
                "torchtitan": torchtitan.__version__,
                "torch": torch.__version__,
            },
        }
        partial = folder / "config.json.partial"
        partial.write_text(json.dumps(config, indent=2) + "\n")
        os.replace(partial, folder / "config.json")

    # Dropout ---------------------------------------------------------------------------------------------------

    def seed_dropout(self, stage: int = 0, chunk: int = 0) -> None:
        """Seed torch's generator, from which dropout draws, for one forward: of pipeline stage `stage`, micro-batch
        `chunk` of the pipeline.

        So masks differ over steps, micro-batches, data-parallel ranks, stages, and tensor-parallel ranks (which
        hold other tokens: dropout stands where the sequence is split), and a resumed run draws what the undisturbed
        run would have.
        """
        if self.model_args.placement == "none" or self.model_args.p == 0:
            return
        tp_mesh = self.parallel_dims.get_optional_mesh("tp")
        ranks = (self.dp_rank, 0 if tp_mesh is None else tp_mesh.get_local_rank())
        seed = self.job_config.training.seed
        torch.manual_seed(derive_seed("dropout", seed, self.step, self.micro_batch, chunk, stage, *ranks))

    def set_dropout_rate(self) -> None:
        """Bring the activation-dropout rate to this step's value, where it follows a schedule."""
        dropout = self.job_config.dropout
        if dropout.schedule != "constant":
            rate = dropout.rate(self.job_config, self.step - 1)
            for part in self.model_parts:
                part.set_dropout_rate(rate)
            self.metrics_processor.extra["dropout_rate"] = rate

    def seed_pipeline_forwards(self) -> None:
        """Seed before every forward that the pipeline schedule runs. The schedule's first step in a process runs
        one more, by which its stages learn their shapes; it calls the model by another way and is not seeded, so it
        does not shift the masks of a resumed run."""
        schedule = self.pp_schedule
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:

            def seeded(chunk: int, *args, stage=stage, forward=stage.forward_one_chunk, **kwargs):
                if stage.submod.training:
                    self.seed_dropout(stage.stage_index, chunk)
                return forward(chunk, *args, **kwargs)

            stage.forward_one_chunk = seeded

    # Layer dropout ---------------------------------------------------------------------------------------------

    def draw_layer_masks(self) -> None:
        """Draw this step's keep mask of the whole global batch, the same on every rank, and account for it."""
        config, training = self.job_config.layer_dropout, self.job_config.training
        self.keep: torch.Tensor | None = None
        if config.p_max == 0:
            return
        rates = config.rates(self.job_config, self.model_args.n_layers, self.step - 1)
        self.keep = keep_mask(
            rates[:, None].expand(-1, 2) if config.unit == "sublayer" else rates,
            self.sequences,
            seed=training.seed,
            step=self.step - 1,
            granularity=config.granularity,
            sampling=config.sampling,
            group=training.local_batch_size,
        )
        self.scale = (1 / (1 - rates)).tolist() if config.scale == "inverse_density" else None
        if not self.masks_agreed:
            self.check_masks_agree()
            self.masks_agreed = True
        self.metrics_processor.count_layer_dropout(rates, self.keep)

    def check_masks_agree(self) -> None:
        """All ranks must have drawn the same mask: two tensor-parallel ranks that drop different sequences give a
        wrong result and no error. Checked once a process; later steps follow from the same inputs."""
        digest = derive_seed(self.keep.numpy().tobytes().hex()) >> 1
        low = torch.tensor([digest, -digest], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
        if low[0] != -low[1]:
            raise RuntimeError(
                f"rank {torch.distributed.get_rank()}: the ranks drew different layer-dropout masks at step "
                f"{self.step}; they must have the same configuration, training.seed and versions"
            )

    # Steps -----------------------------------------------------------------------------------------------------

    def train_step(self, data_iterator) -> None:
        if not self.stepped:  # the checkpoint is loaded by now, and this process's first step begins
            self.metrics_processor.rewind(self.step - 1)
            self.stepped = True
        self.micro_batch = -1
        self.checkpointer.raise_failed_save()
        self.set_dropout_rate()
        self.draw_layer_masks()
        if isinstance(self.samples, Mixture):
            self.metrics_processor.extra["epochs"] = self.samples.epochs(self.dataloader.consumed + self.sequences)
        super().train_step(data_iterator)

    def post_dataloading_process(self, input_dict, labels):
        inputs, labels, extra_inputs, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        if self.model_args.document_mask:
            # every pipeline stage needs it, and only the first one sees the tokens
            extra_kwargs["documents"] = document_ids(inputs, self.model_args.eos_id)
        if self.keep is not None:
            B = self.job_config.training.local_batch_size
            first = (self.micro_batch * self.dp_degree + self.dp_rank) * B
            extra_kwargs |= {"keep": self.keep[first : first + B], "scale": self.scale}
        return inputs, labels, extra_inputs, extra_kwargs

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens) -> torch.Tensor:
        self.micro_batch += 1
        if not self.parallel_dims.pp_enabled:
            self.seed_dropout()
        # DDP averages gradients over replicas: divide by so many tokens fewer, and report the loss as it is
        self.loss_fn.denominator = global_valid_tokens / self.replicas
        try:
            loss = super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=1.0)
        finally:
            self.loss_fn.denominator = None
        return loss / self.replicas

    @record
    def train(self) -> None:
        super().train()

    # State -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`ntokens_seen` counts the tokens of all ranks. `run` is a JSON string, so that later versions can add to
        it: a new key of its own would make older checkpoints unloadable."""
        return {
            "step": self.step,
            "ntokens_seen": self.ntokens_seen * self.dp_degree,
            "run": json.dumps(
                {"seed": self.job_config.training.seed, "flops_saved": self.metrics_processor.flops_saved}
            ),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"] // self.dp_degree
        run = json.loads(state_dict["run"])
        self.metrics_processor.flops_saved = run["flops_saved"]
        saved, now = run["seed"], self.job_config.training.seed
        if saved != now:
            logger.warning(
                f"training.seed was {saved} when the checkpoint was written and is {now}: data order and masks change"
            )

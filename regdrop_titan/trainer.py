"""TorchTitan's trainer, with gradients that are the same in every layout and dropout masks that resume exactly."""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan import train as titan_train
from torchtitan.components.loss import LossFunction, build_cross_entropy_loss, cross_entropy_loss
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger

from . import state_passing
from .checkpoints.manager import CheckpointManager
from .config import JobConfig, forward_tokens, loss_pieces
from .config.resume import data_identity, differences, previous_config, write_config
from .data.loader import Batch, TrainingLoader, eos_id
from .data.mixture import Mixture
from .data.packed import DataError
from .evaluation.moments import as_metrics, measure_in_training
from .evaluation.validation import reshard
from .models.attention import engine
from .models.positions import document_ids
from .optimizers import build_optimizers
from .plan import planned_flops
from .seeds import derive_seed
from .signals import StopSignals
from .startup import check_ranks_agree, versions
from .state_passing import PassedStates


class NonFiniteError(Exception):
    """A loss or gradient norm that is not finite; the weights are those of the step before."""


class TokenLoss:
    """Cross-entropy summed over tokens, divided by `denominator` while one is set.

    TorchTitan 0.2.2 divides the loss outside of the pipeline schedule, after the gradients are made: under PP they
    are too large by the number of tokens, and under pure DDP too small by the number of replicas. Dividing where
    the loss is made is right for both. Validation, which shares this object, sees the sum.

    A model that was given the labels has made the sum itself, in pieces (`training.loss_chunks`), and needs the
    division only.
    """

    def __init__(self, cross_entropy: LossFunction) -> None:
        self.cross_entropy = cross_entropy
        self.denominator: torch.Tensor | float | None = None

    def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = output if output.ndim == 0 else self.cross_entropy(output, labels)
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
    """One training run. `train()` resumes from the newest checkpoint in `job.dump_folder`, if there is one.

    Args:
        signals: asked at every step boundary whether to stop; the default never does.
    """

    def __init__(self, job_config: JobConfig, signals: StopSignals | None = None) -> None:
        job_config.debug.seed = job_config.training.seed
        titan_train.CheckpointManager = CheckpointManager  # TorchTitan's trainer builds the one its module names
        super().__init__(job_config)
        self.signals = signals or StopSignals("")
        self.stopped_by = 0  # number of the signal at which all ranks agreed to stop
        self.saved = False  # what there was to save when the run ended
        self.gloo = torch.distributed.new_group(backend="gloo")  # to agree without a word to the GPU
        self.skipped = self.skipped_in_row = 0  # steps, for their loss or gradients
        self.losses: list[torch.Tensor] = []  # this rank's, of the step's micro-batches
        self.started_at, self.seconds_before = time.monotonic(), 0.0
        self.begun = self.stepped = self.masks_agreed = False
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
        if job_config.validation.enable:
            self.validator.stop_requested, self.validator.loss_pieces = self.stop_requested, self.loss_pieces
        self.samples = self.dataloader.samples if isinstance(self.dataloader, TrainingLoader) else None
        self.model_args.eos_id = eos_id(self.dataloader, self.tokenizer)
        for part in self.model_parts:
            part.args.eos_id = self.model_args.eos_id
        if dims.pp_enabled:
            self.seed_pipeline_forwards()
        self.passed_states: PassedStates | None = None
        if job_config.training.state_passing:
            tp_mesh = dims.get_optional_mesh("tp")
            tp = (0, 1) if tp_mesh is None else (tp_mesh.get_local_rank(), tp_mesh.size())
            dp = (self.dp_rank, self.dp_degree)
            batch_size = job_config.training.local_batch_size
            self.passed_states = PassedStates(self.model_args, batch_size, dp, tp, self.device)
            self.checkpointer.states[state_passing.KEY] = self.passed_states
        self.config_before = previous_config(job_config)
        self.config_now = self.config_record()
        torch.distributed.barrier()  # all have read the old one
        if torch.distributed.get_rank() == 0:
            write_config(Path(job_config.job.dump_folder), self.config_now)
        if set(self.model_args.layer_kinds) != {"mamba"}:
            logger.info(f"Attention: {engine(self.model_args, self.device.type)}")
        self.pieces = self.loss_pieces(forward_tokens(job_config))
        if self.pieces > 1:
            compiled = job_config.compile.enable and "loss" in job_config.compile.components
            logger.info(
                f"Head and loss of a forward's tokens are made in {self.pieces} pieces (training.loss_chunks)"
                + ("; they are not compiled" if compiled else "")
            )
        if job_config.layer_dropout.p_max > 0:
            rates = job_config.layer_dropout.rates(job_config, self.model_args.n_layers, 0).tolist()
            logger.info("Layer dropout at the first step, by layer: " + " ".join(f"{rate:.3f}" for rate in rates))
        if isinstance(self.samples, Mixture):
            self.samples.log(job_config.training.steps * self.sequences)

    @property
    def train_spec(self) -> TrainSpec:
        return self._train_spec

    @train_spec.setter
    def train_spec(self, spec: TrainSpec) -> None:
        # TorchTitan hands the builder the [optimizer] section alone; the groups follow from the whole configuration
        build = functools.partial(build_optimizers, self.job_config)
        self._train_spec = dataclasses.replace(spec, build_optimizers_fn=build)

    def init_distributed(self) -> ParallelDims:
        dims = super().init_distributed()
        check_ranks_agree(self.job_config)
        return dims

    def agree(self, value: int) -> int:
        """The largest `value` of all ranks."""
        largest = torch.tensor([value])
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.gloo)
        return int(largest.item())

    def config_record(self) -> dict[str, Any]:
        """The resolved configuration, for `config.json`: it names the model and the data for every later command."""
        return {
            **self.job_config.to_dict(),
            "model_args": dataclasses.asdict(self.model_args),
            **data_identity(self.job_config),
            "flops": planned_flops(self.job_config, self.sequences * self.job_config.training.seq_len),
            "versions": versions(),
        }

    def loss_pieces(self, tokens: int) -> int:
        """The pieces of a forward of `tokens` tokens that head and loss take; 1: whole, from logits."""
        return loss_pieces(self.job_config, tokens)

    # Dropout ---------------------------------------------------------------------------------------------------

    def seed_dropout(self, stage: int = 0, chunk: int = 0) -> None:
        """Seed torch's generator, from which dropout draws, for one forward: of pipeline stage `stage`, micro-batch
        `chunk` of the pipeline.

        So masks differ over steps, micro-batches, data-parallel ranks, stages, and tensor-parallel ranks (which
        hold other tokens: dropout stands where the sequence is split), and a resumed run draws what the undisturbed
        run would have.
        """
        args = self.model_args
        if (args.placement == "none" or args.p == 0) and args.attention_p == 0:
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

    def measure_moments(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Of a micro-batch that has just been trained on, (B, S), with the weights and the seeds of that forward and
        every layer kept, for this step's record."""
        args = self.model_args
        kwargs: dict[str, Any] = {"documents": document_ids(inputs, args.eos_id)} if args.document_mask else {}
        if args.eval_scale is not None:
            kwargs["scale"] = args.eval_scale  # in training too: layer dropout's scale is no matter of this
        if self.pieces > 1:  # no logits, which are as large here as in training
            kwargs |= {"labels": labels, "loss_pieces": self.pieces}

        def forward() -> None:
            if self.passed_states is not None:
                kwargs["passed"] = self.passed_states.again()
            if self.parallel_dims.pp_enabled:
                first, last = self.pp_has_first_stage, self.pp_has_last_stage
                with self.train_context():
                    self.pp_schedule.eval(
                        *((inputs,) if first else ()), **kwargs, target=labels if last else None, return_outputs=False
                    )
                return
            self.seed_dropout()
            with self.train_context(), self.maybe_enable_amp:
                self.model_parts[0](inputs, **kwargs)

        moments = measure_in_training(self.model_parts, forward, len(labels), self.parallel_dims, self.gloo)
        reshard(self.model_parts)
        self.metrics_processor.moments = as_metrics(moments)

    # Layer dropout ---------------------------------------------------------------------------------------------

    def draw_layer_masks(self) -> None:
        """Draw this step's keep mask of the whole global batch, the same on every rank, and account for it."""
        config, training = self.job_config.layer_dropout, self.job_config.training
        self.keep: torch.Tensor | None = None
        if config.p_max == 0:
            return
        rates = config.rates(self.job_config, self.model_args.n_layers, self.step - 1)
        self.keep = config.keep(rates, self.sequences, training.seed, self.step - 1, training.local_batch_size)
        self.scale = config.train_scale(rates)
        if not self.masks_agreed:
            self.check_masks_agree()
            self.masks_agreed = True
        self.metrics_processor.count_layer_dropout(rates, self.keep)

    def check_masks_agree(self) -> None:
        """All ranks must have drawn the same mask: two tensor-parallel ranks that drop different sequences give a
        wrong result and no error. Checked once a process; later steps follow from the same inputs."""
        digest = derive_seed(self.keep.numpy().tobytes().hex()) >> 1
        if self.agree(digest) != -self.agree(-digest):
            raise RuntimeError(
                f"rank {torch.distributed.get_rank()}: the ranks drew different layer-dropout masks at step "
                f"{self.step}; they must have the same configuration, training.seed and versions"
            )

    # Before the first step -------------------------------------------------------------------------------------

    def rehearse(self) -> None:
        """One forward and backward of a made micro-batch of the real shape, all layers kept: what does not fit into
        memory or does not compile fails here, before a checkpoint is loaded or data are read. It leaves no trace."""
        training, args = self.job_config.training, self.model_args
        B, S = training.local_batch_size, training.seq_len
        tokens = torch.arange(B * S, device=self.device).remainder(args.vocab_size).view(B, S)
        self.micro_batch, self.keep = -1, None
        layer_dropout = self.job_config.layer_dropout
        if layer_dropout.p_max > 0:
            sublayers = (2,) if layer_dropout.unit == "sublayer" else ()
            self.keep = torch.ones(self.sequences, args.n_layers, *sublayers, dtype=torch.bool)
            self.scale = [1.0] * args.n_layers if layer_dropout.scale == "inverse_density" else None
        begun = time.perf_counter()
        labels_of_all = torch.tensor(float(B * S * self.dp_degree), device=self.device)
        self.forward_backward_step(input_dict={"input": tokens}, labels=tokens, global_valid_tokens=labels_of_all)
        self.optimizers.zero_grad()
        self.losses.clear()
        logger.info(
            f"A made batch of {B} x {S} tokens went forward and backward in {time.perf_counter() - begun:.1f} s"
        )
        self.metrics_processor.time_last_log = time.perf_counter()

    def batch_generator(self, data_iterable) -> Iterator[Batch]:
        for input_dict, labels in super().batch_generator(data_iterable):
            if not self.stepped:
                self.check_tokens(input_dict["input"])
            yield input_dict, labels

    def check_tokens(self, tokens: torch.Tensor) -> None:
        """Raise DataError for tokens outside of the vocabulary, which a GPU reports by a failed assertion only."""
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.model_args.vocab_size:
            raise DataError(
                f"rank {torch.distributed.get_rank()}: the first batch has tokens {low} ... {high}, the model a "
                f"vocabulary of {self.model_args.vocab_size} (0 ... {self.model_args.vocab_size - 1}); "
                "set architecture.vocab_size, or the tokenizer that the model was made for"
            )

    def begin(self) -> None:
        """The checkpoint is loaded, and this process goes on behind `self.step`."""
        self.metrics_processor.rewind(self.step)
        changed = differences(self.config_before, self.config_now) if self.step and self.config_before else []
        if changed:
            logger.info(
                f"{len(changed)} settings differ from the run's config.json; the new ones hold from step "
                f"{self.step + 1} on:\n" + "\n".join(f"  {line}" for line in changed)
            )
        validates = self.job_config.validation.enable and self.validator.should_validate(self.step)
        if self.step and validates and self.agree(int(self.metrics_processor.lacks_validation(self.step))):
            # a kill or a signal came between the checkpoint and the end of the round
            self.validator.validate(self.model_parts, self.step)

    # Steps -----------------------------------------------------------------------------------------------------

    def train_step(self, data_iterator) -> None:
        self.micro_batch = -1
        self.losses.clear()
        self.checkpointer.raise_failed_save()
        self.set_dropout_rate()
        self.draw_layer_masks()
        if isinstance(self.samples, Mixture):
            self.metrics_processor.extra["epochs"] = self.samples.epochs(self.dataloader.consumed + self.sequences)
        if self.job_config.training.on_nonfinite == "skip":
            self.metrics_processor.extra["skipped_steps"] = self.skipped
        try:
            with self.checked_gradients():
                super().train_step(data_iterator)
            self.skipped_in_row = 0
        except NonFiniteError as error:
            self.skip_update(error)
        self.stepped = True

    @contextlib.contextmanager
    def checked_gradients(self) -> Iterator[None]:
        """Raise NonFiniteError, on all ranks alike, between the backward pass and the optimizer's step. TorchTitan
        does both in one function and steps whatever the gradients are; between them it clips."""
        clip = dist_utils.clip_grad_norm_

        def clip_and_check(*args, **kwargs) -> torch.Tensor:
            norm = clip(*args, **kwargs)
            self.check_finite(norm)
            return norm

        dist_utils.clip_grad_norm_ = clip_and_check
        try:
            yield
        finally:
            dist_utils.clip_grad_norm_ = clip

    def check_finite(self, grad_norm: torch.Tensor) -> None:
        losses = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in self.losses]
        loss, norm = torch.stack([torch.stack(losses).sum().reshape(()), grad_norm.reshape(())]).tolist()
        # the norm is the same on every rank, a loss is a rank's own
        worst = self.agree(
            0 if math.isfinite(loss + norm) else 1 if math.isfinite(loss) else 2 + torch.distributed.get_rank()
        )
        if worst:
            where = f"the loss is not finite on rank {worst - 2}" if worst > 1 else f"the gradient norm is {norm}"
            raise NonFiniteError(f"step {self.step}: {where}")

    def skip_update(self, error: NonFiniteError) -> None:
        """Go on behind a step that left the weights alone, or end the run."""
        training = self.job_config.training
        advice = (
            f"its update was left out, the weights are those of step {self.step - 1}. The same command goes on from "
            "the newest checkpoint and meets the same data again: lower optimizer.lr, or change training.seed for "
            "another order of the data"
        )
        if training.on_nonfinite == "stop":
            raise NonFiniteError(f"{error}; {advice}, or set training.on_nonfinite = 'skip'")
        self.skipped += 1
        self.skipped_in_row += 1
        if self.skipped_in_row > training.max_skips:
            raise NonFiniteError(f"{error}; it is number {self.skipped_in_row} in a row (training.max_skips); {advice}")
        if self.passed_states is not None:
            self.passed_states.reset()
        logger.info(f"{error}: its update is left out ({self.skipped} so far, {self.skipped_in_row} in a row)")
        self.metrics_processor.extra["skipped_steps"] = self.skipped
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        self.lr_schedulers.step()  # rates are functions of the step
        if self.metrics_processor.should_log(self.step):
            extra = {"n_tokens_seen": self.ntokens_seen * self.dp_degree, "lr": lr}
            self.metrics_processor.log(self.step, math.nan, math.nan, math.nan, extra)

    def stop_requested(self) -> bool:
        """Whether a signal has come to any rank."""
        self.stopped_by = self.agree(self.signals.received)
        return bool(self.stopped_by)

    def should_continue_training(self) -> bool:
        if not self.begun:
            self.begin()
            self.begun = True
        unfinished = super().should_continue_training()
        # at the end of a run only a signal that cut the last validation short counts
        if (unfinished or self.stopped_by) and self.stop_requested():
            # at once: who sent the signal may not wait long. A run without a step has nothing to save
            self.saved = self.checkpointer.enable and (self.step == 0 or self.checkpointer.save_now(self.step))
            return False
        return unfinished

    def post_dataloading_process(self, input_dict, labels):
        inputs, labels, extra_inputs, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        if self.model_args.document_mask:
            # every pipeline stage needs it, and only the first one sees the tokens
            extra_kwargs["documents"] = document_ids(inputs, self.model_args.eos_id)
        if self.keep is not None:
            B = self.job_config.training.local_batch_size
            first = (self.micro_batch * self.dp_degree + self.dp_rank) * B
            extra_kwargs |= {"keep": self.keep[first : first + B], "scale": self.scale}
        if self.passed_states is not None:
            extra_kwargs["passed"] = self.passed_states.start()
        if self.pieces > 1:
            extra_kwargs |= {"labels": labels, "loss_pieces": self.pieces}
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
        self.losses.append(loss.detach())
        every, last = self.job_config.metrics.log_moments, self.gradient_accumulation_steps - 1
        if every and self.step and self.step % every == 0 and self.micro_batch == last:
            self.measure_moments(input_dict["input"], labels)
        if self.passed_states is not None and self.step:  # not of the made batch
            self.passed_states.take()
        return loss / self.replicas

    def train(self) -> None:
        """Train to `training.steps`, or to the step at which a signal came: `stopped_by` then has its number, and
        `saved` says whether the run can go on from there."""
        self.rehearse()
        super().train()
        if self.stepped or self.stopped_by:
            self.metrics_processor.summarize(self.step, self.seconds(), self.checkpointer.current)

    def seconds(self) -> float:
        """Time that this run has taken, over all its starts up to the checkpoints they went on from."""
        return self.seconds_before + time.monotonic() - self.started_at

    # State -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`ntokens_seen` counts the tokens of all ranks. `run` is a JSON string, so that later versions can add to
        it: a new key of its own would make older checkpoints unloadable."""
        return {
            "step": self.step,
            "ntokens_seen": self.ntokens_seen * self.dp_degree,
            "run": json.dumps(
                {
                    "seed": self.job_config.training.seed,
                    "flops_saved": self.metrics_processor.flops_saved,
                    "skipped": self.skipped,
                    "skipped_in_row": self.skipped_in_row,
                    "seconds": self.seconds(),
                }
            ),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"] // self.dp_degree
        run = json.loads(state_dict["run"])
        self.metrics_processor.flops_saved = run["flops_saved"]
        # older checkpoints have no more than this
        self.skipped, self.skipped_in_row = run.get("skipped", 0), run.get("skipped_in_row", 0)
        self.seconds_before = run.get("seconds", 0.0)
        saved, now = run["seed"], self.job_config.training.seed
        if saved != now:
            logger.info(f"training.seed was {saved} in the checkpoint and is {now}: the data's order and masks change")

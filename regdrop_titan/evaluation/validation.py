"""Validation during training: the token-weighted mean loss over the same batches in every round.

TorchTitan 0.2.2 averages batch means and reads on in its stream, so its rounds see other batches.
"""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools.utils import device_type

from ..data.loader import Batch, PackedValidationLoader
from ..data.packed import PackedDataset
from ..models import DecoderArgs
from ..models.positions import document_ids


class Validator(BaseValidator):
    """Takes TorchTitan's arguments; `loss_fn` must return the sum over tokens."""

    def __init__(
        self,
        *,
        job_config,
        dp_world_size,
        dp_rank,
        tokenizer,
        parallel_dims,
        loss_fn,
        validation_context,
        maybe_enable_amp,
        metrics_processor,
        pp_schedule=None,
        pp_has_first_stage=None,
        pp_has_last_stage=None,
    ) -> None:
        super().__init__(job_config)
        self.dp_world_size, self.dp_rank, self.tokenizer = dp_world_size, dp_rank, tokenizer
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.maybe_enable_amp = maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.pp_schedule = pp_schedule
        self.pp_has_first_stage, self.pp_has_last_stage = pp_has_first_stage, pp_has_last_stage
        validation = job_config.validation
        self.packed: PackedValidationLoader | None = None
        if validation.dataset == "packed":
            dataset = PackedDataset(validation.dataset_path, validation.seq_len, seed=0, shuffle=False)
            self.packed = PackedValidationLoader(
                dataset, validation.local_batch_size, dp_rank, dp_world_size, validation.steps
            )

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.job_config.training.steps

    def batches(self) -> Iterable[Batch]:
        """One round's batches: as many on every rank, the same in every round."""
        if self.packed is not None:
            return self.packed
        stream = build_text_validation_dataloader(
            self.dp_world_size, self.dp_rank, self.tokenizer, self.job_config, infinite=True
        )
        return islice(stream, self.job_config.validation.steps)

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        for part in model_parts:
            part.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=device_type)
        tokens = torch.zeros((), dtype=torch.int64, device=device_type)
        for input_dict, labels in self.batches():
            self.metrics_processor.ntokens_since_last_log += labels.numel()
            labels = labels.to(device_type)
            loss = self.batch_loss(model_parts, input_dict["input"].to(device_type), labels)
            loss_sum += loss.full_tensor() if isinstance(loss, DTensor) else loss  # DTensor under loss parallel
            tokens += (labels != IGNORE_INDEX).sum()
        if self.parallel_dims.dp_cp_enabled:
            total = dist_utils.dist_sum(loss_sum, self.parallel_dims.get_optional_mesh("loss"))
            count = dist_utils.dist_sum(tokens, self.parallel_dims.get_optional_mesh("batch"))
        else:
            total, count = loss_sum.item(), tokens.item()
        self.metrics_processor.log_validation(loss=total / count, step=step)
        for part in model_parts:
            part.train()

    def batch_loss(self, model_parts: list[nn.Module], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss of one local batch; on a pipeline stage without the head, 0."""
        args: DecoderArgs = model_parts[0].args  # type: ignore[assignment]
        kwargs = {"documents": document_ids(inputs, args.eos_id)} if args.document_mask else {}
        if self.parallel_dims.pp_enabled:
            losses: list[torch.Tensor] | None = [] if self.pp_has_last_stage else None
            targets = labels if self.pp_has_last_stage else None
            with self.validation_context():
                self.pp_schedule.eval(
                    *((inputs,) if self.pp_has_first_stage else ()), **kwargs, target=targets, losses=losses
                )
            return torch.stack(losses).sum() if losses else torch.zeros((), device=device_type)
        with self.validation_context(), self.maybe_enable_amp:
            return self.loss_fn(model_parts[0](inputs, **kwargs), labels)

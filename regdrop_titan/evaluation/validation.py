"""Validation during training: the token-weighted mean loss over the same batches in every round.

TorchTitan 0.2.2 averages batch means and reads on in its stream, so its rounds see other batches.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from ..config import forward_tokens
from ..data.copying import CopyingDataset
from ..data.loader import Batch, Sample, ValidationLoader
from ..data.packed import PackedDataset, PackedTokens
from ..models import DecoderArgs
from ..models.positions import document_ids


class LongDocuments:
    """The first `length + 1` tokens of the first `n` documents of a packed set that have as many, as samples."""

    def __init__(self, path: str, length: int, n: int) -> None:
        self.documents = list(islice(PackedTokens(path).documents(length + 1), n))

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> Sample:
        return {"input": self.documents[i][:-1], "labels": self.documents[i][1:]}


def reshard(model_parts: list[nn.Module]) -> None:
    """After forwards without a backward pass the last layers stay gathered, and cannot be saved so."""
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


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
        self.stop_requested: Callable[[], bool] = lambda: False  # the same on all ranks
        self.loss_pieces: Callable[[int], int] = lambda tokens: 1  # of a forward of so many tokens; 1: logits
        validation = job_config.validation
        self.loader: ValidationLoader | None = None
        most = validation.steps * validation.local_batch_size * dp_world_size  # -1 steps: all of a set
        if validation.dataset == "packed":
            packed = PackedDataset(validation.dataset_path, validation.seq_len, seed=0, shuffle=False)
            n_samples = len(packed) if validation.steps == -1 else min(most, len(packed))
            self.loader = ValidationLoader(packed, n_samples, validation.local_batch_size, dp_rank, dp_world_size)
        elif validation.dataset == "copying":
            training = job_config.training
            lengths = tuple(training.copying_lengths)
            strings = CopyingDataset(validation.seq_len, seed=training.seed, lengths=lengths, held_out=True)
            self.loader = ValidationLoader(strings, most, validation.local_batch_size, dp_rank, dp_world_size)
        self.context = job_config.training.seq_len
        self.multiples = validation.context_multiples
        if self.multiples:
            documents = LongDocuments(
                validation.context_dataset_path or validation.dataset_path,
                max(self.multiples) * self.context,
                validation.context_documents,
            )
            self.long_loader = ValidationLoader(documents, len(documents), 1, dp_rank, dp_world_size)

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.job_config.training.steps

    def batches(self) -> Iterable[Batch]:
        """One round's batches: as many on every rank, the same in every round."""
        if self.loader is not None:
            return self.loader
        stream = build_text_validation_dataloader(
            self.dp_world_size, self.dp_rank, self.tokenizer, self.job_config, infinite=True
        )
        return islice(stream, self.job_config.validation.steps)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log one round. A signal ends it without a record: the next start makes up for it."""
        for part in model_parts:
            part.eval()
        self.round(model_parts, step)
        for part in model_parts:
            part.train()
        reshard(model_parts)

    @torch.no_grad()
    def round(self, model_parts: list[nn.Module], step: int) -> None:
        loss_sum = torch.zeros((), dtype=torch.float64, device=device_type)
        tokens = torch.zeros((), dtype=torch.int64, device=device_type)
        for input_dict, labels in self.batches():
            if self.stop_requested():
                return
            self.metrics_processor.ntokens_since_last_log += labels.numel()
            labels = labels.to(device_type)
            loss = self.batch_loss(model_parts, input_dict["input"].to(device_type), labels)
            loss_sum += loss.full_tensor() if isinstance(loss, DTensor) else loss  # DTensor under loss parallel
            tokens += (labels != IGNORE_INDEX).sum()
        contexts = self.context_losses(model_parts[0]) if self.multiples else {}
        self.metrics_processor.log_validation(self.mean(loss_sum, tokens), step, contexts)
        if contexts:
            logger.info("long documents: " + ", ".join(f"{k.split('_')[1]} {v:.4f}" for k, v in contexts.items()))

    def mean(self, loss_sum: torch.Tensor, tokens: torch.Tensor) -> float:
        """Over the tokens of all ranks."""
        if not self.parallel_dims.dp_cp_enabled:
            return loss_sum.item() / tokens.item()
        total = dist_utils.dist_sum(loss_sum, self.parallel_dims.get_optional_mesh("loss"))
        return total / dist_utils.dist_sum(tokens, self.parallel_dims.get_optional_mesh("batch"))

    def context_losses(self, model: nn.Module) -> dict[str, float]:
        """The loss over the positions (m-1)C ... mC-1 of long documents, for each multiple m of the training context
        C, from one forward a document: a causal model's loss at a position does not know how much follows."""
        C = self.context
        args: DecoderArgs = model.args  # type: ignore[assignment]
        sums = {m: torch.zeros((), dtype=torch.float64, device=device_type) for m in self.multiples}
        tokens = {m: torch.zeros((), dtype=torch.int64, device=device_type) for m in self.multiples}
        for input_dict, labels in self.long_loader:
            inputs, labels = input_dict["input"].to(device_type), labels.to(device_type)
            kwargs = {"documents": document_ids(inputs, args.eos_id)} if args.document_mask else {}
            with self.validation_context(), self.maybe_enable_amp:
                logits = model(inputs, **kwargs)  # (1, S, vocab)
                for m in self.multiples:
                    at = slice((m - 1) * C, m * C)
                    loss = self.loss_fn(logits[:, at], labels[:, at])
                    sums[m] += loss.full_tensor() if isinstance(loss, DTensor) else loss
                    tokens[m] += (labels[:, at] != IGNORE_INDEX).sum()
        return {f"validation/loss_{m}x": self.mean(sums[m], tokens[m]) for m in self.multiples}

    def batch_loss(self, model_parts: list[nn.Module], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The summed loss of one local batch; on a pipeline stage without the head, 0."""
        args: DecoderArgs = model_parts[0].args  # type: ignore[assignment]
        kwargs: dict[str, Any] = {"documents": document_ids(inputs, args.eos_id)} if args.document_mask else {}
        pipelined = self.parallel_dims.pp_enabled
        pieces = self.loss_pieces(forward_tokens(self.job_config) if pipelined else inputs.numel())
        if pieces > 1:
            kwargs |= {"labels": labels, "loss_pieces": pieces}
        if pipelined:
            losses: list[torch.Tensor] | None = [] if self.pp_has_last_stage else None
            targets = labels if self.pp_has_last_stage else None
            with self.validation_context():
                self.pp_schedule.eval(
                    *((inputs,) if self.pp_has_first_stage else ()),
                    **kwargs,
                    target=targets,
                    losses=losses,
                    return_outputs=False,
                )
            return torch.stack(losses).sum() if losses else torch.zeros((), device=device_type)
        with self.validation_context(), self.maybe_enable_amp:
            return self.loss_fn(model_parts[0](inputs, **kwargs), labels)

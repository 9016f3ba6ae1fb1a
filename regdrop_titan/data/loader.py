"""The training and validation loaders over packed sets, and TorchTitan's own for its data set names.

Row `b` of accumulation step `a` on data-parallel rank `r` of `R`, with a local batch of `B`, is sample
`consumed + (a R + r) B + b` of the global order. The loader's state is the number of samples consumed by all
ranks: the same on every rank, so a checkpoint resumes on any number of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.tools.logging import logger

from .packed import PackedDataset

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def _stack(samples: list[dict[str, torch.Tensor]]) -> Batch:
    inputs = torch.stack([sample["input"] for sample in samples])
    return {"input": inputs}, torch.stack([sample["labels"] for sample in samples])


class PackedLoader(BaseDataLoader):
    """Micro-batches of a packed set for ever, reshuffled each epoch: ({"input": (B, S)}, labels (B, S))."""

    def __init__(self, dataset: PackedDataset, batch_size: int, dp_rank: int, dp_world_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.consumed = 0  # samples, by all ranks, over all epochs

    def __iter__(self) -> Iterator[Batch]:
        while True:
            start = self.consumed + self.dp_rank * self.batch_size
            batch = _stack([self._sample(start + b) for b in range(self.batch_size)])
            self.consumed += self.dp_world_size * self.batch_size
            yield batch

    def _sample(self, index: int) -> dict[str, torch.Tensor]:
        epoch, i = divmod(index, len(self.dataset))
        if epoch != self.dataset.epoch:
            if epoch > self.dataset.epoch:
                logger.warning(f"The data of {self.dataset.tokens.path} repeat: epoch {epoch + 1} begins")
            self.dataset.set_epoch(epoch)
        return self.dataset[i]

    def state_dict(self) -> dict[str, Any]:
        return {"samples_consumed": self.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed = state_dict["samples_consumed"]


class PackedValidationLoader:
    """The same batches in every pass: `steps` global batches from the start of a packed set, -1 for all of it.

    Every rank yields the same number of batches; rows past the end of the set carry no label and count nothing.
    """

    def __init__(
        self, dataset: PackedDataset, batch_size: int, dp_rank: int, dp_world_size: int, steps: int = -1
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        whole_set = -(-len(dataset) // (batch_size * dp_world_size))
        self.steps = whole_set if steps == -1 else min(steps, whole_set)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            start = (step * self.dp_world_size + self.dp_rank) * self.batch_size
            yield _stack([self._sample(start + b) for b in range(self.batch_size)])

    def _sample(self, i: int) -> dict[str, torch.Tensor]:
        if i < len(self.dataset):
            return self.dataset[i]
        sample = self.dataset[0]
        return {"input": sample["input"], "labels": torch.full_like(sample["labels"], IGNORE_INDEX)}


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer, job_config) -> BaseDataLoader:
    """The training loader of `training.dataset`: ours for "packed", TorchTitan's for its own names."""
    training = job_config.training
    if training.dataset != "packed":
        return build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    dataset = PackedDataset(training.dataset_path, training.seq_len, seed=training.seed)
    return PackedLoader(dataset, training.local_batch_size, dp_rank, dp_world_size)

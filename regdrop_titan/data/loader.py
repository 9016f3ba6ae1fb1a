"""The training and validation loaders over packed sets and the copying task, and TorchTitan's own for its names.

Row `b` of accumulation step `a` on data-parallel rank `r` of `R`, with a local batch of `B`, is sample
`consumed + (a R + r) B + b` of the run. The loader's state is the number of samples consumed by all ranks: the same
on every rank, so a checkpoint resumes on any number of them.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.hf_datasets.text_datasets import build_text_dataloader

from .copying import END, CopyingDataset
from .mixture import Mixture

Sample = dict[str, torch.Tensor]  # {"input": (S,), "labels": (S,)} int64
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Samples(Protocol):
    def __getitem__(self, i: int, /) -> Sample: ...


def _stack(samples: list[Sample]) -> Batch:
    inputs = torch.stack([sample["input"] for sample in samples])
    return {"input": inputs}, torch.stack([sample["labels"] for sample in samples])


class TrainingLoader(BaseDataLoader):
    """Micro-batches for ever: ({"input": (B, S)}, labels (B, S)). `samples` has a sample for every i >= 0."""

    def __init__(self, samples: Mixture | CopyingDataset, batch_size: int, dp_rank: int, dp_world_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.consumed = 0  # samples, by all ranks, over all epochs

    def __iter__(self) -> Iterator[Batch]:
        while True:
            start = self.consumed + self.dp_rank * self.batch_size
            batch = _stack([self.samples[start + b] for b in range(self.batch_size)])
            self.consumed += self.dp_world_size * self.batch_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"samples_consumed": self.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed = state_dict["samples_consumed"]


class ValidationLoader:
    """The same batches in every pass: the first `n_samples` samples, in order.

    Every rank yields the same number of batches; rows past the end carry no label and count nothing.
    """

    def __init__(self, samples: Samples, n_samples: int, batch_size: int, dp_rank: int, dp_world_size: int) -> None:
        self.samples = samples
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.steps = -(-n_samples // (batch_size * dp_world_size))

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            start = (step * self.dp_world_size + self.dp_rank) * self.batch_size
            yield _stack([self._sample(start + b) for b in range(self.batch_size)])

    def _sample(self, i: int) -> Sample:
        if i < self.n_samples:
            return self.samples[i]
        sample = self.samples[0]
        return {"input": sample["input"], "labels": torch.full_like(sample["labels"], IGNORE_INDEX)}


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer, job_config) -> BaseDataLoader:
    """The training loader of `training.dataset`: ours for "packed" and "copying", TorchTitan's for its own names."""
    training = job_config.training
    samples: Mixture | CopyingDataset
    if training.dataset == "packed":
        samples = Mixture(training.dataset_path, training.seq_len, seed=training.seed)
    elif training.dataset == "copying":
        samples = CopyingDataset(training.seq_len, seed=training.seed, lengths=tuple(training.copying_lengths))
    else:
        return build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    return TrainingLoader(samples, training.local_batch_size, dp_rank, dp_world_size)


def eos_id(loader: BaseDataLoader, tokenizer) -> int:
    """The end-of-text id of the data that `loader` reads; `tokenizer` is that of TorchTitan's own data sets."""
    if not isinstance(loader, TrainingLoader):
        return tokenizer.eos_id or 0
    if isinstance(loader.samples, CopyingDataset):
        return END
    return loader.samples.sources[0].dataset.tokens.manifest["eos_id"]

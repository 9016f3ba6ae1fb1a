"""The training and validation loaders over packed sets and the copying task, and TorchTitan's own for its names.

Row `b` of accumulation step `a` on data-parallel rank `r` of `R`, with a local batch of `B`, is sample
`consumed + (a R + r) B + b` of the run. The loader's state is the number of samples consumed by all ranks: the same
on every rank, so a checkpoint resumes on any number of them. It counts what was taken, never what was built ahead.

A thread builds the next step's micro-batches while the device computes this one's (`training.prefetch`).
"""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.tools.utils import device_module, device_type

from ..config.sections import global_batch
from .copying import END, CopyingDataset
from .mixture import Mixture

Sample = dict[str, Tensor]  # {"input": (S,), "labels": (S,)} int64
Batch = tuple[dict[str, Tensor], Tensor]


class Samples(Protocol):
    def __getitem__(self, i: int, /) -> Sample: ...


def _stack(samples: list[Sample]) -> Batch:
    inputs = torch.stack([sample["input"] for sample in samples])
    return {"input": inputs}, torch.stack([sample["labels"] for sample in samples])


class Pinned(Tensor):
    """A tensor in pinned memory, which `.to(device)` copies without waiting for the device.

    TorchTitan 0.2.2 moves a micro-batch by a plain `.to(device)`, behind all that the device still has to do of the
    micro-batch before. Kernels that are started later run behind the copy, and torch keeps the memory until it is done.
    """

    # what is computed from it is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, device: torch.device | str) -> Tensor:  # type: ignore[override]
        return super().to(device, non_blocking=True)


class TrainingLoader(BaseDataLoader):
    """Micro-batches for ever: ({"input": (B, S)}, labels (B, S)), the same with any `prefetch` and `device`.

    An error in building a micro-batch is raised where that one is asked for, as the samples raised it.

    Args:
        samples: have one for every i >= 0. They are read by one thread at a time.
        prefetch: micro-batches that a thread keeps ready, at least 0; 0: each is built when it is asked for.
        device: where they will go; for "cuda" they are `Pinned`.
    """

    def __init__(
        self,
        samples: Mixture | CopyingDataset,
        batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        prefetch: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.stride = dp_world_size * batch_size  # samples of a micro-batch on all ranks
        self.prefetch = prefetch
        self.device = device or torch.device("cpu")
        self.consumed = 0  # samples, by all ranks, over all epochs
        self.reading = threading.Lock()  # a mixture has the order of one epoch at a time

    def batch(self, consumed: int) -> Batch:
        """This rank's micro-batch behind the first `consumed` samples of the run."""
        start = consumed + self.dp_rank * self.batch_size
        with self.reading:
            inputs, labels = _stack([self.samples[start + b] for b in range(self.batch_size)])
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # in a new thread it is device 0, whatever the rank's is
                inputs = {name: tensor.pin_memory().as_subclass(Pinned) for name, tensor in inputs.items()}
                labels = labels.pin_memory().as_subclass(Pinned)
        return inputs, labels

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._built_ahead() if self.prefetch else self._built_when_asked():
            self.consumed += self.stride
            yield batch

    def _built_when_asked(self) -> Iterator[Batch]:
        while True:
            yield self.batch(self.consumed)

    def _built_ahead(self) -> Iterator[Batch]:
        # The pool's thread, unlike a daemon, is waited for when Python exits: one that is inside of torch then would
        # abort the process, whatever its exit status was to be
        pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        ahead: deque[tuple[int, Future[Batch]]] = deque()
        try:
            while True:
                if ahead and ahead[0][0] != self.consumed:  # load_state_dict came in between
                    ahead.clear()
                while len(ahead) <= self.prefetch:
                    consumed = self.consumed + len(ahead) * self.stride
                    ahead.append((consumed, pool.submit(self.batch, consumed)))
                _, future = ahead.popleft()
                yield future.result()
        finally:  # it is closed or dropped, or a batch failed
            for _, future in ahead:
                future.cancel()
            pool.shutdown(wait=False)

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
    local = training.local_batch_size
    prefetch = training.prefetch * global_batch(job_config, dp_world_size) // (local * dp_world_size)
    device = torch.device(device_type, device_module.current_device())
    return TrainingLoader(samples, local, dp_rank, dp_world_size, prefetch, device)


def eos_id(loader: BaseDataLoader, tokenizer) -> int:
    """The end-of-text id of the data that `loader` reads; `tokenizer` is that of TorchTitan's own data sets."""
    if not isinstance(loader, TrainingLoader):
        return tokenizer.eos_id or 0
    if isinstance(loader.samples, CopyingDataset):
        return END
    return loader.samples.sources[0].dataset.tokens.manifest["eos_id"]

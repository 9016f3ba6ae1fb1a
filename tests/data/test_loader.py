"""Micro-batches built ahead: the same ones, the same state and errors, overlapped with the step, and no thread left."""

import contextlib
import itertools
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import IGNORE_INDEX

from regdrop_titan.config import load_config
from regdrop_titan.data import DataError
from regdrop_titan.data.copying import CopyingDataset
from regdrop_titan.data.loader import Pinned, TrainingLoader, build_dataloader
from regdrop_titan.data.mixture import Mixture

from ..packed_sets import markov_documents, write_packed

SOURCES = ("packed", "mixture", "copying")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Makes samples of each kind: a packed set of 13 samples, a mixture of 13 and 5, the copying task."""
    folder = tmp_path_factory.mktemp("sets")
    for name, n in (("a", 13), ("b", 5)):
        write_packed(folder / name, markov_documents(n, 20, 50, seed=n), 50)
    return {
        "packed": lambda: Mixture(str(folder / "a"), 20, seed=3),
        "mixture": lambda: Mixture(f"{folder / 'a'}:0.6,{folder / 'b'}:0.4", 20, seed=3),
        "copying": lambda: CopyingDataset(20, seed=3, lengths=(2, 5)),
    }


def rows(batch) -> list:
    inputs, labels = batch
    return [inputs["input"].tolist(), labels.tolist()]


def threads() -> int:
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


def wait_until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Made:
    """Samples of their own number, which can take time, fail, and keep which ones were read."""

    def __init__(self, seconds: float = 0, fails_at: int = -1) -> None:
        self.seconds, self.fails_at = seconds, fails_at
        self.read: list[int] = []
        self.error = DataError("sample 5 is broken")

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self.read.append(i)
        time.sleep(self.seconds)
        if i == self.fails_at:
            raise self.error
        return {"input": torch.tensor([i]), "labels": torch.tensor([i + 1])}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
def test_batches_are_the_same(sources, kind, prefetch):
    """Over 7 epochs of the packed set and 14 of the mixture's second: the samples by their numbers, and their count."""
    alone = sources[kind]()
    loader = TrainingLoader(sources[kind](), 3, 1, 2, prefetch)
    for n, batch in enumerate(itertools.islice(loader, 30)):
        samples = [alone[6 * n + 3 + b] for b in range(3)]
        assert rows(batch) == [[s["input"].tolist() for s in samples], [s["labels"].tolist() for s in samples]]
        assert loader.state_dict() == {"samples_consumed": 6 * (n + 1)}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_state_may_move_at_any_time(sources, kind):
    """Before iterating, between batches, with two iterators that take turns: what comes follows the state alone."""
    loader, reference = TrainingLoader(sources[kind](), 4, 0, 1, 3), TrainingLoader(sources[kind](), 4, 0, 1)
    expected = [rows(batch) for batch in itertools.islice(reference, 40)]
    loader.load_state_dict({"samples_consumed": 4 * 11})
    first = iter(loader)
    assert [rows(next(first)) for _ in range(4)] == expected[11:15]
    for n in (2, 16, 15, 30, 0):
        loader.load_state_dict({"samples_consumed": 4 * n})
        assert [rows(next(first)) for _ in range(2)] == expected[n : n + 2]
    second = iter(loader)
    taken = [rows(next(iterator)) for iterator in (second, first, second, second, first)]
    assert taken == expected[2:7]
    first.close()
    assert rows(next(second)) == expected[7]


def test_the_state_counts_what_was_taken():
    """The thread has read 3 micro-batches more, and no further; a stop here goes on in another layout without a gap."""
    loader = TrainingLoader(Made(), 4, 0, 2, 3)
    iterator = iter(loader)
    next(iterator)
    wait_until(lambda: len(loader.samples.read) == 16)
    time.sleep(0.1)
    assert loader.samples.read == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    assert loader.state_dict() == {"samples_consumed": 8}
    other = TrainingLoader(Made(), 2, 0, 1, 5)
    other.load_state_dict(loader.state_dict())
    assert rows(next(iter(other))) == [[[8], [9]], [[9], [10]]]


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_errors_come_at_their_batch(prefetch):
    """Two good micro-batches come first, however far the thread was; the error is the sample's, with where it arose."""
    loader = TrainingLoader(Made(fails_at=5), 2, 0, 1, prefetch)
    iterator = iter(loader)
    assert [rows(next(iterator))[0] for _ in range(2)] == [[[0], [1]], [[2], [3]]]
    with pytest.raises(DataError) as caught:
        next(iterator)
    assert caught.value is loader.samples.error
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert loader.state_dict() == {"samples_consumed": 4}
    wait_until(lambda: threads() == 0)


def test_no_thread_is_left():
    """Closed, dropped, failed or never used: 60 iterators, some in the middle of a slow sample."""
    wait_until(lambda: threads() == 0)
    loader = TrainingLoader(Made(seconds=0.001), 2, 0, 1, 3)
    for n in range(60):
        iterator = iter(loader)
        if n % 3:
            next(iterator)
            assert threads() >= 1
        if n % 3 == 1:
            iterator.close()
    del iterator
    wait_until(lambda: threads() == 0)


ENDING = """
import sys, torch
from regdrop_titan.data.loader import TrainingLoader
class Slow:
    def __getitem__(self, i):
        for _ in range(5 if i else 1):
            sample = torch.stack([torch.arange(100_000)] * 20).max() + torch.zeros(4)
        return {"input": sample, "labels": sample}
batches = iter(TrainingLoader(Slow(), 1, 0, 1, 4))
next(batches)
sys.exit(2)
"""


def test_the_process_ends_in_the_middle_of_a_batch():
    """Its own exit status, at once: a daemon thread inside of torch would abort it (134)."""
    done = subprocess.run([sys.executable, "-c", ENDING], text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("kind", SOURCES)
def test_torch_s_generator_is_left_alone(sources, kind):
    """Dropout draws from it while the thread builds."""
    before = torch.random.get_rng_state()
    for prefetch in (0, 3):
        for _ in itertools.islice(TrainingLoader(sources[kind](), 3, 0, 1, prefetch), 10):
            pass
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_building_is_hidden_behind_the_step(accumulate):
    """Steps that take as long as their micro-batches: the time of one of both, not of their sum."""
    step, steps = 0.2, 6

    def seconds(prefetch: int) -> float:
        loader = iter(TrainingLoader(Made(seconds=step / accumulate / 2), 2, 0, 1, prefetch))
        for _ in range(accumulate):  # the first step's come late in any case
            next(loader)
        began = time.monotonic()
        for _ in range(steps):
            time.sleep(step)
            for _ in range(accumulate):
                next(loader)
        return time.monotonic() - began

    assert seconds(0) >= 2 * steps * step
    assert seconds(accumulate) < 1.6 * steps * step


def test_pinned_batches(monkeypatch):
    """For a GPU every tensor of a batch is pinned, in the GPU's own context, and goes there without waiting; what
    TorchTitan counts on the CPU is a plain tensor."""
    entered = []

    @contextlib.contextmanager
    def device(which):
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    gpu = torch.device("cuda", 3)
    for prefetch in (0, 2):
        inputs, labels = next(iter(TrainingLoader(Made(), 2, 0, 1, prefetch, gpu)))
        assert rows((inputs, labels)) == [[[0], [1]], [[1], [2]]]
        assert type(inputs["input"]) is type(labels) is Pinned
    assert set(entered) == {gpu}
    assert type((labels != IGNORE_INDEX).sum()) is torch.Tensor

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default:
                copies.append(kwargs)
            return function(*args, **(kwargs or {}))

    copies: list[dict] = []
    with Copies():
        moved = labels.to(torch.device("meta"))
    assert copies[0]["non_blocking"] and type(moved) is torch.Tensor and moved.is_meta
    plain, _ = next(iter(TrainingLoader(Made(), 2, 0, 1, 2)))
    assert type(plain["input"]) is torch.Tensor


@pytest.mark.parametrize(("prefetch", "ready"), [(0, 0), (1, 4), (2, 8)])
def test_prefetch_counts_steps(prefetch, ready, monkeypatch, tmp_path):
    """A step of 16 sequences on 2 ranks, 2 at a time, is 4 micro-batches of a rank."""
    read = []
    sample = CopyingDataset.__getitem__
    monkeypatch.setattr(CopyingDataset, "__getitem__", lambda self, i: read.append(i) or sample(self, i))
    file = tmp_path / "config.toml"
    file.write_text(
        "[model]\nname = 'nape_llama3'\nflavor = 'debug'\n[training]\ndataset = 'copying'\nseq_len = 400\n"
        f"local_batch_size = 2\nglobal_batch_size = 16\nprefetch = {prefetch}\n"
    )
    config = load_config(["--job.config_file", str(file)], 2)
    batches = iter(build_dataloader(2, 0, None, config))
    next(batches)
    wait_until(lambda: len(read) == 2 * (1 + ready))
    time.sleep(0.1)
    assert len(read) == 2 * (1 + ready)
    batches.close()


def test_a_step_is_built_ahead_by_default():
    assert load_config(["--job.config_file", "train_configs/debug_nape_llama3.toml"]).training.prefetch == 1

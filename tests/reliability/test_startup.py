"""Before the first step: ranks that were started alike, a made batch, tokens that the model knows."""

import functools

import pytest
import torch

from regdrop_titan.metrics import read_records

from ..distributed.harness import BASE, run_cases
from ..distributed.ranks import Ranks, train

P = "--parallelism."
VPAD = ["--dropout.placement", "vpad", "--dropout.p", "0.1", "--layer_dropout.p_max", "0.5"]
LAYOUTS = {
    "fsdp": VPAD,
    "pp": [*VPAD, P + "pipeline_parallel_degree", "2"],
    "sublayer": [*VPAD, "--layer_dropout.unit", "sublayer", P + "tensor_parallel_degree", "2"],
}


def train_unlike(before, args, others, rank):
    """Rank 1 has other arguments too."""
    if before is not None:
        before(rank)
    return train(rank, [*args, *(others if rank == 1 else ())])


@pytest.fixture
def start(tmp_path, packed):
    (tmp_path / "run.toml").write_text(BASE.format(packed=packed))

    def run(*args, before=None, others=()) -> tuple[list[int], str]:
        base = ["--job.config_file", str(tmp_path / "run.toml"), "--job.dump_folder", str(tmp_path / "out")]
        ranks = Ranks(2, functools.partial(train_unlike, before, [*base, *args], others), tmp_path / "log")
        return ranks.wait(), ranks.said()

    return run


def other_code(rank: int) -> None:
    from regdrop_titan import startup

    startup.code_hash = lambda: f"code of {rank}"


def test_ranks_that_were_not_started_alike_are_refused(start, tmp_path):
    statuses, said = start("--optimizer.lr", "1e-3", others=["--optimizer.lr", "2e-3", "--dropout.p", "0.3"])
    assert statuses == [2, 2] and "Traceback" not in said
    assert (
        "the ranks were not started alike:\n  dropout.p: 0.0 on rank 0, 0.3 on rank 1\n  optimizer.lr: 0.001 on" in said
    )
    assert not (tmp_path / "out/config.json").exists()
    statuses, said = start(before=other_code)
    assert statuses == [2, 2]
    assert 'code of regdrop_titan: "code of 0" on rank 0, "code of 1" on rank 1' in said


def out_of_memory(rank: int) -> None:
    from regdrop_titan.trainer import Trainer

    def fail(self, **kwargs):
        raise torch.OutOfMemoryError("Tried to allocate 8.40 GiB")

    Trainer.forward_backward_step = fail


def test_memory_is_tried_before_data_are_touched(start, tmp_path):
    statuses, said = start(before=out_of_memory)
    assert statuses == [1, 1] and "Traceback" not in said
    assert "out of memory: Tried to allocate 8.40 GiB\nLower training.local_batch_size" in said
    assert "Training starts" not in said and not (tmp_path / "out/metrics.jsonl").exists()


def a_token_too_many(rank: int) -> None:
    from regdrop_titan.data.packed import PackedDataset

    read = PackedDataset.__getitem__

    def altered(self, i):
        sample = read(self, i)
        return sample | {"input": sample["input"] + 256 * rank}

    PackedDataset.__getitem__ = altered


def test_tokens_outside_of_the_vocabulary(start):
    """Report L6, for data whose tokenizer cannot be asked. Rank 1 alone has them, and says so."""
    statuses, said = start(before=a_token_too_many)
    assert statuses[1] == 2 and statuses[0] != 0
    assert (
        "error: rank 1: the first batch has tokens 25" in said or "error: rank 1: the first batch has tokens 26" in said
    )
    assert "the model a vocabulary of 256 (0 ... 255); set architecture.vocab_size" in said


def test_the_made_batch_leaves_no_trace(tmp_path, packed):
    """Losses and gradients with it and without, bit for bit."""
    cases = {f"{name}{'_without' * off}": {"args": args, "unrehearsed": off}
             for name, args in LAYOUTS.items() for off in (False, True)}  # fmt: skip
    run_cases(2, tmp_path, packed, cases)
    for name in LAYOUTS:
        a, b = (read_records(tmp_path / f"{name}{off}/metrics.jsonl") for off in ("", "_without"))
        assert len(a) == 3
        for key in ("loss", "grad_norm", "kept_fraction"):
            assert [r[key] for r in a] == [r[key] for r in b], (name, key)

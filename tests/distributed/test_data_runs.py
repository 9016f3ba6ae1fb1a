"""Data in real runs: the same global batches on any number of ranks, long-context validation, the copying task."""

from pathlib import Path

import pytest
import torch

from regdrop_titan.checkpoints import load_model
from regdrop_titan.data.mixture import Mixture
from regdrop_titan.data.packed import PackedTokens
from regdrop_titan.evaluation.position_loss import position_loss
from regdrop_titan.metrics import read_records

from ..packed_sets import markov_documents, write_packed
from .harness import run_cases

CONTEXTS = ["--validation.enable", "--validation.freq", "3", "--validation.context_multiples", "1", "3"]
COPYING = ["--training.dataset", "copying", "--training.copying_lengths", "2", "5", "--validation.dataset", "copying",
           "--validation.enable", "--validation.steps", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Sets of 20 and 9 samples of 32 tokens: both repeat within 6 steps of 8."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, n in (("a", 20), ("b", 9)):
        write_packed(folder / name, markov_documents(n, 32, 256, seed=n), 256)
    return f"{folder / 'a'}:0.6,{folder / 'b'}:0.4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data_runs")


@pytest.fixture(scope="module")
def runs(folder, packed, mixture):
    """6 steps in one go and in pieces on 2, 4 and 1 ranks, with other accumulations, batches built ahead or when asked
    for; then the other cases."""

    def part(name, local, steps, dump="pieces", prefetch=1):
        return {
            "args": ["--training.dataset_path", mixture, "--training.local_batch_size", str(local), "--training.steps",
                     str(steps), "--job.dump_folder", str(folder / dump), "--checkpoint.enable",
                     "--checkpoint.interval", "100", "--training.prefetch", str(prefetch)],
            "batches": str(folder / f"{name}.batches"),
        }  # fmt: skip

    saved = ["--checkpoint.enable", "--checkpoint.interval", "3"]
    run_cases(2, folder / "2", packed, {
        "first": part("first", 4, 2),
        "fsdp": {"args": CONTEXTS},
        "tp": {"args": [*CONTEXTS, "--parallelism.tensor_parallel_degree", "2"]},
        "copying": {"args": COPYING},
    })  # fmt: skip
    run_cases(4, folder / "4", packed, {"second": part("second", 1, 4, prefetch=2)})
    run_cases(1, folder / "1", packed, {
        "third": part("third", 2, 6, prefetch=0),
        "whole": part("whole", 8, 6, dump="whole"),
        "contexts": {"args": [*CONTEXTS, *saved]},
        "copying": {"args": COPYING},
    })  # fmt: skip
    return folder


def batches_of(path, ranks) -> dict[int, list[list[int]]]:
    """The rows of each step's global batch, in order."""
    records = [record for rank in range(ranks) for record in read_records(Path(f"{path}.{rank}"))]
    steps: dict[int, list] = {}
    for step, _, _, rows in sorted(records, key=lambda record: record[:3]):  # by step, micro-batch, rank
        steps.setdefault(step, []).extend(rows)
    return steps


def test_global_batches_do_not_depend_on_the_ranks(runs, mixture):
    """2 ranks, stopped and resumed on 4, and on 1, over both sets' epochs: the rows of the undisturbed run."""
    whole = batches_of(runs / "whole.batches", 1)
    pieces = batches_of(runs / "first.batches", 2) | batches_of(runs / "second.batches", 4)
    pieces |= batches_of(runs / "third.batches", 1)
    assert pieces == whole and sorted(whole) == [1, 2, 3, 4, 5, 6]
    samples = Mixture(mixture, 32, seed=42)
    assert [row for step in range(1, 7) for row in whole[step]] == [samples[i]["input"].tolist() for i in range(48)]


def test_passes_over_the_data_and_waiting_are_logged(runs):
    records = read_records(runs / "whole/metrics.jsonl")
    assert all(0 <= record["data_wait_share"] < 1 for record in records)
    assert records[-1]["epochs"] == pytest.approx(48 * 0.4 / 9)
    assert records[0]["epochs"] == pytest.approx(8 * 0.4 / 9)


@pytest.mark.parametrize("name", ["1/contexts", "2/fsdp", "2/tp"])
def test_long_context_validation(runs, packed, name):
    """The position loss of the checkpoint over the same documents, in every layout: to 1e-5."""
    (*_, last) = read_records(runs / name / "validation.jsonl")
    model = load_model(runs / "1/contexts/checkpoint/step-3")
    documents = list(PackedTokens(packed / "validation").documents(97))
    assert len(documents) == 7
    reference = position_loss(model, documents, 96).loss
    assert last["step"] == 3 and set(last) == {"step", "loss", "loss_1x", "loss_3x"}
    assert last["loss_1x"] == pytest.approx(reference[:32].mean().item(), abs=1e-5)
    assert last["loss_3x"] == pytest.approx(reference[64:].mean().item(), abs=1e-5)


def test_copying_runs(runs):
    """The same on 1 and 2 ranks; the loss at the start is that of a random model over 256 tokens, not of padding."""
    one, two = (read_records(runs / f"{n}/copying/metrics.jsonl") for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and "epochs" not in a
    assert abs(one[0]["loss"] - torch.tensor(256.0).log()) < 1
    rounds = [read_records(runs / f"{n}/copying/validation.jsonl") for n in (1, 2)]
    assert rounds[0][-1]["loss"] < rounds[0][0]["loss"]

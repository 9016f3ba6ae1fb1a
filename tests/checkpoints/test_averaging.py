"""The mean of checkpoints: its values against a plain fp64 mean, what is refused, and what reads the result."""

import ctypes
import dataclasses
import gc
import json
import math
import os
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from regdrop_titan.checkpoints import CheckpointError, averaging, load_model
from regdrop_titan.checkpoints.averaging import average_checkpoints, select
from regdrop_titan.checkpoints.huggingface import import_huggingface
from regdrop_titan.checkpoints.safety import load_state
from regdrop_titan.models import build_model

from ..distributed.harness import run_cases

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64, "position": "rope"}
MAMBA = {"dim": 32, "n_layers": 1, "vocab_size": 64, "ssm_head_dim": 16, "state_size": 8}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for each other at every small tensor cost most of the time on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(step, family="nape_llama3", dtype=torch.float32, **changes):
    """The model and its weights at `step`: random, of sizes from 1e-3 to 1e3, zeros of both signs among them."""
    model = build_model(family, "debug", **((SMALL if family == "nape_llama3" else MAMBA) | changes))
    random = torch.Generator().manual_seed(step)
    state = {
        name: (torch.randn(x.shape, generator=random) * 10 ** (6 * torch.rand(x.shape, generator=random) - 3)).to(dtype)
        for name, x in model.state_dict().items()
    }
    state["norm.weight"][:2] = torch.tensor([0.0, -0.0])
    return model, state


def write_run(folder, steps, state_at=None, family="nape_llama3", dtype=torch.float32, config=None, **changes):
    """A run's folder, with optimizer states as a run leaves them; `state_at(step)` of the step's own weights."""
    for step in steps:
        model, state = weights(step if state_at is None else state_at(step), family, dtype, **changes)
        others = {"optimizer": {"state.norm.weight.exp_avg": torch.ones(32), "lr": 0.1}, "train_state": {"step": step}}
        dcp.save({**state, **others}, checkpoint_id=str(folder / f"checkpoint/step-{step}"), no_dist=True)
    record = {"model": {"name": family}, "model_args": dataclasses.asdict(model.args), "tokenizer": None}
    (folder / "config.json").write_text(json.dumps(record | (config or {})))
    return [folder / f"checkpoint/step-{step}" for step in steps]


def change(checkpoint, changes, family="nape_llama3"):
    """Write `checkpoint` anew with other tensors; None leaves one out."""
    state = weights(int(checkpoint.name[5:]), family)[1] | changes
    shutil.rmtree(checkpoint)
    dcp.save({name: x for name, x in state.items() if x is not None}, checkpoint_id=str(checkpoint), no_dist=True)


def state_of(checkpoint, like):
    """The model's tensors, by `load_state`."""
    state = {name: torch.empty_like(x) for name, x in like.items()}
    load_state(state, checkpoint, no_dist=True)
    return state


def bits(state):
    return {name: x.numpy(force=True).tobytes() if x.dtype != torch.bfloat16 else x.view(torch.int16).tolist()
            for name, x in state.items()}  # fmt: skip


def refusal(folders, output, **options):
    with pytest.raises(CheckpointError) as error:
        average_checkpoints(folders, output, **options)
    assert not list(output.parent.glob(f"{output.name}*")), "something was written"
    return str(error.value)


def test_the_mean_is_that_of_fp64(tmp_path):
    folders = write_run(tmp_path / "run", [10, 20, 30, 40, 50])
    states = [weights(step)[1] for step in (10, 20, 30, 40, 50)]
    seen = []
    average_checkpoints(folders, tmp_path / "mean", progress=lambda done, total: seen.append((done, total)))
    mean = state_of(tmp_path / "mean/checkpoint/step-0", states[0])
    for name, x in mean.items():
        held = torch.stack([state[name].double() for state in states])
        # a rounding of fp32 a step, of numbers no larger than the largest of the five
        assert ((x.double() - held.mean(0)).abs() <= 5 * 2**-23 * held.abs().amax(0)).all(), name
    total = 5 * sum(x.nbytes for x in states[0].values())
    assert seen[-1] == (total, total) and len(seen) == 5 * len(states[0])
    average_checkpoints(folders[::-1], tmp_path / "reversed")
    other = state_of(tmp_path / "reversed/checkpoint/step-0", states[0])
    for name, x in mean.items():
        largest = torch.stack([state[name] for state in states]).abs().amax(0)
        assert ((x - other[name]).abs() <= 10 * 2**-23 * largest).all(), name
    record = json.loads((tmp_path / "mean/config.json").read_text())
    assert record["averaged"] == [{"checkpoint": str(f), "step": s} for f, s in zip(folders, range(10, 60, 10))]  # noqa: B905
    names = dcp.FileSystemReader(tmp_path / "mean/checkpoint/step-0").read_metadata().state_dict_metadata
    assert names.keys() == mean.keys()  # no optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identical_checkpoints_come_back_bit_for_bit(tmp_path, dtype):
    folders = write_run(tmp_path / "run", [1, 2, 3, 4, 5, 6, 7], lambda step: 1, dtype=dtype)
    average_checkpoints(folders, tmp_path / "mean")
    first = weights(1, dtype=dtype)[1]
    assert math.copysign(1, first["norm.weight"][1]) == -1  # a zero's sign is a bit too
    assert bits(state_of(tmp_path / "mean/checkpoint/step-0", first)) == bits(first)


def test_bf16_is_averaged_in_fp32(tmp_path):
    """1, 1 and 1 + 3/128 have a mean of 1 + 1/128, which bf16 holds; adding in bf16 would lose it. fp32 on request."""
    values = {1: 1.0, 2: 1.0, 3: 1 + 3 / 128}
    folders = write_run(tmp_path / "run", [1, 2, 3], dtype=torch.bfloat16)
    for folder, value in zip(folders, values.values(), strict=True):
        change(folder, {k: torch.full_like(v, value, dtype=torch.bfloat16) for k, v in weights(1)[1].items()})
    average_checkpoints(folders, tmp_path / "mean")
    average_checkpoints(folders, tmp_path / "fp32", dtype=torch.float32)
    metadata = dcp.FileSystemReader(tmp_path / "mean/checkpoint/step-0").read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in metadata.values()} == {torch.bfloat16}
    metadata = dcp.FileSystemReader(tmp_path / "fp32/checkpoint/step-0").read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in metadata.values()} == {torch.float32}
    for name in ("mean", "fp32"):
        assert all((x == 1 + 1 / 128).all() for x in load_model(tmp_path / name).parameters())


def test_the_mean_is_a_model(tmp_path):
    """Its logits are those of a model that is given the mean."""
    folders = write_run(tmp_path / "run", [1, 2, 4])
    average_checkpoints(folders, tmp_path / "mean")
    model, _ = weights(1)
    states = [weights(step)[1] for step in (1, 2, 4)]
    model.load_state_dict({k: torch.stack([s[k].double() for s in states]).mean(0).float() for k in states[0]})
    tokens = torch.arange(40)[None] % 64
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "mean")(tokens), model.eval()(tokens), rtol=1e-3, atol=1e-3)


# Choosing ------------------------------------------------------------------------------------------------------------


def whole(folder, *steps):
    """Checkpoints as far as `select` looks."""
    for step in steps:
        dcp.save({"x": torch.zeros(1)}, checkpoint_id=str(folder / f"checkpoint/step-{step}"), no_dist=True)
    return folder / "checkpoint"


def steps_of(chosen):
    return [int(path.name.removeprefix("step-")) for path in chosen[0]]


def test_which_are_chosen(tmp_path):
    folder = whole(tmp_path, *range(10, 110, 10))
    (folder / "step-110").mkdir()
    assert steps_of(select(folder, last=3)) == [80, 90, 100]
    assert steps_of(select(tmp_path, last=3)) == [80, 90, 100]  # the run's folder
    assert steps_of(select(folder, share=Fraction("0.25"))) == [80, 90, 100]  # above 75
    assert steps_of(select(folder, share=Fraction("0.3"))) == [80, 90, 100]  # above 70, 70 is not
    assert steps_of(select(folder, share=Fraction("0.9"))) == list(range(20, 110, 10))  # (1 - 0.9) * 100 < 10 in binary
    assert steps_of(select(folder, share=Fraction(1))) == list(range(10, 110, 10))
    assert steps_of(select(folder, share=Fraction(1), count=5)) == [20, 40, 60, 80, 100]
    assert steps_of(select(folder, share=Fraction(1), count=4)) == [30, 50, 80, 100]  # of 25, 50, 75: the later one
    assert steps_of(select(folder, share=Fraction("0.3"), count=3)) == [80, 90, 100]
    passed_over = select(folder, last=2)[1]
    assert list(passed_over) == [110] and "step-110: has no .metadata" in passed_over[110]


def test_a_spread_over_uneven_steps(tmp_path):
    """A run that kept multiples of 1000 and its three newest: by distance, not by number."""
    folder = whole(tmp_path, 7000, 8000, 9000, 9800, 9900, 10000)
    assert steps_of(select(folder, share=Fraction("0.3"), count=3)) == [8000, 9000, 10000]
    assert steps_of(select(folder, share=Fraction("0.3"), count=5)) == [8000, 9000, 9800, 9900, 10000]


@pytest.mark.parametrize("rule", [{"last": 4}, {"share": Fraction("0.5"), "count": 3}, {"share": Fraction("0.25")}])
def test_too_few(tmp_path, rule):
    folder = whole(tmp_path, 10, 20, 30)
    (folder / "step-40").mkdir()
    with pytest.raises(
        CheckpointError, match=r"whole checkpoints are needed, the steps there are: (.*, )?30\n.*step-40"
    ):
        select(folder, **rule)
    with pytest.raises(CheckpointError, match="the steps there are: none"):
        select(tmp_path / "nowhere", **rule)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_the_odd_one_out_is_named(tmp_path):
    """All at once, each with its checkpoint, and no word of those that fit."""
    folders = write_run(tmp_path / "run", [1, 2, 3, 4, 5, 6, 7])
    change(folders[1], {"norm.weight": torch.ones(33)})
    change(folders[2], {"norm.weight": None, "norm.gain": torch.ones(32)})
    (folders[3] / ".metadata").unlink()
    next(folders[4].glob("*.distcp")).unlink()
    change(folders[5], {"norm.weight": torch.ones(32, dtype=torch.bfloat16)})
    (other,) = write_run(tmp_path / "deeper", [8], n_layers=3)
    (mamba,) = write_run(tmp_path / "mamba", [9], family="mamba2")
    gone = tmp_path / "run/checkpoint/step-10"
    said = refusal([*folders, other, mamba, gone, folders[0]], tmp_path / "mean", format="hf")
    for fault in (
        "step-2: norm.weight: is (33,), config.json says (32,)",
        "step-3: norm.weight: missing",
        "step-3: norm.gain: unexpected",
        "step-4: has no .metadata",
        "__0_0.distcp: missing",
        "step-6: norm.weight is (32,) bfloat16; norm.weight is (32,) float32 in ",
        "deeper/checkpoint/step-8: config.json has model_args.n_layers = 3; config.json has model_args.n_layers = 2",
        "deeper/checkpoint/step-8: layers.2.",
        "mamba/checkpoint/step-9: config.json has model.name = 'mamba2'; config.json has model.name = 'nape_llama3'",
        "step-10: no such folder",
        "step-1: is named twice",
    ):
        assert fault in said, f"{fault!r} is not in\n{said}"
    assert "step-1:" not in said.replace("step-1: is named twice", "") and "step-7:" not in said


def test_a_run_that_an_earlier_version_began(tmp_path):
    """Its config.json lacks an argument that came later, and whose default holds; another value than that is told."""
    one, two, cut = (write_run(tmp_path / name, [n])[0] for n, name in enumerate(("old", "new", "cut"), start=1))
    for folder, cutoff in (("old", None), ("cut", 5.0)):
        file = tmp_path / folder / "config.json"
        record = json.loads(file.read_text())
        del record["model_args"]["alibi_cutoff"]
        if cutoff is not None:
            record["model_args"]["alibi_cutoff"] = cutoff
        file.write_text(json.dumps(record))
    average_checkpoints([one, two], tmp_path / "mean")
    assert "has model_args.alibi_cutoff = 5.0" in refusal([one, two, cut], tmp_path / "other")


def test_another_run(tmp_path):
    """The same sizes, but other initial weights, data or tokenizer."""
    one, two = write_run(tmp_path / "run", [1, 2])
    (seed,) = write_run(tmp_path / "seed", [3], seed=7)
    (data,) = write_run(tmp_path / "data", [4], config={"data": {"dataset": "copying"}, "tokenizer": {"name": "b"}})
    said = refusal([one, two, seed, data], tmp_path / "mean").splitlines()
    expected = [
        "seed/checkpoint/step-3: config.json has model_args.seed = 7; config.json has model_args.seed = 42 in 3 of 4",
        "data/checkpoint/step-4: config.json has data.dataset = 'copying'; config.json has data.dataset = None in 3",
        "data/checkpoint/step-4: config.json has tokenizer.name = 'b'",
    ]
    for fault in expected:
        assert any(fault in line for line in said), (fault, said)
    assert all("seed/" in line.split(":")[0] or "data/" in line.split(":")[0] for line in said)


def test_weights_that_have_no_mean(tmp_path):
    folders = write_run(tmp_path / "run", [1, 2, 3])
    change(folders[1], {"norm.weight": torch.full((32,), math.nan)})
    change(folders[2], {"output.weight": weights(3)[1]["output.weight"] / 0.0})
    said = refusal(folders, tmp_path / "mean")
    assert "step-2: norm.weight: has values that are not finite" in said
    assert "step-3: output.weight: has values that are not finite" in said and len(said.splitlines()) == 2


def test_the_command_refuses_with_status_2(tmp_path, script, capsys):
    one, two = write_run(tmp_path / "run", [1, 2])
    run, out = str(tmp_path / "run/checkpoint"), ["--output", str(tmp_path / "mean")]

    def refused(*arguments):
        assert script("average_checkpoints", "--checkpoints", *arguments) == 2
        assert not (tmp_path / "mean").exists()
        return capsys.readouterr().err

    assert "name folders step-N, or say --last or --share" in refused(run, *out)
    assert "must be above 0 and at most 1" in refused(run, "--share", "1.5", *out)
    assert "must be at least 2" in refused(run, "--last", "1", *out)
    assert "--count needs --share" in refused(run, "--last", "2", "--count", "2", *out)
    assert "name that alone" in refused(str(one), str(two), "--last", "2", *out)
    assert "3 whole checkpoints are needed" in refused(run, "--last", "3", *out)
    entmax = [str(step) for step in write_run(tmp_path / "entmax", [1, 2], attention="entmax15")]
    assert "has no place for attention = 'entmax15'" in refused(*entmax, "--format", "hf", *out)
    assert "needs two checkpoints" in refused(str(one), *out)
    both = refused(str(one), str(tmp_path / "x"), "--output", str(tmp_path / "run"))
    assert "x: no such folder" in both and "run: is not empty" in both


# What reads the result -----------------------------------------------------------------------------------------------


def test_of_a_run_and_into_one(tmp_path, packed, script, capsys):
    """The last half of a real run of two ranks; evaluation reads the mean, and a run starts from it with
    the mean's own loss."""
    save = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "0"]
    run_cases(2, tmp_path, packed, {"run": {"args": [*save, "--training.steps", "4"]}})  # FSDP2: weights in two parts
    (tmp_path / "run/checkpoint/step-5").mkdir()
    arguments = ["--checkpoints", str(tmp_path / "run/checkpoint"), "--output", str(tmp_path / "mean")]
    assert script("average_checkpoints", *arguments, "--share", "0.5") == 0
    printed = capsys.readouterr()
    assert "the mean of step-3, step-4" in printed.out and "passed over" in printed.err and "step-5" in printed.err
    a, b, mean = (load_model(tmp_path / name) for name in ("run/checkpoint/step-3", "run/checkpoint/step-4", "mean"))
    for x, y, z in zip(a.parameters(), b.parameters(), mean.parameters(), strict=True):
        torch.testing.assert_close(z.double(), (x.double() + y.double()) / 2, rtol=1e-6, atol=1e-9)
    by_hand = {k: (x.double() + b.state_dict()[k].double()).div(2).float() for k, x in a.state_dict().items()}
    dcp.save(by_hand, checkpoint_id=str(tmp_path / "by_hand/checkpoint/step-0"), no_dist=True)
    step = ["--training.steps", "1", "--optimizer.lr", "1e-12", "--checkpoint.enable"]
    initial = "--checkpoint.initial_load_path"
    logged = run_cases(1, tmp_path, packed, {
        "from_mean": {"args": [*step, initial, str(tmp_path / "mean/checkpoint/step-0")]},
        "from_by_hand": {"args": [*step, initial, str(tmp_path / "by_hand/checkpoint/step-0")]},
        "from_4": {"args": [*step, initial, str(tmp_path / "run/checkpoint/step-4")]},
        "in_place": {"args": [*step, "--job.dump_folder", str(tmp_path / "mean")]},
    })  # fmt: skip
    losses = {name: records[0]["loss"] for name, records in logged.items() if records}
    assert losses["from_mean"] == pytest.approx(losses["from_by_hand"], abs=1e-6)
    assert abs(losses["from_mean"] - losses["from_4"]) > 1e-4
    # a run whose dump folder is the mean's begins from it, at step 1
    again = load_model(tmp_path / "mean/checkpoint/step-1")
    assert all(torch.allclose(x, y, atol=1e-9) for x, y in zip(again.parameters(), mean.parameters(), strict=True))
    assert script("evaluate", "position-loss", "--checkpoint", str(tmp_path / "mean/checkpoint/step-0"),
                  "--data", str(packed / "validation"), "--multiple", "1", "--documents", "2") == 0  # fmt: skip
    assert (tmp_path / "mean/evaluation/position_loss.json").exists()


def test_mamba_to_hugging_face(tmp_path):
    folders = write_run(tmp_path / "run", [1, 2], family="mamba2")
    average_checkpoints(folders, tmp_path / "mean")
    average_checkpoints(folders, tmp_path / "hf", format="hf")
    import_huggingface(tmp_path / "hf", tmp_path / "back")
    assert bits(load_model(tmp_path / "back").state_dict()) == bits(load_model(tmp_path / "mean").state_dict())
    assert [entry["step"] for entry in json.loads((tmp_path / "hf/averaged.json").read_text())] == [1, 2]
    average_checkpoints(folders, tmp_path / "bf16", format="hf", dtype=torch.bfloat16)
    exact, rounded = (load_file(tmp_path / name / averaging.SAFETENSORS) for name in ("hf", "bf16"))
    assert bits({name: x.bfloat16() for name, x in exact.items()}) == bits(rounded)


# Hugging Face folders ------------------------------------------------------------------------------------------------

CONFIG = {"model_type": "smollm3", "hidden_size": 4, "rope_theta": 50000, "torch_dtype": "bfloat16"}


def write_theirs(folder, value, split=("a.safetensors", "b.safetensors"), config=None, **others):
    """A folder in two files with an index: `w` in bf16, `v` in fp32, integers; and what stands beside them."""
    folder.mkdir()
    tensors = {
        "w": torch.full((4, 4), value, dtype=torch.bfloat16),
        "v": torch.tensor([value, -0.0]),
        "n": torch.arange(3),
    } | others
    parts = {"w": split[0], "v": split[1], "n": split[1]} | dict.fromkeys(others, split[0])
    for part in split:
        save_file({name: tensors[name] for name in tensors if parts[name] == part}, folder / part)
    index = {"metadata": {"total_size": 1, "kept": "yes"}, "weight_map": parts}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": str(value)} | (config or {})))
    (folder / "tokenizer.json").write_text(f"{value}")
    (folder / "generation_config.json").write_text("{}")
    (folder / "README.md").write_text("of the revision, not of the mean")
    return folder


def test_hugging_face_folders(tmp_path):
    """Shards need not be the same: the last folder's are the output's, and so are its tokenizer and configuration."""
    folders = [write_theirs(tmp_path / "1", 1.0), write_theirs(tmp_path / "2", 1.0, ("b.safetensors", "c.safetensors")),
               write_theirs(tmp_path / "3", 1 + 3 / 128)]  # fmt: skip
    average_checkpoints(folders, tmp_path / "mean")
    a, b = load_file(tmp_path / "mean/a.safetensors"), load_file(tmp_path / "mean/b.safetensors")
    assert a.keys() == {"w"} and b.keys() == {"v", "n"}
    assert a["w"].dtype == torch.bfloat16 and (a["w"] == 1 + 1 / 128).all()
    torch.testing.assert_close(b["v"], torch.tensor([1 + 1 / 128, 0.0]), rtol=1e-6, atol=0)
    assert torch.equal(b["n"], torch.arange(3))
    index = json.loads((tmp_path / "mean/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"w": "a.safetensors", "v": "b.safetensors", "n": "b.safetensors"}
    assert index["metadata"] == {"total_size": 32 + 8 + 24, "kept": "yes"}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "mean" / name).read_bytes() == (folders[2] / name).read_bytes()
    assert not (tmp_path / "mean/README.md").exists()
    assert json.loads((tmp_path / "mean/averaged.json").read_text()) == [{"checkpoint": str(f)} for f in folders]
    average_checkpoints(folders, tmp_path / "fp32", dtype=torch.float32)
    assert load_file(tmp_path / "fp32/a.safetensors")["w"].dtype == torch.float32
    assert json.loads((tmp_path / "fp32/config.json").read_text())["torch_dtype"] == "float32"


def test_one_file_bit_for_bit(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
        random = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        save_file({"x": random, "y": random.bfloat16(), "z": -torch.zeros(3)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    average_checkpoints([tmp_path / name for name in "abc"], tmp_path / "mean")
    assert bits(load_file(tmp_path / "mean/model.safetensors")) == bits(load_file(tmp_path / "a/model.safetensors"))
    assert {p.name for p in (tmp_path / "mean").iterdir()} == {"config.json", "model.safetensors", "averaged.json"}


def test_hugging_face_refusals(tmp_path):
    good = [write_theirs(tmp_path / name, 1.0) for name in ("one", "two", "three")]
    shape = write_theirs(tmp_path / "shape", 1.0, w=torch.zeros(4, 5, dtype=torch.bfloat16))
    more = write_theirs(tmp_path / "more", 1.0, u=torch.zeros(2))
    theta = write_theirs(tmp_path / "theta", 1.0, config={"rope_theta": 2})
    cut, gone, empty = (write_theirs(tmp_path / name, 1.0) for name in ("cut", "gone", "empty"))
    (cut / "a.safetensors").write_bytes((cut / "a.safetensors").read_bytes()[:-5])
    (gone / "b.safetensors").unlink()
    for path in empty.glob("*.safetensors*"):
        path.unlink()
    outside = write_theirs(tmp_path / "outside", 1.0)
    (outside / averaging.INDEX).write_text('{"weight_map": {"w": "../one/a.safetensors"}}')
    said = refusal([*good, shape, more, theta, cut, gone, empty, outside], tmp_path / "mean", format="dcp")
    for fault in (
        "shape: w is (4, 5) bfloat16; w is (4, 4) bfloat16 in 5 of 6",
        "more: u is (2,) float32; u is missing in 5 of 6",
        "theta: config.json has rope_theta = 2; config.json has rope_theta = 50000 in 5 of 6",
        "cut/a.safetensors: unreadable",
        "gone/b.safetensors: missing",
        "empty: has no weights",
        "'../one/a.safetensors' is not a file's name",
        "bring that in by scripts/import_hf.py",
    ):
        assert fault in said, f"{fault!r} is not in\n{said}"
    integers = write_theirs(tmp_path / "integers", 1.0, n=torch.arange(3) + 1)
    nan = write_theirs(tmp_path / "nan", math.nan)
    said = refusal([good[0], integers, nan], tmp_path / "mean").splitlines()
    assert len(said) == 3 and said[0] == f"{nan}: w: has values that are not finite"
    assert f"{integers}: n: torch.int64 values differ from those of {good[0]}" in said
    ours = write_run(tmp_path / "run", [1])
    assert "in Hugging Face's format, the others are" in refusal([*ours, good[0]], tmp_path / "mean")


# Memory --------------------------------------------------------------------------------------------------------------


def peak(run):
    """The resident memory that `run` adds at its peak, in bytes."""

    def kilobytes(key):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed, or it would be used first, uncounted
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = kilobytes("VmRSS")
    run()
    return (kilobytes("VmHWM") - before) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of a process's peak memory")
def test_two_models_in_memory_at_the_most(tmp_path):
    """Of five checkpoints, 48 MB each, which is one on disk: names are all that has to differ here."""
    n, rows = 48, 1 << 18
    size = n * rows * 4
    state = {f"layers.{i}.weight": torch.randn(1).expand(rows).clone() for i in range(n)}
    expected = state["layers.7.weight"][0].item()
    dcp.save(state, checkpoint_id=str(tmp_path / "step-1"), no_dist=True)
    save_file(state, tmp_path / averaging.SAFETENSORS)
    sources = [averaging.Source(tmp_path / "step-1", {}, {name: ((rows,), torch.float32) for name in state})] * 5
    folders = [tmp_path / str(i) for i in range(5)]
    for folder in folders:
        folder.mkdir()
        os.link(tmp_path / averaging.SAFETENSORS, folder / averaging.SAFETENSORS)
        (folder / "config.json").write_text("{}")
    (tmp_path / "mean").mkdir()
    del state
    ours = peak(lambda: averaging._write_dcp(sources, tmp_path / "mean", None, lambda n: None))
    # of safetensors files the pages in use are counted too, though the system may take them back
    theirs = peak(lambda: average_checkpoints(folders, tmp_path / "theirs"))
    assert size < ours < 2 * size
    assert size * 0.9 < theirs < 2 * size
    assert (load_file(tmp_path / "theirs" / averaging.SAFETENSORS)["layers.7.weight"] == expected).all()

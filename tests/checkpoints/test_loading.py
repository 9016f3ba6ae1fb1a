"""`load_model` and the folders it accepts; a real checkpoint is loaded in tests/distributed."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from regdrop_titan.checkpoints import CheckpointError, load_model, resolve_checkpoint, survey
from regdrop_titan.models import build_model

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64, "position": "rope"}


@pytest.fixture
def run(tmp_path):
    """Checkpoints of steps 5 and 10, an unfinished 20 and a foreign folder."""
    import dataclasses

    model = build_model("nape_llama3", "debug", **SMALL, placement="vpad", p=0.5)
    (tmp_path / "config.json").write_text(json.dumps({"model_args": dataclasses.asdict(model.args)}))
    for step in (5, 10):
        with torch.no_grad():
            model.norm.weight.fill_(step)
        dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / f"checkpoint/step-{step}"), no_dist=True)
    (tmp_path / "checkpoint/step-20").mkdir()
    (tmp_path / "checkpoint/step-99.bak").mkdir()
    (tmp_path / "checkpoint/step-99.bak/.metadata").write_text("")
    return tmp_path, model


def test_the_newest_complete_checkpoint(run):
    folder, model = run
    complete, faults = survey(folder / "checkpoint")
    assert complete == [5, 10] and list(faults) == [20] and "has no .metadata" in faults[20]
    for path in (folder, folder / "checkpoint", folder / "checkpoint/step-10"):
        assert resolve_checkpoint(path).name == "step-10"
    loaded = load_model(folder / "checkpoint")
    assert not loaded.training and loaded.args == model.args
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    tokens = torch.arange(12)[None]
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    assert load_model(folder / "checkpoint/step-5").norm.weight.eq(5).all()


def test_unusable_checkpoints_are_named(run, tmp_path):
    folder, _ = run
    with pytest.raises(CheckpointError, match=r"step-20: has no .metadata.*beside it: \[5, 10\]"):
        load_model(folder / "checkpoint/step-20")
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(folder / "checkpoint/step-7")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_model(folder / "checkpoint/step-99.bak")
    next((folder / "checkpoint/step-5").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: missing, .metadata names it"):
        load_model(folder / "checkpoint/step-5")
    (folder / "config.json").write_text(json.dumps({"model_args": {"depth": 3, "dim": 32}}))
    with pytest.raises(CheckpointError, match=r"config.json: unknown model arguments: depth"):
        load_model(folder / "checkpoint/step-10")
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no model_args"):
        load_model(folder / "checkpoint")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(folder / "checkpoint")

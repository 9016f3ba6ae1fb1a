import json

import pytest
import torch

from regdrop_titan.checkpoints import load_model
from regdrop_titan.evaluation.position_loss import PositionLoss, moving_average, plot_position_loss, position_loss
from regdrop_titan.evaluation.subjects import weights_sha256
from regdrop_titan.models import build_model, cache

from ..distributed.harness import run_cases

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}


def test_equals_the_loss_of_each_position_alone():
    """Against one forward a document and position, in float64."""
    model = build_model("nape_llama3", "debug", **SMALL).eval()
    documents = [torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    result = position_loss(model, documents, 24, batch_size=2)
    model = model.double()
    expected = torch.zeros(24, dtype=torch.float64)
    with torch.no_grad():
        for document in documents:
            for i in range(24):
                logits = model(document[None, : i + 1])[0, -1]
                expected[i] -= torch.log_softmax(logits, 0)[document[i + 1]] / 5
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-5)
    assert result.n_documents == 5
    one_by_one = position_loss(model.float(), documents, 24, batch_size=1)
    torch.testing.assert_close(one_by_one.loss, result.loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["nape_llama3", "smollm3", "mamba2"])
def test_pieces_do_not_change_it(family, monkeypatch):
    """Read in pieces of 5 tokens, from unequal documents, with a window: the sum over positions is the total loss
    of one forward; the errors are numpy's."""
    sizes = {"ssm_head_dim": 16, "state_size": 8, "n_layers": 4, "sliding_window": 4}
    model = build_model(family, "debug", **{**SMALL, **sizes}).eval()
    documents = [torch.randint(0, 64, (24 + i,), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    monkeypatch.setattr(cache, "MAX_PIECE", 5)
    read = []
    result = position_loss(model, documents, 23, batch_size=2, progress=read.append, window=4)
    assert read == [10, 10, 10, 10, 6, 10, 10, 10, 10, 6, 5, 5, 5, 5, 3]
    tokens = torch.stack([document[:24] for document in documents])
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="sum")
    assert result.loss.sum() * 5 == pytest.approx(total.item(), abs=1e-4)
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2).double(), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(result.error, each.std(0) / 5**0.5, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.average[10], each[:, 7:11].mean(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.average_error[10], each[:, 7:11].mean(1).std() / 5**0.5, rtol=1e-4, atol=1e-5)


def test_moving_average():
    assert moving_average(torch.arange(6, dtype=torch.float64), 3).tolist() == [0, 0.5, 1, 2, 3, 4]
    assert moving_average(torch.arange(6, dtype=torch.float64), 100)[-1] == 2.5


@pytest.mark.parametrize(
    ("documents", "message"), [([], "no document"), ([torch.zeros(4, dtype=torch.long)], "4 tokens")]
)
def test_too_few_tokens(documents, message):
    with pytest.raises(ValueError, match=message):
        position_loss(build_model("nape_llama3", "debug", **SMALL).eval(), documents, 8)


def test_plot(tmp_path):
    loss, error = torch.linspace(5, 3, 64, dtype=torch.float64), torch.full((64,), 0.1, dtype=torch.float64)
    one = PositionLoss(loss, error * torch.nan, loss, error * torch.nan, 8, 1)
    two = PositionLoss(loss - 1, error, loss - 1, error, 8, 2)
    plot_position_loss({"a": one, "b": two}, {"a": 16, "b": 4}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(tmp_path, packed, script, capsys):
    """A run at context 8, evaluated at 8 times that on documents of 100 tokens; wrong arguments end with status 2."""
    run_cases(1, tmp_path, packed, {"run": {"args": ["--training.seq_len", "8", "--checkpoint.enable"]}})
    checkpoint = str(tmp_path / "run/checkpoint")
    data = ["--data", str(packed / "train")]
    assert script("evaluate", "position-loss", "--checkpoint", checkpoint, *data, "--documents", "10") == 0
    result = json.loads((tmp_path / "run/evaluation/position_loss.json").read_text())
    assert len(result["loss"]) == 64 and result["documents"] == 10 and result["train_context"] == 8
    assert list(result["loss_at"]) == ["1x", "2x", "4x", "8x"]
    assert result["loss_at"]["1x"] == pytest.approx(sum(result["loss"][:8]) / 8)
    assert result["average"][40] == pytest.approx(sum(result["loss"][33:41]) / 8)
    assert result["weights_sha256"] == weights_sha256(load_model(checkpoint)) and result["settings"]["length"] == 64
    assert result["run"]["training"]["seq_len"] == 8 and result["versions"]["torch"] == torch.__version__
    assert (tmp_path / "run/evaluation/position_loss.png").exists()
    # two models in one plot, a folder for each, and an earlier result beside them
    several = [
        "--checkpoint",
        checkpoint,
        checkpoint,
        "--labels",
        "a",
        "b",
        *data,
        "--length",
        "20",
        "--documents",
        "2",
    ]
    earlier = ["--compare", str(tmp_path / "run/evaluation/position_loss.json"), "--output", str(tmp_path / "out")]
    assert script("evaluate", "position-loss", *several, *earlier) == 0
    results = [json.loads((tmp_path / f"out/{label}/position_loss.json").read_text()) for label in "ab"]
    assert results[0]["loss"] == results[1]["loss"] and len(results[0]["loss"]) == 20 and results[1]["label"] == "b"
    assert (tmp_path / "out/position_loss.png").exists()
    for args, message in [
        (["--checkpoint", str(tmp_path / "none"), *data], "no such folder"),
        (["--checkpoint", checkpoint, "--data", str(tmp_path)], "not a packed set"),
        (["--checkpoint", checkpoint, *data, "--multiple", "64"], "no document has the 513 tokens"),
        (["--checkpoint", checkpoint, *data, "--documents", "0"], "--documents 0: must be at least 1"),
        (["--checkpoint", checkpoint, *data, "--length", "-3"], "--length -3: must be at least 1"),
        (["--checkpoint", checkpoint, *data, "--labels", "a", "b"], "--labels: 2 for 1 models"),
        (["--checkpoint", checkpoint, *data, "--compare", str(tmp_path / "no.json")], "no.json: No such file"),
        (["--checkpoint", checkpoint, *data, "--compare", str(tmp_path / "run/config.json")], "holds no result of"),
    ]:
        capsys.readouterr()
        assert script("evaluate", "position-loss", *args) == 2
        assert message in capsys.readouterr().err

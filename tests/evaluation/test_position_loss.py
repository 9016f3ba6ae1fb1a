import json

import pytest
import torch

from regdrop_titan.evaluation.position_loss import PositionLoss, plot_position_loss, position_loss
from regdrop_titan.models import build_model

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


def test_moving_average():
    result = PositionLoss(torch.arange(6, dtype=torch.float64), 1)
    assert result.moving_average(3).tolist() == [0, 0.5, 1, 2, 3, 4]
    assert result.moving_average(100)[-1] == 2.5


@pytest.mark.parametrize(
    ("documents", "message"), [([], "no document"), ([torch.zeros(4, dtype=torch.long)], "4 tokens")]
)
def test_too_few_tokens(documents, message):
    with pytest.raises(ValueError, match=message):
        position_loss(build_model("nape_llama3", "debug", **SMALL).eval(), documents, 8)


def test_plot(tmp_path):
    results = {"a": PositionLoss(torch.linspace(5, 3, 64), 2), "b": PositionLoss(torch.linspace(5, 2, 64), 2)}
    plot_position_loss(results, 16, 8, tmp_path / "plot.png")
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
    assert (tmp_path / "run/evaluation/position_loss.png").exists()
    for args, message in [
        (["--checkpoint", str(tmp_path / "none"), *data], "no such folder"),
        (["--checkpoint", checkpoint, "--data", str(tmp_path)], "not a packed set"),
        (["--checkpoint", checkpoint, *data, "--multiple", "64"], "no document has the 513 tokens"),
        (["--checkpoint", checkpoint, *data, "--documents", "0"], "--documents 0: must be at least 1"),
    ]:
        capsys.readouterr()
        assert script("evaluate", "position-loss", *args) == 2
        assert message in capsys.readouterr().err

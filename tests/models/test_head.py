"""The loss in pieces against that of whole logits. Every parallel layout: tests/distributed/test_loss_runs.py."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss

from regdrop_titan.models import build_model

B, S, V = 3, 17, 96
SIZES = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": V}
MODELS = {
    "untied": ("nape_llama3", {}),
    "tied": ("nape_llama3", {"tied_embeddings": True}),
    # without biases: the gradient of the keys' is zero but for rounding
    "width_multiplier": ("celerity", {"parametrization": "mup", "base_dim": 8, "bias": False}),
}


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, V, (B, S), generator=generator) for _ in range(2))
    labels[0, 3:9] = labels[2, 12:] = IGNORE_INDEX
    return tokens, labels


def both(model: torch.nn.Module, pieces: int) -> list[list[torch.Tensor]]:
    """Loss and gradients, whole and in pieces."""
    tokens, labels = batch()
    parameters = list(model.parameters())
    logits = model(tokens)
    # TorchTitan's computes in fp32 whatever it is given
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(wide, labels.flatten(), reduction="sum")
    losses = [loss, model(tokens, labels=labels, loss_pieces=pieces)]
    # over a denominator, as the trainer divides it
    return [[loss, *torch.autograd.grad(loss / 40, parameters)] for loss in losses]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pieces", [2, 5, 51])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_loss_and_gradients_equal_those_of_whole_logits(name, pieces, dtype, tolerance):
    family, sizes = MODELS[name]
    model = build_model(family, "debug", **SIZES, **sizes).to(dtype)
    with torch.no_grad():
        model.output.weight *= 10  # no label has much the same probability as another
    expected, got = both(model, pieces)
    assert got[0].ndim == 0 and got[0].dtype == dtype
    for a, b in zip(expected, got, strict=True):
        assert (a - b).abs().max() <= tolerance * a.abs().max()


def test_under_autocast_it_rounds_as_whole_logits_do():
    model = build_model("nape_llama3", "debug", **SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = both(model, 4)
    assert got[0].dtype == torch.float32
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).norm() <= 0.01 * a.norm()


def test_no_more_than_a_piece_of_the_logits_is_made():
    class Rows(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (V,) and out.shape[0] != SIZES["dim"]:
                self.most = max(self.most, out.numel() // V)
            return out

    model = build_model("nape_llama3", "debug", **SIZES)
    tokens, labels = batch()
    with Rows() as rows:
        model(tokens, labels=labels, loss_pieces=10).backward()
    assert rows.most == 6  # 51 tokens: 8 pieces of 6 and one of 3
    with Rows() as rows:
        cross_entropy_loss(model(tokens), labels).backward()
    assert rows.most == B * S


def test_without_gradients_it_is_the_loss_alone():
    model = build_model("nape_llama3", "debug", **SIZES)
    tokens, labels = batch()
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens, labels=labels, loss_pieces=4), cross_entropy_loss(model(tokens), labels)
        )
    model.output.weight.requires_grad_(False)
    model(tokens, labels=labels, loss_pieces=4).backward()
    assert model.output.weight.grad is None and model.norm.weight.grad is not None

"""The loss that makes gradients the same however a batch is cut; the trainer itself runs in tests/distributed."""

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss

from regdrop_titan.models import build_model
from regdrop_titan.seeds import derive_seed
from regdrop_titan.trainer import TokenLoss

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [1, 3]])
def test_accumulation_weighs_tokens_not_micro_batches(sizes):
    """Micro-batches with unequal numbers of labels add up to the whole batch's gradient, in fp64 (report L2)."""
    model = build_model("nape_llama3", "debug", **SMALL).double()
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 64, (4, 16), generator=generator) for _ in range(2))
    for row, valid in enumerate((16, 1, 7, 3)):
        labels[row, valid:] = IGNORE_INDEX
    parameters = list(model.parameters())
    mean = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    expected = torch.autograd.grad(mean, parameters)
    loss = TokenLoss(lambda logits, labels: cross_entropy_loss(logits.double(), labels))
    total = [torch.zeros_like(p) for p in parameters]
    for logits_rows, label_rows in zip(tokens.split(sizes), labels.split(sizes), strict=True):
        loss.denominator = 16 + 1 + 7 + 3
        for accumulated, grad in zip(
            total, torch.autograd.grad(loss(model(logits_rows), label_rows), parameters), strict=True
        ):
            accumulated += grad
    for a, b in zip(total, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)  # TorchTitan's loss itself is fp32


def test_without_a_denominator_the_loss_is_the_sum():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    assert TokenLoss(cross_entropy_loss)(logits, labels) == cross_entropy_loss(logits, labels)


def test_seeds_are_functions_of_their_fields():
    """Near fields share nothing: the low 32 bits, all that torch's CPU generator reads, do not collide."""
    seeds = {derive_seed("dropout", 42, step, micro, rank) & 0xFFFFFFFF
             for step in range(40) for micro in range(5) for rank in range(10)}  # fmt: skip
    assert len(seeds) == 2000
    assert derive_seed("a", 1) == derive_seed("a", 1) != derive_seed("a", 2)
    assert derive_seed("a", 1) != derive_seed("a", "1")

"""Initial weights: TorchTitan's Llama-3 distributions, and functions of seed and name alone."""

import pytest
import torch

from regdrop_titan.models import Decoder, build_model, flavor_args

SIZES = {"dim": 128, "n_layers": 3, "vocab_size": 2000}


def test_a_seed_gives_the_same_weights_however_the_model_is_built():
    whole = build_model("nape_llama3", "debug", **SIZES)
    with torch.device("meta"):
        meta = Decoder(flavor_args("nape_llama3", "debug", **SIZES))
    meta.to_empty(device="cpu")
    torch.manual_seed(5)  # of no consequence
    meta.init_weights()
    deeper = build_model("nape_llama3", "debug", **{**SIZES, "n_layers": 4})
    for name, value in whole.state_dict().items():
        assert torch.equal(value, meta.state_dict()[name]), name
        assert torch.equal(value, deeper.state_dict()[name]), name


def test_seeds_and_names_give_different_weights():
    a = build_model("nape_llama3", "debug", **SIZES).state_dict()
    b = build_model("nape_llama3", "debug", **SIZES, seed=43).state_dict()
    wq = "layers.{}.attention.inner.wq.weight"
    assert not torch.equal(a[wq.format(0)], b[wq.format(0)])
    assert not torch.equal(a[wq.format(0)], a[wq.format(1)])


def test_distributions_are_those_of_torchtitan_llama3():
    """Standard deviations against TorchTitan's own model of the same size, within 4 standard errors of each."""
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    titan = Transformer(TransformerModelArgs(dim=128, n_layers=3, n_heads=4, vocab_size=2000, multiple_of=64))
    with torch.no_grad():
        titan.init_weights()
    ffn_dim = titan.layers["0"].feed_forward.w1.out_features
    ours = build_model("nape_llama3", "debug", **SIZES, ffn_dim=ffn_dim).state_dict()
    rename = {".attention.": ".attention.inner.", ".feed_forward.": ".feed_forward.inner.",
              ".attention_norm.": ".attention.norm.", ".ffn_norm.": ".feed_forward.norm."}  # fmt: skip
    for name, value in titan.named_parameters():
        for old, new in rename.items():
            if old in name:
                name = name.replace(old, new)
                break
        mine = ours[name]
        assert mine.shape == value.shape
        if "norm" in name:
            assert torch.equal(mine, value)
            continue
        error = value.std() * (2 / value.numel()) ** 0.5
        assert abs(mine.std() - value.std()) < 4 * error, name
        assert abs(mine.mean()) < 4 * value.std() / value.numel() ** 0.5, name
        assert mine.abs().max() == pytest.approx(value.abs().max().item(), rel=0.35)


def test_a_tied_head_is_one_parameter():
    model = build_model("nape_llama3", "debug", **SIZES, tied_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.output.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)

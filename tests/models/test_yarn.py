"""YaRN, against transformers' frequencies and whole models, and against its formula."""

import dataclasses
import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from regdrop_titan.checkpoints.huggingface import export_huggingface, load_huggingface, read_args, read_context
from regdrop_titan.models.positions import Yarn, rotary_frequencies, rotary_table

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96,
         "num_hidden_layers": 4, "vocab_size": 97, "eos_token_id": 1, "pad_token_id": None}  # fmt: skip


def rotation(factor: float, original: int, theta: float = 1000.0) -> dict:
    return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original"),
    [(128, 50_000.0, 4.0, 4096), (64, 500_000.0, 2.5, 8192), (32, 1000.0, 8.0, 64), (16, 10_000.0, 16.0, 7)],
)
def test_frequencies_are_those_of_transformers(head_dim, theta, factor, original):
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=int(factor * original),
        rope_parameters=rotation(factor, original, theta),
    )  # fmt: skip
    theirs, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    yarn = Yarn(factor, original)
    torch.testing.assert_close(rotary_frequencies(head_dim, theta, yarn, CPU).float(), theirs, rtol=2e-6, atol=0)
    assert yarn.temperature == pytest.approx(temperature)


def test_formula():
    """A pair that turns 32 times over the original context or more is left alone, one that turns once or less is
    interpolated; cos and sin are 1 + ln(s)/10 long; a factor of 1 changes nothing."""
    head_dim, theta, yarn = 64, 10_000.0, Yarn(4.0, 2048)
    plain, scaled = (rotary_frequencies(head_dim, theta, y, CPU) for y in (None, yarn))
    turns = plain * yarn.original_context / (2 * math.pi)
    fast, slow = turns >= 32 * theta ** (2 / head_dim), turns <= 1 / theta ** (2 / head_dim)  # a channel's rounding
    assert fast.sum() >= 5 and slow.sum() >= 5
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 4, rtol=1e-12, atol=0)
    between = (scaled / plain)[~fast & ~slow]
    assert (between.diff() <= 0).all() and between.unique().numel() > 5
    cos, sin = rotary_table(50, head_dim, theta, CPU, yarn)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, (1 + math.log(4) / 10) ** 2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(rotary_table(50, 64, 1e4, CPU, Yarn(1.0, 64)), rotary_table(50, 64, 1e4, CPU), strict=True)
    )


@pytest.mark.parametrize("name", ["Llama", "SmolLM3"])
@torch.no_grad()
def test_a_model_with_yarn_comes_in_and_goes_out(tmp_path, name):
    """Their logits over 8 times the original context are ours, and those of our export, which is read back as it was.
    SmolLM3's layers without RoPE stay unscaled; a model without YaRN is another one."""
    of_class = {"use_sliding_window": False, "no_rope_layers": [1, 0, 1, 0]} if name == "SmolLM3" else {}
    config = getattr(transformers, f"{name}Config")(
        **SIZES, **of_class, max_position_embeddings=128, rope_parameters=rotation(8.0, 16)
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    args, _ = read_args(tmp_path / "theirs")
    assert args.yarn == Yarn(8.0, 16) and read_context(tmp_path / "theirs", args) == 16
    tokens = torch.randint(0, 97, (2, 128), generator=torch.Generator().manual_seed(0))
    wanted = theirs(tokens).logits
    ours = load_huggingface(tmp_path / "theirs")
    torch.testing.assert_close(ours(tokens), wanted, rtol=1e-5, atol=1e-5)
    export_huggingface(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(again) is type(theirs) and again.config.max_position_embeddings == 128
    torch.testing.assert_close(again(tokens).logits, wanted, rtol=1e-5, atol=1e-5)
    assert read_args(tmp_path / "ours")[0] == ours.args
    plain = dataclasses.replace(args, rope_scaling="none", rope_factor=1.0, rope_original_context=0)
    assert (load_huggingface(tmp_path / "theirs", plain)(tokens) - wanted).abs().max() > 0.01

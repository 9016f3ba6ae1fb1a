"""Exports with a modelling file of their own, through transformers' `AutoModelForCausalLM` (report C7)."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from regdrop_titan.checkpoints import CheckpointError, load_model
from regdrop_titan.checkpoints.huggingface import check_export, export_huggingface, import_huggingface
from regdrop_titan.models import build_model

SIZES = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 97}
COMPLETEP = {"parametrization": "completep", "base_dim": 16, "base_layers": 2}
MODELS = {
    "nape": ("nape_llama3", {}),
    "nape_exp2_sx": ("nape_llama3", {"slopes": "exp2", "scaling": "adaptive", "tied_embeddings": True}),
    "celerity_completep": ("celerity", {**COMPLETEP, "n_kv_heads": 4, "eval_scale": [1.0, 0.9, 0.7, 0.8]}),
    "rope_window_nope_sx": (
        "smollm3",
        {"layers": "attention,nope", "sliding_window": 5, "scaling": "adaptive", "scaling_init": "identity",
         "eval_scale": [1.0, 0.9, 0.7, 0.8], "scale_placement": "block"},
    ),
    "rope_yarn_ssmax": (
        "nape_llama3",
        {"position": "rope", "rope_theta": 100.0, "rope_scaling": "yarn", "rope_factor": 4.0,
         "rope_original_context": 7, "scaling": "ssmax"},
    ),
    "alibi_ssmax": ("nape_llama3", {"position": "alibi", "sliding_window": 6, "scaling": "ssmax"}),
}  # fmt: skip


def make(name):
    """One of MODELS, its weights so large that every part shows in the logits."""
    family, options = MODELS[name]
    model = build_model(family, "debug", **(SIZES | options)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        else:
            torch.nn.init.normal_(parameter, std=0.15, generator=generator)
    return model


@pytest.fixture(scope="module")
def load():
    import transformers

    def load(folder, attention="sdpa"):
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=True, attn_implementation=attention,
            output_loading_info=True,
        )  # fmt: skip
        assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert type(model).__name__ == "RegDropForCausalLM" and model.config._attn_implementation == attention
        return model.eval()

    return load


@pytest.fixture(scope="module", params=MODELS)
def exported(request, tmp_path_factory):
    """A model and its export."""
    model = make(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    export_huggingface(model, folder, shard_size=20_000)
    return model, folder


def tokens_of(rows, length, seed=0):
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def cache_of(output):
    return output["cache" if "cache" in output else "past_key_values"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_logits(load, exported, attention):
    """Of prompts, and of one token at a time or several after a cache: ours. With padding too."""
    model, folder = exported
    theirs = load(folder, attention)
    tokens = tokens_of(2, 24)
    ours = model(tokens)
    close(theirs(tokens).logits, ours)
    close(theirs(tokens, logits_to_keep=3).logits, ours[:, -3:])
    output = theirs(tokens[:, :10], use_cache=True)
    close(output.logits, ours[:, :10])
    for start, end in [(10, 11), (11, 12), (12, 20), *((i, i + 1) for i in range(20, 24))]:
        output = theirs(tokens[:, start:end], past_key_values=cache_of(output))
        close(output.logits, ours[:, start:end])
    # positions count from the first real token: what stands before it changes nothing
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, :7] = 0
    logits = theirs(tokens, attention_mask=mask).logits
    close(logits[0], ours[0])
    close(logits[1, 7:], model(tokens[1:, 7:])[0])
    assert logits.isfinite().all()
    output = theirs(tokens[:, :12], attention_mask=mask[:, :12], use_cache=True)
    close(theirs(tokens[:, 12:], attention_mask=mask, past_key_values=cache_of(output)).logits[1], logits[1, 12:])


@torch.no_grad()
def test_long_prompts_are_attended_to_in_blocks(load, tmp_path, monkeypatch):
    """Of one query each, and of several, after a cache and with padding too: the bias is never larger than allowed."""
    model = make("alibi_ssmax")  # with a window, and keys of several heads
    export_huggingface(model, tmp_path / "hf")
    theirs = load(tmp_path / "hf")
    module = sys.modules[type(theirs).__module__]
    sizes, whole = [], module.attention_bias
    monkeypatch.setattr(module, "attention_bias", lambda *args: sizes.append((b := whole(*args)).numel()) or b)
    tokens = tokens_of(2, 24)
    ours = model(tokens)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, :7] = 0
    for numbers, blocks in ((1, 24), (1500, 4), (4608, 1)):  # 192 numbers a query
        monkeypatch.setattr(module, "BIAS_NUMBERS", numbers)
        sizes.clear()
        close(theirs(tokens).logits, ours)
        assert len(sizes) == (4 * blocks if blocks > 1 else 1) and max(sizes) <= max(numbers, 192)
        output = theirs(tokens[:, :11], use_cache=True)
        close(theirs(tokens[:, 11:], past_key_values=cache_of(output)).logits, ours[:, 11:])
        close(theirs(tokens, attention_mask=mask).logits[1, 7:], model(tokens[1:, 7:])[0])


@torch.no_grad()
def test_generate(load, exported):
    """Greedy generation is the argmax of our own full forwards, in a left-padded batch too; sampling runs."""
    model, folder = exported
    theirs = load(folder)
    theirs.generation_config.eos_token_id = None
    prompts = [tokens_of(1, 9, seed=2), tokens_of(1, 5, seed=3)]
    wanted = []
    for prompt in prompts:
        tokens = prompt
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        wanted.append(tokens[0, prompt.shape[1] :])
    batch, mask = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        batch[row, -prompt.shape[1] :], mask[row, -prompt.shape[1] :] = prompt[0], 1
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(theirs.generate(prompts[1], **options)[0, 5:], wanted[1])
    both = theirs.generate(batch, attention_mask=mask, **options)
    assert torch.equal(both[:, 9:], torch.stack(wanted))
    assert torch.equal(theirs.generate(batch, attention_mask=mask, use_cache=False, **options), both)
    assert theirs.generate(prompts[0], max_new_tokens=4, do_sample=True, num_return_sequences=3).shape == (3, 13)


@torch.no_grad()
@pytest.mark.parametrize("name", ["nape", "celerity_completep", "llama", "smollm3"])
def test_assistant_early_exit(name, tmp_path):
    """transformers' own self-speculation: the draft is the first layers, and the text is the same."""
    import transformers

    if name in ("llama", "smollm3"):
        options = {"position": "rope"} if name == "llama" else {}
        family = "nape_llama3" if name == "llama" else "smollm3"
        model = build_model(family, "debug", **(SIZES | options)).eval()
    else:
        model = make(name)
    export_huggingface(model, tmp_path / "hf", exit_layers=[3, 1])
    assert json.loads((tmp_path / "hf/config.json").read_text())["exit_layers"] == [1, 3]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, trust_remote_code=True
    ).eval()
    assert theirs.config.exit_layers == [1, 3]
    tokens = torch.randint(1, 97, (1, 9), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = theirs.generate(tokens, **options)
    first = theirs.model(tokens).last_hidden_state
    theirs.config.num_hidden_layers = 3
    torch.testing.assert_close(theirs.lm_head(theirs.model(tokens).last_hidden_state) / divisor(theirs),
                               model(tokens, layers=range(3)), rtol=1e-5, atol=1e-5)  # fmt: skip
    theirs.config.num_hidden_layers = 4
    assert torch.equal(theirs.model(tokens).last_hidden_state, first)
    for exit_layer in theirs.config.exit_layers:
        assert torch.equal(theirs.generate(tokens, assistant_early_exit=exit_layer, **options), plain)


def test_exit_layers_of_the_script(script, tmp_path, capsys):
    """All depths of a run with layer dropout, those that are named, or none; depths that there are not are refused."""
    export_huggingface(make("nape"), tmp_path / "hf")
    import_huggingface(tmp_path / "hf", tmp_path / "run")
    mamba = build_model("mamba2", "debug", dim=32, n_layers=2, vocab_size=64, ssm_head_dim=16, state_size=8)
    export_huggingface(mamba, tmp_path / "mamba_hf")
    import_huggingface(tmp_path / "mamba_hf", tmp_path / "mamba")

    def export(run, name, *options):
        return script("export_hf", "--checkpoint", str(tmp_path / run), "--output", str(tmp_path / name), *options)

    def exits(name):
        return json.loads((tmp_path / name / "config.json").read_text()).get("exit_layers")

    assert export("run", "dense") == 0 and exits("dense") is None
    for run in ("run", "mamba"):
        config = json.loads((tmp_path / run / "config.json").read_text()) | {"layer_dropout": {"p_max": 0.4}}
        (tmp_path / run / "config.json").write_text(json.dumps(config))
    assert export("run", "dropped") == 0 and exits("dropped") == [1, 2, 3]
    assert export("run", "named", "--exit-layers", "2") == 0 and exits("named") == [2]
    assert export("mamba", "mamba_out") == 0 and exits("mamba_out") is None
    assert export("run", "wrong", "--exit-layers", "0", "2", "4") == 2
    assert "exit layers 0 4: must be in 1 ... 3" in capsys.readouterr().err
    assert export("mamba", "wrong", "--exit-layers", "1") == 2
    assert "Mamba2ForCausalLM always runs all of its layers" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def divisor(theirs):
    return getattr(theirs.config, "logits_divisor", 1.0)


def test_import_is_the_model(exported, tmp_path):
    model, folder = exported
    args = import_huggingface(folder, tmp_path / "back")
    assert args == model.args
    a, b = load_model(tmp_path / "back/checkpoint").state_dict(), model.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_as_models_of_transformers_are_used(load, tmp_path):
    """Loss and gradients, hidden states, bf16, and a folder that transformers wrote itself, code and all."""
    model = make("celerity_completep")
    export_huggingface(model, tmp_path / "hf", torch.bfloat16)
    theirs = load(tmp_path / "hf")
    tokens = tokens_of(2, 12)
    output = theirs(tokens, labels=tokens, output_hidden_states=True)
    wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, wanted)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())
    assert len(output.hidden_states) == 5
    close(theirs.lm_head(output.hidden_states[-1] / 2.0), output.logits)  # m_d
    assert theirs.to(torch.bfloat16)(tokens).logits.dtype == torch.bfloat16
    with pytest.raises(
        ValueError, match=r"attention_mask must be .batch, 12.: 0 tokens of the cache and 12 new ones, got"
    ):
        theirs(tokens, attention_mask=torch.ones(2, 1, 12, 12))
    with pytest.raises(ValueError, match="static caches are not supported"):
        theirs.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="flex"):
        load(tmp_path / "hf", "flex_attention")
    theirs.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "theirs/modeling_regdrop.py").exists()
    assert import_huggingface(tmp_path / "theirs", tmp_path / "back") == model.args
    assert check_export(model, tmp_path / "theirs", torch.bfloat16) < 1e-5


def test_without_our_package(tmp_path):
    """In a process that has no package of ours."""
    model, folder = make("nape"), tmp_path / "hf"
    export_huggingface(model, folder)
    code = """
import sys, torch
sys.modules["regdrop_titan"] = None  # an import of it fails, wherever it is installed
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, trust_remote_code=True)
assert not [name for name in sys.modules if name.startswith(("regdrop_titan.", "torchtitan"))]
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, eos_token_id=96)[0].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(folder)], cwd=tmp_path, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for _ in range(5):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    assert json.loads(done.stdout.splitlines()[-1]) == tokens[0].tolist()


def test_what_is_refused(tmp_path):
    export_huggingface(make("nape"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())

    def refused(message, **changes):
        (tmp_path / "hf/config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            import_huggingface(tmp_path / "hf", tmp_path / "run")

    refused("config.json: slopes, logits_divisor: not as its `regdrop_arguments`", slopes=[1.0] * 4, logits_divisor=2.0)
    refused("has no `regdrop_arguments`", regdrop_arguments=None)
    refused(
        r"regdrop_arguments: unknown model arguments: depth",
        regdrop_arguments=config["regdrop_arguments"] | {"depth": 3},
    )
    refused("must divide n_heads = 4", regdrop_arguments=config["regdrop_arguments"] | {"n_kv_heads": 3})
    assert not (tmp_path / "run").exists()


def test_check(script, tmp_path, monkeypatch, capsys):
    """Of the script: status 0, 1 where the folder is another model, which stays, and 2 without transformers."""
    model = make("nape")
    export_huggingface(model, tmp_path / "hf")
    import_huggingface(tmp_path / "hf", tmp_path / "run")

    def export(name):
        return script("export_hf", "--checkpoint", str(tmp_path / "run/checkpoint"), "--output",
                      str(tmp_path / name), "--check")  # fmt: skip

    assert export("right") == 0  # in bf16
    assert "checked with transformers: largest difference of logits" in capsys.readouterr().out

    def wrong_weights(weights, file, **options):
        weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
        save_file(weights, file, **options)

    monkeypatch.setattr("regdrop_titan.checkpoints.huggingface.save_file", wrong_weights)
    assert export("wrong") == 1
    assert "not the model: largest difference of logits 0." in capsys.readouterr().err
    assert load_file(tmp_path / "wrong/model.safetensors")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    assert export("without") == 2
    assert "error: --check needs transformers, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "without").exists()

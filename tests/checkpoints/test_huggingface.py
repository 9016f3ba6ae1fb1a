"""Mamba2 weights in and out, against transformers' own model on small random weights (report C7)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from regdrop_titan.checkpoints import CheckpointError, load_model
from regdrop_titan.checkpoints.huggingface import export_huggingface, import_huggingface
from regdrop_titan.models import build_model

from ..distributed.harness import run_cases
from .test_safety import Evil

SIZES = {"dim": 64, "n_layers": 2, "vocab_size": 97, "ssm_head_dim": 16, "state_size": 8, "chunk_size": 32}


@pytest.fixture(scope="module")
def transformers():
    import transformers

    transformers.logging.set_verbosity_error()  # it tells that its kernels are not installed
    return transformers


def logits_of(transformers, folder, tokens):
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Mamba2ForCausalLM"
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("options", [{}, {"tied_embeddings": False}, {"n_groups": 2, "conv_width": 3, "expand": 3}])
def test_there_and_back(transformers, tmp_path, options):
    """Their logits of our export are ours in fp32, and an import of it is the model, bit for bit."""
    model = build_model("mamba2", "debug", **SIZES, **options).eval()
    for name, parameter in model.named_parameters():  # so that no two parts can be mistaken for each other
        if parameter.dim() == 1 and "ssm" not in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    tokens = torch.randint(0, 97, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
    export_huggingface(model, tmp_path / "hf")
    torch.testing.assert_close(logits_of(transformers, tmp_path / "hf", tokens), ours, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["n_groups"] == model.args.n_groups and config["tie_word_embeddings"] == model.args.tied_embeddings
    assert ("lm_head.weight" in load_file(tmp_path / "hf/model.safetensors")) != model.args.tied_embeddings
    import_huggingface(tmp_path / "hf", tmp_path / "back")
    again = load_model(tmp_path / "back/checkpoint")
    a, b = again.state_dict(), model.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_their_model_comes_in(transformers, tmp_path):
    """A folder that transformers wrote, in shards."""
    config = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=3, vocab_size=97, head_dim=16, num_heads=8, state_size=8, n_groups=1,
        tie_word_embeddings=True, chunk_size=32, layer_norm_epsilon=1e-5, time_step_limit=(0.0, float("inf")),
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Mamba2ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    import_huggingface(tmp_path / "hf", tmp_path / "run")
    tokens = torch.randint(0, 97, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "run")(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def original(tmp_path):
    """The state-spaces format of a random model: `pytorch_model.bin`, `backbone.embedding`, the head written out."""
    model = build_model("mamba2", "debug", **(SIZES | {"vocab_size": 112}))
    export_huggingface(model, tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    folder = tmp_path / "original"
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model.bin")
    config = {
        "d_model": 64, "n_layer": 2, "vocab_size": 97, "pad_vocab_size_multiple": 16, "tie_embeddings": True,
        "rms_norm": True, "residual_in_fp32": True, "d_intermediate": 0, "attn_layer_idx": [],
        "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 8},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder, weights, config, model


def test_the_original_format(original, tmp_path):
    folder, *_, model = original
    import_huggingface(folder, tmp_path / "run")
    again = load_model(tmp_path / "run/checkpoint/step-0")
    assert again.args.vocab_size == 112 and again.args.chunk_size == 256
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_what_does_not_fit_is_named(original, tmp_path):
    folder, weights, config, _ = original

    def refused(message, **changes):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            import_huggingface(folder, tmp_path / "run")

    refused(r"backbone.layers.2.norm.weight: missing", n_layer=3)
    refused(r"backbone.layers.1.mixer.A_log: unexpected", n_layer=1)
    refused(r"backbone.embeddings.weight: is \(112, 64\), the configuration says \(200, 64\)", vocab_size=200,
            pad_vocab_size_multiple=1)  # fmt: skip
    refused(r"d_inner = 2 x 65 = 130 must be a multiple of ssm_head_dim = 16", d_model=65)
    refused(r"not supported: ssm_cfg.layer", ssm_cfg={})
    refused(r"not supported: attn_layer_idx", attn_layer_idx=[1])
    torch.save(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, folder / "pytorch_model.bin")
    refused("the configuration ties head and embedding, the weights differ")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="model_type 'llama', expected mamba2"):
        import_huggingface(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tampered_file_runs_no_code(original, tmp_path):
    folder, weights, *_ = original
    torch.save(weights | {"x": Evil(tmp_path / "sign")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: holds more than tensors, it may be tampered with"):
        import_huggingface(folder, tmp_path / "run")
    assert not (tmp_path / "sign").exists()
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        import_huggingface(folder, tmp_path / "run")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"model.safetensors: unreadable"):
        import_huggingface(folder, tmp_path / "run")


def test_hybrids_are_not_exported(tmp_path):
    model = build_model("mamba2", "debug", **SIZES, layers="mamba,attention", n_heads=2, n_kv_heads=2)
    with pytest.raises(CheckpointError, match="only stacks of Mamba2 layers can be exported, this one is 'mamba,att"):
        export_huggingface(model, tmp_path / "hf")


def test_what_the_format_has_no_place_for(tmp_path):
    model = build_model("mamba2", "debug", **SIZES, parametrization="mup", base_dim=SIZES["dim"] // 2)
    with pytest.raises(CheckpointError, match="no place for the multipliers of mup: m_d = 2, m_L = 1"):
        export_huggingface(model, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="no place for norm = 'layernorm'"):
        export_huggingface(build_model("mamba2", "debug", **SIZES, norm="layernorm"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_scripts_and_continual_pretraining(tmp_path, packed, script, capsys):
    """Export of a run, import of that, and a run that starts from it: the first loss is that of the weights."""
    mamba = ["--model.name", "mamba2", "--architecture.ssm_head_dim", "16", "--architecture.state_size", "16"]
    save = [*mamba, "--checkpoint.enable", "--checkpoint.interval", "10"]
    initial = ["--checkpoint.initial_load_path", str(tmp_path / "imported/checkpoint/step-0")]
    run_cases(1, tmp_path, packed, {"run": {"args": save}})
    assert script("export_hf", "--checkpoint", str(tmp_path / "run/checkpoint"), "--output", str(tmp_path / "hf"),
                  "--dtype", "float32") == 0  # fmt: skip
    assert script("import_hf", "--input", str(tmp_path / "hf"), "--output", str(tmp_path / "imported")) == 0
    assert "imported/checkpoint/step-0" in capsys.readouterr().out
    assert script("import_hf", "--input", str(tmp_path / "nowhere"), "--output", str(tmp_path / "x")) == 2
    assert "nowhere: has no config.json" in capsys.readouterr().err
    assert script("export_hf", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "hf")) == 2
    assert "hf: is not empty" in capsys.readouterr().err
    case = {"args": [*mamba, "--training.steps", "1", "--optimizer.lr", "1e-12", "--checkpoint.enable", *initial]}
    run_cases(1, tmp_path, packed, {"continued": case})
    a, b = (load_model(tmp_path / name / "checkpoint") for name in ("imported", "continued"))
    assert all(torch.allclose(x, y, atol=1e-9) for x, y in zip(a.parameters(), b.parameters(), strict=True))

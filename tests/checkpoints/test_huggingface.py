"""Weights in and out, against transformers' own models on small random weights (report C7)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from regdrop_titan.checkpoints import CheckpointError, load_model
from regdrop_titan.checkpoints.huggingface import check_readable_in_parts, export_huggingface, import_huggingface
from regdrop_titan.config import ConfigError, load_config
from regdrop_titan.models import build_model

from ..distributed.harness import DDP, TP, run_cases
from .test_safety import Evil

SIZES = {"dim": 64, "n_layers": 2, "vocab_size": 97, "ssm_head_dim": 16, "state_size": 8, "chunk_size": 32}


@pytest.fixture(scope="module")
def transformers():
    import transformers

    transformers.logging.set_verbosity_error()  # it tells that its kernels are not installed
    return transformers


def logits_of(transformers, folder, tokens, architecture="Mamba2ForCausalLM"):
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == architecture
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


ATTENTION = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 97}


@pytest.mark.parametrize(
    ("family", "options", "architecture"),
    [
        ("smollm3", {}, "SmolLM3ForCausalLM"),
        ("smollm3", {"sliding_window": 7, "layers": "nope,attention", "rope_theta": 5e5}, "SmolLM3ForCausalLM"),
        ("nape_llama3", {"position": "rope"}, "LlamaForCausalLM"),
        ("nape_llama3", {"position": "rope", "tied_embeddings": True, "bias": True}, "LlamaForCausalLM"),
    ],
)
def test_attention_models_there_and_back(transformers, tmp_path, family, options, architecture):
    """In files of 100 kB with an index; their logits are ours in fp32, an import is the model bit for bit."""
    model = build_model(family, "debug", **ATTENTION, **options).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    tokens = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    export_huggingface(model, tmp_path / "hf", shard_size=100_000)
    with torch.no_grad():
        theirs = logits_of(transformers, tmp_path / "hf", tokens, architecture)
        torch.testing.assert_close(theirs, model(tokens), rtol=1e-4, atol=1e-5)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) != model.args.tied_embeddings
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == model.args.eos_id
    import_huggingface(tmp_path / "hf", tmp_path / "back")
    a, b = load_model(tmp_path / "back/checkpoint").state_dict(), model.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("window", [None, 5])
def test_their_smollm3_comes_in(transformers, tmp_path, window):
    """A folder that transformers wrote, its own rule for layers without RoPE left to it."""
    types = ["sliding_attention"] * 3 + ["full_attention"] if window else None
    config = transformers.SmolLM3Config(
        hidden_size=64, num_hidden_layers=4, vocab_size=97, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, use_sliding_window=window is not None, sliding_window=window, layer_types=types,
        rope_theta=50_000.0, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.SmolLM3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    args = import_huggingface(tmp_path / "hf", tmp_path / "run")
    assert args.layer_kinds == ["attention"] * 3 + ["nope"] and args.sliding_window == window
    tokens = torch.randint(0, 97, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "run")(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_what_attention_models_are_refused_for(tmp_path):
    """By their configuration, by their tensors, and what ours has that the formats have not."""
    export_huggingface(build_model("smollm3", "debug", **ATTENTION), tmp_path / "hf", shard_size=100_000)
    config = json.loads((tmp_path / "hf/config.json").read_text())

    def refused(message, **changes):
        (tmp_path / "hf/config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            import_huggingface(tmp_path / "hf", tmp_path / "run")

    types = ["full_attention"] * 3 + ["sliding_attention"]
    refused("layer_types .the window must be on", use_sliding_window=True, sliding_window=8, layer_types=types)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    refused("not supported: rope_scaling of type 'linear'", rope_parameters=yarn | {"rope_type": "linear"})
    refused("not supported: rope_scaling of type 'llama3'", rope_parameters=None, rope_scaling={"type": "llama3"})
    for key, value in {"factor": None, "beta_fast": 16, "beta_slow": 2.0, "truncate": False}.items():
        refused(f"not supported: rope_scaling.{key}", rope_parameters=yarn | {key: value})
    refused(
        r"not supported: rope_scaling.attention_factor .other than 1.13863.",
        rope_parameters=yarn | {"attention_factor": 1.0},
    )
    refused("not supported: rope_scaling.mscale", rope_parameters=yarn | {"mscale": 1.0, "mscale_all_dim": 0.7})
    refused(
        "rope_original_context = 0: must be at least 7", rope_parameters=yarn | {"original_max_position_embeddings": 0}
    )
    refused("not supported: partial_rotary_factor", rope_parameters=yarn | {"partial_rotary_factor": 0.5})
    refused("not supported: quantization_config", quantization_config={"quant_method": "fp8"})
    refused("not supported: no_rope_layers", no_rope_layers=[1, 1, 0])
    refused(
        r"model.layers.0.mlp.up_proj.weight: is \(96, 64\), the configuration says \(80, 64\)", intermediate_size=80
    )
    refused("model_type 'gpt2', expected mamba2, smollm3, llama, regdrop", model_type="gpt2")
    (part,) = sorted((tmp_path / "hf").glob("model-00002-*"))
    weights = load_file(part)
    name = next(iter(weights))
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, part)
    refused(f"{name}: is torch.float8_e4m3fn, quantized weights are not supported")
    part.unlink()
    refused(rf"{part.name}: missing")
    with pytest.raises(CheckpointError, match="the format has no place for attention = 'entmax15'"):
        export_huggingface(build_model("smollm3", "debug", **ATTENTION, attention="entmax15"), tmp_path / "other")
    assert not (tmp_path / "run").exists() and not (tmp_path / "other").exists()


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
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="model_type 'gpt2', expected mamba2"):
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
    with pytest.raises(CheckpointError, match="hybrid stacks have no format there, this one is 'mamba,att"):
        export_huggingface(model, tmp_path / "hf")


def test_what_the_format_has_no_place_for(tmp_path):
    model = build_model("mamba2", "debug", **SIZES, parametrization="mup", base_dim=SIZES["dim"] // 2)
    with pytest.raises(CheckpointError, match="no place for the multipliers of mup: m_d = 2, m_L = 1"):
        export_huggingface(model, tmp_path / "hf")
    model = build_model("mamba2", "debug", **SIZES, eval_scale=[1.0, 0.9])
    with pytest.raises(CheckpointError, match="no place for each layer's own factor in evaluation"):
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
                  "--dtype", "float32", "--check") == 0  # fmt: skip
    assert "checked with transformers: largest difference of logits" in capsys.readouterr().out
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


def test_a_folder_read_in_parts(tmp_path, packed):
    """`checkpoint.initial_load_in_hf`: each rank reads its shards of a SmolLM3 folder in bf16; the first loss is that
    of the imported weights, in every layout. Scaled queries begin at the identity."""
    smollm3 = ["--model.name", "smollm3", "--architecture.sliding_window", "9"]
    model = build_model("smollm3", "debug", dim=64, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=256)
    export_huggingface(model, tmp_path / "hf", torch.bfloat16, shard_size=60_000)
    import_huggingface(tmp_path / "hf", tmp_path / "imported")
    start = [*smollm3, "--checkpoint.enable", "--checkpoint.interval", "10", "--checkpoint.initial_load_path"]
    folder = [*start, str(tmp_path / "hf"), "--checkpoint.initial_load_in_hf", "--training.seed", "7"]
    scaled = ["--architecture.scaling", "adaptive", "--architecture.scaling_init", "identity"]
    runs = run_cases(2, tmp_path, packed, {
        "imported": {"args": [*start, str(tmp_path / "imported/checkpoint/step-0"), "--training.seed", "7"]},
        "fsdp": {"args": folder}, "tp": {"args": folder + TP}, "ddp": {"args": folder + DDP},
        "scaled": {"args": folder + scaled},
    })  # fmt: skip
    for name in ("fsdp", "tp", "ddp", "scaled"):
        assert runs[name][0]["loss"] == pytest.approx(runs["imported"][0]["loss"], rel=1e-6), name
    for ours, imported in zip(runs["fsdp"], runs["imported"], strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (imported["loss"], imported["grad_norm"])


def test_folders_that_cannot_be_read_in_parts(tmp_path):
    export_huggingface(build_model("smollm3", "debug", **ATTENTION), tmp_path / "hf")
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[model]\nname = "smollm3"\n[architecture]\n' + "\n".join(f"{k} = {v}" for k, v in ATTENTION.items())
    )

    def faults(*args: str) -> list[str]:
        base = ["--job.config_file", str(toml), "--job.dump_folder", str(tmp_path / "out"), "--checkpoint.enable"]
        with pytest.raises(ConfigError) as raised:
            load_config([*base, "--checkpoint.initial_load_in_hf", *args], inputs=True)
        return [fault for fault in raised.value.faults if fault.startswith("checkpoint.")]

    assert faults() == ["checkpoint.initial_load_in_hf: needs checkpoint.initial_load_path, the folder"]
    path = ["--checkpoint.initial_load_path", str(tmp_path / "hf")]
    (fault,) = faults(*path, "--architecture.ffn_dim", "80")
    assert "model.layers.0.mlp.gate_proj.weight: is (96, 64), the configuration says (80, 64)" in fault
    (fault,) = faults(*path, "--architecture.rope_theta", "10000.0")
    assert "is of another model: rope_theta = 10000.0, of the folder's model 50000.0" in fault
    (tmp_path / "hf/model.safetensors").write_bytes(b"broken")
    assert "model.safetensors: unreadable" in faults(*path)[0]
    (tmp_path / "hf/model.safetensors").unlink()
    assert "has no weights" in faults(*path)[0]
    export_huggingface(build_model("mamba2", "debug", **SIZES), tmp_path / "mamba2")
    assert "cannot be read in parts; use scripts/import_hf.py" in faults(path[0], str(tmp_path / "mamba2"))[0]
    export_huggingface(build_model("smollm3", "debug", **ATTENTION), tmp_path / "again")
    path[1] = str(tmp_path / "again")
    (fault,) = faults(*path, "--checkpoint.last_save_in_hf", "--architecture.attention", "entmax15")
    assert fault.startswith("checkpoint.last_save_in_hf: the format has no place for attention = 'entmax15'")


def test_yarn_may_be_new_to_a_folder_but_not_another(tmp_path):
    """Of one that is read in parts: continued pre-training may begin with it."""
    yarn = {"rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_context": 64}
    plain, scaled = (build_model("smollm3", "debug", **ATTENTION, **options) for options in ({}, yarn))
    export_huggingface(plain, tmp_path / "plain")
    export_huggingface(scaled, tmp_path / "scaled")
    check_readable_in_parts(tmp_path / "plain", scaled.args)
    check_readable_in_parts(tmp_path / "scaled", scaled.args)
    with pytest.raises(CheckpointError, match=r"rope scaling is None, of the folder's model Yarn.factor=2.0"):
        check_readable_in_parts(tmp_path / "scaled", plain.args)


def test_from_a_folder_through_training_to_a_folder(transformers, tmp_path, packed, script):
    """transformers' SmolLM3 of 8 layers in, 20 steps with VPAD on two FSDP2 ranks, out again; and a NAPE model of ours:
    the logits of transformers are those of the checkpoint to 1e-5."""
    config = transformers.SmolLM3Config(
        hidden_size=64, num_hidden_layers=8, vocab_size=256, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, use_sliding_window=False, rope_theta=50_000.0, pad_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.SmolLM3ForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert script("import_hf", "--input", str(tmp_path / "hf"), "--output", str(tmp_path / "imported")) == 0
    train = ["--dropout.placement", "vpad", "--dropout.p", "0.1", "--training.steps", "20", "--optimizer.lr", "1e-3",
             "--metrics.log_freq", "5", "--checkpoint.enable", "--checkpoint.interval", "20",
             "--checkpoint.last_save_in_hf"]  # fmt: skip
    smollm3 = ["--model.name", "smollm3", "--architecture.n_layers", "8",
               "--checkpoint.initial_load_path", str(tmp_path / "imported/checkpoint/step-0")]  # fmt: skip
    runs = run_cases(2, tmp_path, packed, {"smollm3": {"args": smollm3 + train}, "nape": {"args": train}})
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    for name, records in runs.items():
        assert records[-1]["step"] == 20 and records[-1]["loss"] != records[0]["loss"]
        checkpoint, out = tmp_path / name / "checkpoint", tmp_path / f"{name}_hf"
        export = ["export_hf", "--checkpoint", str(checkpoint), "--output", str(out), "--dtype", "float32", "--check"]
        assert script(*export) == 0
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=True)
        with torch.no_grad():
            torch.testing.assert_close(theirs.eval()(tokens).logits, load_model(checkpoint)(tokens), rtol=0, atol=1e-5)
        # what the run itself left, written by its ranks together, beside a checkpoint to go on from
        at_end = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name / "hf-step-20", dtype=torch.float32, trust_remote_code=True
        )
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, at_end.state_dict()[key]), key
        assert not (tmp_path / name / "hf-step-20/sharded").exists()

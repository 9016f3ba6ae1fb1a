"""Subjects from plain Hugging Face folders, and YaRN on any subject, through `scripts/evaluate.py`."""

import json
import shutil

import pytest
import torch

from regdrop_titan.checkpoints import load_model
from regdrop_titan.checkpoints.huggingface import export_huggingface, import_huggingface
from regdrop_titan.data.packed import PackedTokens
from regdrop_titan.data.tokenizers import load_tokenizer, train_tokenizer
from regdrop_titan.evaluation.subjects import (
    InputError,
    checkpoint_subject,
    huggingface_subject,
    scale_positions,
    weights_sha256,
)
from regdrop_titan.models import build_model
from regdrop_titan.models.positions import Yarn

from ..packed_sets import markov_documents, write_packed

SMALL = {"dim": 32, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 256}
MAMBA2 = {"dim": 32, "n_layers": 2, "vocab_size": 256, "ssm_head_dim": 16, "state_size": 8}


def write_folder(folder, family, context=None, **options):
    """An export of a random model, with the context that other writers put into config.json."""
    model = build_model(family, "debug", **options).eval()
    export_huggingface(model, folder)
    if context is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [("nape_llama3", SMALL), ("nape_llama3", SMALL | {"position": "rope"}), ("smollm3", SMALL), ("mamba2", MAMBA2)],
)
def test_a_folder_is_the_model_of_its_import(tmp_path, family, options):
    """Weights and logits, of all formats there are, without a checkpoint in between."""
    model = write_folder(tmp_path / "hf", family, **options)
    import_huggingface(tmp_path / "hf", tmp_path / "run")
    subject = huggingface_subject(tmp_path / "hf", context=8)
    loaded = subject.load()
    assert not loaded.training and weights_sha256(loaded) == weights_sha256(load_model(tmp_path / "run"))
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))
    assert (subject.label, subject.folder, subject.context, subject.config) == ("hf", None, 8, {})


def test_the_context_is_what_positions_were_trained_on(tmp_path):
    write_folder(tmp_path / "plain", "smollm3", context=32, **SMALL)
    yarn = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 16}
    write_folder(tmp_path / "scaled", "smollm3", **SMALL, **yarn)
    assert json.loads((tmp_path / "scaled/config.json").read_text())["max_position_embeddings"] == 64
    write_folder(tmp_path / "mamba2", "mamba2", **MAMBA2)
    assert huggingface_subject(tmp_path / "plain").context == 32
    assert huggingface_subject(tmp_path / "plain", context=24).context == 24
    assert huggingface_subject(tmp_path / "scaled").context == 16
    assert huggingface_subject(tmp_path / "mamba2", context=8).context == 8
    with pytest.raises(InputError, match=r"mamba2: its config.json does not say .* give it by --context"):
        huggingface_subject(tmp_path / "mamba2")
    with pytest.raises(InputError, match=r"scaled: --rope-scaling: the model has Yarn.factor=4.0"):
        scale_positions(huggingface_subject(tmp_path / "scaled"), 2.0)
    with pytest.raises(InputError, match=r"mamba2: --rope-scaling: .* needs attention layers with position = 'rope'"):
        scale_positions(huggingface_subject(tmp_path / "mamba2", context=8), 2.0)


def test_yarn_on_a_checkpoint_and_on_a_folder(tmp_path):
    """Is the model that has it in its arguments, with the training context as the original one."""
    write_folder(tmp_path / "hf", "smollm3", context=16, **SMALL)
    import_huggingface(tmp_path / "hf", tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps(config | {"training": {"seq_len": 16}}))
    yarn = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 16}
    wanted = build_model("smollm3", "debug", **SMALL, **yarn).eval()  # of the same seed
    plain = load_model(tmp_path / "run")
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        assert (wanted(tokens) - plain(tokens)).abs().max() > 1e-4
        for subject in (huggingface_subject(tmp_path / "hf"), checkpoint_subject(tmp_path / "run")):
            scale_positions(subject, 4.0)
            assert torch.equal(subject.load()(tokens), wanted(tokens))
            assert subject.args.yarn == Yarn(4.0, 16) and subject.label.endswith(", YaRN 4x")


def test_its_tokenizer_and_packed_sets(tmp_path):
    """That of the folder, or the one that is named; a packed set of another one is refused."""
    write_folder(tmp_path / "hf", "smollm3", context=16, **(SMALL | {"vocab_size": 300}))
    documents = markov_documents(3, 20, 256, seed=1)
    write_packed(tmp_path / "other", documents, 256)
    subject = huggingface_subject(tmp_path / "hf")
    assert isinstance(subject.packed_tokens(tmp_path / "other"), PackedTokens)  # nothing says that it is wrong
    with pytest.raises(InputError, match="hf: no tokenizer is known of its run; name one by --tokenizer"):
        _ = subject.tokenizer
    train_tokenizer(["the quick brown fox " * 20], 270).save(str(tmp_path / "hf/tokenizer.json"))
    subject = huggingface_subject(tmp_path / "hf")
    assert subject.tokenizer.sha256 == load_tokenizer(tmp_path / "hf").sha256
    with pytest.raises(InputError, match=r"other was tokenized by stand-in, the model was trained on tokens of hugg"):
        subject.packed_tokens(tmp_path / "other")
    write_packed(tmp_path / "same", documents, 256)
    manifest = json.loads((tmp_path / "same/manifest.json").read_text())
    manifest["tokenizer"] = {"name": "its own", "sha256": subject.tokenizer.sha256}
    (tmp_path / "same/manifest.json").write_text(json.dumps(manifest))
    assert isinstance(subject.packed_tokens(tmp_path / "same"), PackedTokens)
    assert huggingface_subject(tmp_path / "hf", tokenizer="bytes").tokenizer.vocab_size == 257
    train_tokenizer([" ".join(map(str, range(999)))], 301).save(str(tmp_path / "hf/tokenizer.json"))
    with pytest.raises(InputError, match="has 301 tokens, the model's vocabulary 300"):
        _ = huggingface_subject(tmp_path / "hf").tokenizer


def test_the_command(tmp_path, packed, script, capsys):
    """A folder beside a checkpoint of the same weights: the same losses; with YaRN, others. Wrong arguments are named
    all at once."""
    folder, run = tmp_path / "hf", tmp_path / "run"
    write_folder(folder, "smollm3", context=8, **SMALL)
    import_huggingface(folder, run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"training": {"seq_len": 8}}))
    base = ["evaluate", "position-loss", "--data", str(packed / "train"), "--documents", "4", "--multiple", "4"]
    both = ["--checkpoint", str(run), "--hf", str(folder), "--labels", "ours", "theirs"]
    assert script(*base, *both, "--output", str(tmp_path / "out")) == 0
    ours, theirs = (json.loads((tmp_path / f"out/{n}/position_loss.json").read_text()) for n in ("ours", "theirs"))
    assert ours["loss"] == theirs["loss"] and ours["weights_sha256"] == theirs["weights_sha256"]
    assert theirs["train_context"] == 8 and theirs["run"] == {} and theirs["checkpoint"] == str(folder)
    assert theirs["model_args"] == ours["model_args"] and theirs["parameters"] == ours["parameters"]
    scaled = ["--hf", str(folder), "--rope-scaling", "yarn:4", "--output", str(tmp_path / "yarn")]
    assert script(*base, *scaled) == 0
    result = json.loads((tmp_path / "yarn/position_loss.json").read_text())
    assert result["loss"] != theirs["loss"] and result["weights_sha256"] == theirs["weights_sha256"]
    assert (result["model_args"]["rope_factor"], result["model_args"]["rope_original_context"]) == (4.0, 8)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    for args, messages in [
        ([], ["name a model by --checkpoint or --hf"]),
        (["--checkpoint", str(run), "--context", "8"], ["--context: is of --hf"]),
        (
            ["--hf", str(other), str(tmp_path / "none"), "--context", "0"],
            ["--output where the results go", "--context 0: must be", "none: has no config.json",
             "'bloom', expected mamba2, smollm3, llama, regdrop"],
        ),
        (["--hf", str(folder), "--rope-scaling", "linear:2"], ["'linear:2': must be yarn:FACTOR"]),
        (["--hf", str(folder), "--rope-scaling", "yarn:nan"], ["'yarn:nan': must be yarn:FACTOR"]),
    ]:  # fmt: skip
        capsys.readouterr()
        assert script(*base, *args) == 2
        said = capsys.readouterr().err
        assert all(message in said for message in messages), said

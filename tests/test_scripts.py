"""The scripts: help, a tokenizer, and shell files that parse."""

import json
import subprocess

import pytest

from regdrop_titan.data.tokenizers import train_tokenizer

from .distributed.harness import ROOT

HELPFUL = [
    "average_checkpoints", "benchmark", "evaluate", "export_hf", "generate", "import_hf", "prepare_data",
    "search_draft", "sweep", "train_exits", "train_tokenizer",
]  # fmt: skip


@pytest.mark.parametrize("name", HELPFUL)
def test_help(name, script, capsys):
    assert script(name, "--help") == 0
    assert "usage" in capsys.readouterr().out
    assert script(name, "nonsense") == 2


def test_train_tokenizer(tmp_path, script, capsys):
    """The tokenizer of the filtered text; a bad record is named; a tokenizer that is there is not overwritten."""
    texts = [f"the {i} quick brown foxes" * 3 for i in range(50)]
    records = [{"body": text, "s": i % 2} for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--text-key", "body", "--filter", "s==1", "--vocab-size", "270",
                 "--output"]  # fmt: skip
    assert script("train_tokenizer", *arguments, str(tmp_path / "out")) == 0
    expected = json.loads(train_tokenizer(texts[1::2], 270).to_str())
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == expected
    assert script("train_tokenizer", *arguments, str(tmp_path / "out")) == 2
    assert "exists; packed sets may depend on it" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"body": "a", "s": 1}\n{"body": null, "s": 1}\n')
    assert script("train_tokenizer", *arguments, str(tmp_path / "other")) == 2
    assert "a.jsonl, line 2: body is null" in capsys.readouterr().err


SHELL = [*sorted((ROOT / "scripts").rglob("*.sh")), *sorted((ROOT / "scripts").rglob("*.sbatch")), ROOT / ".ci/run"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0

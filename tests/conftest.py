"""Fixtures shared by the suite. `regdrop_titan` comes first: it fixes TorchTitan's device."""

import importlib.util
import sys
from pathlib import Path

import pytest

import regdrop_titan  # noqa: F401

from .packed_sets import markov_documents, write_packed

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch):
    """Runs a script of `scripts/` in this process, which has torch imported: its exit status."""

    def run(name: str, *arguments: str) -> int:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"scripts/{name}.py", *arguments])
        try:
            return module.main()
        except SystemExit as end:  # argparse's
            return end.code

    return run


@pytest.fixture(scope="session")
def packed(tmp_path_factory) -> Path:
    """A folder with small packed sets `train` and `validation`: vocabulary 256, documents of 100 tokens."""
    folder = tmp_path_factory.mktemp("packed")
    write_packed(folder / "train", markov_documents(120, 100, 256, seed=1), 256)
    write_packed(folder / "validation", markov_documents(7, 100, 256, seed=2), 256)
    return folder

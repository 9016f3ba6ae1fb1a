"""The code is formatted, lints and type-checks."""

import subprocess
import sys

import pytest

from .distributed.harness import ROOT


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_style(tool):
    done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr

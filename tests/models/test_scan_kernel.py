"""The scan's GPU path without a GPU: fla-core's own kernels, run by Triton's interpreter on the CPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def test_the_kernels_agree_with_the_plain_scan(tmp_path):
    """Forward, final state and all gradients in fp32, with resets, initial states, groups and a broken last chunk."""
    installed = Path(importlib.util.find_spec("fla").origin).parent
    shutil.copytree(installed, tmp_path / "fla", ignore=shutil.ignore_patterns("__pycache__"))
    # the interpreter's loop counters are Python ints, which have no `.to`
    chunk_h = tmp_path / "fla/ops/common/chunk_h.py"
    text, changed = re.subn(r"= i_t\.to\(tl\.int64\)", "= i_t", chunk_h.read_text())
    assert changed == 2
    chunk_h.write_text(text)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("scan_kernel.py")],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    errors = [float(error) for error in re.findall(r"^error (\S+)", run.stdout, re.M)]
    assert len(errors) == 3 and max(errors) < 2e-5, run.stdout
    assert run.stdout.count("SUCCESS") == 3, run.stdout

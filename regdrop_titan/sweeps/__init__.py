"""Many runs from one sweep file: read (`file`), checked and listed (`runs`), run here (`local`) or elsewhere
(`launchers`). `scripts/sweep.py` is the command line, docs/sweeps.md the manual."""

from .file import Run, Sweep, SweepError, read_sweep

__all__ = ["Run", "Sweep", "SweepError", "read_sweep"]

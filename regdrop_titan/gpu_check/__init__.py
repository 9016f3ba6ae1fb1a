"""Every GPU path against its oracle, and what training and generation take: `scripts/gpu_check.sh` (docs/gpu_check.md).

Parts (`parts.py`) are run one after another by a worker process (`worker.py`), within the time that `command.py` keeps.
"""

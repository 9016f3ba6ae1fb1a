"""Starts real gloo ranks. One launch runs many cases, one after another."""

import functools
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

from regdrop_titan.metrics import read_records

from .ranks import Ranks, train
from .worker import run

ROOT = Path(__file__).parent.parent.parent

P = "--parallelism."
TP = [P + "tensor_parallel_degree", "2"]
PP = [P + "pipeline_parallel_degree", "2"]
DDP = [P + "data_parallel_replicate_degree", "2", P + "data_parallel_shard_degree", "1"]

# A model and batch small enough for 4 ranks on 2 cores: 8 sequences of 32 tokens a step.
BASE = """
[model]
name = "nape_llama3"
flavor = "debug"
[architecture]
dim = 64
n_layers = 4
n_heads = 4
n_kv_heads = 2
ffn_dim = 96
vocab_size = 256
[training]
dataset_path = "{packed}/train"
seq_len = 32
local_batch_size = 2
global_batch_size = 8
steps = 3
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
implementation = "for-loop"
[lr_scheduler]
warmup_steps = 2
total_steps = 6
[validation]
dataset_path = "{packed}/validation"
[metrics]
log_freq = 1
[activation_checkpoint]
mode = "none"
"""


def environment() -> dict[str, str]:
    """This process's, with the project importable and one thread a rank."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def torchrun(n: int, *command: str, timeout: int = 240, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", "--standalone", *command],
        cwd=ROOT, env=environment(), timeout=timeout, text=True, capture_output=True, **kwargs,
    )  # fmt: skip


def train_py(n: int, folder: Path, *args: str) -> tuple[list[int], str]:
    """`train.py` in `n` ranks: their exit statuses, and what they printed (kept in `folder`)."""
    ranks = Ranks(n, functools.partial(train, args=list(args)), folder / f"said-{time.monotonic_ns()}")
    return ranks.wait(240), ranks.said()


def run_cases(world_size: int, folder: Path, packed: Path, cases: dict[str, dict]) -> dict[str, list[dict]]:
    """Train every case (name: {"args": [...], ...}) on `world_size` ranks; returns each one's metrics records.

    A case's dump folder is `folder/name` unless its args say otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    toml = folder / "base.toml"
    toml.write_text(BASE.format(packed=packed))
    full = [
        case | {"args": ["--job.config_file", str(toml), "--job.dump_folder", str(folder / name), *case["args"]]}
        for name, case in cases.items()
    ]
    for attempt in range(2):
        output = folder / f"said-{attempt}"
        ranks = Ranks(world_size, functools.partial(run, cases=full), output)
        statuses = ranks.wait(300)
        if attempt or not {-6, -11} & set(statuses):
            break
        # Seen once in some 100 launches: gloo's own thread ends a rank by a signal, with no word from Python. Any
        # fault of ours is a Python exception, and is not tried again.
        warnings.warn(f"a rank was killed by a signal {statuses}; starting its ranks once more", stacklevel=2)
        for name in cases:
            shutil.rmtree(folder / name, ignore_errors=True)
    if any(statuses):
        raise AssertionError(f"{world_size} ranks ended with {statuses}:\n{ranks.said()[-5000:]}")
    return {name: read_records(folder / name / "metrics.jsonl") for name in cases}

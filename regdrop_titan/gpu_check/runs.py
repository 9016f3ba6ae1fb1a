"""Checks and timings by the command lines themselves: train.py, evaluate.py, export_hf.py, benchmark.py."""

import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ..generation import generate
from ..generation.measure import spent
from ..metrics import METRICS_FILE, read_records
from ..models import build_model
from .kernels import has_fla
from .rows import MEASURED, NEEDS_FLA, Machine, Row, agreed, bounded
from .whole_models import ways_to_write

ROOT = Path(__file__).resolve().parents[2]
GOAL = 0.45  # MFU of the dense 400M flavor on one H200


class ChildFailed(Exception):
    """A command ended with another status than 0; the message has its last line and its log."""


def called(machine: Machine, name: str, *command: str, environment: dict[str, str] | None = None) -> None:
    """Run a Python script of the project; what it prints goes to `name`.log. It stays in this process's group, which is
    ended as one when the part takes too long."""
    log = machine.output / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"} | (environment or {})
    with open(log, "w") as file:
        status = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        ).returncode
    if status:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise ChildFailed(f"{command[0]} ended with status {status}: {lines[-1] if lines else 'no word'} (see {log})")


def train(machine: Machine, name: str, config: str, *overrides: str, fresh: bool = True) -> list[dict]:
    """Train in `runs/name` of the output folder: the records of its steps. A process by itself, without torchrun,
    whose own processes would outlive it."""
    folder = machine.output / "runs" / name
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    called(
        machine, name, "train.py", "--job.config_file", f"train_configs/{config}.toml",
        "--job.dump_folder", str(folder),
        *overrides, environment=ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
    )  # fmt: skip
    return read_records(folder / METRICS_FILE)


def batch(machine: Machine, seq_len: int, sequences: int) -> list[str]:
    """The sizes of a step; a rehearsal's are tiny."""
    S, B = (64, 4) if machine.small else (seq_len, sequences)
    return ["--training.seq_len", str(S), "--training.local_batch_size", str(B), "--training.global_batch_size", str(B)]


# Resume -------------------------------------------------------------------------------------------------------------

STEPS, STOP = 12, 6
RESUMED = "resumed"  # the run that evaluation reads


def resume(machine: Machine) -> list[Row]:
    """A run with VPAD and layer dropout, and the same from its checkpoint in the middle: equal losses."""
    overrides = [
        *batch(machine, 256, 8), "--training.steps", str(STEPS), "--metrics.log_freq", "1",
        "--checkpoint.interval", str(STOP), "--checkpoint.keep_latest_k", "0", "--validation.no-enable",
        "--layer_dropout.p_max", "0.4", "--layer_dropout.sampling", "balanced",
        "--training.mixed_precision_param", "bfloat16", "--compile.enable",
        "--debug.deterministic", "--debug.deterministic_warn_only",
    ]  # fmt: skip
    whole = train(machine, "whole", "debug_nape_llama3", *overrides)
    folder = machine.output / "runs"
    shutil.rmtree(folder / RESUMED, ignore_errors=True)
    shutil.copytree(folder / "whole", folder / RESUMED)
    shutil.rmtree(folder / RESUMED / "checkpoint" / f"step-{STEPS}")
    again = train(machine, RESUMED, "debug_nape_llama3", *overrides, fresh=False)
    log = (machine.output / f"{RESUMED}.log").read_text()
    return [*resumed_rows(whole, again), agreed(
        "resume: went on from the checkpoint", f"starts at step {STOP + 1}" in log, f"see {RESUMED}.log"
    )]  # fmt: skip


def resumed_rows(whole: list[dict], again: list[dict]) -> list[Row]:
    """Of the losses of two runs, the second from step `STOP` on."""
    steps = [record["step"] for record in again]
    complete = steps == list(range(1, STEPS + 1)) == [record["step"] for record in whole]
    rows = [agreed("resume: every step once", complete, f"steps {steps}")]
    if complete:
        worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole[STOP:], again[STOP:], strict=True))
        rows.append(bounded("resume: losses", worst, 0.0))
    return rows


def evaluation(machine: Machine) -> list[Row]:
    """The checkpoint that `resume` left, evaluated and exported: status 0."""
    checkpoint = str(machine.output / "runs" / RESUMED / "checkpoint")
    output = machine.output / "evaluation"
    shutil.rmtree(output, ignore_errors=True)
    common = ("--checkpoint", checkpoint, "--output")
    check = ["--check"] if importlib.util.find_spec("transformers") else []
    commands = {
        "position-loss": [
            "scripts/evaluate.py", "position-loss", *common, str(output), "--data", "data/stdlib/long",
            "--documents", "4",
        ],
        "moments": ["scripts/evaluate.py", "moments", *common, str(output), "--data", "data/stdlib/validation"],
        "export": ["scripts/export_hf.py", *common, str(output / "hf"), *check],
    }  # fmt: skip
    rows = []
    for name, command in commands.items():
        try:
            called(machine, name, *command)
            rows.append(agreed(f"{name} of the checkpoint", True, ""))
        except ChildFailed as error:
            rows.append(agreed(f"{name} of the checkpoint", False, str(error)))
    return rows


# Training throughput ------------------------------------------------------------------------------------------------

DENSE = "400M dense"
LAYER_DROPOUT = ("--layer_dropout.distribution", "uniform", "--layer_dropout.schedule", "constant",
                 "--layer_dropout.sampling", "balanced")  # fmt: skip
# NAPE with its local heads cut, unless said otherwise; no dropout
TIMED_400M: dict[str, tuple[str, ...]] = {
    DENSE: (),
    "400M VPAD": ("--dropout.placement", "vpad", "--dropout.p", "0.1"),
    "400M layer dropout 0.25": ("--layer_dropout.p_max", "0.25", *LAYER_DROPOUT),
    "400M layer dropout 0.5": ("--layer_dropout.p_max", "0.5", *LAYER_DROPOUT),
    "400M dense, no cut": ("--architecture.alibi_cutoff", "0"),
    "400M dense, RoPE": ("--architecture.position", "rope"),
}


def folder_name(row: str) -> str:
    return row.lower().replace(",", "").replace(" ", "_")


def common(machine: Machine) -> list[str]:
    steps, log_freq = ("6", "1") if machine.small else ("30", "5")
    return [
        "--training.steps", steps, "--metrics.log_freq", log_freq, "--training.mixed_precision_param", "bfloat16",
        "--compile.enable", "--checkpoint.no-enable", "--validation.no-enable", "--dropout.placement", "none",
        "--dropout.p", "0",
    ]  # fmt: skip


def figures_of(records: Sequence[dict]) -> dict[str, float]:
    """Of the second half of the records, before which graphs are compiled: medians; the most memory."""
    last = records[len(records) // 2 :]
    figures = {"tokens/s": statistics.median(record["tokens_per_second"] for record in last)}
    if all(record.get("mfu") is not None for record in last):
        figures["MFU"] = statistics.median(record["mfu"] for record in last)
    figures["GiB"] = max(record["memory_gib"] for record in records)
    if "kept_fraction" in last[-1]:
        figures["computed"] = statistics.fmean(record["kept_fraction"] for record in last)
    return figures


def timed_400m(machine: Machine, name: str) -> list[Row]:
    """One of `TIMED_400M`: tokens/s, MFU of what was computed, memory, and tokens/s to the dense run's."""
    flavor = "debug" if machine.small else "400M"
    overrides = ["--model.flavor", flavor, *batch(machine, 2048, 16), *common(machine), *TIMED_400M[name]]
    figures = figures_of(train(machine, folder_name(name), "debug_nape_llama3", *overrides))
    dense = read_records(machine.output / "runs" / folder_name(DENSE) / METRICS_FILE)
    if dense:
        figures["tokens/s to dense"] = figures["tokens/s"] / figures_of(dense)["tokens/s"]
    message = ""
    if name == DENSE and "MFU" in figures:
        message = f"goal on an H200: MFU {GOAL}, {'reached' if figures['MFU'] >= GOAL else 'not reached'}"
    return [Row(name, MEASURED, figures=figures, message=message)]


def timed_mamba2(machine: Machine) -> list[Row]:
    name = "Mamba2 85M"
    if machine.cuda and not has_fla():
        return [Row(name, NEEDS_FLA)]
    flavor = ["debug", "64"] if machine.small else ["85M", "256"]
    overrides = ["--model.flavor", flavor[0], "--architecture.chunk_size", flavor[1], *batch(machine, 1024, 32)]
    records = train(machine, folder_name(name), "debug_mamba2", *overrides, *common(machine))
    return [Row(name, MEASURED, figures=figures_of(records))]


# Generation ---------------------------------------------------------------------------------------------------------


def timed_generation(machine: Machine, family: str, flavor: str) -> list[Row]:
    """Greedy answers to two prompts, eager and compiled, plain and with every second layer as the draft; fp32."""
    name = f"generation, {family} {flavor}"
    if machine.cuda and family == "mamba2" and not has_fla():
        return [Row(name, NEEDS_FLA)]
    lengths, new = ((9, 20), 8) if machine.small else ((200, 500), 64)
    model = build_model(family, "debug" if machine.small else flavor).eval().to(machine.device)
    prompts = [torch.randint(1, model.args.vocab_size, (n,), device=machine.device) for n in lengths]
    rows: list[Row] = []
    for way, draft, compiled in ways_to_write(machine, range(0, model.args.n_layers, 2)):

        def write(draft=draft, compiled=compiled):
            return generate(model, prompts, new, draft_layers=draft, draft_length=4, compile=compiled)

        for _ in range(2):  # graphs are made
            write()
        seconds, (_, stats) = spent(machine.device, write)
        figures = {"tokens/s": stats["tokens"] / seconds}
        plain = rows[0].figures if rows else figures
        figures["tokens/s to plain eager"] = figures["tokens/s"] / plain["tokens/s"]
        rows.append(Row(f"{name}, {way}", MEASURED, figures=figures))
    return rows


# Benchmarks ---------------------------------------------------------------------------------------------------------

BENCHMARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # verb: options on a GPU, in a rehearsal
    "layer-dropout": (
        ("--dim", "1024", "--layers", "12", "--seq-len", "2048", "--compile"),
        ("--dim", "128", "--layers", "2", "--seq-len", "32", "--rounds", "2", "--warmup", "1", "--rates", "0.5"),
    ),
    "attention": (("--batch-size", "8"), ("--seq-len", "512", "--rounds", "2", "--warmup", "1")),
    "loss": (
        ("--seq-len", "2048", "--pieces", "0", "4", "64"),
        ("--seq-len", "32", "--vocab-size", "256", "--pieces", "2", "--rounds", "2"),
    ),
    "mamba2": (
        ("--layers", "4", "--batch-size", "8", "--chunks", "64", "256", "--compile"),
        ("--layers", "1", "--dim", "128", "--seq-len", "64", "--batch-size", "1", "--chunks", "64", "--rounds", "2"),
    ),
    "dense": (
        ("--layers", "12", "--seq-len", "2048", "--batch-size", "8", "--compile"),
        ("--dim", "128", "--layers", "1", "--seq-len", "64", "--batch-size", "1", "--rounds", "2", "--warmup", "1"),
    ),
}


def benchmark(machine: Machine, verb: str) -> list[Row]:
    """`benchmark.py VERB`: the ratios of its rows."""
    if verb == "mamba2" and machine.cuda and not has_fla():
        return [Row("benchmark mamba2", NEEDS_FLA)]
    file = machine.output / f"benchmark_{verb}.json"
    options = BENCHMARKS[verb][1 if machine.small else 0]
    called(machine, f"benchmark_{verb}", "scripts/benchmark.py", verb, *options, "--output", str(file))
    found = json.loads(file.read_text())["rows"]
    wanted = ("ratio", "seconds", "peak_mib")
    return [
        Row(f"benchmark {verb}: {name}", MEASURED, figures={key: row[key] for key in wanted if key in row})
        for name, row in found.items()
    ]

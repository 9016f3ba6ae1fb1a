"""Runs written by hand."""

import csv
import json
from dataclasses import asdict

from regdrop_titan.config import JobConfig, model_args
from regdrop_titan.config.resume import data_identity, write_config


def write_run(folder, losses, validation=(), steps=None, saved=None, **values):
    """A run that logged `losses` at steps 1, 2, ... (None: not finite), validated as {step: loss}, with `saved` of its
    layers' FLOPs, 80 % of all, by layer dropout. `values`: settings as section__key."""
    config = JobConfig()
    config.training.dataset = "copying"
    config.training.steps = steps or len(losses)
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 64, 8, 8
    config.metrics.log_freq = 1
    config.validation.enable = bool(validation)
    for key, value in values.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    config.debug.seed = config.training.seed
    config.job.dump_folder = str(folder)
    args = model_args(config)
    write_config(folder, config.to_dict() | {"model_args": asdict(args), **data_identity(config)})
    tokens = config.training.global_batch_size * config.training.seq_len
    lines = []
    for step, loss in enumerate(losses, 1):
        record = {"step": step, "tokens": step * tokens, "loss": loss, "flops": 1000 * step * tokens}
        if saved is not None:
            record |= {"flops_executed": record["flops"] * (1 - 0.8 * saved), "flops_saved": saved}
        lines.append(json.dumps(record) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    rounds = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in dict(validation).items()]
    if rounds:
        (folder / "validation.jsonl").write_text("".join(rounds))
    return folder


def read_csv(file):
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))

"""What a run logs: `metrics.jsonl` and `validation.jsonl` (one object a step), `loss.png`, progress on the console.

TensorBoard and W&B are TorchTitan's, switched by its `[metrics]` section.
"""

import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components import metrics as titan_metrics
from torchtitan.tools.logging import logger

from .models import DecoderArgs

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"


def read_records(path: Path) -> list[dict]:
    """The records of a `.jsonl` file; a line that a crash cut short is left out."""
    records: list[dict] = []
    if not path.exists():
        return records
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


class StepLog:
    """A `.jsonl` file with each step once, also after crashes and resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop what a run that goes on after `step` will log again. A new run (step 0) in a folder with an older
        log keeps that one under another name."""
        records = read_records(self.path)
        if not records:
            return
        if step == 0:
            n = 1
            while (older := self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}")).exists():
                n += 1
            self.path.rename(older)
            return
        kept = [record for record in records if record["step"] <= step]
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(partial, self.path)


class JsonLinesLogger(titan_metrics.BaseLogger):
    """Writes what TorchTitan hands its loggers to `metrics.jsonl` and `validation.jsonl`, under plain names."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.training = StepLog(folder / METRICS_FILE)
        self.validation = StepLog(folder / VALIDATION_FILE)
        self.world_size = world_size
        self.flops_per_token: float = 0
        self.extra: dict[str, float] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "validation_metrics/loss" in metrics:
            contexts = {k.removeprefix("validation/"): v for k, v in metrics.items() if k.startswith("validation/")}
            self.validation.append({"step": step, "loss": metrics["validation_metrics/loss"], **contexts})
            return
        tokens = int(metrics["n_tokens_seen"])
        record = {
            "step": step,
            "tokens": tokens,
            "loss": metrics["loss_metrics/global_avg_loss"],
            "grad_norm": metrics["grad_norm"],
            "lr": metrics["lr"],
            # TorchTitan's figure is per device
            "tokens_per_second": metrics["throughput(tps)"] * self.world_size,
            "seconds_per_step": metrics["time_metrics/end_to_end(s)"],
            "data_seconds": metrics["time_metrics/data_loading(s)"],
            "memory_gib": metrics["memory/max_reserved(GiB)"],
            "flops": tokens * self.flops_per_token,  # dense
            **self.extra,
        }
        if not math.isnan(metrics["mfu(%)"]):
            record["mfu"] = metrics["mfu(%)"] / 100
        self.training.append(record)


class MetricsProcessor(titan_metrics.MetricsProcessor):
    """TorchTitan's, with the log files and a line of progress. One rank writes: the one that knows the loss."""

    logger: titan_metrics.BaseLogger
    num_flops_per_token: float

    def __init__(self, job_config, parallel_dims, model_args: DecoderArgs, tag: str | None = None) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.folder = Path(job_config.job.dump_folder)
        self.json_lines: JsonLinesLogger | None = None
        metrics_rank = titan_metrics._get_metrics_rank(parallel_dims, job_config)
        if torch.distributed.get_rank() == metrics_rank:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.json_lines = JsonLinesLogger(self.folder, parallel_dims.world_size)
            loggers = titan_metrics.LoggerContainer()
            loggers.add_logger(self.logger)  # TensorBoard and W&B
            loggers.add_logger(self.json_lines)
            self.logger = loggers
        self._first: tuple[int, float] | None = None  # step and time of this process's first logged step
        self.model_args = model_args
        self.seq_len = job_config.training.seq_len
        self.flops_saved = 0.0  # by layer dropout, of the run so far
        self._interval = [0.0, 0.0]  # dense and saved FLOPs since the last log
        self._layer_dropout: dict[str, float] = {}
        self.extra: dict[str, float] = {}  # what the trainer adds to a step's record

    def rewind(self, step: int) -> None:
        """Make the log files end at `step`, where training goes on."""
        if self.json_lines is not None:
            self.json_lines.training.rewind(step)
            self.json_lines.validation.rewind(step)

    def count_layer_dropout(self, rates: Tensor, keep: Tensor) -> None:
        """Account for one step's layer dropout: rates (L,), keep (sequences, L) or (sequences, L, 2)."""
        tokens = keep.shape[0] * self.seq_len
        attention, feed_forward = self.model_args.sublayer_flops(self.seq_len)
        dropped = (~keep).double().mean(0)  # (L,) or (L, 2)
        by_sublayer = dropped if dropped.dim() == 2 else dropped[:, None].expand(-1, 2)
        saved = tokens * (by_sublayer @ torch.tensor([attention, feed_forward], dtype=torch.float64)).sum().item()
        if not self.job_config.layer_dropout.skip_compute:
            saved = 0.0
        self.flops_saved += saved
        self._interval[0] += tokens * self.num_flops_per_token
        self._interval[1] += saved
        kept_fraction = keep.double().mean().item()
        self._layer_dropout = {
            "layer_dropout_rate": rates.mean().item(),
            "layer_dropout_rate_max": rates.max().item(),
            "kept_fraction": kept_fraction,
            "effective_depth": kept_fraction * self.model_args.n_layers,
        }

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None) -> None:
        dense_per_token = self.num_flops_per_token
        if self._layer_dropout:
            dense = extra_metrics["n_tokens_seen"] * dense_per_token
            self._layer_dropout |= {
                "flops_executed": dense - self.flops_saved,
                "flops_saved": self.flops_saved / (dense * self.model_args.layer_flops_share(self.seq_len)),
            }
            extra_metrics = extra_metrics | {f"layer_dropout/{k}": v for k, v in self._layer_dropout.items()}
            # TorchTitan's TFLOP/s and MFU then count what was executed
            self.num_flops_per_token = dense_per_token * (1 - self._interval[1] / self._interval[0])
            self._interval = [0.0, 0.0]
        if self.json_lines is not None:
            self.json_lines.flops_per_token = dense_per_token
            self.json_lines.extra = self._layer_dropout | self.extra
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        self.num_flops_per_token = dense_per_token
        if self._layer_dropout:
            now = self._layer_dropout
            logger.info(
                f"layer dropout: rate {now['layer_dropout_rate']:.3f} (max {now['layer_dropout_rate_max']:.3f}), "
                f"saved {100 * now['flops_saved']:.1f} % of the layers' FLOPs so far"
            )
        if self._first is None:
            self._first = step, time.perf_counter()
            return
        first_step, first_time = self._first
        steps = self.job_config.training.steps
        left = (time.perf_counter() - first_time) / (step - first_step) * (steps - step)
        logger.info(f"{step} of {steps} steps ({100 * step / steps:.0f} %), {timedelta(seconds=round(left))} left")

    def close(self) -> None:
        super().close()
        if self.json_lines is not None:
            records = read_records(self.folder / METRICS_FILE)
            if records:
                plot_loss(records, read_records(self.folder / VALIDATION_FILE), self.folder / "loss.png")


def _multiple(key: str) -> int:
    """2 of `loss_2x`."""
    return int(key.removeprefix("loss_").removesuffix("x"))


def plot_loss(records: list[dict], validation: list[dict], path: Path) -> None:
    """Training and validation loss by step, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], label="training")
    if validation:
        axes.plot([r["step"] for r in validation], [r["loss"] for r in validation], "o-", label="validation")
        for key in sorted({key for r in validation for key in r if key.startswith("loss_")}, key=_multiple):
            drawn = [r for r in validation if key in r]
            label = f"long documents at {_multiple(key)}x the context"
            axes.plot([r["step"] for r in drawn], [r[key] for r in drawn], ".--", label=label)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def build_metrics_processor(job_config, parallel_dims, model_args=None, tag: str | None = None) -> MetricsProcessor:
    return MetricsProcessor(job_config, parallel_dims, model_args, tag)

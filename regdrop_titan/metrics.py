"""What a run logs: `metrics.jsonl` and `validation.jsonl` (one object a step), `loss.png`, progress on the console.

TensorBoard and W&B are switched by TorchTitan's `[metrics]` section. Unlike there, a run that is resumed goes on in the
same run of theirs.
"""

import json
import math
import os
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components import metrics as titan_metrics
from torchtitan.tools.logging import logger

from .checkpoints.safety import steps_in
from .files import free_name, write_whole
from .models import DecoderArgs

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_run_id"
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
            self.path.rename(free_name(self.path, self.path.stem + ".{n}" + self.path.suffix))
            return
        kept = [record for record in records if record["step"] <= step]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))


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
            "data_seconds": metrics["time_metrics/data_loading(s)"],  # a micro-batch
            "data_wait_share": metrics["time_metrics/data_loading(%)"] / 100,
            "memory_gib": metrics["memory/max_reserved(GiB)"],
            "flops": tokens * self.flops_per_token,  # dense
            **self.extra,
        }
        if not math.isnan(metrics["mfu(%)"]):
            record["mfu"] = metrics["mfu(%)"] / 100
        # of a step that was skipped: JSON has no NaN
        self.training.append({k: None if v != v or abs(v) == math.inf else v for k, v in record.items()})

    def rewind(self, step: int) -> None:
        self.training.rewind(step)
        self.validation.rewind(step)


class TensorBoardLogger(titan_metrics.BaseLogger):
    """One TensorBoard run in `folder` over all starts. TorchTitan names a folder after the time of the start, so that
    every resume is a run of its own there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None

    def rewind(self, step: int) -> None:
        """Go on after `step`: TensorBoard forgets what was written of later ones."""
        self.writer = SummaryWriter(str(self.folder), max_queue=1000, purge_step=step + 1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        assert self.writer is not None
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def start_wandb(job_config, folder: Path) -> titan_metrics.WandBLogger:
    """W&B, under the id that the run in `folder` began with; another run, without a checkpoint to go on from, has
    another id. `WANDB_RUN_ID` in the environment wins. W&B ignores steps that it has already: a resumed run repeats
    them bit for bit."""
    file = folder / WANDB_ID_FILE
    if not (file.exists() and steps_in(Path(job_config.job.dump_folder) / job_config.checkpoint.folder)):
        write_whole(file, uuid.uuid4().hex[:12] + "\n")
    names = {"WANDB_RUN_ID": file.read_text().strip(), "WANDB_RESUME": "allow"}
    ours = {name: value for name, value in names.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        return titan_metrics.WandBLogger(str(folder), job_config)
    finally:
        for name in ours:
            del os.environ[name]


def build_loggers(job_config, parallel_dims, tag: str | None = None) -> titan_metrics.LoggerContainer:
    """The loggers of this rank: files on the one that knows the loss, TensorBoard and W&B there or on all."""
    config = job_config.metrics
    folder, rank = Path(job_config.job.dump_folder), torch.distributed.get_rank()
    loggers = titan_metrics.LoggerContainer()
    writes = rank == titan_metrics._get_metrics_rank(parallel_dims, job_config)
    if writes or config.save_for_all_ranks:
        own = folder / f"rank_{rank}" if config.save_for_all_ranks else folder
        own.mkdir(parents=True, exist_ok=True)
        if config.enable_wandb:
            try:
                loggers.add_logger(start_wandb(job_config, own))
            except Exception as error:  # no account, no network: nothing that should end a run
                logger.error(f"W&B does not log this run: {error}")
        if config.enable_tensorboard:
            loggers.add_logger(TensorBoardLogger(own / config.save_tb_folder))
    if writes:
        loggers.add_logger(JsonLinesLogger(folder, parallel_dims.world_size))
    return loggers


titan_metrics._build_metric_logger = build_loggers  # what TorchTitan's processor calls


class MetricsProcessor(titan_metrics.MetricsProcessor):
    """TorchTitan's, with the log files and a line of progress. One rank writes: the one that knows the loss."""

    logger: titan_metrics.LoggerContainer
    num_flops_per_token: float

    def __init__(self, job_config, parallel_dims, model_args: DecoderArgs, tag: str | None = None) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.folder = Path(job_config.job.dump_folder)
        loggers = self.logger._loggers
        self.json_lines = next((found for found in loggers if isinstance(found, JsonLinesLogger)), None)
        self._first: tuple[int, float] | None = None  # step and time of this process's first logged step
        self.model_args = model_args
        self.seq_len = job_config.training.seq_len
        self.flops_saved = 0.0  # by layer dropout, of the run so far
        self._interval = [0.0, 0.0]  # dense and saved FLOPs since the last log
        self._layer_dropout: dict[str, float] = {}
        self.extra: dict[str, float] = {}  # what the trainer adds to a step's record
        self.moments: dict[str, float] = {}  # of the step, where they are measured
        self.last: dict[str, float] = {}  # loss and tokens of the last logged step

    def rewind(self, step: int) -> None:
        """Make the logs end at `step`, where training goes on."""
        for found in self.logger._loggers:
            if isinstance(found, JsonLinesLogger | TensorBoardLogger):
                found.rewind(step)

    def lacks_validation(self, step: int) -> bool:
        """Whether this rank writes the logs, and `validation.jsonl` has no record of `step`."""
        if self.json_lines is None:
            return False
        return all(record["step"] != step for record in read_records(self.json_lines.validation.path))

    def count_layer_dropout(self, rates: Tensor, keep: Tensor) -> None:
        """Account for one step's layer dropout: rates (L,), keep (sequences, L) or (sequences, L, 2)."""
        tokens = keep.shape[0] * self.seq_len
        flops = torch.tensor(self.model_args.sublayer_flops(self.seq_len), dtype=torch.float64)  # (L, 2)
        dropped = (~keep).double().mean(0)  # (L,) or (L, 2)
        by_sublayer = dropped if dropped.dim() == 2 else dropped[:, None].expand(-1, 2)
        saved = tokens * (by_sublayer * flops).sum().item()
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
                "flops_saved": self.flops_saved / (dense * sum(self.model_args.layer_flops_shares(self.seq_len))),
            }
            extra_metrics = extra_metrics | {f"layer_dropout/{k}": v for k, v in self._layer_dropout.items()}
            # TorchTitan's TFLOP/s and MFU then count what was executed
            self.num_flops_per_token = dense_per_token * (1 - self._interval[1] / self._interval[0])
            self._interval = [0.0, 0.0]
        if self.json_lines is not None:
            self.json_lines.flops_per_token = dense_per_token
            self.json_lines.extra = self._layer_dropout | self.extra | self.moments
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics | self.moments)
        self.moments = {}
        self.last = {"loss": global_avg_loss, "tokens": extra_metrics["n_tokens_seen"]}
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

    def summarize(self, step: int, seconds: float, checkpoint: str | None) -> None:
        """Print what the run has come to."""
        lines = {"steps": f"{step:,} of {self.job_config.training.steps:,}"}
        if self.last:
            dense = self.last["tokens"] * self.num_flops_per_token
            lines["tokens"] = f"{int(self.last['tokens']):,} at the last logged step"
            lines["loss"] = f"{self.last['loss']:.4f}"
            lines["FLOPs"] = f"{dense - self.flops_saved:.3e} executed"
            if self.flops_saved:
                lines["FLOPs"] += f", {100 * self.flops_saved / dense:.1f} % of {dense:.3e} saved by layer dropout"
        if skipped := self.extra.get("skipped_steps"):
            lines["skipped"] = f"{skipped:,.0f} steps, for a loss or gradient norm that was not finite"
        lines["time"] = f"{timedelta(seconds=round(seconds))}, all starts together"
        lines["checkpoint"] = checkpoint or "none"
        lines["logs"] = str(self.folder)
        logger.info("The run so far:\n" + "\n".join(f"  {name:<11}{value}" for name, value in lines.items()))

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
    losses = [math.nan if r["loss"] is None else r["loss"] for r in records]  # a step that was skipped leaves a gap
    axes.plot([r["step"] for r in records], losses, label="training")
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

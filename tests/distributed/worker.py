"""Runs training cases one after another in one set of ranks, for `harness.run_cases`.

A case is `{"args": [...]}` and, each if wanted, "check_init": true, "masks": file, "batches": file,
"other_masks": true, "same_masks": true, "unrehearsed": true, "no_logits": true, "nonfinite": [what, rank, steps],
"omitted": steps. Its results lie in its dump folder. With "masks" each rank appends the hash of every dropout mask it
draws to `file.RANK`, with "batches" every micro-batch. "same_masks" replaces the dropout masks by one that is the same
in every layout. "nonfinite" makes a loss or gradient infinite or NaN, and an error that ends the run is written to
`error.RANK`; "omitted" leaves out the optimizer's update of these steps; "no_logits" fails where a loss is made from
logits.
"""

import hashlib
import json
import logging
import math
import os
import sys
import time
import types
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from regdrop_titan.config import load_config
from regdrop_titan.models.initialization import canonical_name, initial_value
from regdrop_titan.regularization import dropout, layer_dropout
from regdrop_titan.trainer import NonFiniteError, Trainer

# TorchTitan's rank 0 sleeps two seconds at the end of a run
sys.modules["torchtitan.train"].time = types.SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)

draw_keep = dropout._draw_keep


def check_initial_weights(trainer: Trainer) -> None:
    """Every parameter of this layout, gathered, is the initial value of its name."""
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            expected = initial_value(canonical_name(name), parameter.shape, trainer.model_args)
            assert torch.equal(whole.cpu(), expected), name


def log_masks(trainer: Trainer, path: str) -> None:
    def draw(x, p):
        keep = draw_keep(x, p)
        if not trainer.step:
            return keep  # of the made batch before the first step
        digest = hashlib.sha256(keep.numpy().tobytes()).hexdigest()[:16]
        with open(f"{path}.{os.environ['RANK']}", "a") as file:
            file.write(json.dumps([trainer.step, list(keep.shape), digest]) + "\n")
        return keep

    dropout._draw_keep = draw


def same_masks(trainer: Trainer) -> None:
    """One mask by token and channel for all sequences and layers; each rank takes its tokens of it."""
    S, d = trainer.job_config.training.seq_len, trainer.model_args.dim
    whole = torch.rand(S, d, generator=torch.Generator().manual_seed(0))
    tp_mesh = trainer.parallel_dims.get_optional_mesh("tp")
    rank = 0 if tp_mesh is None else tp_mesh.get_local_rank()
    dropout._draw_keep = lambda x, p: (whole >= p)[rank * x.shape[1] : (rank + 1) * x.shape[1]].expand(x.shape)


def log_batches(trainer: Trainer, path: str) -> None:
    step = trainer.forward_backward_step

    def logged(*, input_dict, **kwargs):
        loss = step(input_dict=input_dict, **kwargs)
        if not trainer.step:
            return loss  # of the made batch before the first step
        with open(f"{path}.{os.environ['RANK']}", "a") as file:
            rows = input_dict["input"].tolist()
            file.write(json.dumps([trainer.step, trainer.micro_batch, trainer.dp_rank, rows]) + "\n")
        return loss

    trainer.forward_backward_step = logged


def inject_nonfinite(trainer: Trainer, what: str, rank: int, steps: list[int]) -> None:
    """In the second micro-batch of `steps`, on one rank: a loss of NaN (and so its gradients), a loss alone, or one
    infinite element of one gradient."""
    step = trainer.forward_backward_step
    cross_entropy = trainer.loss_fn.cross_entropy

    def injected(**kwargs):
        hit = trainer.step in steps and trainer.micro_batch == 0 and int(os.environ["RANK"]) == rank
        trainer.loss_fn.cross_entropy = lambda *a: cross_entropy(*a) * (math.nan if hit and what == "nan" else 1)
        loss = step(**kwargs)
        if hit and what == "loss":
            trainer.losses[-1] = trainer.losses[-1] * math.inf
        if hit and what == "gradient":
            gradient = next(p.grad for part in trainer.model_parts for p in part.parameters() if p.grad.numel())
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = math.inf
        return loss

    trainer.forward_backward_step = injected


def omit_updates(trainer: Trainer, steps: list[int]) -> None:
    step = trainer.optimizers.step
    trainer.optimizers.step = lambda: None if trainer.step in steps else step()


def run(rank: int, cases: list[dict]) -> int:
    """A target of `Ranks`."""
    logging.getLogger().setLevel(logging.ERROR)
    world_size = int(os.environ["WORLD_SIZE"])
    for case in cases:
        trainer = Trainer(load_config(case["args"], world_size, inputs=True))
        dropout._draw_keep = draw_keep
        if case.get("check_init"):
            check_initial_weights(trainer)
        if case.get("masks"):
            log_masks(trainer, case["masks"])
        if case.get("same_masks"):
            same_masks(trainer)
        if case.get("batches"):
            log_batches(trainer, case["batches"])
        if case.get("other_masks") and os.environ["RANK"] == "1":
            sys.modules["regdrop_titan.config.sections"].keep_mask = lambda *a, **k: ~layer_dropout.keep_mask(*a, **k)
        if case.get("unrehearsed"):
            trainer.rehearse = lambda: None
        if case.get("no_logits"):
            trainer.loss_fn.cross_entropy = None
        if case.get("nonfinite"):
            inject_nonfinite(trainer, *case["nonfinite"])
        if case.get("omitted"):
            omit_updates(trainer, case["omitted"])
        try:
            trainer.train()
        except NonFiniteError as error:
            Path(trainer.job_config.job.dump_folder, f"error.{os.environ['RANK']}").write_text(str(error))
        trainer.close()
    torch.distributed.destroy_process_group()
    return 0

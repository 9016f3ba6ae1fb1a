"""TorchTitan's checkpoint manager, made safe: what is resumed from, what is deleted, and what a failed save says.

TorchTitan 0.2.2 takes any folder with a `.metadata` for a checkpoint (`step-99.bak` for step 99, one whose tensor files
are missing or cut), deletes by step number whatever the order of saving and whether anything whole is left, writes over
a whole checkpoint in place, and unpickles `.metadata` with the ordinary unpickler.
"""

import dataclasses
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import AsyncMode
from torchtitan.components.checkpoint import CheckpointManager as TitanCheckpointManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from ..files import free_name
from .huggingface import export_format, format_of, read_config, write_configuration
from .safety import (
    METADATA,
    CheckpointError,
    SaveError,
    causes,
    check_complete,
    load_state,
    read_metadata,
    steps_in,
    survey,
)

DELETING = ".deleting"  # suffix of a folder that retention has given up


class CheckpointManager(TitanCheckpointManager):
    """Takes TorchTitan's arguments; `checkpoint_config` also has `keep_every`."""

    save_future: Future | None
    current: str | None = None  # the folder that this process loaded or saved last

    def __init__(
        self,
        *args: Any,
        checkpoint_config: Any,
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        **kwargs: Any,
    ) -> None:
        # upstream's would take the place of the last checkpoint, and the run could not go on from it
        config = dataclasses.replace(checkpoint_config, last_save_in_hf=False)
        super().__init__(*args, checkpoint_config=config, optimizers=optimizers, lr_schedulers=lr_schedulers, **kwargs)
        self.exports_at_end: bool = checkpoint_config.last_save_in_hf
        self.keep_every: int = checkpoint_config.keep_every
        self.optimizers, self.lr_schedulers = optimizers, lr_schedulers

    # Loading ---------------------------------------------------------------------------------------------------

    def load(self, step: int = -1) -> bool:
        """Load step `step`, or with -1 the newest whole checkpoint of the run's folder, or where it has none the one
        of `checkpoint.initial_load_path`. Returns whether something was loaded, and logs what.

        Raises CheckpointError for a step that is not there, and for files that are damaged or tampered with.
        """
        if not self.enable:
            return False
        # one rank looks, all do the same: a shared file system may not show all of them the same folder
        choice: list[Any] = [self._choose(step) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(choice, src=0)
        if isinstance(choice[0], CheckpointError):
            raise choice[0]
        if choice[0] is None:
            return False
        path, model_only, from_hf = choice[0]
        logger.info(f"Loading {'the model of ' if model_only else ''}{path}")
        configured = [
            {name: value for name, value in group.items() if name != "params"}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        states = self._states_to_load(model_only)
        if model_only:
            states = self._without_new_scaling(states, path, from_hf)
        self.dcp_load(states, path, from_hf=from_hf, from_quantized=False)
        self._restore_configuration(configured)
        self.current = path
        return True

    def _without_new_scaling(self, states: dict[str, Any], path: str, from_hf: bool) -> dict[str, Any]:
        """A model that begins to scale its queries has parameters for it that the weights it starts from have not:
        they keep their initial values."""
        saved = () if from_hf else read_metadata(Path(path)).state_dict_metadata  # no format there has them
        new = [name for name in states if ".scaling." in name and name not in saved]
        if new:
            logger.info(f"{len(new)} parameters of scaled queries are not in {path}: they keep their initial values")
        return {name: value for name, value in states.items() if name not in new}

    def _restore_configuration(self, configured: list[dict[str, Any]]) -> None:
        """A checkpoint holds the optimizer's learning rate, betas and weight decay and the schedule's base rates, and
        loading puts them in place of the configuration's: put those back, at the step that was loaded."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, own in zip(groups, configured, strict=True):
            group.update(own)
        saved = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        for optimizer, scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
            rates = [
                base * factor(scheduler.last_epoch)
                for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates
        now = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        if now != saved:
            logger.info(f"The next step's learning rate is {now:.4g}; by the checkpoint it would have been {saved:.4g}")

    def _choose(self, step: int) -> tuple[str, bool, bool] | CheckpointError | None:
        """What to load, whether only its model, and whether it is a Hugging Face folder."""
        complete, faults = survey(Path(self.folder))
        for other, fault in faults.items():
            if other > max(complete, default=-1) or other == step:
                logger.warning(f"step-{other} is passed over: {fault}")
        if step != -1 and step not in complete:
            return CheckpointError(missing_step(self.folder, step, complete, faults))
        if complete:
            if self.initial_load_path:
                logger.info(f"checkpoint.initial_load_path is not read: {self.folder} has checkpoints of this run")
            chosen = step if step != -1 else complete[-1]
            return self._create_checkpoint_id(chosen), chosen == 0, False
        if self.initial_load_in_hf:
            return self.initial_load_path, True, True  # looked at with the configuration
        if self.initial_load_path:
            try:
                check_complete(Path(self.initial_load_path))
            except CheckpointError as error:
                return CheckpointError(f"checkpoint.initial_load_path: {error}")
            return self.initial_load_path, self.initial_load_model_only, False
        if faults:
            logger.warning(f"{self.folder} has no whole checkpoint: training starts from the beginning")
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf:
            # their tensors are ours under other names: each rank reads its shards in place
            args = self.states["model"].model[0].args
            form = format_of(read_config(Path(checkpoint_id)), Path(checkpoint_id))
            theirs = form.to_theirs(state_dict, args)
            dcp.load(theirs, storage_reader=HuggingFaceStorageReader(checkpoint_id))
        else:
            load_state(state_dict, Path(checkpoint_id))
        if "model" in self.states:
            # as TorchTitan: the model's tensors lie flat in the state, and are handed over by hand
            self.states["model"].load_state_dict(state_dict)

    # Saving ----------------------------------------------------------------------------------------------------

    def save(self, curr_step: int, last_step: bool = False) -> None:
        super().save(curr_step, last_step)
        if last_step and self._should_save(curr_step, last_step):
            self._purge_stale_checkpoints()  # TorchTitan does so after every save but the last
            if self.exports_at_end:
                self._export(curr_step)

    @torch.no_grad()
    def _export(self, step: int) -> None:
        """Write the model as a Hugging Face folder beside the checkpoints, each rank its shards, one of them the files
        that `transformers` reads."""
        args = self.states["model"].model[0].args
        form = export_format(args)
        beside = Path(self.folder).parent / f"hf-step-{step}"
        choice = [free_name(beside, beside.name + ".{n}") if beside.exists() else beside]
        dist.broadcast_object_list(choice, src=0)
        (folder,) = choice
        state = form.to_theirs(self.states["model"].state_dict(), args)
        state = {name: value.to(self.export_dtype) for name, value in state.items()}
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        try:
            dcp.save(state, storage_writer=writer)
        except CheckpointException as error:
            raise self._failed(error) from error
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "sharded")
            write_configuration(args, form, folder, self.export_dtype)
            logger.info(f"The model is in {folder} too, for transformers")

    @torch.no_grad()
    def save_now(self, step: int) -> bool:
        """Save all that a resume needs, whatever the interval and unless that is done. Returns whether it is saved."""
        if not self._should_save(step, last_step=True):
            return False
        self._async_wait()
        path = self._create_checkpoint_id(step)
        if self.current != path:
            self.dcp_save(self._flattened_model_states_sd(), path, AsyncMode.DISABLED, enable_garbage_collection=True)
            self._purge_stale_checkpoints()
        return True

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        self._set_aside(Path(checkpoint_id))
        self.current = checkpoint_id
        try:
            return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        except CheckpointException as error:  # a BaseException
            raise self._failed(error) from error

    def _set_aside(self, checkpoint: Path) -> None:
        """After a roll-back, whole checkpoints of this step and later ones are of a branch that was given up: rename
        them, or a save would write over one in place, and a resume would go on with the other branch."""
        if dist.get_rank() == 0:
            step = int(checkpoint.name.removeprefix("step-"))
            later = [other for other in steps_in(checkpoint.parent) if other >= step]
            for other in later:
                folder = checkpoint.parent / f"step-{other}"
                try:
                    check_complete(folder)
                except CheckpointError:
                    continue  # of a save that was killed: written over, or left as it is
                aside = free_name(folder, folder.name + ".replaced-{n}")
                folder.rename(aside)
                logger.warning(f"{folder} is of a branch that this run rolled back: kept as {aside.name}")
        dist.barrier()

    def raise_failed_save(self) -> None:
        """Raise what made an asynchronous save fail, as soon as it is known. Raises CheckpointError."""
        future = getattr(self, "save_future", None)
        if future is not None and future.done() and (error := future.exception()) is not None:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> SaveError:
        return SaveError(f"{self.current}: could not be saved: {causes(error)}")

    def _async_wait(self) -> None:
        if self.async_mode == AsyncMode.ASYNC and self.save_future is not None:
            error = self.save_future.exception()  # waits
            self.save_future = None
            if error is not None:
                raise self._failed(error) from error
        super()._async_wait()

    # Retention -------------------------------------------------------------------------------------------------

    def _purge_stale_checkpoints(self) -> None:
        """Delete all but the newest `keep_latest_k` whole checkpoints and the multiples of `keep_every`.

        Only whole ones count and are deleted: what an asynchronous save is still writing is neither, and what a kill
        left incomplete stays for its owner to look at. A folder is renamed before it is deleted, so that no half of
        one is ever taken for a checkpoint; what a kill left of that is deleted here the next time.
        """
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        folder = Path(self.folder)
        complete, _ = survey(folder)
        by_time = sorted(complete, key=lambda step: ((folder / f"step-{step}" / METADATA).stat().st_mtime_ns, step))
        kept = {*by_time[-self.keep_latest_k :], *complete[-1:]}
        for step in complete:
            if step not in kept and not (self.keep_every and step % self.keep_every == 0):
                (folder / f"step-{step}").rename(folder / f"step-{step}{DELETING}")
        for path in folder.glob(f"step-*{DELETING}"):
            self.purge_queue.put(str(path))


def missing_step(folder: str | Path, step: int, complete: list[int], faults: dict[int, str]) -> str:
    """Why `checkpoint.load_step` cannot be loaded, and what can."""
    there = ", ".join(map(str, complete)) or "none"
    reason = faults.get(step, "there is no such checkpoint")
    return f"checkpoint.load_step = {step}: {reason}; whole checkpoints in {folder}: {there}"

"""Whether a checkpoint is whole, and reading one without running code from it.

A checkpoint is a folder `step-N` that DCP wrote: files of tensors, and `.metadata`, which names them and is renamed to
its place last, after all are on disk. It is whole if `.metadata` can be read and every file that it names is there
with all of its bytes.

`.metadata` and the small objects beside the tensors are pickles, and DCP reads them with an unpickler that calls
whatever they name. Here only the classes that a checkpoint needs are admitted, so a tampered file is refused.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
_ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # their home in Python 3.13
    "collections": {"OrderedDict"},
}  # fmt: skip


class CheckpointError(Exception):
    """A checkpoint that cannot be read; the message names the folder and what was expected."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written; those before it are untouched."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_torch_value = module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format)
        )
        if not is_torch_value and name not in _ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs: it may be tampered with")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of the checkpoint in `folder`. Raises CheckpointError."""
    try:
        with open(folder / METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {METADATA}, it was not written to its end") from None
    except Exception as error:  # broken pickles raise all kinds
        raise CheckpointError(f"{folder / METADATA}: cannot be read: {error}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{folder / METADATA}: is a {type(metadata).__name__}, not a checkpoint's metadata")
    return metadata


def check_complete(folder: Path) -> Metadata:
    """The metadata of the checkpoint in `folder`, if it is whole. Raises CheckpointError saying what is missing."""
    metadata = read_metadata(folder)
    sizes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sorted(sizes.items()):
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, {METADATA} names it")
        if (actual := file.stat().st_size) < size:
            raise CheckpointError(f"{file}: {actual:,} bytes, {METADATA} names {size:,}")
    return metadata


def steps_in(folder: Path) -> list[int]:
    """The steps N of the folders `step-N` in `folder`, whole or not, ascending; `step-99.bak` is not one."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"step-(0|[1-9]\d*)", child.name) for child in folder.iterdir() if child.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def survey(folder: Path) -> tuple[list[int], dict[int, str]]:
    """The steps whose checkpoints in `folder` are whole, ascending, and why others are not."""
    complete, faults = [], {}
    for step in steps_in(folder):
        try:
            check_complete(folder / f"step-{step}")
            complete.append(step)
        except CheckpointError as error:
            faults[step] = str(error)
    return complete, faults


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """DCP's own would unpickle whatever is there; torch's restricted unpickler reads first, and refuses."""
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            reason = str(error).split("\n")[0]
            raise CheckpointError(f"{name} is not plain data, it may be tampered with: {reason}") from None
        value.seek(0)
        super().load_bytes(read_item, value)


def causes(error: BaseException) -> str:
    """What made a load or save fail: of DCP's exception, the causes of all ranks, each once."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}))
    return f"{type(error).__name__}: {error}"


def load_state(state: dict[str, Any], folder: Path, no_dist: bool = False) -> None:
    """Load the checkpoint in `folder` into `state` in place, on all ranks of the default group.

    Raises CheckpointError where it does not hold what `state` asks for, or is damaged or tampered with.
    """
    try:
        dcp.load(state, storage_reader=_SafeReader(folder), planner=_SafePlanner(), no_dist=no_dist)
    except CheckpointException as error:  # what a rank met in the files; the loss of another rank goes through
        raise CheckpointError(f"{folder}: cannot be loaded: {causes(error)}") from error

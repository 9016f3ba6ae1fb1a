"""The mean of K checkpoints of one run, weight by weight (LG: K = 10 over the last 25 % of training).

Checkpoints are chosen (`select`), opened by their metadata alone and compared (`open_sources`), and only then read:

    m_1 = x_1,    m_k = m_{k-1} - (m_{k-1} - x_k) / k        in fp32, or fp64 where the weights are

In this form equal weights give a difference of +0, and m - (+0) is m bit for bit, -0 included: the mean of K identical
checkpoints is that checkpoint, which a sum over K is not. Rounding to the weights' own type comes once, at the end.

Of DCP checkpoints the mean of one model is held, and of the checkpoint that is being read a few tensors. Hugging Face
folders are averaged tensor by tensor, and no more than one output file is held. Optimizer states are not averaged.
"""

import dataclasses
import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE

from .. import state_passing
from ..config.resume import CONFIG_FILE, flat
from ..files import whole_folder, write_json
from ..models import Decoder, DecoderArgs
from .huggingface import WEIGHTS, export_format, export_huggingface, open_safetensors, read_config
from .loading import model_args_of, run_config
from .safety import CheckpointError, check_complete, load_state, steps_in, survey

SAFETENSORS = WEIGHTS[0]
INDEX = SAFETENSORS + ".index.json"
AVERAGED = "averaged"  # key of config.json; in a Hugging Face folder, whose config.json is theirs, averaged.json
BESIDE_MODEL = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE, state_passing.KEY)  # the model's tensors lie flat
SAME_RUN = ("model_args", "tokenizer", "data")  # of a run's config.json
INCIDENTAL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")  # of theirs
SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
AT_ONCE = 32  # tensors of a DCP checkpoint; each time its metadata are read again
TOLD = 10  # faults of one checkpoint


def select(
    folder: Path, last: int | None = None, share: Fraction | None = None, count: int | None = None
) -> tuple[list[Path], dict[int, str]]:
    """Whole checkpoints of a run, ascending, and why others of it are passed over (by step).

    Args:
        folder: `…/checkpoint`, or the run's folder above it.
        last: the newest so many.
        share: those of the last share of training, step > (1 - share) times the newest step. In (0, 1].
        count: so many of these, the nearest to equal distances up to the newest, which is one of them.

    Raises:
        CheckpointError: there are fewer, or fewer than two.
    """
    if (folder / "checkpoint").is_dir():
        folder = folder / "checkpoint"
    complete, passed_over = survey(folder)
    chosen = complete
    if last is not None:
        chosen = complete[-last:]
    elif share is not None and complete:
        start = (1 - share) * complete[-1]  # exact: 0.1 in binary would let a step in, or keep one out
        chosen = [step for step in complete if step > start]
        if count is not None and count <= len(chosen):
            chosen = _spread(chosen, start, count)
    wanted = last or count or 2
    if len(chosen) < wanted:
        where = f"{folder}: " + (f"in the last {float(share):g} of training " if share is not None else "")
        there = ", ".join(map(str, chosen)) or "none"
        reasons = "".join(f"\n  passed over: {fault}" for fault in passed_over.values())
        raise CheckpointError(f"{where}{wanted} whole checkpoints are needed, the steps there are: {there}{reasons}")
    return [folder / f"step-{step}" for step in chosen], passed_over


def _spread(steps: list[int], start: Fraction, count: int) -> list[int]:
    """`count` different ones of ascending `steps`, near the ends of `count` equal parts of (start, last]. From the last
    down, each time the nearest that leaves enough below; of two as near, the later."""
    chosen: list[int] = []
    end = len(steps)
    for part in range(count, 0, -1):
        target = start + (steps[-1] - start) * part / count
        end = min(range(part - 1, end), key=lambda i: (abs(steps[i] - target), -i))
        chosen.insert(0, steps[end])
    return chosen


# Opening and comparing -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint as its metadata tell it; its tensors are still on disk."""

    folder: Path
    config: dict[str, Any]  # its config.json
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]  # the model's, without optimizer states
    files: dict[str, str] | None = None  # of a Hugging Face folder: the file of each tensor

    @property
    def identity(self) -> dict[str, Any]:
        """The settings in which checkpoints of one run are the same."""
        if self.files is not None:
            return flat({key: value for key, value in self.config.items() if key not in INCIDENTAL})
        same = {key: self.config.get(key) for key in SAME_RUN}
        # a run that was begun by an earlier version lacks later arguments, and computes by their defaults
        same["model_args"] = dataclasses.asdict(DecoderArgs()) | (same["model_args"] or {})
        return flat({"model": {"name": (self.config.get("model") or {}).get("name")}} | same)

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, one after another, each the reader's to change. Raises CheckpointError."""
        if self.files is not None:
            for name in names:
                with open_safetensors(self.folder / self.files[name]) as file:
                    yield name, file.get_tensor(name).clone()  # what it gives is a view of the file
            return
        left = iter(names)
        while part := list(islice(left, AT_ONCE)):
            state = {name: torch.empty(self.tensors[name][0], dtype=self.tensors[name][1]) for name in part}
            load_state(state, self.folder, no_dist=True)
            for name in part:
                yield name, state.pop(name)


def _is_huggingface(folder: Path) -> bool:
    """A run's folder has a config.json too, and `checkpoint` beside it; a folder step-N of a run has none."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "checkpoint").is_dir()


def _open(folder: Path) -> Source:
    """Raises CheckpointError where it is missing or incomplete."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if _is_huggingface(folder):
        return _open_huggingface(folder)
    inner = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    if steps_in(inner):
        raise CheckpointError(f"{folder}: is not one checkpoint: name folders step-N, or say --last or --share")
    stored = check_complete(folder).state_dict_metadata
    tensors = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and name.split(".")[0] not in BESIDE_MODEL
    }
    return Source(folder, run_config(folder), tensors)


def _open_huggingface(folder: Path) -> Source:
    config, index = read_config(folder), folder / INDEX
    listed: dict[str, str] = {}
    if (folder / SAFETENSORS).exists():
        parts = [SAFETENSORS]
    elif index.exists():
        try:
            listed = json.loads(index.read_text())["weight_map"]
            parts = sorted(set(listed.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: is not an index of weights: {error!r}") from None
        if strange := [part for part in parts if part != Path(part).name]:  # the output's parts get the same names
            raise CheckpointError(f"{index}: {strange[0]!r} is not a file's name")
    else:
        raise CheckpointError(f"{folder}: has no weights ({SAFETENSORS}, or {INDEX} and its files)")
    tensors, files, faults = {}, {}, []
    for part in parts:
        try:
            with open_safetensors(folder / part) as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    tensor = file.get_tensor(name)  # a view: nothing is read
                    tensors[name], files[name] = (tuple(tensor.shape), tensor.dtype), part
        except CheckpointError as error:
            faults.append(str(error))
    if listed and not faults:
        faults += [f"{folder / part}: {name}: missing, the index names it" for name, part in listed.items()
                   if files.get(name) != part]  # fmt: skip
        faults += [f"{folder / files[name]}: {name}: unexpected, not in the index" for name in files.keys() - listed]
    if faults:
        raise CheckpointError("\n".join(_told(faults)))
    return Source(folder, config, tensors, files)


def _told(faults: list[str]) -> list[str]:
    return faults[:TOLD] + ([f"and {len(faults) - TOLD} more"] if len(faults) > TOLD else [])


def open_sources(folders: list[Path]) -> tuple[list[Source], list[str]]:
    """The checkpoints of `folders`, and all that keeps them from being averaged: missing, incomplete or damaged ones,
    and which differs from the others, or from its own config.json, in what."""
    faults = [f"{folder}: is named twice" for folder, n in Counter(f.resolve() for f in folders).items() if n > 1]
    if len(folders) < 2:
        faults.append(f"{folders[0]}: is the only one: a mean needs two checkpoints at the least")
    opened, sound = [], []
    for folder in folders:
        try:
            source = _open(folder)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        opened.append(source)
        unfit = _told(_unlike_its_config(source)) if source.files is None else []
        faults += [f"{folder}: {fault}" for fault in unfit]
        sound += [] if unfit else [source]
    if len({source.files is None for source in opened}) > 1:
        theirs = ", ".join(str(source.folder) for source in opened if source.files is not None)
        return opened, [*faults, f"{theirs}: in Hugging Face's format, the others are checkpoints of this package"]
    settings = [(source.folder, source.identity) for source in opened]
    faults += _odd_ones_out(settings, lambda key, value: f"config.json has {key} = {value!r}")
    tensors = [(source.folder, source.tensors) for source in sound]
    faults += _odd_ones_out(tensors, lambda name, held: f"{name} is {_described(held)}")
    return opened, faults


def _described(held: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "missing" if held is None else f"{held[0]} {str(held[1]).removeprefix('torch.')}"


def _unlike_its_config(source: Source) -> list[str]:
    """In which tensors a checkpoint of ours differs from the model that its run's config.json describes."""
    try:
        args = model_args_of(source.folder)
    except CheckpointError as error:
        return [str(error)]
    with torch.device("meta"):
        wanted = Decoder(args).state_dict()
    faults = [f"{name}: missing" for name in wanted if name not in source.tensors]
    for name, (shape, _) in source.tensors.items():
        if name not in wanted:
            faults.append(f"{name}: unexpected")
        elif shape != tuple(wanted[name].shape):
            faults.append(f"{name}: is {shape}, config.json says {tuple(wanted[name].shape)}")
    return faults


def _odd_ones_out(tables: list[tuple[Path, dict[str, Any]]], told: Callable[[str, Any], str]) -> list[str]:
    """Which of the tables (of a folder each) differ from most of them, and in what."""
    by_folder: dict[Path, list[str]] = {}
    for key in dict.fromkeys(key for _, table in tables for key in table):
        values = [(folder, table.get(key)) for folder, table in tables]
        most, n = Counter(repr(value) for _, value in values).most_common(1)[0]
        usual = next((folder, value) for folder, value in values if repr(value) == most)
        for folder, value in values:
            if repr(value) != most:
                fault = f"{folder}: {told(key, value)}; {told(key, usual[1])} in {n} of {len(values)}, as {usual[0]}"
                by_folder.setdefault(folder, []).append(fault)
    return [fault for faults in by_folder.values() for fault in _told(faults)]


# Averaging -----------------------------------------------------------------------------------------------------------


def running_mean(
    sources: list[Source], names: Iterable[str], faults: list[str], advance: Callable[[int], object]
) -> dict[str, Tensor]:
    """The mean of these tensors over `sources`, in fp32 (fp64 of fp64). Integers, booleans and 8-bit floats have no
    mean: they must be equal, and are handed on.

    Args:
        faults: weights that are not finite and integers that differ are added here.
        advance: called with the bytes that were read, tensor by tensor.
    """
    names = list(names)
    mean: dict[str, Tensor] = {}
    for k, source in enumerate(sources, 1):
        for name, x in source.read(names):
            advance(x.nbytes)
            if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
                first = mean.setdefault(name, x)
                if not torch.equal(first.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8)):
                    faults.append(f"{source.folder}: {name}: {x.dtype} values differ from those of {sources[0].folder}")
                continue
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if not x.sum().isfinite() and not x.isfinite().all():  # a sum is one pass; it may also overflow
                faults.append(f"{source.folder}: {name}: has values that are not finite")
            if k == 1:
                mean[name] = x
            else:
                mean[name].sub_(torch.sub(mean[name], x, out=x).div_(k))
    return mean


def average_checkpoints(
    folders: list[Path],
    output: Path,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Write the mean of the checkpoints in `folders`, of one run, whole or not at all.

    Args:
        folders: `…/checkpoint/step-N`, or Hugging Face folders with safetensors; two or more, in order of training:
            the last one's configuration and tokenizer go with the mean.
        output: new or empty. Becomes a run's folder with `config.json` and `checkpoint/step-0` (0, since there is no
            optimizer state to go on from), or a Hugging Face folder. What was averaged is in `config.json` under
            "averaged", or in `averaged.json`.
        format: "dcp" or "hf"; None: that of the inputs. "dcp" of Hugging Face folders is refused.
        dtype: of the output's weights; None: each tensor's own.
        progress: called with the bytes read so far and the bytes to read.

    Raises:
        CheckpointError: with all that is wrong, one line each; nothing is written.
    """
    sources, faults = open_sources(folders)
    theirs = bool(sources) and sources[-1].files is not None
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        faults.append(f"{output}: is not empty" if output.is_dir() else f"{output}: is a file")
    if theirs and format == "dcp":
        faults.append("Hugging Face folders are averaged into one: bring that in by scripts/import_hf.py")
    if sources and not theirs and format == "hf":
        try:
            export_format(model_args_of(sources[-1].folder))
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError("\n".join(faults))
    done, total = 0, sum(source.size for source in sources)

    def advance(n: int) -> None:
        nonlocal done
        done += n
        progress(done, total)

    write = _write_huggingface if theirs else _write_exported if format == "hf" else _write_dcp
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # what no_dist asks for
    with whole_folder(output) as folder:
        write(sources, folder, dtype, advance)


def _stored(sources: list[Source], dtype: torch.dtype | None, advance: Callable[[int], object]) -> dict[str, Tensor]:
    """The mean of all tensors in the type that is written. Raises CheckpointError."""
    faults: list[str] = []
    tensors = sources[0].tensors
    mean = running_mean(sources, tensors, faults, advance)
    if faults:
        raise CheckpointError("\n".join(_told(faults)))
    for name, tensor in mean.items():  # one at a time: its fp32 is freed
        mean[name] = _rounded(tensor, tensors[name][1], dtype)
    return mean


def _rounded(tensor: Tensor, own: torch.dtype, dtype: torch.dtype | None) -> Tensor:
    averaged = own.is_floating_point and own.itemsize > 1
    return tensor.to(dtype or own) if averaged else tensor


def _averaged(sources: list[Source]) -> list[dict[str, Any]]:
    """What the mean is of, for its reader."""
    steps = [re.fullmatch(r"step-(\d+)", source.folder.name) for source in sources]
    return [
        {"checkpoint": str(source.folder)} | ({"step": int(step[1])} if step else {})
        for source, step in zip(sources, steps, strict=True)
    ]


def _write_dcp(
    sources: list[Source], folder: Path, dtype: torch.dtype | None, advance: Callable[[int], object]
) -> None:
    dcp.save(_stored(sources, dtype, advance), checkpoint_id=str(folder / "checkpoint/step-0"), no_dist=True)
    write_json(folder / CONFIG_FILE, sources[-1].config | {AVERAGED: _averaged(sources)})


def _write_exported(
    sources: list[Source], folder: Path, dtype: torch.dtype | None, advance: Callable[[int], object]
) -> None:
    state = _stored(sources, dtype, advance)
    with torch.device("meta"):
        model = Decoder(model_args_of(sources[-1].folder))
    model.load_state_dict(state, assign=True)  # the model is the mean, not a copy
    export_huggingface(model, folder, dtype or state["tok_embeddings.weight"].dtype)
    write_json(folder / f"{AVERAGED}.json", _averaged(sources))


def _write_huggingface(
    sources: list[Source], folder: Path, dtype: torch.dtype | None, advance: Callable[[int], object]
) -> None:
    """The same files as the last folder's, each made tensor by tensor."""
    last, faults, size = sources[-1], list[str](), 0
    assert last.files is not None
    for part in sorted(set(last.files.values())):
        weights = {}
        for name in (name for name, file in last.files.items() if file == part):
            mean = running_mean(sources, [name], faults, advance)[name]
            weights[name] = _rounded(mean, last.tensors[name][1], dtype)
        size += sum(tensor.nbytes for tensor in weights.values())
        save_file(weights, folder / part, metadata={"format": "pt"})
    if faults:
        raise CheckpointError("\n".join(_told(faults)))
    for file in last.folder.iterdir():
        if file.suffix in SMALL_FILES and file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    if not (folder / SAFETENSORS).exists():
        index = json.loads((last.folder / INDEX).read_text())
        write_json(folder / INDEX, index | {"metadata": (index.get("metadata") or {}) | {"total_size": size}})
    if dtype is not None:
        named = {key: str(dtype).removeprefix("torch.") for key in ("torch_dtype", "dtype") if key in last.config}
        write_json(folder / CONFIG_FILE, last.config | named)
    write_json(folder / f"{AVERAGED}.json", _averaged(sources))

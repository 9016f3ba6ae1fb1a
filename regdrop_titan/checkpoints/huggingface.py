"""Weights from and to Hugging Face folders: `Mamba2ForCausalLM`, `SmolLM3ForCausalLM`, `LlamaForCausalLM`, other
attention models with a modelling file of their own, and in only the original state-spaces format of Mamba2. `formats`
has the names.

Weights are read from safetensors, `.bin` files by torch's unpickler of plain tensors alone: reading runs no code.
"""

import dataclasses
import importlib.util
import json
import pickle
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config.resume import CONFIG_FILE
from ..files import write_json
from ..models import Decoder, DecoderArgs
from .formats import FORMATS, LLAMA, MAMBA2, REGDROP, SMOLLM3, Format, Tensors
from .safety import CheckpointError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHECK_LENGTH = 128  # tokens
CHECK_TOLERANCE = 1e-4  # of logits, both in fp32


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a Hugging Face folder. Raises CheckpointError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no config.json (expected a Hugging Face folder)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: unreadable: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'}: holds no settings")
    return config


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing") from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{file}: holds more than tensors, it may be tampered with: {reason}") from None
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file}: unreadable: {error}") from None


def weight_files(folder: Path) -> list[Path]:
    """The file with the weights, or the parts that an index names. Raises CheckpointError where there is neither."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return [folder / name]
        if index.exists():
            return [folder / part for part in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    raise CheckpointError(f"{folder}: has no weights ({' or '.join(WEIGHTS)}, or their index)")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by their names. Raises CheckpointError."""
    return {key: tensor for file in weight_files(folder) for key, tensor in _read_file(file).items()}


def open_safetensors(file: Path) -> Any:
    """A file of tensors, whose header alone is read. Raises CheckpointError."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: unreadable: {error}") from None


def read_headers(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder of safetensors without their values, on the meta device. Raises CheckpointError."""
    found = {}
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{file}: only safetensors can be read in parts; use scripts/import_hf.py")
        with open_safetensors(file) as part:
            for name in part.keys():  # noqa: SIM118, it is no dict
                header = part.get_slice(name)
                dtype = DTYPES.get(header.get_dtype(), torch.uint8)
                found[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
    return found


def check_readable_in_parts(folder: Path, args: DecoderArgs) -> Format:
    """The format of a folder whose weights a model of `args` reads in place, each rank its shards.

    Raises CheckpointError for another model, by its configuration and its tensors' names and shapes; the window may be
    another one, and YaRN may be new.
    """
    config = read_config(folder)
    form = format_of(config, folder)
    if not form.renames:
        raise CheckpointError(f"{folder}: this format cannot be read in parts; use scripts/import_hf.py")
    theirs = form.args(config, folder)
    faults = [
        f"{name} = {getattr(args, name)!r}, of the folder's model {getattr(theirs, name)!r}"
        for name in ("layer_kinds", "norm_eps", "rope_theta", "tied_embeddings", "n_heads", "n_kv_heads")
        if getattr(args, name) != getattr(theirs, name)
    ]
    if theirs.yarn not in (None, args.yarn):
        faults.append(f"rope scaling is {args.yarn}, of the folder's model {theirs.yarn}")
    if faults:
        raise CheckpointError(f"{folder}: is of another model: {'; '.join(faults)}")
    # what scales queries begins afresh, these formats have no place for it
    check_tensors(read_headers(folder), dataclasses.replace(args, scaling="none"), form, folder)
    return form


def format_of(config: dict[str, Any], where: Path) -> Format:
    for found in FORMATS:
        if found.reads(config):
            return found
    raise CheckpointError(
        f"{where}: model_type {config.get('model_type')!r}, expected mamba2, smollm3, llama, regdrop, or the "
        "state-spaces format"
    )


def check_tensors(weights: Tensors, args: DecoderArgs, form: Format, where: Path) -> None:
    """Raise CheckpointError naming every tensor that is missing, unexpected, ill-shaped or quantized; a tied head need
    not be there."""
    with torch.device("meta"):
        wanted = form.to_theirs(Decoder(args).state_dict(), args)
    head = {"lm_head.weight": torch.empty(args.vocab_size, args.dim, device="meta")} if args.tied_embeddings else {}
    faults = [f"{name}: missing" for name in wanted if name not in weights]
    wanted |= head
    faults += [f"{name}: unexpected" for name in weights if name not in wanted]
    faults += [
        f"{name}: is {tuple(weights[name].shape)}, the configuration says {tuple(w.shape)}"
        for name, w in wanted.items()
        if name in weights and weights[name].shape != w.shape
    ]
    faults += [
        f"{name}: is {w.dtype}, quantized weights are not supported"
        for name, w in weights.items()
        if w.dtype not in DTYPES.values()
    ]
    if faults:
        more = [f"and {len(faults) - 10} more"] if len(faults) > 10 else []
        raise CheckpointError(f"{where}: the weights do not fit:\n  " + "\n  ".join(faults[:10] + more))


def from_huggingface(weights: Tensors, args: DecoderArgs, form: Format, where: Path) -> Tensors:
    """Our state of their tensors, fp32. Raises CheckpointError for tensors that do not fit."""
    weights = {name.replace(*form.older) if form.older[0] else name: w for name, w in weights.items()}
    check_tensors(weights, args, form, where)
    if args.tied_embeddings:
        weights.setdefault("lm_head.weight", weights[form.embedding])
    weights = {name: tensor.float() for name, tensor in weights.items()}
    if args.tied_embeddings and not torch.equal(weights["lm_head.weight"], weights[form.embedding]):
        raise CheckpointError(f"{where}: the configuration ties head and embedding, the weights differ")
    return form.to_ours(weights, args)


def export_format(args: DecoderArgs) -> Format:
    """The format that a model of these arguments is written in: the first that has a place for all of it. Raises
    CheckpointError where there is none."""
    kinds = set(args.layer_kinds)
    if "mamba" in kinds and len(kinds) > 1:
        raise CheckpointError(f"hybrid stacks have no format there, this one is {args.layers!r}")
    fault = None
    for form in (MAMBA2,) if kinds == {"mamba"} else (LLAMA, SMOLLM3, REGDROP):
        fault = form.fault(args)
        if fault is None:
            return form
    raise CheckpointError(f"the format has no place for {fault}")


def export_huggingface(
    model: Decoder,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    shard_size: str | int = "5GB",
    exit_layers: Sequence[int] = (),
) -> None:
    """Write `model` as a folder that `transformers` loads, which must be new or empty: weights in files of at most
    `shard_size`, with their index, `config.json`, `generation_config.json`, and the modelling file where transformers
    has no class for it. `exit_layers`: depths that stand in `config.json`, at which the model may stop
    (`assistant_early_exit` of transformers' `generate`). Raises CheckpointError."""
    args = model.args
    form = export_format(args)
    if fault := fault_of_exits(exit_layers, args, form):
        raise CheckpointError(fault)
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(dtype).contiguous()
        for name, tensor in form.to_theirs(model.state_dict(), args).items()
    }
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_size
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{WEIGHTS[0]}.index.json", index)
    write_configuration(args, form, folder, dtype, exit_layers)


def fault_of_exits(exit_layers: Sequence[int], args: DecoderArgs, form: Format) -> str | None:
    """Why an export cannot stop at these depths."""
    if exit_layers and form is MAMBA2:
        return "exit layers: transformers' Mamba2ForCausalLM always runs all of its layers"
    if wrong := [layer for layer in exit_layers if not 0 < layer < args.n_layers]:
        return f"exit layers {' '.join(map(str, wrong))}: must be in 1 ... {args.n_layers - 1}"
    return None


def write_configuration(
    args: DecoderArgs, form: Format, folder: Path, dtype: torch.dtype, exit_layers: Sequence[int] = ()
) -> None:
    """What lies beside the weights: `config.json`, `generation_config.json`, and the modelling file if there is one."""
    if form.code is not None:
        shutil.copyfile(form.code, folder / form.code.name)
    config = form.config(args, dtype)
    if exit_layers:
        config["exit_layers"] = sorted(set(exit_layers))
    write_json(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})


def check_transformers(what: str) -> None:
    """Raise CheckpointError where `what` cannot be had for want of transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(f"{what} needs transformers, which is not installed (pip install 'transformers>=5')")


@torch.no_grad()
def check_export(model: Decoder, folder: Path, dtype: torch.dtype) -> float:
    """The largest difference between the fp32 logits of `folder`, an export of `model` in `dtype`, as `transformers`
    loads it, and of `model`, whose weights are rounded to `dtype` here. Runs the modelling file of the folder."""
    from transformers import AutoModelForCausalLM  # takes seconds, and only tests install it

    model = model.to(dtype).float().eval()
    args = model.args
    tokens = torch.randint(args.vocab_size, (2, CHECK_LENGTH), generator=torch.Generator().manual_seed(0))
    # of one document, which is all that the other side knows
    tokens = torch.where(tokens == args.eos_id, (args.eos_id + 1) % args.vocab_size, tokens)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    return (theirs(tokens).logits - model(tokens)).abs().max().item()


def read_args(folder: Path) -> tuple[DecoderArgs, Format]:
    """Our arguments of the model in a Hugging Face folder, and its format. Raises CheckpointError."""
    config = read_config(folder)
    form = format_of(config, folder)
    args = form.args(config, folder)
    eos = config.get("eos_token_id")
    args.eos_id = eos if isinstance(eos, int) else 0
    return args, form


def read_context(folder: Path, args: DecoderArgs) -> int | None:
    """Tokens that the model of a folder, `args`, was trained on: what YaRN begins with, else
    `max_position_embeddings`; None where its configuration does not say, as Mamba2's. Raises CheckpointError."""
    return args.rope_original_context or read_config(folder).get("max_position_embeddings")


def load_huggingface(folder: Path, args: DecoderArgs | None = None) -> Decoder:
    """The model of a Hugging Face folder as ours, on the CPU, in evaluation mode, fp32.

    `args`: where it shall compute otherwise with the same weights. None: the folder's. Raises CheckpointError.
    """
    found, form = read_args(folder)
    model = Decoder(found if args is None else args)
    model.load_state_dict(from_huggingface(read_weights(folder), model.args, form, folder))
    return model.eval()


def import_huggingface(source: Path, folder: Path) -> DecoderArgs:
    """Write the weights of a Hugging Face folder as `FOLDER/checkpoint/step-0` and `FOLDER/config.json`, from which
    `checkpoint.initial_load_path` and every script read. Raises CheckpointError; `folder` must be new or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty")
    args, form = read_args(source)
    state = from_huggingface(read_weights(source), args, form, source)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # what no_dist asks for
    dcp.save(state, checkpoint_id=str(folder / "checkpoint/step-0"), no_dist=True)
    ours = {"model": {"name": form.family, "flavor": None}, "model_args": dataclasses.asdict(args), "tokenizer": None}
    write_json(folder / CONFIG_FILE, ours)
    return args

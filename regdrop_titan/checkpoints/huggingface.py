"""Mamba2 weights from and to Hugging Face folders: `Mamba2ForCausalLM`, and in only the original state-spaces format.

    ours, of layer i                      theirs
    layers.i.mamba.norm.weight            backbone.layers.i.norm.weight
    ...inner.in_proj.{z,x,bc,dt}.weight   ...mixer.in_proj.weight, rows [z | x | B | C | dt]
    ...inner.conv_{x,bc}.{weight,bias}    ...mixer.conv1d.{weight,bias}, channels [x | B | C], weight (channels, 1, 4)
    ...inner.ssm.{A_log,dt_bias,D}        ...mixer.{A_log,dt_bias,D}
    ...inner.{norm,out_proj}.weight       ...mixer.{norm,out_proj}.weight
    tok_embeddings, norm, output          backbone.embeddings (theirs: backbone.embedding), backbone.norm_f, lm_head

Weights are read from safetensors, `.bin` files by torch's unpickler of plain tensors alone: reading runs no code.
"""

import dataclasses
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config.resume import CONFIG_FILE
from ..files import write_json
from ..models import Decoder, DecoderArgs, flavor_args
from .safety import CheckpointError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no config.json (expected a Hugging Face folder)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: unreadable: {error}") from None


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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by their names: one file, or the parts that an index names. Raises CheckpointError."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return _read_file(folder / name)
        if index.exists():
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return {key: tensor for part in parts for key, tensor in _read_file(folder / part).items()}
    raise CheckpointError(f"{folder}: has no weights ({' or '.join(WEIGHTS)}, or their index)")


def args_from_config(config: dict[str, Any], where: Path) -> DecoderArgs:
    """Our arguments of a `Mamba2ForCausalLM` or state-spaces configuration. Raises CheckpointError for what they have
    and we do not."""
    if "ssm_cfg" in config:
        ssm = config["ssm_cfg"] or {}
        padding = config.get("pad_vocab_size_multiple", 1)
        theirs = {
            "dim": config["d_model"], "n_layers": config["n_layer"],
            "vocab_size": -(-config["vocab_size"] // padding) * padding,
            "tied_embeddings": config.get("tie_embeddings", True), "expand": ssm.get("expand", 2),
            "ssm_head_dim": ssm.get("headdim", 64), "state_size": ssm.get("d_state", 128),
            "n_groups": ssm.get("ngroups", 1), "conv_width": ssm.get("d_conv", 4),
            "chunk_size": ssm.get("chunk_size", 256),
        }  # fmt: skip
        refused = {
            "ssm_cfg.layer": ssm.get("layer", "Mamba1") != "Mamba2", "d_intermediate": config.get("d_intermediate", 0),
            "attn_layer_idx": config.get("attn_layer_idx"), "rms_norm": not config.get("rms_norm", True),
        }  # fmt: skip
    elif config.get("model_type") == "mamba2":
        theirs = {
            "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "vocab_size": config["vocab_size"],
            "tied_embeddings": config.get("tie_word_embeddings", False), "expand": config.get("expand", 2),
            "ssm_head_dim": config["head_dim"], "state_size": config["state_size"],
            "n_groups": config.get("n_groups", 8), "conv_width": config["conv_kernel"],
            "chunk_size": config.get("chunk_size", 256), "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        }  # fmt: skip
        # transformers writes infinity as {"__float__": "Infinity"}
        limit = [t["__float__"] if isinstance(t, dict) else t for t in config.get("time_step_limit") or (0, "inf")]
        refused = {
            "hidden_act": config.get("hidden_act", "silu") != "silu", "use_bias": config.get("use_bias", False),
            "use_conv_bias": not config.get("use_conv_bias", True), "rms_norm": not config.get("rms_norm", True),
            "time_step_limit": [float(t) for t in limit] != [0.0, math.inf],
        }  # fmt: skip
    else:
        raise CheckpointError(
            f"{where}: model_type {config.get('model_type')!r}, expected mamba2, or the state-spaces format"
        )
    if wrong := [key for key, bad in refused.items() if bad]:
        raise CheckpointError(f"{where}: not supported: {', '.join(wrong)}")
    args = flavor_args("mamba2", "debug", **theirs)
    if faults := args.faults():
        raise CheckpointError(f"{where}: {'; '.join(faults)}")
    return args


def from_huggingface(weights: dict[str, Tensor], args: DecoderArgs, where: Path) -> dict[str, Tensor]:
    """Our state of their tensors, fp32. Raises CheckpointError naming every missing, unexpected or ill-shaped one."""
    weights = {name.replace("backbone.embedding.", "backbone.embeddings."): w for name, w in weights.items()}
    if args.tied_embeddings:
        weights.setdefault("lm_head.weight", weights.get("backbone.embeddings.weight", torch.empty(0)))
    with torch.device("meta"):
        wanted = to_huggingface(Decoder(args).state_dict(), args) | {
            "lm_head.weight": torch.empty(args.vocab_size, args.dim)
        }
    faults = [f"{name}: missing" for name in wanted if name not in weights]
    faults += [f"{name}: unexpected" for name in weights if name not in wanted]
    faults += [
        f"{name}: is {tuple(weights[name].shape)}, the configuration says {tuple(w.shape)}"
        for name, w in wanted.items()
        if name in weights and weights[name].shape != w.shape
    ]
    if faults:
        more = [f"and {len(faults) - 10} more"] if len(faults) > 10 else []
        raise CheckpointError(f"{where}: the weights do not fit:\n  " + "\n  ".join(faults[:10] + more))
    weights = {name: tensor.float() for name, tensor in weights.items()}
    if args.tied_embeddings and not torch.equal(weights["lm_head.weight"], weights["backbone.embeddings.weight"]):
        raise CheckpointError(f"{where}: the configuration ties head and embedding, the weights differ")
    state = {
        "tok_embeddings.weight": weights["backbone.embeddings.weight"],
        "norm.weight": weights["backbone.norm_f.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    bc = 2 * args.n_groups * args.state_size
    for i in range(args.n_layers):
        ours, theirs = f"layers.{i}.mamba.inner.", f"backbone.layers.{i}.mixer."
        state[f"layers.{i}.mamba.norm.weight"] = weights[f"backbone.layers.{i}.norm.weight"]
        rows = weights[theirs + "in_proj.weight"].split([args.d_inner, args.d_inner, bc, args.ssm_heads])
        state |= {f"{ours}in_proj.{part}.weight": t for part, t in zip(("z", "x", "bc", "dt"), rows, strict=True)}
        for name in ("weight", "bias"):
            channels = weights[f"{theirs}conv1d.{name}"].split([args.d_inner, bc])
            state |= {
                f"{ours}conv_{part}.{name}": t.squeeze(1) if name == "weight" else t
                for part, t in zip(("x", "bc"), channels, strict=True)
            }
        state |= {f"{ours}ssm.{name}": weights[theirs + name] for name in ("A_log", "dt_bias", "D")}
        state |= {f"{ours}{name}.weight": weights[f"{theirs}{name}.weight"] for name in ("norm", "out_proj")}
    return state


def to_huggingface(state: dict[str, Tensor], args: DecoderArgs) -> dict[str, Tensor]:
    """The tensors of a `Mamba2ForCausalLM`; a tied head is left out, as they do."""
    weights = {
        "backbone.embeddings.weight": state["tok_embeddings.weight"],
        "backbone.norm_f.weight": state["norm.weight"],
    }
    if not args.tied_embeddings:
        weights["lm_head.weight"] = state["output.weight"]
    for i in range(args.n_layers):
        ours, theirs = f"layers.{i}.mamba.inner.", f"backbone.layers.{i}.mixer."
        weights[f"backbone.layers.{i}.norm.weight"] = state[f"layers.{i}.mamba.norm.weight"]
        weights[theirs + "in_proj.weight"] = torch.cat(
            [state[f"{ours}in_proj.{part}.weight"] for part in ("z", "x", "bc", "dt")]
        )
        conv = [torch.cat([state[f"{ours}conv_{part}.{name}"] for part in ("x", "bc")]) for name in ("weight", "bias")]
        weights |= {theirs + "conv1d.weight": conv[0][:, None], theirs + "conv1d.bias": conv[1]}
        weights |= {theirs + name: state[f"{ours}ssm.{name}"] for name in ("A_log", "dt_bias", "D")}
        weights |= {f"{theirs}{name}.weight": state[f"{ours}{name}.weight"] for name in ("norm", "out_proj")}
    return weights


def config_to_huggingface(args: DecoderArgs, dtype: torch.dtype) -> dict[str, Any]:
    """Every field that our model fixes is written, whatever their default is."""
    return {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers, "vocab_size": args.vocab_size, "num_heads": args.ssm_heads,
        "head_dim": args.ssm_head_dim, "state_size": args.state_size, "n_groups": args.n_groups, "expand": args.expand,
        "conv_kernel": args.conv_width, "chunk_size": args.chunk_size, "layer_norm_epsilon": args.norm_eps,
        "hidden_act": "silu", "use_bias": False, "use_conv_bias": True, "rms_norm": True, "norm_before_gate": False,
        "residual_in_fp32": True, "tie_word_embeddings": args.tied_embeddings, "bos_token_id": args.eos_id,
        "eos_token_id": args.eos_id, "pad_token_id": args.eos_id, "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def export_huggingface(model: Decoder, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `model` as a `Mamba2ForCausalLM` folder, which must be new or empty. Raises CheckpointError."""
    args = model.args
    if set(args.layer_kinds) != {"mamba"}:
        raise CheckpointError(f"only stacks of Mamba2 layers can be exported, this one is {args.layers!r}")
    if args.norm != "rmsnorm":
        raise CheckpointError(f"the format has no place for norm = {args.norm!r}")
    if (args.width_multiplier, args.depth_multiplier) != (1, 1):
        raise CheckpointError(
            f"the format has no place for the multipliers of {args.parametrization}: m_d = {args.width_multiplier:g}, "
            f"m_L = {args.depth_multiplier:g}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(dtype).contiguous()
        for name, tensor in to_huggingface(model.state_dict(), args).items()
    }
    save_file(weights, folder / WEIGHTS[0], metadata={"format": "pt"})
    write_json(folder / "config.json", config_to_huggingface(args, dtype))


def import_huggingface(source: Path, folder: Path) -> DecoderArgs:
    """Write the weights of a Hugging Face folder as `FOLDER/checkpoint/step-0` and `FOLDER/config.json`, from which
    `checkpoint.initial_load_path` and every script read. Raises CheckpointError; `folder` must be new or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty")
    config = _read_config(source)
    args = args_from_config(config, source)
    eos = config.get("eos_token_id")
    args.eos_id = eos if isinstance(eos, int) else 0
    state = from_huggingface(read_weights(source), args, source)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # what no_dist asks for
    dcp.save(state, checkpoint_id=str(folder / "checkpoint/step-0"), no_dist=True)
    ours = {"model": {"name": "mamba2", "flavor": None}, "model_args": dataclasses.asdict(args), "tokenizer": None}
    write_json(folder / CONFIG_FILE, ours)
    return args

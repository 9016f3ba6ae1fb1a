"""`Mamba2ForCausalLM`, and in only the original state-spaces format.

ours, of layer i                      theirs
layers.i.mamba.norm.weight            backbone.layers.i.norm.weight
...inner.in_proj.{z,x,bc,dt}.weight   ...mixer.in_proj.weight, rows [z | x | B | C | dt]
...inner.conv_{x,bc}.{weight,bias}    ...mixer.conv1d.{weight,bias}, channels [x | B | C], weight (channels, 1, 4)
...inner.ssm.{A_log,dt_bias,D}        ...mixer.{A_log,dt_bias,D}
...inner.{norm,out_proj}.weight       ...mixer.{norm,out_proj}.weight
tok_embeddings, norm, output          backbone.embeddings (theirs: backbone.embedding), backbone.norm_f, lm_head
"""

import math
from pathlib import Path
from typing import Any

import torch

from ...models import DecoderArgs, flavor_args
from .base import Format, Tensors, check_args, fault_of_factors, ids_and_dtype, refuse


def _args(config: dict[str, Any], where: Path) -> DecoderArgs:
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
    else:
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
    refuse(refused, where)
    return check_args(flavor_args("mamba2", "debug", **theirs), where)


def _to_ours(weights: Tensors, args: DecoderArgs) -> Tensors:
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


def _to_theirs(state: Tensors, args: DecoderArgs) -> Tensors:
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


def _config(args: DecoderArgs, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers, "vocab_size": args.vocab_size, "num_heads": args.ssm_heads,
        "head_dim": args.ssm_head_dim, "state_size": args.state_size, "n_groups": args.n_groups, "expand": args.expand,
        "conv_kernel": args.conv_width, "chunk_size": args.chunk_size, "layer_norm_epsilon": args.norm_eps,
        "hidden_act": "silu", "use_bias": False, "use_conv_bias": True, "rms_norm": True, "norm_before_gate": False,
        "residual_in_fp32": True, "tie_word_embeddings": args.tied_embeddings, **ids_and_dtype(args, dtype),
    }  # fmt: skip


def _fault(args: DecoderArgs) -> str | None:
    return f"norm = {args.norm!r}" if args.norm != "rmsnorm" else fault_of_factors(args)


MAMBA2 = Format(
    family="mamba2",
    reads=lambda config: "ssm_cfg" in config or config.get("model_type") == "mamba2",
    args=_args,
    fault=_fault,
    to_theirs=_to_theirs,
    to_ours=_to_ours,
    config=_config,
    embedding="backbone.embeddings.weight",
    older=("backbone.embedding.", "backbone.embeddings."),
)

"""`LlamaForCausalLM` and `SmolLM3ForCausalLM`: the same tensors. Both rotate halves of a head, as we do, so nothing is
permuted.

    ours, of layer i                      theirs
    layers.i.attention.norm               model.layers.i.input_layernorm
    ...attention.inner.{wq,wk,wv,wo}      ...self_attn.{q,k,v,o}_proj
    layers.i.feed_forward.norm            ...post_attention_layernorm
    ...feed_forward.inner.{w1,w2,w3}      ...mlp.{gate,down,up}_proj
    tok_embeddings, norm, output          model.embed_tokens, model.norm, lm_head

SmolLM3's `no_rope_layers` has 1 where RoPE is *used*. Left alone, its configuration puts the window on the other
layers, the reverse of ours: so `layer_types` is always written out.
"""

import math
from pathlib import Path
from typing import Any

import torch

from ...models import DecoderArgs, flavor_args
from ...models.positions import Yarn
from .base import Format, Tensors, check_args, fault_of_factors, ids_and_dtype, refuse

OF_MODEL = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
OF_LAYER = {
    "attention.norm": "input_layernorm", "attention.inner.wq": "self_attn.q_proj",
    "attention.inner.wk": "self_attn.k_proj", "attention.inner.wv": "self_attn.v_proj",
    "attention.inner.wo": "self_attn.o_proj", "feed_forward.norm": "post_attention_layernorm",
    "feed_forward.inner.w1": "mlp.gate_proj", "feed_forward.inner.w2": "mlp.down_proj",
    "feed_forward.inner.w3": "mlp.up_proj",
}  # fmt: skip


def their_name(name: str, of_layer: dict[str, str] = OF_LAYER) -> str:
    """Of the parameter that we call `name`."""
    module, _, kind = name.rpartition(".")
    if module in OF_MODEL:
        return f"{OF_MODEL[module]}.{kind}"
    _, layer, rest = module.split(".", 2)
    return f"model.layers.{layer}.{of_layer[rest]}.{kind}"


def _names(args: DecoderArgs) -> list[str]:
    kinds = ("weight", "bias") if args.bias else ("weight",)
    of_layers = [
        f"layers.{layer}.{module}.{kind}"
        for layer in range(args.n_layers)
        for module in OF_LAYER
        for kind in (kinds if "inner" in module else ("weight",))
    ]
    return ["tok_embeddings.weight", "norm.weight", "output.weight", *of_layers]


def _to_theirs(state: Tensors, args: DecoderArgs) -> Tensors:
    return {
        their_name(name): tensor
        for name, tensor in state.items()
        if not (args.tied_embeddings and name == "output.weight")
    }


def _to_ours(weights: Tensors, args: DecoderArgs) -> Tensors:
    return {name: weights[their_name(name)] for name in _names(args)}


def _theta(config: dict[str, Any]) -> float:
    return (config.get("rope_parameters") or config)["rope_theta"]


def _rotation(config: dict[str, Any]) -> dict[str, Any]:
    """What scales the rotary positions; transformers has had two names for it, and for its type."""
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {**rotation, "rope_type": rotation.get("rope_type", rotation.get("type", "default"))}


def _yarn_args(config: dict[str, Any], rotation: dict[str, Any], where: Path) -> dict[str, Any]:
    """Our arguments of YaRN, of which only the paper's numbers can be had. Raises CheckpointError."""
    factor, temperature = rotation.get("factor"), rotation.get("attention_factor")
    refuse(
        {
            "rope_scaling.factor (no number of at least 1)": not isinstance(factor, (int, float)) or factor < 1,
            "rope_scaling.beta_fast (other than 32)": (rotation.get("beta_fast") or Yarn.BETA_FAST) != Yarn.BETA_FAST,
            "rope_scaling.beta_slow (other than 1)": (rotation.get("beta_slow") or Yarn.BETA_SLOW) != Yarn.BETA_SLOW,
            "rope_scaling.truncate": not rotation.get("truncate", True),
            "rope_scaling.mscale": rotation.get("mscale") and rotation.get("mscale_all_dim"),
        },
        where,
    )
    original = config.get("original_max_position_embeddings") or rotation.get("original_max_position_embeddings")
    yarn = Yarn(float(factor), int(original or config.get("max_position_embeddings") or 0))  # type: ignore[arg-type]
    given = temperature is not None and not math.isclose(temperature, yarn.temperature, rel_tol=1e-6)
    refuse({f"rope_scaling.attention_factor (other than {yarn.temperature:.6g})": given}, where)
    return {
        "rope_scaling": "yarn", "rope_factor": yarn.factor, "rope_original_context": yarn.original_context,
    }  # fmt: skip


def _args_of(config: dict[str, Any], where: Path, family: str, **more: Any) -> DecoderArgs:
    heads = config["num_attention_heads"]
    rotation = _rotation(config)
    refuse(
        {
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "mlp_bias": config.get("mlp_bias", False) != config.get("attention_bias", False),
            "head_dim": config.get("head_dim") not in (None, config["hidden_size"] // heads),
            f"rope_scaling of type {rotation['rope_type']!r}": rotation["rope_type"] not in ("default", "yarn"),
            "partial_rotary_factor": (
                rotation.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
            )
            != 1.0,
            "quantization_config": config.get("quantization_config"),
        },
        where,
    )
    theirs = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads, "ffn_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"], "norm_eps": config.get("rms_norm_eps", 1e-6), "position": "rope",
        "rope_theta": float(_theta(config)), "tied_embeddings": config.get("tie_word_embeddings", False),
        "bias": config.get("attention_bias", False),
    }  # fmt: skip
    if rotation["rope_type"] == "yarn":
        theirs |= _yarn_args(config, rotation, where)
    return check_args(flavor_args(family, "debug", **(theirs | more)), where)


def _args_llama(config: dict[str, Any], where: Path) -> DecoderArgs:
    return _args_of(config, where, "nape_llama3")


def _args_smollm3(config: dict[str, Any], where: Path) -> DecoderArgs:
    L = config["num_hidden_layers"]
    rope = config.get("no_rope_layers")
    if rope is None:
        every = config.get("no_rope_layer_interval", 4)
        rope = [int((layer + 1) % every != 0) for layer in range(L)]
    windowed = config.get("use_sliding_window", False)
    window = config.get("sliding_window") if windowed else None
    # transformers fills absent layer types in by a rule of its own, which is not ours
    types = config.get("layer_types") or (["full_attention"] * L if window is None else [])
    wanted = ["sliding_attention" if window is not None and used else "full_attention" for used in rope]
    refuse(
        {
            "no_rope_layers (not one for each layer)": len(rope) != L,
            "layer_types (the window must be on the layers with RoPE, and on all of them)": types != wanted,
        },
        where,
    )
    layers = ",".join("attention" if used else "nope" for used in rope)
    return _args_of(config, where, "smollm3", layers=layers, sliding_window=window)


def _common(args: DecoderArgs, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_size": args.dim, "num_hidden_layers": args.n_layers, "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads, "head_dim": args.dim // args.n_heads,
        "intermediate_size": args.ffn_dim, "vocab_size": args.vocab_size, "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps, "tie_word_embeddings": args.tied_embeddings, "attention_bias": args.bias,
        "mlp_bias": args.bias, "attention_dropout": 0.0, "rope_theta": args.rope_theta,
        **_rotation_of(args), **ids_and_dtype(args, dtype),
    }  # fmt: skip


def _rotation_of(args: DecoderArgs) -> dict[str, Any]:
    if args.yarn is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta}}
    yarn = args.yarn
    rotation = {
        "rope_type": "yarn", "rope_theta": args.rope_theta, "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_context, "beta_fast": yarn.BETA_FAST,
        "beta_slow": yarn.BETA_SLOW, "attention_factor": yarn.temperature,
    }  # fmt: skip
    return {"rope_parameters": rotation, "max_position_embeddings": round(yarn.factor * yarn.original_context)}


def _config_llama(args: DecoderArgs, dtype: torch.dtype) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_common(args, dtype)}


def _config_smollm3(args: DecoderArgs, dtype: torch.dtype) -> dict[str, Any]:
    rope = [int(kind == "attention") for kind in args.layer_kinds]
    windowed = args.sliding_window is not None
    return {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", **_common(args, dtype),
        "no_rope_layers": rope, "no_rope_layer_interval": 4, "use_sliding_window": windowed,
        "sliding_window": args.sliding_window,
        "layer_types": ["sliding_attention" if windowed and used else "full_attention" for used in rope],
    }  # fmt: skip


def _fault_of_both(args: DecoderArgs) -> str | None:
    others = {
        "norm": args.norm != "rmsnorm", "ffn": args.ffn != "swiglu", "attention": args.attention != "softmax",
        "scaling": args.scaling != "none", "position": args.position != "rope",
        "attention_scale": args.score_scale is not None,
    }  # fmt: skip
    found = [f"{name} = {getattr(args, name)!r}" for name, has in others.items() if has]
    return ", ".join(found) or fault_of_factors(args)


def _fault_llama(args: DecoderArgs) -> str | None:
    only_smollm3 = {
        f"layers = {args.layers!r}": "nope" in args.layer_kinds,
        f"sliding_window = {args.sliding_window}": args.sliding_window is not None,
    }
    return _fault_of_both(args) or ", ".join(name for name, has in only_smollm3.items() if has) or None


SHARED: dict[str, Any] = {
    "to_theirs": _to_theirs, "to_ours": _to_ours, "embedding": "model.embed_tokens.weight", "renames": True,
}  # fmt: skip
LLAMA = Format(
    family="nape_llama3",
    reads=lambda config: config.get("model_type") == "llama",
    args=_args_llama,
    fault=_fault_llama,
    config=_config_llama,
    **SHARED,
)
SMOLLM3 = Format(
    family="smollm3",
    reads=lambda config: config.get("model_type") == "smollm3",
    args=_args_smollm3,
    fault=_fault_of_both,
    config=_config_smollm3,
    **SHARED,
)

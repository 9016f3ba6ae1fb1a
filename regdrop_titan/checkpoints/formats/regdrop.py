"""`RegDropForCausalLM`: attention models that no class of transformers has a place for, with their own modelling file.

Tensors are named as in `llama`, those of scaled queries `...self_attn.scaling.*`, the first matrix of a feed-forward
without a gate `...mlp.up_proj`. The configuration has every number that `modeling_regdrop.py` computes with, and under
`regdrop_arguments` our own arguments, from which it is read back.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...models import Decoder, DecoderArgs
from ...models.positions import head_slopes
from ..safety import CheckpointError
from .base import Format, Tensors, args_from_json, check_args, ids_and_dtype
from .llama import OF_LAYER, their_name

ARGUMENTS = "regdrop_arguments"  # not `decoder`, which is a configuration to transformers
MODELING = Path(__file__).with_name("modeling_regdrop.py")
OF_SCALING = {
    f"attention.inner.{name}": f"self_attn.{name}" for name in ("scaling", "scaling.beta", "scaling.gamma")
}  # fmt: skip


def _of_layer(args: DecoderArgs) -> dict[str, str]:
    only = {} if args.ffn == "swiglu" else {"feed_forward.inner.w1": "mlp.up_proj"}
    return OF_LAYER | OF_SCALING | only


def _to_theirs(state: Tensors, args: DecoderArgs) -> Tensors:
    of_layer = _of_layer(args)
    return {
        their_name(name, of_layer): tensor
        for name, tensor in state.items()
        if not (args.tied_embeddings and name == "output.weight")
    }


def _to_ours(weights: Tensors, args: DecoderArgs) -> Tensors:
    of_layer = _of_layer(args)
    with torch.device("meta"):
        names = list(Decoder(args).state_dict())
    return {name: weights[their_name(name, of_layer)] for name in names}


def _numbers(args: DecoderArgs) -> dict[str, Any]:
    """All that the modelling file computes with."""
    slopes = head_slopes(args.position, args.slopes, args.n_heads)
    head_dim = args.dim // args.n_heads
    identity = args.scaling_init == "identity"
    only_nope = args.scaled_heads == "nope" and slopes is not None
    return {
        "hidden_size": args.dim, "num_hidden_layers": args.n_layers, "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads, "intermediate_size": args.ffn_dim, "vocab_size": args.vocab_size,
        "layer_kinds": args.layer_kinds, "slopes": None if slopes is None else list(slopes),
        "rotary_theta": args.rope_theta if args.position == "rope" else None, "attention_window": args.sliding_window,
        "rotary_yarn": None if args.yarn is None else [args.rope_factor, args.rope_original_context],
        "attention_multiplier": head_dim**-0.5 if args.score_scale is None else args.score_scale,
        "scaling": args.scaling, "scaled_layers": [args.scales_queries(kind) for kind in args.layer_kinds],
        "scaled_heads": [not only_nope or slope == 0 for slope in slopes or [0.0] * args.n_heads],
        "scaling_delta": (1 - F.softplus(torch.zeros(()))).item() if identity else 1.0,
        "ffn": args.ffn, "norm": args.norm, "norm_eps": args.norm_eps, "use_bias": args.bias,
        "residual_multiplier": 1 / args.depth_multiplier, "layer_factors": args.eval_scale,
        "factor_of_layer": args.scale_placement == "block" and args.unit == "layer",
        "logits_divisor": args.width_multiplier, "tie_word_embeddings": args.tied_embeddings,
    }  # fmt: skip


def _config(args: DecoderArgs, dtype: torch.dtype) -> dict[str, Any]:
    saved = {name: value for name, value in dataclasses.asdict(args).items() if name != "_enforced"}  # TorchTitan's own
    classes = {"AutoConfig": "RegDropConfig", "AutoModel": "RegDropModel", "AutoModelForCausalLM": "RegDropForCausalLM"}
    return {
        "architectures": ["RegDropForCausalLM"], "model_type": "regdrop",
        "auto_map": {auto: f"{MODELING.stem}.{name}" for auto, name in classes.items()},
        **_numbers(args), **ids_and_dtype(args, dtype), ARGUMENTS: saved,
    }  # fmt: skip


def _args(config: dict[str, Any], where: Path) -> DecoderArgs:
    saved = config.get(ARGUMENTS)
    if saved is None:
        raise CheckpointError(f"{where}: config.json has no `{ARGUMENTS}`")
    args = check_args(args_from_json(saved, f"{where}: config.json: {ARGUMENTS}"), where)
    # the two were written together: one that was changed alone would make another model here than there
    numbers = _numbers(args)
    if other := [key for key, value in numbers.items() if config.get(key) != value]:
        raise CheckpointError(f"{where}: config.json: {', '.join(other)}: not as its `{ARGUMENTS}` say")
    return args


def _fault(args: DecoderArgs) -> str | None:
    return f"attention = {args.attention!r}" if args.attention != "softmax" else None


REGDROP = Format(
    family="nape_llama3",
    reads=lambda config: config.get("model_type") == "regdrop",
    args=_args,
    fault=_fault,
    to_theirs=_to_theirs,
    to_ours=_to_ours,
    config=_config,
    embedding="model.embed_tokens.weight",
    code=MODELING,
)

"""The norm before a sublayer and before the head."""

from torch import nn

from .args import DecoderArgs


def build_norm(args: DecoderArgs) -> nn.RMSNorm | nn.LayerNorm:
    """RMSNorm, or LayerNorm with a bias, over the d channels of a token."""
    return (nn.LayerNorm if args.norm == "layernorm" else nn.RMSNorm)(args.dim, eps=args.norm_eps)

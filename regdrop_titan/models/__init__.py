"""Model families as arguments of one decoder."""

from .args import FAMILIES, DecoderArgs, Flavors, flavor_args
from .decoder import Decoder, Part
from .positions import alibi_slopes, nape_slopes
from .scan import ssd_scan

__all__ = [
    "FAMILIES",
    "Decoder",
    "DecoderArgs",
    "Flavors",
    "Part",
    "alibi_slopes",
    "build_model",
    "flavor_args",
    "nape_slopes",
    "ssd_scan",
]


def build_model(name: str, flavor: str, **overrides) -> Decoder:
    """A model of the family `name`, initialised, on the CPU in fp32, in training mode.

    Args:
        name: "nape_llama3" or "mamba2".
        flavor: a size of the family, such as "debug" or "400M".
        overrides: any field of `DecoderArgs`: sizes, `position`, `slopes`, `sliding_window`, `placement`, `p`,
            `mask`, `vpad_stop_gradient`, `seed`, ...

    Raises:
        ValueError: an unknown name, flavor or field, or an impossible value.
    """
    args = flavor_args(name, flavor, **overrides)
    if faults := args.faults():
        raise ValueError("; ".join(faults))
    model = Decoder(args)
    model.init_weights()
    return model

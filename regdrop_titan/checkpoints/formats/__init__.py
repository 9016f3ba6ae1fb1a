"""Weight formats of Hugging Face, one for each architecture there is, and our own with its code."""

from .base import Format, Tensors, args_from_json
from .llama import LLAMA, SMOLLM3
from .mamba2 import MAMBA2
from .regdrop import REGDROP

FORMATS = (MAMBA2, SMOLLM3, LLAMA, REGDROP)

__all__ = ["FORMATS", "LLAMA", "MAMBA2", "REGDROP", "SMOLLM3", "Format", "Tensors", "args_from_json"]

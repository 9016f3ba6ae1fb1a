"""Weight formats of Hugging Face, one for each architecture there is."""

from .base import Format, Tensors
from .llama import LLAMA, SMOLLM3
from .mamba2 import MAMBA2

FORMATS = (MAMBA2, SMOLLM3, LLAMA)

__all__ = ["FORMATS", "LLAMA", "MAMBA2", "SMOLLM3", "Format", "Tensors"]

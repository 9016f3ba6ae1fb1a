"""Reading and writing text with a cache."""

from .confident import generate_confidently
from .generate import chosen_layers, generate
from .reading import logits_at

__all__ = ["chosen_layers", "generate", "generate_confidently", "logits_at"]

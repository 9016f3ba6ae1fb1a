"""Reading and writing text with a cache."""

from .generate import chosen_layers, generate
from .reading import logits_at

__all__ = ["chosen_layers", "generate", "logits_at"]

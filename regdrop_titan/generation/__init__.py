"""Reading and writing text with a cache."""

from .confident import generate_confidently
from .drafts import Draft
from .generate import chosen_layers, generate
from .reading import logits_at

__all__ = ["Draft", "chosen_layers", "generate", "generate_confidently", "logits_at"]

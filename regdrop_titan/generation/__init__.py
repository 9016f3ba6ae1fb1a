"""Reading and writing text with a cache."""

from .decoding import greedy, logits_at

__all__ = ["greedy", "logits_at"]

"""The distribution of the next token, and draws from it."""

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature: float = 0.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Probabilities of the next token, (..., V) fp32, from logits (..., V).

    Args:
        temperature: 0 gives the likeliest token all of the probability (of equally likely ones the first).
        top_k: only the k likeliest.
        top_p: only the likeliest whose probabilities before them sum to less than this, in (0, 1].
    """
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = (logits.float() / temperature).softmax(-1)
    if top_k is None and top_p == 1.0:
        return p
    ordered, index = p.sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    if top_k is not None:
        kept = kept & (torch.arange(p.shape[-1], device=p.device) < top_k)
    ordered = ordered * kept
    return torch.zeros_like(p).scatter(-1, index, ordered / ordered.sum(-1, keepdim=True))


def draw(p: Tensor, generators: list[torch.Generator]) -> Tensor:
    """One index for each row of p (B, V), each from a generator of its own: (B,)."""
    return torch.stack([
        torch.multinomial(row, 1, generator=generator)[0] for row, generator in zip(p, generators, strict=True)
    ])  # fmt: skip

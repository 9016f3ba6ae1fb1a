"""Blocks that are compiled while they decode, where a token is so little work that starting kernels takes the time."""

import contextlib
from collections.abc import Iterator

import torch

from ..models import Decoder

# Graphs of a block: by kind of layer, one token or several, rows of one length or of many, growing caches. All layers
# of a kind share theirs.
GRAPHS = 32


@contextlib.contextmanager
def compiled_blocks(model: Decoder, enabled: bool, backend: str = "inductor") -> Iterator[None]:
    """Inside, each block's forward is compiled, if `enabled`. The graphs stay with torch for the next time."""
    if not enabled:
        yield
        return
    blocks = list(model.layers.values())
    compiled = torch.compile(type(blocks[0]).forward, backend=backend)
    for block in blocks:
        block.forward = compiled.__get__(block)
    try:
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            yield
    finally:
        for block in blocks:
            del block.forward

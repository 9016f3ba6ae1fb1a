"""Random numbers are functions: every stream is seeded from what it is for, never continued from before.

A seed is a hash of named fields, so neighbouring steps, ranks and layers share nothing, and a resumed run
draws what the undisturbed run would have drawn, with no generator state in the checkpoint. Fields are hashed,
not added or packed: torch's CPU generator reads only the low 32 bits of a seed.
"""

import hashlib


def derive_seed(*fields: int | str) -> int:
    """A 63-bit seed that is a function of `fields` (their order, types and values)."""
    digest = hashlib.blake2b(repr(fields).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

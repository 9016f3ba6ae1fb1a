"""Arguments of blocks that pass FSDP2 as they are."""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform()
def opaque(cls: type[T]) -> type[T]:
    """A class with fields, written as a dataclass is, that is none.

    FSDP2's mixed precision casts every floating tensor among a module's arguments to bf16, and looks into tuples, dicts
    and dataclasses for them: ALiBi's bias could not tell distances past 256, Mamba2's decays would be off by 0.8 %,
    and a layer's factor 1/0.9 would be 1.109.
    """
    made = dataclass(eq=False)(cls)
    del made.__dataclass_fields__  # type: ignore[attr-defined]
    return made


def replaced(value: T, **changes: Any) -> T:
    """A copy of an opaque value with other fields, as `dataclasses.replace` makes of a dataclass."""
    made = copy.copy(value)
    for name, change in changes.items():
        setattr(made, name, change)
    return made

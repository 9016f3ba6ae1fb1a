"""Writing a file whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write `text` durably so that `path` holds either the old or the new content, whatever happens."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    """`write_whole` of `value` as indented JSON."""
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def free_name(path: Path, pattern: str) -> Path:
    """The first name beside `path` that is not taken: `pattern` with n = 1, 2, ... in place of {n}."""
    n = 1
    while (free := path.with_name(pattern.format(n=n))).exists():
        n += 1
    return free

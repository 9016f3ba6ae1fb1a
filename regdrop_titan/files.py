"""Writing a file, or a folder, whole or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
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


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """`write_whole` of `value` as indented JSON."""
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def free_name(path: Path, pattern: str) -> Path:
    """The first name beside `path` that is not taken: `pattern` with n = 1, 2, ... in place of {n}."""
    n = 1
    while (free := path.with_name(pattern.format(n=n))).exists():
        n += 1
    return free


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write in. At the end it becomes `path`, which must be new or empty; when the block
    fails or is interrupted, it is deleted."""
    path = path.absolute()
    partial = free_name(path, path.name + ".partial-{n}")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise

"""A corpus of real text that every machine has: the sources of Python's standard library.

Built on first use into a folder with three packed sets, the text they were prepared from, and the tokenizer they
share:

    train/        every module not in one of the others
    validation/   every 20th module
    long/         every 4th of the long modules, for evaluation at 8x a 256-token context

The BPE tokenizer is trained on the spot, on the training modules. Which modules there are depends on the Python
version; given that, the corpus is deterministic.
"""

import json
import sysconfig
from pathlib import Path

from filelock import FileLock
from torchtitan.tools.logging import logger

from .packed import MANIFEST, DataError
from .preparation import prepare
from .tokenizers import train_tokenizer

VOCAB_SIZE = 2048
LONG_CHARACTERS = 10_000  # about 3000 tokens
SETS = ("train", "validation", "long")
# not prose-like code: installed packages, tests (often absent), generated tables
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "encodings"}


def stdlib_sources(folder: Path | None = None) -> list[str]:
    """The text of every module of the standard library, sorted by path; unreadable ones are left out."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    texts = []
    for file in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{root}: no Python sources found to build the debug corpus from")
    return texts


def divide(texts: list[str]) -> dict[str, list[str]]:
    """The modules of each set."""
    sets: dict[str, list[str]] = {name: [] for name in SETS}
    n_long = 0
    for i, text in enumerate(texts):
        if i % 20 == 0:
            sets["validation"].append(text)
            continue
        is_long = len(text) >= LONG_CHARACTERS
        n_long += is_long
        sets["long" if is_long and n_long % 4 == 1 else "train"].append(text)
    return sets


def build_stdlib_corpus(folder: str | Path, sources: Path | None = None) -> None:
    """Build the corpus in `folder` unless it is there. Safe to call from every rank: one builds, others wait."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if all((folder / name / MANIFEST).is_file() for name in SETS):
            return
        logger.info(f"Building the debug corpus in {folder} from the standard library's sources")
        sets = divide(stdlib_sources(sources))
        (folder / "text").mkdir(exist_ok=True)
        for name, texts in sets.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / "text" / f"{name}.jsonl").write_text(lines)
        tokenizer = folder / "tokenizer.json"
        train_tokenizer(sets["train"], VOCAB_SIZE).save(str(tokenizer))
        for name in SETS:
            prepare([str(folder / "text" / f"{name}.jsonl")], tokenizer, folder / name, workers=2)

"""A corpus of real text that every machine has: the sources of Python's standard library.

Built on first use into a folder with three packed sets and the tokenizer they share:

    train/        every module not in one of the others
    validation/   every 20th module
    long/         every 4th of the modules with at least 2049 tokens, for evaluation at 8x a 256-token context

The BPE tokenizer is trained on the spot by the `tokenizers` library, on the training modules. Which modules there
are depends on the Python version; given that, the corpus is deterministic.
"""

import sysconfig
from pathlib import Path

from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.tools.logging import logger

from .packed import MANIFEST, DataError, write_packed

VOCAB_SIZE = 2048
END_OF_TEXT = "<|end_of_text|>"
LONG_TOKENS = 2049
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


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries, id 0 being end-of-text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_stdlib_corpus(folder: str | Path, sources: Path | None = None) -> None:
    """Build the corpus in `folder` unless it is there. Safe to call from every rank: one builds, others wait."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if all((folder / name / MANIFEST).is_file() for name in SETS):
            return
        logger.info(f"Building the debug corpus in {folder} from the standard library's sources")
        texts = stdlib_sources(sources)
        tokenizer = train_tokenizer([text for i, text in enumerate(texts) if i % 20], VOCAB_SIZE)
        tokenizer_file = folder / "tokenizer.json"
        tokenizer.save(str(tokenizer_file))
        documents: dict[str, list[list[int]]] = {name: [] for name in SETS}
        n_long = 0
        for i, encoding in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
            if i % 20 == 0:
                documents["validation"].append(encoding.ids)
                continue
            is_long = len(encoding.ids) >= LONG_TOKENS
            n_long += is_long
            documents["long" if is_long and n_long % 4 == 1 else "train"].append(encoding.ids)
        for name in SETS:
            if not (folder / name / MANIFEST).is_file():
                manifest = write_packed(folder / name, documents[name], tokenizer_file, VOCAB_SIZE, eos_id=0)
                logger.info(f"{name}: {manifest['documents']} modules, {manifest['tokens']:,} tokens")

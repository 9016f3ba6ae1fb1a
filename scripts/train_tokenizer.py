r"""Train a byte-level BPE tokenizer on text.

    python scripts/train_tokenizer.py --input 'data/*.jsonl' --vocab-size 32000 --output assets/mine

Reads what prepare_data.py reads, with the same --text-key and --filter, and writes OUTPUT/tokenizer.json. All of the
text passes through memory once; a few GB are enough for a vocabulary of 128k, take a sample of more.
"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from regdrop_titan.data.packed import DataError
from regdrop_titan.data.records import BadRecord, Filter, Recipe, documents
from regdrop_titan.data.sources import UNITS, UnreadableFile, find_inputs, read_blocks
from regdrop_titan.data.tokenizers import train_tokenizer
from regdrop_titan.signals import interruptible


def texts(arguments: argparse.Namespace):
    """The text of every record; the first bad one ends it with a DataError."""
    filters = tuple(Filter.parse(text) for text in arguments.filter)
    recipe = Recipe("", None, arguments.text_key, filters, 0.0)
    files = find_inputs(arguments.input)
    done = 0
    with tqdm(total=sum(file.size for file in files), desc="read", unit="B", unit_scale=True) as bar:
        for file in files:
            try:
                unit = 1
                for block in read_blocks(file, recipe.columns):
                    if block.kind == "text":
                        yield from (text for text, _, _ in block.payload)
                    else:
                        for i, text in documents(block, recipe):
                            if isinstance(text, BadRecord):
                                raise DataError(f"{file.path}, {UNITS[file.kind]} {unit + i}: {text}")
                            if text is not None:
                                yield text
                    unit += block.n_units
                    bar.update(max(0, done + block.position - bar.n))
            except UnreadableFile as error:
                raise DataError(f"{file.path}: {error}") from None
            done += file.size


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH|GLOB|hf:NAME[:config]")
    parser.add_argument("--vocab-size", type=int, required=True, help="entries, end-of-text and the 256 bytes included")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for tokenizer.json")
    parser.add_argument("--text-key", default="text", help="key or column of the text (default: text)")
    parser.add_argument("--filter", action="append", default=[], metavar="'COLUMN>=VALUE'")
    arguments = parser.parse_args()
    file = Path(arguments.output) / "tokenizer.json"
    try:
        if file.exists():
            raise DataError(f"{file}: exists; packed sets may depend on it. Choose another --output, or remove it")
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(texts(arguments), arguments.vocab_size)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokenizer.save(str(file))
    print(f"wrote {file}: {tokenizer.get_vocab_size()} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

"""Our tokenizers as files that transformers' `AutoTokenizer` loads, with the ids of `Tokenizer.encode`.

The `tokenizer_config.json` that is written adds nothing to a text: no beginning or end token, and special-token text is
split like any other (`split_special_tokens`), as in our own data.
"""

import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ..data.tokenizers import (
    LLAMA3_PATTERN,
    LLAMA3_SPECIAL_TOKENS,
    ByteTokenizer,
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)
from ..files import write_json

FILES = ("tokenizer.json", "tokenizer_config.json")  # what is written


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a tokenizer into `folder`, which is there.

    A `tokenizer.json` is copied byte for byte, but for a post-processor that adds tokens, which is left out; of `bytes`
    and a tiktoken file one is made, which for the latter needs transformers.
    """
    made = _converted(tokenizer)
    if made.num_special_tokens_to_add(is_pair=False) > 0:  # which no option of AutoTokenizer turns off
        made.post_processor = None
        made.save(str(folder / FILES[0]))
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        shutil.copyfile(tokenizer.file, folder / FILES[0])  # type: ignore[arg-type]
    else:
        made.save(str(folder / FILES[0]))
    end_of_text = made.id_to_token(tokenizer.eos_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_of_text, "pad_token": end_of_text,
        "split_special_tokens": True, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    write_json(folder / FILES[1], config)


def _converted(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizers.Tokenizer.from_file(str(tokenizer.file))
    return _tiktoken(tokenizer) if isinstance(tokenizer, TiktokenTokenizer) else _bytes()


def _bytes() -> tokenizers.Tokenizer:
    """`ByteTokenizer`: byte-level BPE without merges, whose 256 letters have their bytes' values as ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(letter): letter for letter in letters if ord(letter) < 256}  # stand for themselves
    others = [byte for byte in range(256) if byte not in printable]  # have letters above, in order
    letter_of = printable | dict(zip(others, letters[len(printable) :], strict=True))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letter_of.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ByteTokenizer.special_ids))
    return tokenizer


def _tiktoken(tokenizer: TiktokenTokenizer) -> tokenizers.Tokenizer:
    """By transformers' converter; all of its merges, and Llama-3's special tokens after them."""
    from transformers.convert_slow_tokenizer import TikTokenConverter  # takes seconds, and only tests install it

    converter = TikTokenConverter(pattern=LLAMA3_PATTERN, extra_special_tokens=LLAMA3_SPECIAL_TOKENS)
    # its own reader keeps a copy by path, and would give the old tokens of a file that has changed
    converter.load_tiktoken_bpe = lambda _: tokenizer.ranks  # type: ignore[method-assign, assignment]
    return converter.converted()

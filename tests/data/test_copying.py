"""The copying task's sequences, against their own text."""

import re
from collections import Counter

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from regdrop_titan.data import DataError
from regdrop_titan.data.copying import VOCAB_SIZE, CopyingDataset, copy_example, source

CHARACTERS = "abcdefghijklmnopqrstuvwxyz$|._"  # by token; _ is padding


def spell(tokens):
    return "".join(CHARACTERS[token] for token in tokens.tolist())


def sources(sequence):
    """The sources in one sequence's text, read from the input alone: its very last token is only a label."""
    return re.findall(r"\$([a-z]+)\|", spell(sequence["input"]))


@pytest.mark.parametrize(
    ("seq_len", "lengths", "pairs", "padding"),
    [(305, (50, 100), 1, 0), (917, (50, 100), 3, 0), (917 + 40, (50, 100), 3, 40), (611, [3, 9], 20, 12),
     (9, (1, 1), 1, 0)],
)  # fmt: skip
def test_the_text_and_its_labels(seq_len, lengths, pairs, padding):
    """Input and labels of whole sequences, from strings."""
    dataset = CopyingDataset(seq_len, seed=5, lengths=lengths)
    assert dataset.examples_per_sequence == 2 * pairs
    for j in (0, 1, 77):
        sequence = dataset[j]
        assert sequence["input"].dtype == sequence["labels"].dtype == torch.int64
        found = sources(sequence)
        assert len(found) == 2 * pairs
        for first, second in zip(found[::2], found[1::2], strict=True):
            assert len(first) + len(second) == sum(lengths)
            assert lengths[0] <= len(first) <= lengths[1]
        text = "".join(f"${s}|{s}." for s in found) + "_" * padding
        answers = "".join(" " * (len(s) + 2) + s + "." for s in found) + " " * padding
        assert len(text) == seq_len + 1
        assert spell(sequence["input"]) == text[:-1]
        expected = [IGNORE_INDEX if c == " " else CHARACTERS.index(c) for c in answers[1:]]
        assert sequence["labels"].tolist() == expected


def test_vocabulary():
    assert len(CHARACTERS) == VOCAB_SIZE
    assert spell(copy_example(torch.tensor([[2, 0, 1], [25, 25, 0]])).flatten()) == "$cab|cab.$zza|zza."


def test_lengths_are_uniform():
    """Over 51 * 200 examples, by chi-square at its 0.1 % point; so are letters. The second of a pair mirrors the
    first, so the firsts alone are independent."""
    dataset = CopyingDataset(305, seed=0)
    firsts, seconds = zip(*(sources(dataset[j]) for j in range(51 * 100)), strict=True)
    lengths = Counter(map(len, firsts))
    assert set(lengths) == set(range(50, 101))
    assert sum((n - 100) ** 2 / 100 for n in lengths.values()) < 86.7  # 50 degrees of freedom
    assert Counter(map(len, seconds)) == {150 - length: n for length, n in lengths.items()}
    letters = Counter("".join(firsts + seconds))
    mean = letters.total() / 26
    assert len(letters) == 26 and mean == 51 * 200 * 75 / 26
    assert sum((n - mean) ** 2 / mean for n in letters.values()) < 52.6  # 25 degrees of freedom
    assert len(set(firsts + seconds)) == 51 * 200


def test_examples_depend_on_their_index_alone():
    """Not on the order of access, nor on how many stand in a sequence."""
    dataset = CopyingDataset(305, seed=1)
    forward = [sources(dataset[j]) for j in range(9)]
    again = CopyingDataset(305, seed=1)
    assert [sources(again[j]) for j in reversed(range(9))] == forward[::-1]
    wide = CopyingDataset(3 * 306 + 100, seed=1)
    assert [s for j in range(3) for s in sources(wide[j])] == [s for pair in forward for s in pair]
    assert sources(dataset[10**12]) != sources(dataset[10**12 + 1])


@pytest.mark.parametrize(
    ("held_out", "expected"),
    [(False, [(67, "okgrnkrkuoec"), (83, "jgozuzdglrjz")]), (True, [(69, "trrzwflfuzop"), (81, "vitlqgmusrhs")])],
)
def test_the_stream_stays_as_it_is(held_out, expected):
    """A run that is resumed under other versions of numpy and Python must read on in the same data."""
    dataset = CopyingDataset(305, seed=42, held_out=held_out)
    assert [(len(s), s[:12]) for s in sources(dataset[19_531])] == expected


def test_seeds_and_held_out_differ():
    def drawn(**options):
        dataset = CopyingDataset(305, **options)
        return {s for j in range(50) for s in sources(dataset[j])}

    streams = [drawn(seed=0), drawn(seed=1), drawn(seed=0, held_out=True), drawn(seed=1, held_out=True)]
    assert len(set.union(*streams)) == 400
    # not by length alone either
    starts = {spell(source(s, 0, i, 50)) for s in ("training", "held out", "evaluation") for i in range(100)}
    assert len(starts) == 300


def test_a_shorter_source_begins_the_longer():
    assert torch.equal(source("evaluation", 0, 3, 150), source("evaluation", 0, 3, 300)[:150])


@pytest.mark.parametrize(
    ("seq_len", "lengths", "message"),
    [(304, (50, 100), "seq_len 304: .* 50 to 100 letters has 306 tokens, seq_len must be at least 305"),
     (305, (0, 100), r"\[0, 100\]: expected \[lo, hi\] with 1 <= lo <= hi"),
     (305, (60, 50), r"\[60, 50\]"),
     (305, [50], r"\[50\]")],
)  # fmt: skip
def test_errors(seq_len, lengths, message):
    with pytest.raises(DataError, match=message):
        CopyingDataset(seq_len, seed=0, lengths=lengths)


def test_no_sequence_before_the_first():
    with pytest.raises(IndexError, match="sequence -1"):
        CopyingDataset(305, seed=0)[-1]

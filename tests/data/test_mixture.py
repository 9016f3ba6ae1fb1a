"""Mixtures: exact shares, every sample of a source once an epoch, faults, and what a run says of its data."""

import logging
from fractions import Fraction

import pytest

from regdrop_titan.data import DataError
from regdrop_titan.data.mixture import Mixture, parse_mixture

from ..packed_sets import write_packed


@pytest.fixture
def sets(tmp_path):
    """Sets a, b, c of 13, 7 and 3 samples of 10 tokens; every token of a set is its number."""
    for number, (name, n) in enumerate([("a", 13), ("b", 7), ("c", 3)], start=1):
        write_packed(tmp_path / name, [[number] * 9 for _ in range(n)] + [[number]], 10)
    return tmp_path


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (0.001, 0.5, 0.499), (5, 2, 11), ("1e-3", 1)])
def test_shares_are_exact_at_every_length(sets, weights):
    """After any n samples each source has given its share to within one sample a source."""
    parts = zip(("a", "b", "c"), weights, strict=False)
    mixture = Mixture(",".join(f"{sets / name}:{weight}" for name, weight in parts), 10, seed=0)
    assert sum(source.weight for source in mixture.sources) == 1
    given = [0] * len(weights)
    for i in range(3000):
        k, within = mixture.locate(i)
        assert within == given[k]  # each source is read in its own order, nothing left out
        given[k] += 1
        for source, count in zip(mixture.sources, given, strict=True):
            assert abs(count - (i + 1) * source.weight) < len(weights)
    for i in (10**12, 10**12 + 1):
        k, within = mixture.locate(i)
        assert abs(within - i * mixture.sources[k].weight) < len(weights)


def test_each_source_is_reshuffled_by_its_own_epochs(sets):
    a = Mixture(f"{sets / 'a'}:0.5,{sets / 'b'}:0.5", 10, seed=1)
    first_tokens = [a[i]["input"][0].item() for i in range(40)]
    assert [token for token in first_tokens if token == 1] == [1] * 20
    alone = Mixture(str(sets / "b"), 10, seed=1)
    in_mixture = [a[i] for i in range(40) if a.locate(i)[0] == 1]
    assert all((x["input"] == alone[i]["input"]).all() for i, x in enumerate(in_mixture))
    assert a.epochs(40) == 20 / 7 and alone.epochs(14) == 2.0


def test_repeated_data_are_said_once(sets):
    class Kept(logging.Handler):
        def emit(self, record):
            records.append(record)

    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger(), Kept()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        mixture = Mixture(f"{sets / 'a'}:0.5,{sets / 'c'}:0.5", 10, seed=1)
        for i in range(17):
            mixture[i]
        mixture.log(12)
        logger.setLevel(logging.WARNING)  # as on the ranks that do not log what is common to all
        Mixture(str(sets / "c"), 10, seed=1)[5]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    messages = [record.getMessage() for record in records]
    repeats = [message for message in messages if "begins" in message]
    assert [message.split(": ")[1] for message in repeats] == ["pass 2 begins", "pass 3 begins"]
    assert all(str(sets / "c") in message for message in repeats)
    said = "\n".join(messages)
    assert "50.00 % of the run, 2.00 passes" in said and "c is read 2.00 times in 12 samples" in said
    # 13 documents of 10 tokens, one of 2
    assert "132 tokens in 13 samples of 10 (2 left over)" in said


def test_specifications():
    assert parse_mixture("data/x") == [("data/x", 1)]
    assert parse_mixture("a:0.7,b:0.3") == [("a", Fraction(7, 10)), ("b", Fraction(3, 10))]
    assert parse_mixture(" a:2 , b:1 ") == [("a", Fraction(2, 3)), ("b", Fraction(1, 3))]
    assert parse_mixture("C:/data") == [("C:/data", 1)]
    for text, fault in [("a,b", "'a' must be PATH:WEIGHT"), ("a:0,b:1", "'a:0' must be"), ("a:-1,b:2", "'a:-1'"),
                        ("a:x,b:1", "'a:x'"), ("a:1,a:2", "'a' is there twice"), (":1,b:1", "':1'")]:  # fmt: skip
        with pytest.raises(DataError, match=fault):
            parse_mixture(text)


def test_sets_of_other_tokenizers_are_refused(sets):
    write_packed(sets / "other", [[1] * 50], 10, tokenizer="another")
    with pytest.raises(DataError, match=r"one tokenizer: .*other was tokenized by another .* by stand-in"):
        Mixture(f"{sets / 'a'}:1,{sets / 'other'}:1", 10, seed=0)

"""The training samples of a run: one packed set, or a mixture of several with exact shares.

Sample `i` of a run, `i = 0, 1, ...` without end, is a function of the specification and the seed alone. Each source
is read epoch after epoch, reshuffled for each.

A mixture `"a:0.7,b:0.3"` halves its sources one by one: of the first `n` samples, `floor(n w_a / (w_a + w_b + ...))`
come from `a`, the others from the rest, divided in the same way. So after any `n` each source has had its share to
within one sample a source, with no table and no state, and a sample is found in O(sources).
"""

import logging
import re
from dataclasses import dataclass
from fractions import Fraction

import torch
from torchtitan.tools.logging import logger

from .packed import DataError, PackedDataset
from .tokenizers import same_tokenizer


def parse_mixture(text: str) -> list[tuple[str, Fraction]]:
    """Paths and weights of `"a:0.7,b:0.3"`, normalized to a sum of 1; of a single path, itself and 1.

    Raises DataError naming every part without a positive weight, and paths that come twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and not re.search(r":[\d.]+$", text):
        return [(text, Fraction(1))]
    faults, weights = [], {}
    for part in parts:
        path, _, written = part.rpartition(":")
        try:
            weight = Fraction(written)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if not path or weight <= 0:
            faults.append(f"{part!r} must be PATH:WEIGHT with a weight above 0")
        elif path in weights:
            faults.append(f"{path!r} is there twice")
        weights[path] = weight
    if faults:
        raise DataError(f"mixture {text!r}: " + "; ".join(faults))
    total = sum(weights.values())
    return [(path, weight / total) for path, weight in weights.items()]


@dataclass
class Source:
    """One packed set of a mixture."""

    path: str
    weight: Fraction
    dataset: PackedDataset
    warned: int = 0  # the last epoch whose beginning was logged

    def epochs(self, n_samples: int) -> float:
        """Passes over this source in the first `n_samples` of the run."""
        return float(n_samples * self.weight) / len(self.dataset)


class Mixture:
    """Sample `i` of a run over one or more packed sets: {"input": (S,), "labels": (S,)} int64.

    Args:
        specification: a path, or `"a:0.7,b:0.3"`.

    Raises:
        DataError: an unusable set, weights that are none, or sets of different tokenizers.
    """

    def __init__(self, specification: str, seq_len: int, *, seed: int) -> None:
        self.sources = [
            Source(path, weight, PackedDataset(path, seq_len, seed=seed))
            for path, weight in parse_mixture(specification)
        ]
        manifests = {source.path: source.dataset.tokens.manifest for source in self.sources}
        if different := same_tokenizer(manifests):
            raise DataError("a mixture needs one tokenizer: " + "; ".join(different))
        # of what is left when the sources before have taken theirs
        left = [sum(source.weight for source in self.sources[k:]) for k in range(len(self.sources))]
        self.shares = [source.weight / rest for source, rest in zip(self.sources, left, strict=True)]

    def locate(self, i: int) -> tuple[int, int]:
        """The source of sample `i`, and how many samples that source has given before."""
        for k, share in enumerate(self.shares):
            before = i * share.numerator // share.denominator
            if (i + 1) * share.numerator // share.denominator > before:
                return k, before
            i -= before
        raise AssertionError("the last source takes all that is left")

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        k, within = self.locate(i)
        source = self.sources[k]
        epoch, within = divmod(within, len(source.dataset))
        if epoch != source.dataset.epoch:
            source.dataset.set_epoch(epoch)
        if epoch > source.warned:
            source.warned = epoch
            if logger.isEnabledFor(logging.INFO):  # every rank comes here, one of them logs what is common to all
                logger.warning(f"The data of {source.path} repeat: pass {epoch + 1} begins")
        return source.dataset[within]

    def epochs(self, n_samples: int) -> float:
        """Passes over the source that is repeated most, in the first `n_samples` of the run."""
        return max(source.epochs(n_samples) for source in self.sources)

    def log(self, n_samples: int) -> None:
        """Say what a run of `n_samples` will read, and whether it repeats data."""
        for source in self.sources:
            dataset, tokens = source.dataset, len(source.dataset.tokens)
            logger.info(
                f"{source.path}: {tokens:,} tokens in {len(dataset):,} samples of {dataset.seq_len} "
                f"({tokens - len(dataset) * dataset.seq_len} left over); {100 * float(source.weight):.2f} % of the "
                f"run, {source.epochs(n_samples):.2f} passes"
            )
            if source.epochs(n_samples) > 1 and logger.isEnabledFor(logging.INFO):
                logger.warning(f"{source.path} is read {source.epochs(n_samples):.2f} times in {n_samples:,} samples")

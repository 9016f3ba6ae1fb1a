"""What is evaluated: checkpoints of runs and plain Hugging Face folders, behind one interface."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import load_model, resolve_checkpoint, run_config
from ..checkpoints.loading import model_args_of
from ..data.mixture import parse_mixture
from ..data.packed import DataError, PackedTokens
from ..data.tokenizers import Tokenizer, load_tokenizer
from ..models import Decoder, DecoderArgs


class InputError(Exception):
    """Arguments of an evaluation that cannot be used; one line a fault."""


@dataclass
class Subject:
    """A model to evaluate, loaded when it is asked for.

    Args:
        label: its name in tables and plots.
        source: the checkpoint, or the Hugging Face folder.
        folder: where its results go by default; None where the user must say.
        args: of the model.
        context: tokens, the length it was trained on.
        config: the run's `config.json`; empty for a Hugging Face folder.
        tokenizer_path: what the user named; None: found beside the training data, or in the folder.
    """

    label: str
    source: Path
    folder: Path | None
    args: DecoderArgs
    context: int
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str | None = None

    def load(self, device: str | None = None) -> Decoder:
        """The model in fp32, in evaluation mode; default: on the GPU if there is one."""
        return load_model(self.source).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The one that the model was trained with. Raises InputError."""
        trained_on = self.config.get("tokenizer")
        try:
            if self.tokenizer_path is not None:
                found = load_tokenizer(self.tokenizer_path)
            elif trained_on is not None and trained_on.get("kind") == "bytes":
                found = load_tokenizer("bytes")
            else:
                found = load_tokenizer(self._beside_the_data())
        except DataError as error:
            raise InputError(f"{self.label}: {error}") from None
        if trained_on is not None and trained_on["sha256"] != found.sha256:
            raise InputError(
                f"{self.label}: {found.name} is not the tokenizer that the model was trained with, "
                f"{trained_on['name']} (sha256 {trained_on['sha256'][:12]})"
            )
        if found.vocab_size > self.args.vocab_size:
            raise InputError(
                f"{self.label}: {found.name} has {found.vocab_size} tokens, the model's vocabulary "
                f"{self.args.vocab_size}"
            )
        return found

    def _beside_the_data(self) -> Path:
        """The copy that preparation leaves in each packed set."""
        path = self.config.get("training", {}).get("dataset_path")
        if self.config.get("training", {}).get("dataset") != "packed" or not path:
            raise InputError(f"{self.label}: no tokenizer is known of its run; name one by --tokenizer")
        folder = Path(parse_mixture(path)[0][0])
        if not folder.is_dir():
            raise InputError(
                f"{self.label}: its training data, which hold the tokenizer, are not at {folder}; name one by "
                "--tokenizer"
            )
        return folder

    def packed_tokens(self, path: str | Path) -> PackedTokens:
        """The packed set at `path`, if its tokens are those that the model knows. Raises InputError, DataError."""
        tokens = PackedTokens(path)
        if tokens.manifest["vocab_size"] > self.args.vocab_size:
            raise InputError(
                f"{path} was written by a tokenizer of {tokens.manifest['vocab_size']} tokens, the model's "
                f"vocabulary has {self.args.vocab_size}"
            )
        trained_on, used = self.config.get("tokenizer"), tokens.manifest["tokenizer"]
        if trained_on is not None and trained_on["sha256"] != used["sha256"]:
            raise InputError(
                f"{path} was tokenized by {used['name']}, the model was trained on tokens of "
                f"{trained_on['name']}: the same ids mean other text"
            )
        return tokens


def checkpoint_subject(path: str | Path, label: str | None = None, tokenizer: str | None = None) -> Subject:
    """The newest whole checkpoint of a path, as `resolve_checkpoint` reads it. Raises CheckpointError."""
    checkpoint = resolve_checkpoint(path)
    run, config = checkpoint.absolute().parent.parent, run_config(checkpoint)
    return Subject(
        label=label or f"{run.name} {checkpoint.name}",
        source=checkpoint,
        folder=run / "evaluation",
        args=model_args_of(checkpoint),
        context=config.get("training", {}).get("seq_len", 0),
        config=config,
        tokenizer_path=tokenizer,
    )


def weights_sha256(model: Decoder) -> str:
    """Of all weights with their names, dtypes and shapes: the same for every layout and folder of one model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def unique_labels(subjects: Sequence[Subject]) -> None:
    """Number the labels that occur more than once."""
    for label in {subject.label for subject in subjects}:
        same = [subject for subject in subjects if subject.label == label]
        for n, subject in enumerate(same if len(same) > 1 else [], 1):
            subject.label = f"{label} ({n})"

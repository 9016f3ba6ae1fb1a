"""What is evaluated: checkpoints of runs and plain Hugging Face folders, behind one interface."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import load_model, resolve_checkpoint, run_config
from ..checkpoints.huggingface import load_huggingface, read_args, read_context
from ..checkpoints.loading import model_args_of, state_sha256
from ..data.mixture import parse_mixture
from ..data.packed import DataError, PackedTokens
from ..data.tokenizers import TOKENIZER_FILES, Tokenizer, load_tokenizer
from ..models import Decoder, DecoderArgs


class InputError(Exception):
    """Arguments of an evaluation that cannot be used; one line a fault."""


def tell(error: Exception) -> int:
    """Say on stderr what a user can mend, a line a fault; returns the exit status."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


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
        tokenizer_path: what the user named, or a Hugging Face folder that holds one; None: found beside the training
            data.
        read_model: what reads the model of `source` and `args`.
    """

    label: str
    source: Path
    folder: Path | None
    args: DecoderArgs
    context: int
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str | None = None
    read_model: Callable[[Path, DecoderArgs], Decoder] = load_model

    def load(self, device: str | None = None) -> Decoder:
        """The model in fp32, in evaluation mode; default: on the GPU if there is one."""
        model = self.read_model(self.source, self.args)
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

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
        if trained_on is None and self.tokenizer_path is not None:
            trained_on = {"name": self.tokenizer.name, "sha256": self.tokenizer.sha256}
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


def huggingface_subject(
    path: str | Path, label: str | None = None, tokenizer: str | None = None, context: int | None = None
) -> Subject:
    """The model of a Hugging Face folder, of any format that can be imported. Raises CheckpointError; InputError where
    neither its configuration nor `context` says what length it was trained on."""
    folder = Path(path)
    args, _ = read_args(folder)
    context = context or read_context(folder, args)
    if not context:
        raise InputError(
            f"{folder}: its config.json does not say what length the model was trained on (max_position_embeddings); "
            "give it by --context"
        )
    if tokenizer is None and any((folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = str(folder)
    return Subject(
        label=label or folder.resolve().name,
        source=folder,
        folder=None,
        args=args,
        context=context,
        tokenizer_path=tokenizer,
        read_model=load_huggingface,
    )


def scale_positions(subject: Subject, factor: float) -> None:
    """Let a model compute with YaRN for `factor` times its training context, and say so in its label. Raises InputError
    where it cannot."""
    if subject.args.yarn is not None:
        raise InputError(f"{subject.label}: --rope-scaling: the model has {subject.args.yarn} already")
    args = dataclasses.replace(
        subject.args, rope_scaling="yarn", rope_factor=factor, rope_original_context=subject.context
    )
    if faults := args.faults():
        raise InputError("\n".join(f"{subject.label}: --rope-scaling: {fault}" for fault in faults))
    subject.args = args
    subject.label += f", YaRN {factor:g}x"


def weights_sha256(model: Decoder) -> str:
    """Of all weights, as `state_sha256` takes it."""
    return state_sha256(model.state_dict())


def unique_labels(subjects: Sequence[Subject]) -> None:
    """Number the labels that occur more than once."""
    for label in {subject.label for subject in subjects}:
        same = [subject for subject in subjects if subject.label == label]
        for n, subject in enumerate(same if len(same) > 1 else [], 1):
            subject.label = f"{label} ({n})"

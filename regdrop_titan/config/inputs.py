"""What a configuration names on disk and cannot be used: data, tokenizer, output folder."""

import os
from pathlib import Path

import torchtitan.config as titan
from torchtitan.hf_datasets.text_datasets import DATASETS

from ..checkpoints.huggingface import check_readable_in_parts
from ..checkpoints.manager import missing_step
from ..checkpoints.safety import CheckpointError, check_complete, survey
from ..data.mixture import parse_mixture
from ..data.packed import DataError, PackedDataset, PackedTokens
from ..data.stdlib_corpus import SETS
from ..data.tokenizers import same_tokenizer, tokenizer_hashes
from ..models.args import FAMILIES, DecoderArgs
from .resume import refusals
from .sections import JobConfig, model_args


def _usable_manifest(path: str, seq_len: int, vocab_size: int) -> dict:
    """The manifest of a packed set. Raises DataError where the set cannot be read, or not by this model."""
    try:
        manifest = PackedDataset(path, seq_len, seed=0).tokens.manifest
    except (KeyError, TypeError) as error:
        raise DataError(str(error)) from None
    if manifest["vocab_size"] > vocab_size:
        raise DataError(
            f"the tokenizer of {path} has {manifest['vocab_size']} tokens, the model a vocabulary of "
            f"{vocab_size}; set architecture.vocab_size"
        )
    return manifest


def _context_faults(path: str, config: JobConfig) -> list[str]:
    longest = max(config.validation.context_multiples) * config.training.seq_len
    if next(PackedTokens(path).documents(longest + 1), None) is not None:
        return []
    return [
        f"validation.context_multiples = {config.validation.context_multiples}: no document of {path} has the "
        f"{longest + 1} tokens that the longest needs; name a set with long documents by "
        "validation.context_dataset_path"
    ]


def _all_packed_faults(config: JobConfig, args: DecoderArgs, to_be_built: set[Path]) -> list[str]:
    """Packed sets that cannot be used, alone or together."""
    training, validation = config.training, config.validation
    faults: list[str] = []
    wanted: list[tuple[str, str, int]] = []  # key, path, seq_len
    if training.dataset == "packed":
        try:
            sources = parse_mixture(training.dataset_path or "")
        except DataError:  # the checks say so
            sources = []
        wanted += [("training.dataset_path", path, training.seq_len) for path, _ in sources]
    if validation.enable and validation.dataset == "packed":
        wanted.append(("validation.dataset_path", validation.dataset_path or "", validation.seq_len))
    contexts = validation.enable and validation.context_multiples and training.dataset == "packed"
    if contexts and validation.context_dataset_path:
        wanted.append(("validation.context_dataset_path", validation.context_dataset_path, training.seq_len))
    usable = {}
    for key, path, seq_len in wanted:
        if not path:
            faults.append(f"{key}: must name a packed set")
        elif Path(path).exists() or Path(path) not in to_be_built:
            try:
                usable[path] = _usable_manifest(path, seq_len, args.vocab_size)
            except DataError as error:
                faults.append(f"{key}: {error}")
    if usable:
        faults += [f"training and validation data: {difference}" for difference in same_tokenizer(usable)]
        folder, (path, manifest) = config.model.hf_assets_path, next(iter(usable.items()))
        given = folder != titan.Model().hf_assets_path and Path(folder).is_dir()
        if given and manifest["tokenizer"]["sha256"] not in tokenizer_hashes(folder):
            faults.append(
                f"model.hf_assets_path = {folder!r}: has another tokenizer than {path}, which was tokenized by "
                f"{manifest['tokenizer']['name']}"
            )
    context_path = validation.context_dataset_path or validation.dataset_path
    if contexts and context_path in usable:
        faults += _context_faults(context_path, config)
    return faults


def _tokenizer_faults(config: JobConfig, args: DecoderArgs) -> list[str]:
    folder = Path(config.model.hf_assets_path)
    if not folder.is_dir():
        return [f"model.hf_assets_path = {str(folder)!r}: no such folder (it must hold the tokenizer's files)"]
    from torchtitan.components.tokenizer import build_hf_tokenizer

    try:
        size = build_hf_tokenizer(config).get_vocab_size()
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        return [f"model.hf_assets_path = {str(folder)!r}: no usable tokenizer: {error}"]
    if size > args.vocab_size:
        return [
            f"model.hf_assets_path = {str(folder)!r}: the tokenizer has {size} tokens, the model a vocabulary of "
            f"{args.vocab_size}; set architecture.vocab_size"
        ]
    return []


def _checkpoint_faults(config: JobConfig) -> list[str]:
    checkpoint = config.checkpoint
    if not checkpoint.enable or (checkpoint.load_step == -1 and checkpoint.initial_load_path is None):
        return []
    folder = Path(config.job.dump_folder) / checkpoint.folder
    complete, found = survey(folder)
    faults = []
    if checkpoint.load_step != -1 and checkpoint.load_step not in complete:
        faults.append(missing_step(folder, checkpoint.load_step, complete, found))
    if checkpoint.initial_load_path is not None and not complete:
        try:
            if checkpoint.initial_load_in_hf:
                check_readable_in_parts(Path(checkpoint.initial_load_path), model_args(config))
            else:
                check_complete(Path(checkpoint.initial_load_path))
        except CheckpointError as error:
            faults.append(f"checkpoint.initial_load_path: {error}")
    return faults


def input_faults(config: JobConfig) -> list[str]:
    """Data, tokenizer and output paths that cannot be used. A stdlib corpus still to be built is no fault."""
    faults = []
    dump_folder = Path(config.job.dump_folder)
    existing = next(p for p in [dump_folder, *dump_folder.absolute().parents] if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        faults.append(f"job.dump_folder = {config.job.dump_folder!r}: {existing} is not a writable folder")
    faults += _checkpoint_faults(config)
    if config.model.name not in FAMILIES or config.model.flavor not in FAMILIES[config.model.name]:
        return faults
    args = model_args(config)
    to_be_built = set()
    if config.training.dataset_source == "stdlib":
        to_be_built = {Path(config.training.dataset_path or "").parent / name for name in SETS}
    faults += _all_packed_faults(config, args, to_be_built)
    sections = [("training", config.training)] + ([("validation", config.validation)] * config.validation.enable)
    for name, section in sections:
        path = section.dataset_path
        if section.dataset in DATASETS and path is not None and not Path(path).exists():
            faults.append(f"{name}.dataset_path = {path!r}: no such file or folder")
    if any(section.dataset in DATASETS for _, section in sections):
        faults += _tokenizer_faults(config, args)
    return faults or refusals(config)

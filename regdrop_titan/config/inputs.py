"""What a configuration names on disk and cannot be used: data, tokenizer, output folder."""

import os
from pathlib import Path

from ..data.packed import DataError, PackedDataset, read_manifest
from ..models.args import FAMILIES, DecoderArgs
from .sections import JobConfig, model_args


def _packed_faults(key: str, path: str | None, seq_len: int, vocab_size: int) -> list[str]:
    if path is None:
        return [f"{key}: must name a packed set"]
    try:
        manifest = read_manifest(path)
        PackedDataset(path, seq_len, seed=0)
    except (DataError, KeyError, TypeError) as error:
        return [f"{key}: {error}"]
    if manifest["vocab_size"] > vocab_size:
        return [
            f"{key}: the tokenizer of {path} has {manifest['vocab_size']} tokens, the model a vocabulary of "
            f"{vocab_size}; set architecture.vocab_size"
        ]
    return []


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


def input_faults(config: JobConfig) -> list[str]:
    """Data, tokenizer and output paths that cannot be used. A stdlib corpus still to be built is no fault."""
    faults = []
    dump_folder = Path(config.job.dump_folder)
    existing = next(p for p in [dump_folder, *dump_folder.absolute().parents] if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        faults.append(f"job.dump_folder = {config.job.dump_folder!r}: {existing} is not a writable folder")
    initial = config.checkpoint.initial_load_path
    if initial is not None and not Path(initial).is_dir():
        faults.append(f"checkpoint.initial_load_path = {initial!r}: no such folder")
    if config.model.name not in FAMILIES or config.model.flavor not in FAMILIES[config.model.name]:
        return faults
    args = model_args(config)
    to_be_built = set()
    if config.training.dataset_source == "stdlib":
        from .data.stdlib_corpus import SETS

        to_be_built = {Path(config.training.dataset_path or "").parent / name for name in SETS}
    sets = [("training.dataset_path", config.training)]
    if config.validation.enable:
        sets.append(("validation.dataset_path", config.validation))
    for key, section in sets:
        path = section.dataset_path
        missing = path is None or not Path(path).exists()
        if section.dataset == "packed" and not (missing and Path(path or "") in to_be_built):
            faults += _packed_faults(key, path, section.seq_len, args.vocab_size)
        elif section.dataset != "packed" and path is not None and missing:
            faults.append(f"{key} = {path!r}: no such file or folder")
    if any(section.dataset != "packed" for _, section in sets):
        faults += _tokenizer_faults(config, args)
    return faults

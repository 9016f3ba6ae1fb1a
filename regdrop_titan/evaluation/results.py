"""Results as data: a JSON file for each model and verb, with all that says where its numbers come from.

    {"verb": "depth", "label": …, "checkpoint": …, "weights_sha256": …, "parameters": …, "train_context": …,
     "model_args": {…}, "run": {… the run's config.json}, "versions": {…}, "device": …, "time": …,
     "settings": {… seeds and counts}, … the verb's own results}

`scripts/report.py` reads them from the `evaluation` folder of each run.
"""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import torch

from ..files import write_json
from ..models import Decoder
from ..startup import versions
from .subjects import InputError, Subject, weights_sha256


def result_folder(subject: Subject, output: Path | None, several: bool) -> Path:
    """The folder of a model's results, made where missing: its run's `evaluation`, or `output`, in which each of
    several models has a folder of its own. Raises InputError where there is no default."""
    if output is None and subject.folder is None:
        raise InputError(f"{subject.label}: say by --output where its results go")
    if output is None:
        folder = subject.folder
    else:
        folder = output / subject.label.replace("/", "_").replace(" ", "_") if several else output
    folder.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
    return folder  # type: ignore[return-value]


def describe(verb: str, subject: Subject, model: Decoder, settings: dict[str, Any]) -> dict[str, Any]:
    """What stands before a verb's own results. `settings`: what they depend on beside the model: seeds, counts,
    lengths, data."""
    return {
        "verb": verb,
        "label": subject.label,
        "checkpoint": str(subject.source),
        "weights_sha256": weights_sha256(model),
        "parameters": subject.args.n_parameters(),
        "train_context": subject.context,
        "model_args": dataclasses.asdict(subject.args),
        "run": subject.config,
        "versions": versions(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
    }


def write_result(folder: Path, verb: str, result: dict[str, Any]) -> Path:
    """Leave `result` as `VERB.json` in `folder`; returns the file."""
    file = folder / f"{verb.replace('-', '_')}.json"
    write_json(file, result, indent=None)  # some hold a number for each of 100,000 positions
    return file


def read_result(file: Path, verb: str) -> dict[str, Any]:
    """A result of `verb` that an earlier call has left. Raises InputError where `file` is none."""
    try:
        result = json.loads(file.read_text())
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(result, dict) or result.get("verb") != verb:
        raise InputError(f"{file}: holds no result of {verb}")
    return result

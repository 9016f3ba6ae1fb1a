"""What may change when a run goes on, and what may not.

The rule: the new configuration wins, from the next step on. A checkpoint gives back weights, optimizer moments, the
step and the number of samples consumed; learning rate, betas, weight decay, schedules, drop rates, batch size and all
else are the configuration's. What the state cannot go on with is refused: another model shape or vocabulary, another
tokenizer, other data. A run's `config.json` says what was; the differences are logged.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..checkpoints.safety import steps_in, survey
from ..data.mixture import parse_mixture
from ..data.packed import MANIFEST
from ..files import free_name, write_whole
from .sections import JobConfig, model_args

CONFIG_FILE = "config.json"
SHAPE = (
    "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "tied_embeddings", "layers", "expand",
    "ssm_head_dim", "state_size", "n_groups", "conv_width", "ffn", "bias", "norm",
)  # fmt: skip
MULTIPLIERS = ("kind", "base_dim", "base_layers", "attention_scale")  # of [parametrization]: another function
NO_SETTINGS = ("job", "model_args", "flops", "tokenizer", "data")  # parts of config.json that follow from others
ELSEWHERE = "train from these weights in a new job.dump_folder with checkpoint.initial_load_path"


def flat(values: dict, prefix: str = "") -> dict[str, Any]:
    """`{"section.key": value}` of nested dicts."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def manifest_hash(path: str) -> str:
    """Of a packed set: its manifest holds the hashes of all its shards."""
    return hashlib.sha256((Path(path) / MANIFEST).read_bytes()).hexdigest()


def data_identity(config: JobConfig) -> dict[str, Any]:
    """What the data of a run are, for `config.json`: `tokenizer` (None for tokens of no tokenizer of ours) and `data`:
    the kind, and of a packed set's samples the length and each source's share and manifest hash."""
    training = config.training
    data: dict[str, Any] = {"dataset": training.dataset}
    tokenizer = None
    if training.dataset in ("packed", "copying"):
        data["seq_len"] = training.seq_len
    if training.dataset == "packed":
        mixture = parse_mixture(training.dataset_path or "")
        data["sources"] = [{"share": str(share), "manifest": manifest_hash(path)} for path, share in mixture]
        tokenizer = json.loads((Path(mixture[0][0]) / MANIFEST).read_text())["tokenizer"]  # the shards are checked
    return {"tokenizer": tokenizer, "data": data}


def previous_config(config: JobConfig) -> dict[str, Any] | None:
    """The `config.json` of the run that `config` would go on with: None where there is no checkpoint to go on from,
    or no readable file."""
    folder = Path(config.job.dump_folder)
    if not config.checkpoint.enable or not steps_in(folder / config.checkpoint.folder):
        return None
    try:
        before = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    return before if isinstance(before, dict) else None


def refusals(config: JobConfig) -> list[str]:
    """Why `config` cannot go on with what its dump folder holds, one sentence each. Data sets must be usable."""
    before = previous_config(config)
    if before is None:
        return []
    checkpoint = f"the checkpoints in {config.job.dump_folder} are"
    faults = []
    family = before.get("model", {}).get("name", config.model.name)
    if family != config.model.name:
        faults.append(f"model.name = {config.model.name!r}: {checkpoint} of {family}")
    shape, args = before.get("model_args", {}), model_args(config)
    for name in SHAPE:
        if name in shape and shape[name] != getattr(args, name):
            faults.append(f"architecture.{name} = {getattr(args, name)}: {checkpoint} of {name} = {shape[name]}")
    multipliers = before.get("parametrization", {})
    for name in MULTIPLIERS:
        if name in multipliers and multipliers[name] != (now := getattr(config.parametrization, name)):
            faults.append(f"parametrization.{name} = {now!r}: {checkpoint} of {multipliers[name]!r}")
    faults += _data_refusals(before, data_identity(config), checkpoint)
    if faults and not survey(Path(config.job.dump_folder) / config.checkpoint.folder)[0]:
        return []  # none is whole: the run begins anew
    return [f"{fault}; {ELSEWHERE}" for fault in faults]


def _data_refusals(before: dict[str, Any], now: dict[str, Any], checkpoint: str) -> list[str]:
    data, new = before.get("data"), now["data"]
    if data is None:
        return []  # of a version that did not keep it
    if data["dataset"] != new["dataset"]:
        return [f"training.dataset = {new['dataset']!r}: {checkpoint} of {data['dataset']!r}"]
    faults = []
    if data.get("seq_len") != new.get("seq_len"):
        faults.append(
            f"training.seq_len = {new['seq_len']}: the run's position in its data counts samples of "
            f"{data['seq_len']} tokens"
        )
    if before.get("tokenizer") != now["tokenizer"]:
        old, other = before["tokenizer"], now["tokenizer"]
        faults.append(
            f"training.dataset_path: was tokenized by {other['name']} ({other['sha256'][:12]}), {checkpoint} of "
            f"{old['name']} ({old['sha256'][:12]})"
        )
    elif data.get("sources") != new.get("sources"):
        faults.append(
            "training.dataset_path: names other packed sets, or other shares, than the run has read so far "
            "(by the hashes of their manifests)"
        )
    return faults


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings that differ between two `config.json`, one line each. A key that only one of them has is of another
    version of this package."""
    then, new = (
        flat({name: section for name, section in config.items() if name not in NO_SETTINGS}) for config in (before, now)
    )
    changed = [key for key in sorted(then.keys() & new.keys()) if then[key] != new[key]]
    return [f"{key}: {then[key]!r} -> {new[key]!r}" for key in changed]


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Leave `config` as the folder's `config.json`; another one that is there is kept as `config.1.json`, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    file, text = folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n"
    if file.exists() and (before := file.read_text()) != text:
        write_whole(free_name(file, "config.{n}.json"), before)
    write_whole(file, text)

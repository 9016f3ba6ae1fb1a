"""From a TOML file and `--section.key value` overrides to a validated configuration."""

import contextlib
import difflib
import io
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

import torchtitan.config as titan
import tyro
from pydantic import TypeAdapter, ValidationError
from torchtitan.config.manager import custom_registry

from .checks import validate
from .inputs import input_faults
from .sections import JobConfig


class ConfigError(Exception):
    """A configuration that cannot run; `faults` has one sentence each, naming key, value and what is allowed."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"  {fault}" for fault in faults))


def _describe(annotation: Any) -> str:
    """A field's type in words for an error message."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(annotation))
    if get_args(annotation) and get_origin(annotation) not in (list, dict):
        return " or ".join(_describe(a) for a in get_args(annotation) if a is not type(None))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(annotation, str(annotation).replace("typing.", ""))


def _matches(annotation: Any, value: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _keys(cls: Any, prefix: str = "") -> list[str]:
    """Every `section.key` of a configuration class."""
    found = []
    for f in fields(cls):
        found += _keys(f.type, f"{prefix}{f.name}.") if is_dataclass(f.type) else [prefix + f.name]
    return found


def _nearest(key: str, known: list[str]) -> str:
    """A hint at the key that was meant: the same last word in another section, else the closest spelling."""
    near = [k for k in known if "." in key and k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _from_dict(cls: Any, values: dict, prefix: str, faults: list[str]) -> Any:
    """An instance of the dataclass `cls` with `values`; what is wrong is left at its default and listed."""
    types = {f.name: f.type for f in fields(cls)}
    kept = {}
    for name, value in values.items():
        key = prefix + name
        if name not in types:
            known = _keys(JobConfig) if prefix else [f.name for f in fields(JobConfig)]
            faults.append(f"{key}: unknown {'key' if prefix else 'section'}{_nearest(key, known)}")
        elif is_dataclass(types[name]):
            if isinstance(value, dict):
                kept[name] = _from_dict(types[name], value, f"{key}.", faults)
            else:
                faults.append(f"{key} = {value!r}: is a section, write [{key}]")
        elif _matches(types[name], value):
            kept[name] = value
        else:
            faults.append(f"{key} = {value!r}: must be {_describe(types[name])}")
    try:
        return cls(**kept)
    except (AssertionError, ValueError) as error:  # TorchTitan's own checks, in its classes' __post_init__
        faults.append(f"[{prefix.rstrip('.')}]: {error}")
        return cls()


def _read_toml(path: str, faults: list[str]) -> dict | None:
    """The file's values; None when it cannot be read, with the reason in `faults`."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        faults.append(f"job.config_file = {path!r}: no such file")
    except tomllib.TOMLDecodeError as error:
        faults.append(f"job.config_file = {path!r}: not valid TOML: {error}")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"job.config_file = {path!r}: unreadable: {error}")
    return None


@dataclass
class Override:
    """One command-line override: `--section.key value`."""

    key: str
    values: list[str]

    def tyro_args(self) -> list[str]:
        """As tyro reads it: a bool is a flag, `--section.key` or `--section.no-key`; an optional one has a value."""
        section, _, name = self.key.rpartition(".")
        flag = f"--{self.key}"
        kind = _field_type(self.key)
        if kind not in (bool, bool | None):
            return [flag, *self.values]
        word = self.values[0].lower() if len(self.values) == 1 else "" if self.values else "true"
        if word not in ("true", "false"):
            return [flag, *self.values]  # tyro refuses it
        if kind is bool:
            return [flag if word == "true" else f"--{section}.no-{name}"]
        return [flag, word.capitalize()]


def _field_type(key: str) -> Any:
    cls: Any = JobConfig
    for name in key.split("."):
        cls = {f.name: f.type for f in fields(cls)}[name]
    return cls


def key_fault(key: str, value: Any) -> str | None:
    """What is wrong with `section.key = value` by spelling and type, in one sentence; None where nothing is."""
    known = _keys(JobConfig)
    if key not in known:
        return f"{key}: unknown key{_nearest(key, known)}"
    if not _matches(_field_type(key), value):
        return f"{key} = {value!r}: must be {_describe(_field_type(key))}"
    return None


def _read_overrides(args: list[str], faults: list[str]) -> list[Override]:
    """The overrides in `args`; what is not one is listed in `faults`.

    `--a.b 1`, `--a.b=1`, `--a.b-c 1`, and for bools `--a.b`, `--a.b true`, `--a.no-b` and `--no-a.b`.
    """
    overrides: list[Override] = []
    known = _keys(JobConfig)
    for arg in args:
        if not arg.startswith("--"):
            if overrides:
                overrides[-1].values.append(arg)
            else:
                faults.append(f"{arg!r}: unexpected argument; write --section.key value")
            continue
        written, has_value, value = arg[2:].partition("=")
        key = written.replace("-", "_")
        section, _, name = key.rpartition(".")
        negated = [f"{section}.{name.removeprefix('no_')}", key.removeprefix("no_")]
        overrides.append(Override(key, [value] if has_value else []))
        if key not in known:
            off = next((k for k in negated if k in known and _field_type(k) in (bool, bool | None)), None)
            if off is not None:
                overrides[-1] = Override(off, ["false"])
    for override in overrides:
        if override.key not in known:
            faults.append(f"--{override.key}: unknown key{_nearest(override.key, known)}")
    return [override for override in overrides if override.key in known]


def _apply_overrides(config: JobConfig, overrides: list[Override], faults: list[str]) -> JobConfig:
    """`config` with command-line overrides, read by tyro as TorchTitan does."""

    def read(chosen: list[Override]) -> JobConfig | None:
        args = [arg for override in chosen for arg in override.tyro_args()]
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                return tyro.cli(JobConfig, args=args, default=config, registry=custom_registry)
            except SystemExit:
                return None

    titan.ConfigManager.register_tyro_rules(custom_registry)
    if (result := read(overrides)) is not None:
        return result
    # tyro stops at its first error: find every override that it refuses, keep the rest
    refused = [override for override in overrides if read([override]) is None]
    for override in refused:
        written = " ".join([f"--{override.key}", *override.values])
        faults.append(f"{written}: must be {_describe(_field_type(override.key))}")
    return read([override for override in overrides if override not in refused]) or config


def overridden(args: list[str]) -> dict[str, list[str]]:
    """The keys that a command line overrides, with the words behind each; what is no override is left out."""
    return {override.key: override.values for override in _read_overrides(args, [])}


def saved_sections(saved: dict[str, Any], names: Iterable[str]) -> JobConfig:
    """The sections `names` of a run's config.json, all others at their defaults, and so is what is null there, as in
    that of imported weights. A key that another version wrote and this one does not know is left out. Raises
    ConfigError."""
    faults: list[str] = []
    kept: dict[str, dict] = {}
    sections = {field.name: field.type for field in fields(JobConfig)}
    for name in names:
        known = {field.name for field in fields(sections[name])}  # type: ignore[arg-type]
        values = (saved.get(name) or {}).items()
        kept[name] = {key: value for key, value in values if key in known and value is not None}
    config = _from_dict(JobConfig, kept, "", faults)
    if faults:
        raise ConfigError([f"the run's config.json: {fault}" for fault in faults])
    return config


def load_config(
    args: list[str], world_size: int | None = None, inputs: bool = False, base: JobConfig | None = None
) -> JobConfig:
    """The validated configuration of a run.

    Args:
        args: command line, as `["--job.config_file", "F.toml", "--dropout.p", "0.2"]`.
        world_size: number of processes, where known; degrees and batch sizes are checked against it.
        inputs: look at tokenizer and data paths too.
        base: what `args` override, in place of a TOML.

    Raises:
        ConfigError: listing every fault that was found.
    """
    faults: list[str] = []
    overrides = _read_overrides(args, faults)
    if base is None:
        path = next((" ".join(o.values) for o in overrides if o.key == "job.config_file"), None)
        values = _read_toml(path, faults) if path else {}
        if values is None:
            raise ConfigError(faults)  # defaults in place of the file would only add misleading faults
        base = _from_dict(JobConfig, values, "", faults)
    config = _apply_overrides(base, overrides, faults)
    if not config.validation.local_batch_size:
        config.validation.local_batch_size = config.training.local_batch_size
    if not config.validation.seq_len:
        config.validation.seq_len = config.training.seq_len
    faults += validate(config, world_size)
    if inputs:
        faults += input_faults(config)
    if faults:
        raise ConfigError(faults)
    return config

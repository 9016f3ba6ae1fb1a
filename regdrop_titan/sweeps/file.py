"""A sweep file: a base configuration, and axes whose every combination is a run.

    config = "train_configs/debug_nape_llama3.toml"   # the base, from the project's root
    folder = "outputs/sweeps/rates"                   # default: outputs/sweeps/<the file's name>
    processes = 1                                     # ranks of a run, on each of its nodes

    [set]                                             # the same in every run
    "training.steps" = 100

    [grid]                                            # each key an axis
    "layer_dropout.distribution" = ["uniform", "increasing"]
    "training.seed" = [1, 2, 3]

    [[linked]]                                        # keys that change together: one axis
    "optimizer.lr" = [1e-3, 2e-3]
    "optimizer.weight_decay" = [0.1, 0.05]
    names = ["slow", "fast"]                          # may be absent

    [[runs]]                                          # points of one more axis
    name = "vpad"                                     # may be absent
    "dropout.placement" = "vpad"
    "dropout.p" = 0.1

Keys may be written as sections too: `[grid.layer_dropout]`. `job.config_file` is a key like any other, so that a sweep
can go over base configurations.

A run is named after its values on the axes, `distribution=uniform,seed=1,vpad`: a folder's name that no shell needs
quotes for.
"""

import itertools
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import key_fault
from ..config.resume import flat

TYPES = {"config": str, "folder": str, "processes": int, "set": dict, "grid": dict, "linked": list, "runs": list}
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*")  # as a folder and as a word of a shell
OURS = ("sweep.json", "sweep.lock", "sweep.sbatch", "wandb.yaml", "slurm")  # in the sweep's folder
LONGEST = 200  # characters of a name: file systems end at 255, and a folder put aside has a longer one


class SweepError(Exception):
    """A sweep that cannot start; `faults` has one sentence each."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"  {fault}" for fault in faults))


@dataclass(frozen=True)
class Run:
    """One run of a sweep. `values` are those that tell it from the others, `settings` all that it overrides."""

    name: str
    folder: Path
    values: dict[str, Any]
    settings: dict[str, Any]

    def arguments(self) -> list[str]:
        """`train.py`'s, in the form that `load_config` takes."""
        words: list[str] = []
        for key, value in self.settings.items():
            words += [f"--{key}", *map(_word, value if isinstance(value, list) else [value])]
        return [*words, "--job.dump_folder", str(self.folder)]


@dataclass(frozen=True)
class Sweep:
    file: Path
    folder: Path
    processes: int  # ranks of a run, on each of its nodes
    runs: list[Run]

    @property
    def name(self) -> str:
        return self.file.stem


@dataclass(frozen=True)
class _Point:
    """A place on an axis; named after its values where it has no name of its own."""

    values: dict[str, Any]
    name: str | None = None


def read_sweep(file: Path) -> Sweep:
    """The runs of a sweep file, in the order of its axes, the last one changing fastest.

    Raises:
        SweepError: listing every fault of the file. Whether the configuration of each run can run is asked later, and
            of each by itself.
    """
    content = _read_toml(file)
    faults = [f"{key}: unknown; a sweep has {', '.join(TYPES)}" for key in content.keys() - TYPES.keys()]
    for key, kind in TYPES.items():
        if key in content and type(content[key]) is not kind:
            words = {str: "a string", int: "an integer", dict: f"a table, [{key}]", list: f"tables, [[{key}]]"}
            faults.append(f"{key} = {content.pop(key)!r}: must be {words[kind]}")
    if (processes := content.get("processes", 1)) < 1:
        faults.append(f"processes = {processes}: must be at least 1")
    base = {"job.config_file": content["config"]} if "config" in content else {}
    if base and not Path(content["config"]).is_file():
        faults.append(f"config = {content['config']!r}: no such file (from the project's root)")
    common = flat(content.get("set", {}))
    faults += [f"[set]: {fault}" for key, value in common.items() if (fault := _setting_fault(key, value))]
    axes = _grid(content, faults) + _linked(content, faults) + _listed(content, faults)

    used = Counter(key for axis in axes for key in {key for point in axis for key in point.values})
    faults += [f"{key}: is on {n} axes" for key, n in used.items() if n > 1]
    faults += [f"{key}: is in [set] and on an axis" for key in used if key in common]
    if not axes:
        faults.append("nothing varies: give axes by [grid], [[linked]] or [[runs]]")
    if not base and "job.config_file" not in common and "job.config_file" not in used:
        faults.append("config: must name the base configuration")
    if faults:
        raise SweepError(sorted(set(faults), key=faults.index))

    folder = Path(content.get("folder", Path("outputs/sweeps") / file.stem))
    runs = []
    for points in itertools.product(*axes):
        name = ",".join(point.name or _name(point.values, list(used)) for point in points)
        values = {key: value for point in points for key, value in point.values.items()}
        runs.append(Run(name, folder / name, values, base | common | values))
    faults = _name_faults([run.name for run in runs])
    if faults:
        raise SweepError(faults)
    return Sweep(file, folder, processes, runs)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise SweepError([f"{file}: no such file"]) from None
    except tomllib.TOMLDecodeError as error:
        raise SweepError([f"{file}: not valid TOML: {error}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError([f"{file}: unreadable: {error}"]) from None


def _setting_fault(key: str, value: Any) -> str | None:
    if key == "job.dump_folder":
        return f"{key}: every run has a folder of its own; set `folder`, at the top, to that of all"
    return key_fault(key, value)


def _axis_values(where: str, table: dict[str, Any], faults: list[str]) -> dict[str, list[Any]]:
    """The keys of `table` that have values to go over."""
    found = {}
    for key, values in table.items():
        if not isinstance(values, list):
            faults.append(f"{where}: {key} = {values!r}: must be a list of values")
        elif not values:
            faults.append(f"{where}: {key}: has no values")
        else:
            faults += [f"{where}: {fault}" for value in values if (fault := _setting_fault(key, value))]
            found[key] = values
    return found


def _grid(content: dict[str, Any], faults: list[str]) -> list[list[_Point]]:
    axes = _axis_values("[grid]", flat(content.get("grid", {})), faults)
    return [[_Point({key: value}) for value in values] for key, values in axes.items()]


def _tables(content: dict[str, Any], key: str, own: str, faults: list[str]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Of each table of `[[key]]`: where it is, its value for the word `own`, and its settings."""
    found = []
    for i, table in enumerate(content.get(key, []), start=1):
        if isinstance(table, dict):
            settings = {name: value for name, value in table.items() if name != own}
            found.append((f"[[{key}]] number {i}", table.get(own), flat(settings)))
        else:
            faults.append(f"{key} = {content[key]!r}: must be tables, [[{key}]]")
    return found


def _linked(content: dict[str, Any], faults: list[str]) -> list[list[_Point]]:
    axes = []
    for where, names, table in _tables(content, "linked", "names", faults):
        values = _axis_values(where, table, faults)
        lengths = {key: len(of_key) for key, of_key in values.items()}
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            lengths["names"] = len(names)
        elif names is not None:
            faults.append(f"{where}: names = {names!r}: must be a list of strings")
        if not table:
            faults.append(f"{where}: has no keys")
        elif len(set(lengths.values())) > 1:
            counted = ", ".join(f"{key} {length}" for key, length in lengths.items())
            faults.append(f"{where}: lists of different lengths: {counted}")
        elif values:
            rows = zip(*values.values(), strict=True)
            points = [dict(zip(values, row, strict=True)) for row in rows]
            own = names if "names" in lengths else [None] * len(points)
            axes.append([_Point(point, name) for point, name in zip(points, own, strict=True)])
    return axes


def _listed(content: dict[str, Any], faults: list[str]) -> list[list[_Point]]:
    points = []
    for where, name, settings in _tables(content, "runs", "name", faults):
        if name is not None and not isinstance(name, str):
            faults.append(f"{where}: name = {name!r}: must be a string")
        if name is None and not settings:
            faults.append(f"{where}: has neither a name nor a key")
        faults += [f"{where}: {fault}" for key, value in settings.items() if (fault := _setting_fault(key, value))]
        points.append(_Point(settings, name))
    if "runs" in content and not content["runs"]:
        faults.append("[[runs]]: has no points")
    return [points] if points else []


def _word(value: Any) -> str:
    """As `train.py`'s command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(values: dict[str, Any], keys: list[str]) -> str:
    """`lr=0.001,seed=1`: each value behind its key's last word, or the whole key where `keys` have two of that word."""
    last_words = Counter(key.rsplit(".", 1)[-1] for key in keys)
    parts = []
    for key, value in values.items():
        word = key.rsplit(".", 1)[-1]
        text = "-".join(map(_word, value)) if isinstance(value, list) else _word(value)
        if key == "job.config_file":
            parts.append(_safe(Path(text).stem))
        else:
            parts.append(f"{word if last_words[word] == 1 else key}={_safe(text)}")
    return ",".join(parts)


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)


def _name_faults(names: list[str]) -> list[str]:
    faults = [f"{n} runs have the name {name}" for name, n in Counter(names).items() if n > 1]
    for name in dict.fromkeys(names):
        if not SAFE.fullmatch(name) or name in OURS:
            faults.append(
                f"name {name!r}: must be letters, digits and ._+=,- after a letter or digit; not a file of ours"
            )
        if len(name) > LONGEST:
            faults.append(f"name {name}: {len(name)} characters, {LONGEST} are possible; give names of your own")
    return faults

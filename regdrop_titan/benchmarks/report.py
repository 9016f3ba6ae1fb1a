"""What `benchmark.py all` found, as a Markdown page with a plot."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ..reports.cells import markdown
from .results import Line, table, with_quartiles

ABOVE = "ABOVE"


@dataclass(frozen=True)
class Figure:
    """A figure that has a bound.

    Args:
        state: "held", ABOVE, "failed", "not run", or "not measured" where the run's options left it out.
        base: what the ratio is to.
    """

    name: str
    most: float
    state: str
    found: float | None = None
    quartiles: list[float] | None = None
    base: str = ""


@dataclass(frozen=True)
class Section:
    """One run of a verb; without a result, `state` says why.

    Args:
        command: as `all` runs it, without further options.
        about: what the verb measures, in a sentence.
        picture: drawn by the verb.
    """

    title: str
    command: str
    about: str
    state: str
    result: dict[str, Any] | None = None
    picture: Path | None = None


def figures_table(figures: Sequence[Figure]) -> list[Line]:
    return [
        {
            "figure": figure.name,
            "to": figure.base,
            "found": "" if figure.found is None else with_quartiles(figure.found, figure.quartiles),
            "at most": f"{figure.most:.2f}",
            "state": figure.state,
        }
        for figure in figures
    ]


def write_report(file: Path, figures: Sequence[Figure], sections: Sequence[Section]) -> None:
    """The page in `file`, and its pictures beside it, under its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    plot_figures(figures, file.with_suffix(".png"))
    machines = list(dict.fromkeys(machine_line(section.result) for section in sections if section.result is not None))
    lines = [*_header(sections, machines), "## Bounds", "", markdown(figures_table(figures)), ""]
    lines += [f"![every figure beside the most that it may be]({file.stem}.png)", ""]
    for section in sections:
        lines += _section(section, file, one_machine=len(machines) == 1)
    file.write_text("\n".join(lines))


def _header(sections: Sequence[Section], machines: list[str]) -> list[str]:
    results = [section.result for section in sections if section.result is not None]
    other = [section.title for section in sections if section.result and section.result["command"] != section.command]
    lines = [
        "# Benchmarks",
        "",
        f"Written on {date.today().isoformat()} by `python scripts/benchmark.py all --report docs/benchmarks.md`: not "
        "to be edited. What `all` does not run is in `docs/measurements.md`.",
        "",
        "A figure is a ratio of times unless its name says otherwise: variants take turns, one step each a round in "
        "an order of its own, so that a drift of the machine's speed meets all of them alike; a ratio is the median "
        "over rounds of the pairwise ratios, its quartiles in brackets. Seconds are the median of a step, and say "
        "little beside those of another machine. A bound is that of the verb's own sizes, on 2 CPU cores.",
        "",
        f"Measured on: {machines[0]}." if len(machines) == 1 else "Measured on: what each section says.",
        "",
    ]
    if other:
        lines += [f"**Run with other options than the bounds are for**, see the commands: {', '.join(other)}.", ""]
    if all(result["device"].startswith("CPU") for result in results):
        lines += ["**GPU figures are missing**: no GPU was at hand. `scripts/gpu_check.sh` makes them.", ""]
    return lines


def machine_line(result: dict[str, Any]) -> str:
    """Processor or GPU, versions and threads of a result."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    gpu = "" if result["device"].startswith("CPU") else f"{result['device']}, "
    return (
        f"{gpu}{result['processor']}, {result['cores']} cores, {result['memory_gib']} GiB; {versions}; "
        f"{result['threads']} thread{'s' * (result['threads'] != 1)}"
    )


def _section(section: Section, file: Path, one_machine: bool) -> list[str]:
    lines = [f"## {section.title}", ""]
    result = section.result
    if result is None:
        return [*lines, f"`{section.command}`: {section.state}.", ""]
    lines += [f"{section.about} `{result['command']}`, {result['date']}: {sizes(result['arguments'])}.", ""]
    if not one_machine:
        lines += [f"Measured on: {machine_line(result)}.", ""]
    if result["rows"]:
        lines += [markdown(table(result["rows"])), ""]
    if result.get("notes"):
        lines += [*(f"- {note}" for note in result["notes"]), ""]
    if section.picture is not None and section.picture.is_file():
        picture = file.with_name(f"{file.stem}_{section.picture.name}")
        shutil.copyfile(section.picture, picture)
        lines += [f"![{section.title}]({picture.name})", ""]
    return lines


def sizes(arguments: dict[str, Any]) -> str:
    """The numbers and choices of a verb's arguments, in words."""
    words = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        if value is True:
            words.append(name.replace("_", " "))
        elif value is not None and value is not False:
            shown = (f"{each:g}" if isinstance(each, float) else str(each) for each in values)
            words.append(" ".join([name.replace("_", " "), *shown]))
    return ", ".join(words)


def plot_figures(figures: Sequence[Figure], file: Path) -> None:
    """Each figure with its quartiles, and the most that it may be as a bar."""
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(9, 1.3 + 0.27 * len(figures)), layout="constrained")
    axes = drawing.subplots()
    held, above, bound = "#0072b2", "#d55e00", "#555555"
    for y, figure in enumerate(figures):
        color = held if figure.state == "held" else above
        axes.plot([figure.most] * 2, [y - 0.36, y + 0.36], color=bound, linewidth=2)
        if figure.quartiles:
            axes.plot(figure.quartiles, [y, y], color=color, linewidth=2, alpha=0.5)
        if figure.found is not None:
            axes.plot(figure.found, y, "o", color=color, markersize=5)
        axes.text(
            1.01, y, figure.state if figure.found is None else f"{figure.found:.3f}", va="center", fontsize=8,
            color=color, transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    axes.plot([], [], "o", color=held, label="found: median over rounds, line between the quartiles")
    axes.plot([], [], "o", color=above, label="found, above its bound")
    axes.plot([], [], color=bound, linewidth=2, label="at most")
    axes.set_yticks(range(len(figures)), [figure.name for figure in figures], fontsize=8)
    axes.set(ylim=(len(figures) - 0.4, -0.6), xlabel="ratio")
    axes.set_xlim(left=-0.02)
    axes.grid(axis="x", alpha=0.3)
    drawing.legend(loc="outside lower center", ncols=3, fontsize=8)
    drawing.savefig(file, dpi=130)

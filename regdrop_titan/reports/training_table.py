"""The training table: a row a group, with what it trained, what it cost, its losses and those of its baseline."""

import math
from dataclasses import dataclass
from typing import Any

from .cells import count, markdown
from .groups import (
    Comparison,
    Group,
    Spread,
    compare_training,
    compare_validation,
    dense_baseline,
    describe,
    short_names,
    spread,
    training_loss,
    validation_loss,
    varied_keys,
    window,
)
from .runs import Run


@dataclass
class Row:
    """A group as the table shows it. None is what is not known."""

    group: Group
    settings: str  # what differs between groups, but for the columns of their own
    label: str  # all that differs
    best: Run
    train: Spread | None
    validation: Spread | None
    baseline: Group | None
    train_against: Comparison | None
    validation_against: Comparison | None
    flops: float | None
    executed: float | None
    saved_of_layers: float | None


COLUMNS = (  # of their own
    "model.name", "model.flavor", "layer_dropout.distribution", "layer_dropout.schedule", "layer_dropout.p_max",
)  # fmt: skip


def build_rows(groups: list[Group], last: int | None = None, baseline: Group | None = None) -> list[Row]:
    """The table's rows.

    Args:
        last: logged steps that the training loss is a mean of; None: 5 % of them.
        baseline: compare every group with this one instead of with its dense baseline.
    """
    varied = varied_keys(groups)
    names = short_names(varied)
    rows = []
    for group in groups:
        against = baseline if baseline is not None and group.averaged else dense_baseline(group, groups)
        train = compare_training(group, against, last) if against else None
        validation = compare_validation(group, against) if against else None
        if against and against is not group:
            _note_lengths(group, against, train, validation)
        keys = varied if group.known else [key for key in group.settings if key != "training.seed"]
        points = [run.training[-1] for run in group.averaged]
        flops, executed = spread(p.flops for p in points), spread(p.executed for p in points)
        saved = spread(run.saved for run in group.averaged)
        rows.append(
            Row(
                group=group,
                settings=describe(group.settings, [key for key in keys if key not in COLUMNS], names),
                label=describe(group.settings, keys, names) or group.runs[0].name,
                best=group.best(last),
                train=spread(training_loss(run, last) for run in group.averaged),
                validation=spread(validation_loss(run) for run in group.averaged),
                baseline=against,
                train_against=train,
                validation_against=validation,
                flops=flops.mean if flops else None,
                executed=executed.mean if executed else None,
                saved_of_layers=saved.mean if saved else None,
            )
        )
    return rows


def _note_lengths(group: Group, baseline: Group, train: Comparison | None, validation: Comparison | None) -> None:
    """Say where a comparison is not at the end of both."""
    for kind, against in (("training", train), ("validation", validation)):
        if against is None:
            if all(getattr(run, kind) for run in group.averaged + baseline.averaged):
                group.notes.append(f"{kind} loss: no number of tokens at which both this and the baseline have one")
            continue
        ends = {getattr(run, kind)[-1].tokens for run in group.averaged + baseline.averaged}
        if ends != {against.tokens}:
            group.notes.append(
                f"{kind} loss compared with {baseline.runs[0].name} at {count(against.tokens)} tokens, the last that "
                f"both have (runs of {count(group.tokens)} and {count(baseline.tokens)} tokens)"
            )


def _loss_cell(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.4f}" + (f" ± {value.deviation:.4f}" if value.deviation is not None else "")


def _percent_cell(against: Comparison | None, row: Row) -> str:
    if against is None:
        return ""
    return "baseline" if row.baseline is row.group else f"{against.percent:+.2f} %"


def _run_cell(row: Row) -> str:
    averaged = len(row.group.averaged)
    return row.best.name + (f" (best of {averaged})" if averaged > 1 else "")


def _name(settings: dict[str, Any]) -> str:
    return " ".join(str(settings[key]) for key in ("model.name", "model.flavor") if key in settings)


def _layer_dropout(group: Group, key: str) -> str:
    return "none" if group.p_max == 0 else str(group.settings.get(f"layer_dropout.{key}", ""))


def markdown_table(rows: list[Row]) -> str:
    """The rows as Markdown; columns that no row fills are left out."""
    table: list[dict[str, str]] = []
    for n, row in enumerate(rows, 1):
        group, of_all = row.group, _saved_of_all(row)
        saved = "" if of_all is None else f"{100 * (row.saved_of_layers or 0):.1f} % ({100 * of_all:.1f} %)"
        table.append(
            {
                "#": str(n),
                "run": _run_cell(row),
                "model": _name(group.settings),
                "size": count(group.parameters),
                "tokens": count(group.tokens or None),
                "TPP": f"{group.tpp:.3g}" if group.tpp else "",
                "distribution": _layer_dropout(group, "distribution"),
                "schedule": _layer_dropout(group, "schedule"),
                "p_max": "" if group.p_max is None else f"{group.p_max:g}",
                "settings": row.settings,
                "FLOPs executed": f"{row.executed:.3e}" if row.executed else "",
                "saved, of layers (of all)": saved,
                "train loss": _loss_cell(row.train),
                "train vs baseline": _percent_cell(row.train_against, row),
                "validation loss": _loss_cell(row.validation),
                "validation vs baseline": _percent_cell(row.validation_against, row),
                "seeds": str(len(row.group.averaged)),
                "status": group.status,
            }
        )
    return markdown(table)


def runs_table(rows: list[Row], last: int | None) -> str:
    """Every run as Markdown."""
    table = []
    for n, row in enumerate(rows, 1):
        for run in row.group.runs:
            train, validation = training_loss(run, last) if run.training else math.nan, validation_loss(run)
            table.append(
                {
                    "row": str(n),
                    "run": run.name,
                    "seed": "" if run.seed is None else str(run.seed),
                    "status": run.status,
                    "step": f"{run.training[-1].step:,}" if run.training else "",
                    "of": "" if run.steps is None else f"{run.steps:,}",
                    "train loss": "" if math.isnan(train) else f"{train:.4f}",
                    "validation loss": "" if math.isnan(validation) else f"{validation:.4f}",
                    "remarks": "; ".join(run.notes),
                }
            )
    return markdown(table)


def _saved_of_all(row: Row) -> float | None:
    return 1 - row.executed / row.flops if row.flops and row.executed is not None else None


def row_values(n: int, row: Row) -> dict[str, Any]:
    """A row as plain numbers, None where there is none: a line of `report.csv`."""
    group = row.group
    train, validation = row.train or Spread(math.nan, None), row.validation or Spread(math.nan, None)
    values: dict[str, Any] = {
        "row": n,
        "label": row.label,
        "model": group.settings.get("model.name"),
        "flavor": group.settings.get("model.flavor"),
        "parameters": group.parameters,
        "tokens": group.tokens or None,
        "tpp": group.tpp,
        "distribution": _layer_dropout(group, "distribution") or None,
        "schedule": _layer_dropout(group, "schedule") or None,
        "p_max": group.p_max,
        "settings": row.settings or None,
        "flops": row.flops,
        "flops_executed": row.executed,
        "flops_saved_of_layers": row.saved_of_layers,
        "flops_saved_of_all": _saved_of_all(row),
        "train_loss": train.mean,
        "train_loss_deviation": train.deviation,
        "train_against_percent": row.train_against.percent if row.train_against else None,
        "train_against_tokens": row.train_against.tokens if row.train_against else None,
        "validation_loss": validation.mean,
        "validation_loss_deviation": validation.deviation,
        "validation_against_percent": row.validation_against.percent if row.validation_against else None,
        "validation_against_tokens": row.validation_against.tokens if row.validation_against else None,
        "baseline": str(row.baseline.runs[0].folder) if row.baseline else None,
        "runs": len(group.runs),
        "averaged": len(group.averaged),
        "best": str(row.best.folder),
        "status": group.status,
        "notes": "; ".join(group.notes) or None,
    }
    return {key: None if value != value else value for key, value in values.items()}


def run_values(n: int, run: Run, last: int | None) -> dict[str, Any]:
    """A run as plain numbers: a line of `runs.csv`."""
    end = run.training[-1] if run.training else None
    values: dict[str, Any] = {
        "row": n,
        "name": run.name,
        "folder": str(run.folder),
        "seed": run.seed,
        "status": run.status,
        "step": end.step if end else None,
        "steps": run.steps,
        "tokens": run.tokens or None,
        "parameters": run.parameters,
        "flops": end.flops if end else None,
        "flops_executed": end.executed if end else None,
        "flops_saved_of_layers": run.saved if end else None,
        "train_loss": training_loss(run, last) if end else None,
        "train_loss_steps": window(len(run.training), last) if end else None,
        "validation_loss": validation_loss(run),
        "notes": "; ".join(run.notes) or None,
    }
    return {key: None if value != value else value for key, value in values.items()}


def remarks(rows: list[Row]) -> list[str]:
    """What must be known about rows and runs, one sentence each: what is unfinished, broken, or compared elsewhere."""
    found = []
    for n, row in enumerate(rows, 1):
        found += [f"row {n}: {note}" for note in row.group.notes]
        for run in row.group.runs:
            if run.status != "done" or run.notes:
                found.append(f"row {n}, {run.name}: {run.status}" + "".join(f"; {note}" for note in run.notes))
    return found


def explanation(last: int | None) -> str:
    """What the table's columns mean."""
    steps = f"the last {last} logged steps" if last else "the last 5 % of the logged steps, at least one"
    return (
        "Losses in nats a token, mean ± sample deviation over seeds (none for one seed). Train loss: mean over "
        f"{steps}. Validation loss: the last round. Vs baseline: 100 (loss / baseline - 1) at the same number of "
        "tokens; the baseline is the row without layer dropout whose other settings are equal, unless one was named. "
        "TPP: tokens a parameter, embeddings included. Saved: share of the layers' FLOPs, in parentheses of all. Best: "
        "the lowest validation loss, else train loss. Only finished runs are averaged; in a row without one, those "
        "that have come furthest."
    )

"""The second paper's table 4 from the searches of self_speculation_tiny.sh: each draft timed against plain decoding, a
prompt at a time, on prompts that no search has seen; as a table, its numbers and a figure."""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from regdrop_titan.checkpoints import CheckpointError
from regdrop_titan.data.packed import DataError
from regdrop_titan.evaluation.subjects import InputError, checkpoint_subject, tell
from regdrop_titan.files import write_json, write_whole
from regdrop_titan.generation.drafts import Draft, part_text, read_draft
from regdrop_titan.generation.measure import Comparison, compare
from regdrop_titan.generation.prompts import read_prompts
from regdrop_titan.signals import interruptible

RUNS = {"dense": "dense", "ild": "ILD 0.4"}
METHODS = {"tpe": "Bayesian (TPE)", "nsga2": "genetic (NSGA-II)", "hill": "hill climbing", "annealing": "annealing"}


def row_of(run: str, method: str, search: dict[str, Any], draft: Draft, found: list[Comparison]) -> dict[str, Any]:
    """The figures of one draft: medians over the prompts of `found`, and the quartiles of its speed-up."""

    def middle(name: str) -> float:
        return statistics.median(getattr(each, name) for each in found)

    def accepted(name: str) -> float:
        return statistics.median(getattr(each.acceptance, name) for each in found)

    low, speed_up, high = statistics.quantiles([each.speed_up for each in found], n=4, method="inclusive")
    return {
        "run": run,
        "method": method,
        "trials": len(search["trials"]),
        "score": search["best"]["score"],
        "layers": [part_text(part) for part in draft.parts],
        "accepted_share": accepted("accepted_share"),
        "alpha": accepted("alpha"),
        "draft_length": accepted("draft_length"),
        "tokens_a_pass": accepted("tokens_a_pass"),
        "c": middle("c"),
        "speed_up": speed_up,
        "speed_up_quartiles": [low, high],
        "speed_up_by_tokens": middle("speed_up_by_tokens"),
        "speed_up_by_share": middle("speed_up_by_share"),
        "same_tokens": all(each.same_tokens for each in found),
        "plain_tokens_per_second": middle("plain_tokens_per_second"),
        "by_prompt": [each.to_dict() for each in found],
    }


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every search. Raises InputError where one is missing."""
    searches = {(run, method): folder / run / "drafts" / method for run in RUNS for method in METHODS}
    if missing := [str(path) for path in searches.values() if not (path / "search.json").is_file()]:
        raise InputError("\n".join(f"{path}: has no search.json" for path in missing))
    rows = []
    total = len(searches) * arguments.prompts * (arguments.rounds + 1)
    with tqdm(total=total, desc="paired rounds", unit="round") as bar:
        for run in RUNS:
            subject = checkpoint_subject(folder / run / "checkpoint")
            model = subject.load()
            for method in METHODS:
                path = searches[run, method]
                search, draft = json.loads((path / "search.json").read_text()), read_draft(path / "draft.json")
                settings = search["settings"]
                # the search has taken the first 2 x prompts texts: half to choose, half to test
                seen = 2 * settings["prompts"]
                prompts = read_prompts(
                    subject, settings["data"], settings["text_key"], seen + arguments.prompts, settings["prompt_tokens"]
                )[seen:]
                found = [
                    compare(model, [prompt], draft, arguments.new_tokens, arguments.rounds, bar.update)
                    for prompt in prompts
                ]
                rows.append(row_of(run, method, search, draft, found))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | search | layers that draft | accepted share | alpha | draft length | tokens a pass | c | "
        "expected by alpha | speed-up [quartiles] | same text |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        low, high = row["speed_up_quartiles"]
        lines.append(
            f"| {RUNS[row['run']]} | {METHODS[row['method']]} | {' '.join(row['layers'])} ({len(row['layers'])}) | "
            f"{row['accepted_share']:.3f} | {row['alpha']:.3f} | {row['draft_length']:.2f} | "
            f"{row['tokens_a_pass']:.2f} | {row['c']:.3f} | {row['speed_up_by_tokens']:.2f} | "
            f"{row['speed_up']:.2f} [{low:.2f}, {high:.2f}] | {'yes' if row['same_tokens'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """The measured speed-up of each draft, with its quartiles over prompts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(RUNS):
        own = [row for row in rows if row["run"] == run]
        at = [position + 0.38 * (number - 0.5) for position in range(len(own))]
        heights = [row["speed_up"] for row in own]
        errors = [
            [row["speed_up"] - row["speed_up_quartiles"][0] for row in own],
            [row["speed_up_quartiles"][1] - row["speed_up"] for row in own],
        ]
        axes.bar(at, heights, width=0.36, yerr=errors, capsize=3, label=RUNS[run], color=f"C{number}")
        for x, height in zip(at, heights, strict=True):
            axes.annotate(f"{height:.2f}", (x, 0.03), ha="center", color="white", fontsize=9)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(METHODS)), list(METHODS.values()))
    axes.set_ylabel("tokens/s with the draft\nto plain decoding's")
    axes.legend(title="trained", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(file, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/sweeps/self_speculation_tiny"), help="of the runs")
    parser.add_argument("--prompts", type=int, default=6, help="that each draft is timed on")
    parser.add_argument("--new-tokens", type=int, default=128, help="written behind each")
    parser.add_argument("--rounds", type=int, default=2, help="of pairs, of each prompt; one more comes before")
    arguments = parser.parse_args()
    try:
        if faults := [
            f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 2"
            for name in ("prompts", "new_tokens", "rounds")
            if getattr(arguments, name) < 2
        ]:
            raise InputError("\n".join(faults))
        rows = measure(arguments.folder, arguments)
    except (InputError, CheckpointError, DataError) as error:
        return tell(error)
    settings = {name: getattr(arguments, name) for name in ("prompts", "new_tokens", "rounds")}
    write_json(arguments.folder / "self_speculation.json", {"settings": settings, "rows": rows})
    write_whole(arguments.folder / "self_speculation.md", table(rows))
    draw(rows, arguments.folder / "self_speculation.png")
    print(table(rows), end="")
    print(f"wrote {arguments.folder}/self_speculation.md, .json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))

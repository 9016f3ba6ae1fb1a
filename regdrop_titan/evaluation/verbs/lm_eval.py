"""`evaluate.py lm-eval`: short tasks and RULER by lm-evaluation-harness.

python scripts/evaluate.py lm-eval --checkpoint outputs/RUN/checkpoint --suite ruler lg_short --data-dir data/eval
torchrun --nproc_per_node=8 scripts/evaluate.py lm-eval --checkpoint outputs/RUN/checkpoint --suite ruler
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from ...files import write_whole
from ..results import describe, read_result, result_folder, write_result
from ..subjects import InputError, Subject, weights_sha256
from . import check_positive

NAME = "lm-eval"
SUMMARY = "short tasks and RULER by lm-evaluation-harness"
SUITES = ("lg_short", "dd_downstream", "ruler", "niah")
SAMPLES = 500  # of a RULER task at a length
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", nargs="+", default=[], choices=SUITES, help="the papers' tasks, by name")
    parser.add_argument("--tasks", nargs="+", default=[], help="names of the harness's tasks")
    parser.add_argument(
        "--lengths", nargs="+", metavar="N", help="RULER: tokens, or multiples of the training context as 4x; default: "
        "1x to 64x",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="samples a task (and length); default: all, of RULER 500")
    parser.add_argument("--data-dir", type=Path, help="folder with the tasks' data, see docs/evaluation.md")
    parser.add_argument("--batch-size", type=int, default=1, help="samples side by side")
    parser.add_argument(
        "--max-length", type=int,
        help="short tasks: tokens of prompt and answer, at most (0: any); default: the training context",
    )  # fmt: skip
    parser.add_argument("--truncation", action="store_true", help="cut longer prompts from the left and count them")
    parser.add_argument("--num-fewshot", type=int, help="worked examples before each question; default: the task's")
    parser.add_argument(
        "--bos-token",
        help="special token that begins every text, or none; default: what the "
        "tokenizer of a Hugging Face folder begins with; of our runs none",
    )
    parser.add_argument("--exit-layer", type=int, help="only the first so many layers")
    parser.add_argument("--skip-layers", type=int, nargs="+", default=[], help="layers to leave out")
    parser.add_argument("--seed", type=int, default=42, help="of RULER's samples")
    parser.add_argument("--plan", action="store_true", help="make the samples, say what would run, and load no model")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="FILE", help="lm_eval.json to draw too")


def evaluate(subjects: Sequence[Subject], arguments: argparse.Namespace) -> None:
    check_positive(arguments, "limit", "batch_size")
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("lm-eval needs lm-evaluation-harness: pip install 'regdrop-titan[eval]'")
    from .. import ruler, suites  # take seconds

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every task that it builds
    names = suites.task_names(arguments.tasks, arguments.suite)
    if not names:
        raise InputError("name tasks by --tasks or --suite")
    of_ruler = [name for name in names if name in ruler.TASKS]
    lengths = {subject.label: ruler_lengths(arguments.lengths, subject) for subject in subjects}
    earlier = [read_result(file, NAME) for file in arguments.compare]
    tasks, left_out = suites.load_tasks([name for name in names if name not in of_ruler], arguments.data_dir)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    lacking = {name: needs for name in of_ruler if (needs := ruler.missing_data(name, arguments.data_dir))}
    if lacking:
        needed = ", ".join(sorted({need for needs in lacking.values() for need in needs}))
        print(
            f"RULER: {len(lacking)} of {len(of_ruler)} tasks are left out ({', '.join(lacking)}); put into --data-dir "
            f"(docs/evaluation.md says from where): {needed}"
        )
    if not tasks and len(lacking) == len(of_ruler):
        raise InputError("none of these tasks can be run here")
    if arguments.plan:
        for name, task in tasks.items():
            print(f"{name}: {len(task.eval_docs)} samples")
        for subject in subjects:
            plan_ruler(subject, of_ruler, lengths[subject.label], arguments)
        return
    results = []
    for subject in subjects:
        result = evaluate_one(subject, arguments, tasks, left_out, of_ruler, lengths[subject.label], len(subjects) > 1)
        if result is not None:
            results.append(result)
    if results:
        folder = arguments.output or result_folder(subjects[0], None, several=False)
        plot(earlier + results, folder / "lm_eval.png")
        print(f"wrote {folder / 'lm_eval.png'}")
    if dist.is_initialized():
        dist.destroy_process_group()


def ruler_lengths(given: Sequence[str] | None, subject: Subject) -> list[int]:
    """Tokens. Raises InputError."""
    lengths, faults = [], []
    for text in given or [f"{multiple}x" for multiple in MULTIPLES]:
        number = text.removesuffix("x")
        if not number.isdecimal() or int(number) < 1:
            faults.append(f"--lengths {text}: give tokens, as 4096, or multiples of the training context, as 4x")
        else:
            lengths.append(int(number) * (subject.context if text.endswith("x") else 1))
    if faults:
        raise InputError("\n".join(faults))
    return sorted(set(lengths))


def plan_ruler(subject: Subject, names: Sequence[str], lengths: Sequence[int], arguments: argparse.Namespace) -> None:
    """Make the samples of each task and length, and print how many there are and how long their prompts."""
    from .. import ruler

    print(f"{subject.label}, tokenizer {subject.tokenizer.name}:")
    for length in lengths:
        for name in names:
            try:
                samples = ruler.documents(
                    name, length, arguments.limit or SAMPLES, subject.tokenizer, arguments.data_dir, arguments.seed
                )
            except ruler.LeftOut as reason:
                print(f"  {length:>7}  {name:<16} left out: {reason}")
                continue
            tokens = [len(subject.tokenizer.encode(f"{s['input']} {s['gen_prefix']}")) for s in samples]
            print(f"  {length:>7}  {name:<16} {len(samples)} samples, {min(tokens)} to {max(tokens)} tokens a prompt")


def evaluate_one(
    subject: Subject, arguments: argparse.Namespace, tasks: dict, left_out: dict[str, str], of_ruler: Sequence[str],
    lengths: Sequence[int], several: bool,
) -> dict[str, Any] | None:  # fmt: skip
    """The result of one model, written; None on ranks but the first."""
    from .. import suites
    from ..lm import RegDropLM

    lm = RegDropLM(
        subject, batch_size=arguments.batch_size, max_length=arguments.max_length, truncation=arguments.truncation,
        bos_token=arguments.bos_token, exit_layer=arguments.exit_layer, skip_layers=arguments.skip_layers,
    )  # fmt: skip
    n = arguments.limit or SAMPLES
    if lm.world_size > n:
        raise InputError(f"--limit {n}: fewer samples than the {lm.world_size} ranks")
    folder = result_folder(subject, arguments.output, several)
    samples: list[dict] = []
    scores: dict[str, dict] = {}
    by_length = {}
    with kept_answers(lm, folder) as remembering:
        if tasks:
            found = suites.evaluate_tasks(remembering, tasks, arguments.limit, arguments.num_fewshot)
            if found is not None:
                scores, samples = found
        lm.max_length = 0  # RULER's prompts are as long as they are asked to be
        bar = tqdm(lengths if of_ruler else [], desc=f"{subject.label}: RULER", unit="length", disable=lm.rank > 0)
        for length in bar:
            bar.set_postfix(tokens=length)
            found = suites.evaluate_ruler(remembering, of_ruler, length, n, arguments.data_dir, arguments.seed)
            if found is not None:
                by_length[str(length)] = found[0]
                samples += found[1]
    if lm.rank > 0:
        return None
    settings = {
        "tasks": [*scores, *of_ruler], "limit": arguments.limit, "batch_size": arguments.batch_size,
        "max_length": subject.context if arguments.max_length is None else arguments.max_length,
        "truncation": arguments.truncation, "num_fewshot": arguments.num_fewshot, "bos_token": lm.bos_token,
        "exit_layer": arguments.exit_layer, "skip_layers": arguments.skip_layers, "seed": arguments.seed,
        "examples_seed": suites.SEED, "lm_eval": importlib.metadata.version("lm_eval"),
    }  # fmt: skip
    result = {
        **describe(NAME, subject, lm.model, settings),
        "tokenizer": {"name": lm.text.name, "sha256": lm.text.sha256},
        "first_prompt": lm.head,
        "truncated": lm.cut,
        "tasks": scores,
        "left_out": left_out,
        "suites": suite_means(arguments.suite, suites.SUITES, scores, left_out),
        "ruler": by_length,
    }
    file = write_result(folder, NAME, result)
    lines = "".join(json.dumps(sample, default=str) + "\n" for sample in samples)
    write_whole(folder / "lm_eval_samples.jsonl", lines)
    show(result)
    print(f"wrote {file} and {folder / 'lm_eval_samples.jsonl'}")
    return result


@contextlib.contextmanager
def kept_answers(lm: Any, folder: Path) -> Iterator[Any]:
    """The model behind a file of its answers in `folder`, so that an interrupted call that is repeated goes on where it
    was. The file goes when all is done. Where prompts are cut there is none: those are counted when they are read."""
    if lm.truncation:
        yield lm
        return
    from lm_eval.api.model import CachingLM

    which = [weights_sha256(lm.model), lm.layers, lm.bos_token, lm.text.sha256, lm.rank, lm.world_size]
    file = folder / f"lm_eval_answers-{hashlib.sha256(json.dumps(which).encode()).hexdigest()[:16]}.db"
    remembering = CachingLM(lm, str(file))
    try:
        yield remembering
    finally:
        remembering.dbdict.close()
    file.unlink()


def suite_means(
    chosen: Sequence[str], tasks_of: dict[str, tuple[str, ...]], scores: dict[str, dict], left_out: dict[str, str]
) -> dict[str, dict]:
    """Of each suite of short tasks the mean over all its tasks, None where one is left out."""
    means = {}
    for suite in chosen:
        names = tasks_of[suite]
        if suite in ("ruler", "niah"):
            continue
        ran = [name for name in names if name in scores]
        whole = len(ran) == len(names)
        means[suite] = {
            "mean": sum(scores[name]["value"] for name in ran) / len(ran) if whole else None,
            "tasks": ran,
            "left_out": {name: left_out[name] for name in names if name in left_out},
        }
    return means


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def show(result: dict[str, Any]) -> None:
    print(f"{result['label']}:")
    for name, score in result["tasks"].items():
        error = "" if score["stderr"] is None else f" ± {100 * score['stderr']:.1f}"
        print(f"  {name:<20} {score['metric']:<10} {percent(score['value']):>6}{error}  ({score['n']} samples)")
    for name, suite in result["suites"].items():
        print(f"  {name:<20} {'mean':<10} {percent(suite['mean']):>6}")
    if result["ruler"]:
        print("  RULER     mean of 13   of those that ran   NIAH-1")
    for length, at in result["ruler"].items():
        ran = f"{percent(at['mean_of_available'])} ({len(at['tasks'])})"
        print(f"  {length:>6}    {percent(at['mean']):>10} {ran:>19} {percent(at['niah_1']):>8}")
        for name, reason in at["left_out"].items():
            if "--data-dir" not in reason:
                print(f"            left out: {name}: {reason}")


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """RULER's mean and NIAH-1 by length, and the short tasks, of one or more models, as a PNG."""
    from matplotlib.figure import Figure

    with_ruler = [result for result in results if result["ruler"]]
    names = sorted({name for result in results for name in result["tasks"]})
    panels = 2 * bool(with_ruler) + bool(names)
    figure = Figure(figsize=(4.6 * panels + 0.5, 4.2), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if with_ruler:
        for panel, key, title in zip(axes, ("mean_of_available", "niah_1"), ("RULER", "NIAH-1"), strict=False):
            for result in with_ruler:
                at: list[tuple[int, dict]] = sorted((int(length), scores) for length, scores in result["ruler"].items())
                tasks = len({name for _, scores in at for name in scores["tasks"]})
                points = [(length, 100 * scores[key]) for length, scores in at if scores[key] is not None]
                partly = f" ({tasks} of 13 tasks)" if key == "mean_of_available" and tasks < 13 else ""
                panel.plot(
                    *zip(*points, strict=True) if points else ([], []), marker="o", label=result["label"] + partly
                )
            for context in sorted({result["train_context"] for result in with_ruler}):
                panel.axvline(context, color="black", linestyle="--", linewidth=1, label=f"training context {context}")
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            panel.set(title=title, xlabel="length (tokens)", ylabel="recall (%)", ylim=(-3, 103))
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    if names:
        panel, width = axes[-1], 0.8 / len(results)
        for i, result in enumerate(results):
            where = [j + (i - (len(results) - 1) / 2) * width for j in range(len(names))]
            values = [100 * result["tasks"][name]["value"] if name in result["tasks"] else math.nan for name in names]
            errors = [100 * (result["tasks"].get(name, {}).get("stderr") or 0.0) for name in names]
            panel.bar(where, values, width, yerr=errors, capsize=2, label=result["label"])
        panel.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
        panel.set(title="short tasks", ylabel="score (%)")
        panel.grid(alpha=0.3, axis="y")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)

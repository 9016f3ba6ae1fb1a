"""Tasks of lm-evaluation-harness by name, in suites of the papers, with local data where there are some.

The papers' lists of short tasks are not printed in what this was built from: the two below are the usual ones of such
models (chosen); `--tasks` takes any others.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import evaluate
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from . import ruler
from .lm import RegDropLM
from .subjects import InputError

SUITES: dict[str, tuple[str, ...]] = {
    "lg_short": (
        "arc_challenge", "arc_easy", "boolq", "hellaswag", "lambada_openai", "openbookqa", "piqa", "sciq", "winogrande",
    ),  # LG table 7
    "dd_downstream": ("arc_challenge", "arc_easy", "boolq", "hellaswag", "piqa", "social_iqa", "winogrande"),  # DD A.3
    "ruler": ruler.TASKS,
    "niah": ("niah_single_1",),
}  # fmt: skip
METRICS = ("acc_norm", "acc", "exact_match", "recall")  # the first of these that a task has is its score (chosen)
SEED = 1234  # of worked examples


@functools.cache
def task_manager() -> TaskManager:
    """It reads thousands of files to know its tasks."""
    return TaskManager()


def task_names(tasks: Sequence[str], suites: Sequence[str]) -> list[str]:
    """All names, each once, in order."""
    return list(dict.fromkeys([*tasks, *(name for suite in suites for name in SUITES[suite])]))


def load_tasks(names: Sequence[str], data: Path | None) -> tuple[dict[str, Task], dict[str, str]]:
    """The harness's tasks that can be loaded here, and why each other one cannot.

    A data set of the hub that lies in `data` under its name (`DATA/allenai/ai2_arc`, as the hub's command line leaves
    it) is read there. Raises InputError for names that the harness does not know.
    """
    manager = task_manager()
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise InputError("\n".join(f"--tasks {name}: lm-evaluation-harness has no such task" for name in unknown))
    loaded: dict[str, Task] = {}
    left_out = {}
    for name in names:
        try:
            loaded |= manager.load(_with_local_data(manager, name, data))["tasks"]
        except Exception as error:  # whatever a data set's host, format or script gives
            reason = str(error).strip().splitlines() or [""]
            left_out[name] = f"{type(error).__name__}: {reason[0]}"
    return loaded, left_out


def _with_local_data(manager: TaskManager, name: str, data: Path | None) -> Any:
    """A task of the harness, by name, or built on the data set in `data`."""
    entry = manager.task_index[name]
    if data is None or entry.yaml_path is None:
        return name
    config = ruler.load_yaml(entry.yaml_path, resolve_func=True)
    path = config.get("dataset_path")
    if "task" not in config or not path or not (data / path).is_dir():
        return name
    return ruler.ConfigurableTask(config=config | {"dataset_path": str(data / path)})


def evaluate_tasks(
    lm: RegDropLM, tasks: dict[str, Task], limit: int | None, shots: int | None
) -> tuple[dict[str, dict], list[dict]] | None:
    """Scores and samples of tasks; None on ranks but the first.

    A score has "metric", "value", "stderr" (None where the harness has none), "n", "shots", and "metrics" with all that
    the harness gives.
    """
    for task in tasks.values():
        default = task.get_config("num_fewshot")
        # a task that says 0 itself has no worked examples, whatever is asked for
        task.set_config("num_fewshot", default if shots is None or default == 0 else shots)
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(SEED)
    # not its `simple_evaluate`, which asks the machine for everything installed, at every call
    found = evaluate(lm, {"tasks": tasks, "groups": {}, "group_map": {}}, limit=limit, bootstrap_iters=0)
    if found is None:
        return None
    scores = {name: _score(name, found) for name in tasks}
    samples = [_sample(name, sample) for name in tasks for sample in found["samples"][name]]
    return scores, samples


def _score(name: str, found: dict) -> dict[str, Any]:
    values = {
        metric: value for metric, value in found["results"][name].items() if isinstance(value, int | float)
    }  # "acc,none": 0.5, "acc_stderr,none": 0.1
    names = {metric.split(",")[0]: metric for metric in values if "_stderr" not in metric}
    metric = next((m for m in METRICS if m in names), next(iter(names), None))
    if metric is None:
        raise InputError(f"{name}: the harness gives no number for it")
    filtered = names[metric].split(",")[1]
    error = values.get(f"{metric}_stderr,{filtered}", math.nan)
    return {
        "metric": metric,
        "value": values[names[metric]],
        "stderr": None if math.isnan(error) else error,
        "n": found["n-samples"][name]["effective"],
        "shots": found["n-shot"][name],
        "metrics": values,
    }


def _sample(name: str, sample: dict) -> dict[str, Any]:
    """What the model said to one sample; not the prompt, which may be long."""
    return {
        "task": name,
        "doc_id": sample["doc_id"],
        "target": sample["target"],
        "answers": sample["filtered_resps"],
        "scores": {metric: sample[metric] for metric in sample["metrics"]},
    }


def evaluate_ruler(
    lm: RegDropLM, names: Sequence[str], length: int, n: int, data: Path | None, seed: int
) -> tuple[dict[str, Any], list[dict]] | None:
    """RULER at one length: scores by task, their mean, and samples; None on ranks but the first.

    "mean" is that of all 13 tasks, None where some are left out, whose reasons "left_out" has; "mean_of_available" is
    that of those that ran. "longest" is the most tokens that a prompt has with its answer: the generators count the
    beginning of the answer, and of one task the answer itself, beside the length.
    """
    scores: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    counts: dict[str, int] = {}
    longest: dict[str, int] = {}
    left_out: dict[str, str] = {}
    samples = []
    for name in names:
        try:
            made = ruler.documents(name, length, n, lm.text, data, seed)
        except ruler.LeftOut as reason:
            left_out[name] = str(reason)
            continue
        task = ruler.build_task(name, length, made)
        found = evaluate_tasks(lm, {name: task}, limit=None, shots=None)
        answer = task.config.generation_kwargs["max_gen_toks"]  # type: ignore[index]
        most = max(len(lm.tok_encode(request.args[0])) for request in task.instances) + answer
        of_ranks = lm.gather_object(most)
        if found is None:
            continue
        score, answers = found[0][name], found[1]
        scores[name], errors[name], counts[name] = score["value"], score["stderr"], score["n"]
        longest[name] = max(of_ranks)
        samples += [sample | {"length": length} for sample in answers]
    if lm.rank > 0:
        return None
    everything = set(scores) == set(ruler.TASKS)
    mean = sum(scores.values()) / len(scores) if scores else None
    return {
        "tasks": scores, "errors": errors, "samples": counts, "longest": longest,
        "mean": mean if everything else None, "mean_of_available": mean, "niah_1": scores.get("niah_single_1"),
        "left_out": left_out,
    }, samples  # fmt: skip

"""RULER's 13 tasks (Hsieh et al., arXiv 2404.06654) at any length, by the generators of lm-evaluation-harness.

The harness's own tasks declare scores for 4096 to 131072 tokens only, average at 4096 only, make 500 samples whatever
`limit` says, draw them from one random stream in the order of the tasks, and fetch what they need. Here each task and
length has documents of its own, drawn from its own seed, as many as asked for; what is needed lies in a local folder,
or the task is left out and named.

    DATA/paul_graham_essays/            parquet, JSON lines or text of hub data set baber/paul_graham_essays
    DATA/nltk_data/tokenizers/punkt_tab/
    DATA/squad/dev-v2.0.json            of rajpurkar.github.io/SQuAD-explorer
    DATA/hotpotqa/hotpot_dev_distractor_v1.json

A score is RULER's recall: the share of the reference strings that the answer contains, case ignored (spec sec. 7, RBA);
for the two question tasks, 1 where it contains any.
"""

import contextlib
import importlib.util
import io
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import numpy as np
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from ..data.tokenizers import Tokenizer
from .subjects import InputError

MARGIN = 1.05  # the smallest sample of a task must be this much shorter than the length: samples differ


class LeftOut(Exception):
    """Why a task has no samples at a length."""


@dataclass(frozen=True)
class Niah:
    """A needle-in-a-haystack task, in RULER's words."""

    haystack: str  # repeat, essay or needle
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": Niah("repeat"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
    "niah_multiquery": Niah("essay", queries=4),
    "niah_multivalue": Niah("essay", values=4),
}
TASKS = (*NIAH, "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot")
WITHOUT_DATA = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")

ESSAYS, PUNKT = "paul_graham_essays", "nltk_data/tokenizers/punkt_tab"
SQUAD, HOTPOT = "squad/dev-v2.0.json", "hotpotqa/hotpot_dev_distractor_v1.json"
NEEDS = {name: (ESSAYS, PUNKT) for name, task in NIAH.items() if task.haystack == "essay"} | {
    "ruler_qa_squad": (SQUAD,), "ruler_qa_hotpot": (HOTPOT,),
}  # fmt: skip


def missing_data(task: str, data: Path | None) -> list[str]:
    """What a task needs and `data` does not have."""
    return [need for need in NEEDS.get(task, ()) if data is None or not (data / need).exists()]


def documents(task: str, length: int, n: int, tokenizer: Tokenizer, data: Path | None, seed: int) -> list[dict]:
    """`n` samples of a task whose prompts, with the answer's tokens, have about `length` tokens: "input", "gen_prefix",
    "outputs", ... as the harness's tasks have them. The first samples are the same for every n.

    Raises LeftOut where data are missing or not even the smallest sample fits.
    """
    if missing := missing_data(task, data):
        raise LeftOut(f"needs {' and '.join(missing)} in --data-dir")
    # they print
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        generate = Generators(data).of(task)
        own = zlib.crc32(f"{seed} {task} {length}".encode())
        random.seed(own)  # after the import, which draws too
        np.random.seed(own)
        samples = generate(_ids_of(tokenizer), length, n)
    if not all(sample["outputs"] for sample in samples):
        raise LeftOut(f"has samples without an answer at {length} tokens")
    return samples


def _ids_of(tokenizer: Tokenizer) -> Callable[[str], SimpleNamespace]:
    """All that the generators ask of a tokenizer."""
    return lambda text: SimpleNamespace(input_ids=tokenizer.encode(text))


class Generators:
    """The harness's modules, which are imported with RULER's packages there and without its download."""

    def __init__(self, data: Path | None) -> None:
        if lacking := [name for name in ("wonderwords", "nltk") if importlib.util.find_spec(name) is None]:
            raise InputError(f"RULER needs {' and '.join(lacking)}: pip install 'regdrop-titan[eval]'")
        import nltk

        if data is not None and str(data / "nltk_data") not in nltk.data.path:
            nltk.data.path.insert(0, str(data / "nltk_data"))
        # imported, the module fetches a tokenizer that only some tasks use
        with mock.patch.object(nltk, "download", lambda *args, **kwargs: False):
            from lm_eval.tasks.ruler import cwe_utils, fwe_utils, prepare_niah, qa_utils, vt_utils
        self.niah, self.vt, self.cwe, self.fwe, self.qa = prepare_niah, vt_utils, cwe_utils, fwe_utils, qa_utils
        self.data = data

    def of(self, task: str) -> Callable[[Any, int, int], list[dict]]:
        if task in NIAH:
            return lambda tokenizer, length, n: self.of_niah(NIAH[task], tokenizer, length, n)
        return {
            "ruler_vt": self.of_vt, "ruler_cwe": self.of_cwe, "ruler_fwe": self.of_fwe,
            "ruler_qa_squad": lambda *args: self.of_questions(self.qa.read_squad, SQUAD, *args),
            "ruler_qa_hotpot": lambda *args: self.of_questions(self.qa.read_hotpotqa, HOTPOT, *args),
        }[task]  # fmt: skip

    def of_niah(self, task: Niah, tokenizer, length: int, n: int) -> list[dict]:
        haystack = self.essays() if task.haystack == "essay" else self.niah.get_haystack(task.haystack)
        template = importlib.import_module("lm_eval.tasks.ruler.niah_utils").TEMPLATE
        with _too_short():
            return self.niah.generate_samples(
                haystack, max_seq_length=length, template=template, type_haystack=task.haystack,
                type_needle_k=task.key, type_needle_v=task.value, num_needle_k=task.keys, num_needle_v=task.values,
                num_needle_q=task.queries, num_samples=n, TOKENIZER=tokenizer,
            )  # fmt: skip

    def essays(self) -> list[str]:
        """The words of all essays."""
        assert self.data is not None
        texts = datasets.load_dataset(str(self.data / ESSAYS), split="train")["text"]
        return re.sub(r"\s+", " ", " ".join(texts)).split(" ")

    def of_vt(self, tokenizer, length: int, n: int) -> list[dict]:
        make, answer = self.vt.sys_vartrack_w_noise_random, 30
        (example,) = make(
            tokenizer=tokenizer, num_samples=1, max_seq_length=_example_length(self, tokenizer), incremental=5
        )
        smallest, variables = self.vt.generate_input_output(10, 1, 4)
        shown = example["input"] + " " + " ".join(example["outputs"]) + "\n\n"
        _check_fits(tokenizer, smallest + " " + shown + " ".join(variables), answer, length)
        return make(tokenizer=tokenizer, num_samples=n, max_seq_length=length, icl_example=example)

    def of_cwe(self, tokenizer, length: int, n: int) -> list[dict]:
        self.cwe.RNG.seed(random.getrandbits(32))  # the module's own stream goes on from call to call
        example, smallest, words = self.cwe.generate_input_output(10, length)
        answer = " ".join(f"{i + 1}. {word}" for i, word in enumerate(words))
        _check_fits(tokenizer, f"{example}\n{smallest} {answer}", 120, length)
        return self.cwe.sys_word_pair_random(num_samples=n, max_seq_length=length, tokenizer=tokenizer)

    def of_fwe(self, tokenizer, length: int, n: int) -> list[dict]:
        if length // 50 < 4:
            raise LeftOut(f"has no vocabulary at {length} tokens, 200 are needed")
        _check_fits(tokenizer, self.fwe.TEMPLATE, 0, length)
        return self.fwe.sys_kwext(tokenizer=tokenizer, max_seq_length=length, num_samples=n)

    def of_questions(self, read: Callable, file: str, tokenizer, length: int, n: int) -> list[dict]:
        assert self.data is not None
        path = self.data / file
        # the harness's reader fetches the file from its address, and remembers what it got
        read = getattr(read, "__wrapped__", read)
        with mock.patch.object(self.qa, "download_json", lambda url: json.loads(path.read_text())):
            questions, texts = read()
        with _too_short():
            return self.qa.generate_samples(
                tokenizer=tokenizer, docs=texts, qas=questions, max_seq_length=length,
                num_samples=min(n, len(questions)), tokens_to_generate=32,
            )  # fmt: skip


@contextlib.contextmanager
def _too_short() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise LeftOut(str(error).split(". ")[0]) from None


def _check_fits(tokenizer, smallest: str, answer: int, length: int) -> None:
    """Raise LeftOut where a generator would search for ever for a sample that fits."""
    needed = len(tokenizer(smallest).input_ids) + answer
    if needed * MARGIN > length:
        raise LeftOut(f"its smallest sample has {needed} tokens with the answer's")


def _example_length(generators: Generators, tokenizer) -> int:
    """Tokens of variable tracking's worked example: RULER's 500, more where a tokenizer makes more of it (bytes)."""
    smallest, variables = generators.vt.generate_input_output(5, 1, 4, is_icl=True)
    return max(500, int(MARGIN * (len(tokenizer(smallest + f" {variables}").input_ids) + 30)))


def build_task(name: str, length: int, samples: list[dict]) -> ConfigurableTask:
    """The harness's task over these samples, with one metric, "recall"."""
    folder = Path(importlib.import_module("lm_eval.tasks.ruler").__path__[0])
    config = load_yaml(folder / f"{name.removeprefix('ruler_')}.yaml", resolve_func=True)
    score = config["process_results"]
    config |= {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(samples)},
        "process_results": lambda doc, answers: {"recall": score(doc, answers)[str(length)]},
        "metric_list": [{"metric": "recall", "aggregation": "mean", "higher_is_better": True}],
    }
    return ConfigurableTask(config=config)

"""What there is to run, in the order of importance."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from . import kernels, runs, whole_models
from .rows import Machine, Row


@dataclass(frozen=True)
class Part:
    """`seconds`: what it should take, on an H200 and in a rehearsal on 2 CPU cores."""

    name: str
    run: Callable[[Machine], list[Row]]
    seconds: float
    rehearsal_seconds: float

    def expected(self, small: bool) -> float:
        return self.rehearsal_seconds if small else self.seconds


def _timed(name: str, seconds: float, rehearsal_seconds: float = 35) -> Part:
    return Part(name, functools.partial(runs.timed_400m, name=name), seconds, rehearsal_seconds)


def _benchmark(verb: str, seconds: float) -> Part:
    return Part(f"benchmark {verb}", functools.partial(runs.benchmark, verb=verb), seconds, 20)


def _generation(name: str, family: str, flavor: str, seconds: float) -> Part:
    return Part(name, functools.partial(runs.timed_generation, family=family, flavor=flavor), seconds, 60)


# Seconds on an H200 are estimates: most of them go to starting processes (15 s) and compiling (5 s a graph). The first
# run builds its corpus as well.
PARTS = (
    Part("FlexAttention", kernels.flex_attention_against_sdpa, 90, 20),
    Part("loss in pieces", kernels.loss_in_pieces, 5, 2),
    Part("scan", kernels.scan_against_fp64, 20, 2),
    _timed("400M dense", 80, 40),
    _timed("400M VPAD", 40),
    _timed("400M layer dropout 0.25", 40),
    _timed("400M layer dropout 0.5", 35),
    _timed("400M dense, no cut", 40),
    Part("Mamba2 85M", runs.timed_mamba2, 40, 50),
    _generation("generation 400M", "nape_llama3", "400M", 70),
    Part("layer dropout", whole_models.layer_dropout, 40, 30),
    Part("no synchronisation", whole_models.no_synchronisation, 15, 1),
    Part("models", whole_models.models_against_cpu, 80, 3),
    Part("dropout", kernels.dropout_statistics, 15, 10),
    Part("recomputation", whole_models.recomputation, 20, 30),
    Part("resume", runs.resume, 60, 60),
    Part("cache", whole_models.cache_in_pieces, 10, 2),
    Part("greedy generation", whole_models.greedy_generation, 60, 60),
    Part("compiled models", whole_models.compiled_models, 50, 20),
    _generation("generation Mamba2 85M", "mamba2", "85M", 60),
    _timed("400M dense, RoPE", 35),
    Part("evaluation", runs.evaluation, 40, 30),
    *(_benchmark(verb, 60) for verb in runs.BENCHMARKS),
)

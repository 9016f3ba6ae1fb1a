"""Which parts of a model draft best for all of it: five searches through one study (spec sec. 7, "subset search").

A unit is a layer, or a sublayer; a subset of units is a draft, and its score what it makes writing faster by. Each
trial is a subset that was not tried before, proposed by one of METHODS from the trials before it and a seed that is a
function of the search's seed and their number. The study, which optuna keeps in a file, has all that a search depends
on: one that was stopped goes on as if it had not been.
"""

import functools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor

from ..evaluation.depth import alternate, exits, without
from ..models import Decoder, DecoderArgs, Part
from ..seeds import derive_seed
from .drafts import Draft, flops_share, in_order, part_text, sublayers_of
from .generate import generate
from .measure import Acceptance, compare
from .walks import Kept, Walk, annealing, hill_climbing, unseen

METHODS = ("tpe", "gp", "nsga2", "hill", "annealing")
OBJECTIVES = ("formula", "measured")
RANDOM_TRIALS = 10  # at most, behind the warm starts, before a model of the scores proposes (optuna's default)
NOISY_ROUNDS = 2  # of each measured trial


@dataclass(frozen=True)
class Worth:
    """What a draft is found to be worth."""

    score: float  # speed-up over plain decoding
    alpha: float  # rate of acceptance a token
    accepted_share: float  # of all drafted tokens
    tokens_a_pass: float
    c: float  # cost of a drafted token, in passes of the model


Objective = Callable[[tuple[Part, ...]], Worth]


@dataclass(frozen=True)
class Trial:
    """A subset that was tried."""

    number: int  # from 0, in the order of trying
    kept: Kept
    parts: tuple[Part, ...]
    origin: str  # "warm start", or the method
    worth: Worth

    def to_dict(self) -> dict[str, Any]:
        parts = [part_text(part) for part in self.parts]
        return {"number": self.number, "layers": parts, "origin": self.origin, **asdict(self.worth)}


# Subsets ------------------------------------------------------------------------------------------------------


def units_of(args: DecoderArgs, sublayers: bool) -> list[Part]:
    """What a draft has or has not, by depth: every layer, or every sublayer."""
    if not sublayers:
        return list(range(args.n_layers))
    return [part for layer in range(args.n_layers) for part in sorted(sublayers_of(args, layer), key=str)]


def warm_starts(args: DecoderArgs, units: Sequence[Part]) -> list[Kept]:
    """Subsets that are known to be good drafts of some models: every second layer skipped, a contiguous run skipped
    that ends before the last layer, and early exits. A family's subsets are in turn, those of half the depth first;
    neither nothing nor the whole model is among them."""
    L = args.n_layers
    late = [without(L, range(L - 1 - n, L - 1)) for n in range(1, L)]
    families = [alternate(L, from_last=True), late, exits(L), alternate(L, from_last=False)]
    for family in families:
        family.sort(key=lambda layers: abs(2 * len(layers) - L))
    turns = [family[i] for i in range(L + 1) for family in families if i < len(family)]
    subsets = [tuple((unit[0] if isinstance(unit, tuple) else unit) in layers for unit in units) for layers in turns]
    return [kept for kept in dict.fromkeys(subsets) if any(kept) and not all(kept)]


# Objectives ---------------------------------------------------------------------------------------------------


def by_formula(
    model: Decoder, prompts: Sequence[Tensor], new_tokens: int, length: int, exit: float | str | None
) -> Objective:
    """Tokens a pass as counted, over what a pass and its drafts cost in FLOPs at the mean context. Deterministic."""
    context = round(sum(map(len, prompts)) / len(prompts)) + new_tokens // 2

    def worth(parts: tuple[Part, ...]) -> Worth:
        _, stats = generate(model, prompts, new_tokens, **Draft(parts, length, exit).options())
        return worth_of(Acceptance.of(stats), flops_share(model.args, parts, context))

    return worth


def by_measurement(
    model: Decoder, prompts: Sequence[Tensor], new_tokens: int, length: int, exit: float | str | None
) -> Objective:
    """Tokens a second over plain decoding's, the median of NOISY_ROUNDS paired rounds. Noisy."""

    def worth(parts: tuple[Part, ...]) -> Worth:
        found = compare(model, prompts, Draft(parts, length, exit), new_tokens, rounds=NOISY_ROUNDS)
        return worth_of(found.acceptance, found.c, found.speed_up)

    return worth


def worth_of(acceptance: Acceptance, c: float, speed_up: float | None = None) -> Worth:
    """`speed_up`: measured; None: by `acceptance` and `c`."""
    score = acceptance.speed_up(c) if speed_up is None else speed_up
    return Worth(score, acceptance.alpha, acceptance.accepted_share, acceptance.tokens_a_pass, c)


# The study ----------------------------------------------------------------------------------------------------


class Proposer(BaseSampler):
    """Proposes whole subsets: what `choose` makes of that of the sampler `base`, which is asked (NSGA-II counts its
    generations then) even where another subset is tried."""

    def __init__(
        self, space: dict[str, BaseDistribution], base: BaseSampler | None, choose: Callable[[Kept | None], Kept]
    ) -> None:
        self.space, self.base, self.choose = space, base, choose

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return dict(zip(search_space, self.choose(self.of_base(study, trial)), strict=True))

    def of_base(self, study: optuna.Study, trial: FrozenTrial) -> Kept | None:
        if self.base is None:
            return None
        self.base.before_trial(study, trial)
        known = self.base.infer_relative_search_space(study, trial)
        found = self.base.sample_relative(study, trial, known)
        return tuple(
            found[name] if name in found else self.base.sample_independent(study, trial, name, distribution)
            for name, distribution in self.space.items()
        )

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is not a unit")

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        if self.base is not None:
            self.base.after_trial(study, trial, state, values)


class Search:
    """A search in a file, begun or gone on with.

    Args:
        file: optuna's journal; made where missing.
        method: one of METHODS.
        seed: of everything random.
        trials: how many subsets to try in all. What depends on the length of a search (how many warm starts, the
            temperature of annealing, the size of a population) follows the first call's.
        warm: whether to begin with warm starts, for at most a third of the trials.
        settings: what the scores depend on beside these, JSON; those of the file must be equal.

    Raises:
        ValueError: the file has a search with other settings, a line for each that differs.
    """

    def __init__(
        self, file: Path, args: DecoderArgs, units: Sequence[Part], method: str, seed: int, trials: int, warm: bool,
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.args, self.units, self.method, self.seed = args, list(units), method, seed
        self.space: dict[str, BaseDistribution] = {
            part_text(unit): CategoricalDistribution([False, True]) for unit in self.units
        }
        up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
        directions = [up, down] if method == "nsga2" else [up]
        own = {"method": method, "seed": seed, "warm_starts": warm, "units": list(self.space), **settings}
        own = json.loads(json.dumps(own))  # as it comes back from the file
        begins_whole_lines(file)
        storage = JournalStorage(JournalFileBackend(str(file)))
        names = optuna.get_all_study_names(storage)
        if names and (differing := differences(json.loads(names[0])["settings"], own)):
            raise ValueError("\n".join(f"{file}: holds a search with {each}" for each in differing))
        # its name has its settings, so that there is no study without them
        name = names[0] if names else json.dumps({"settings": own, "budget": trials})
        self.study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
        self.budget = json.loads(name)["budget"]
        for left in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):  # by a stop
            self.study.tell(left.number, state=TrialState.FAIL)
        self.n_units, self.target = len(self.units), min(trials, 2 ** len(self.units) - 1)
        self.starts = warm_starts(args, self.units)[: self.budget // 3] if warm else []
        self.trials = [
            self.trial(number, found)
            for number, found in enumerate(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
        ]
        self.scores = {trial.kept: trial.worth.score for trial in self.trials}
        self.walk: Walk | None = None

    def trial(self, number: int, found: FrozenTrial) -> Trial:
        kept = tuple(found.params[name] for name in self.space)
        return Trial(number, kept, self.parts(kept), found.user_attrs["origin"], Worth(**found.user_attrs["worth"]))

    def parts(self, kept: Kept) -> tuple[Part, ...]:
        return in_order(self.args, [unit for unit, has in zip(self.units, kept, strict=True) if has])

    def run(self, objective: Objective) -> Iterator[Trial]:
        """Try subsets until there are as many trials as wanted; each as it is done."""
        while len(self.trials) < self.target:
            number = len(self.trials)
            warm = self.starts[number] if number < len(self.starts) else None
            choose = functools.partial(self.choose, number, warm)
            self.study.sampler = Proposer(self.space, self.base(number), choose)
            asked = self.study.ask(self.space)
            worth = objective(self.parts(tuple(asked.params[name] for name in self.space)))
            asked.set_user_attr("origin", self.method if warm is None else "warm start")
            asked.set_user_attr("worth", asdict(worth))
            values = [worth.alpha, worth.c] if self.method == "nsga2" else [worth.score]
            trial = self.trial(number, self.study.tell(asked, values))
            self.trials.append(trial)
            self.scores[trial.kept] = worth.score
            yield trial

    def base(self, number: int) -> BaseSampler | None:
        """A sampler of optuna's, with a seed for this trial alone: one that has been drawn from could not be had again
        after a stop."""
        seed = derive_seed("draft search", self.seed, number) % 2**32
        # warm starts alone are too much alike to learn from
        n_random = len(self.starts) + min(RANDOM_TRIALS, self.budget // 5)
        if self.method == "tpe":
            return TPESampler(seed=seed, n_startup_trials=n_random)
        if self.method == "gp":
            return GPSampler(seed=seed, n_startup_trials=n_random)
        if self.method == "nsga2":
            return NSGAIISampler(seed=seed, population_size=max(4, min(20, self.budget // 5)))
        return None

    def choose(self, number: int, warm: Kept | None, proposed: Kept | None) -> Kept:
        """The subset to try. Of a proposal that is empty or was tried before, one near it that is not."""
        if warm is not None:
            return warm
        start = proposed or self.next_of_walk()
        draws = random.Random(derive_seed("draft search, not tried yet", self.seed, number))
        found = unseen(draws, self.scores, self.n_units, start)
        assert found is not None  # there are no more trials than subsets
        return found

    def next_of_walk(self) -> Kept:
        """The next subset that the local search asks for and whose score is not known."""
        if self.walk is None:
            starts = {kept: self.scores[kept] for kept in self.starts}
            seed = derive_seed("draft search", self.seed, self.method)
            if self.method == "hill":
                self.walk = hill_climbing(seed, starts, self.n_units)
            else:
                self.walk = annealing(seed, starts, self.n_units, max(1, self.budget - len(starts)))
            self.wanted = next(self.walk)
        while self.wanted in self.scores:
            self.wanted = self.walk.send(self.scores[self.wanted])
        return self.wanted


def begins_whole_lines(file: Path) -> None:
    """Cut a last line that a kill left half written: optuna would write behind it, and read neither."""
    if file.exists() and not (text := file.read_bytes()).endswith(b"\n"):
        os.truncate(file, text.rfind(b"\n") + 1)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} {json.dumps(before.get(key))}, not {json.dumps(now.get(key))}"
        for key in dict.fromkeys([*now, *before])
        if before.get(key) != now.get(key)
    ]


def best_of(trials: Iterable[Trial], n: int = 1) -> list[Trial]:
    """The n with the highest scores; of equal ones the cheaper, then the earlier."""
    return sorted(trials, key=lambda trial: (-trial.worth.score, trial.worth.c, trial.number))[:n]


def front_of(trials: Iterable[Trial]) -> list[Trial]:
    """Those than which none is both as cheap and as often right, by rising cost."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.worth.c, -trial.worth.alpha, trial.number)):
        if not front or trial.worth.alpha > front[-1].worth.alpha:
            front.append(trial)
    return front

"""Local searches over subsets of n units: hill climbing and simulated annealing.

A walk is a generator: it yields a subset and is sent its score. It keeps its own generator of random numbers, and asks
for subsets again that it has asked for before; whoever drives it answers those from memory. So a walk that is driven
anew with the same answers goes the same way, and a search that was stopped goes on as if it had not been.
"""

import math
import random
from collections.abc import Collection, Generator

Kept = tuple[bool, ...]  # of each unit, whether the draft has it
Walk = Generator[Kept, float, None]

# of annealing (chosen), in units of the score, which is a speed-up: 1 is plain decoding's
HOT, COLD = 0.1, 0.003
PATIENCE = 20  # steps a unit, all to subsets asked for before, until annealing jumps


def neighbours(kept: Kept) -> list[Kept]:
    """All that differ by one unit, and all that have one unit in place of another; never the subset of nothing."""

    def flipped(*units: int) -> Kept:
        return tuple(has != (i in units) for i, has in enumerate(kept))

    inside = [i for i, has in enumerate(kept) if has]
    outside = [i for i, has in enumerate(kept) if not has]
    found = [flipped(i) for i in range(len(kept))] + [flipped(i, j) for i in inside for j in outside]
    return [each for each in found if any(each)]


def unseen(draws: random.Random, seen: Collection[Kept], n: int, start: Kept | None = None) -> Kept | None:
    """A subset of n units, not of nothing, that is not in `seen`: `start`, or a random one, or the first that is found
    from there by changing single units. None: there is no other."""
    if len(seen) >= 2**n - 1:
        return None
    kept = start or tuple(draws.random() < 0.5 for _ in range(n))
    while kept in seen or not any(kept):
        unit = draws.randrange(n)
        kept = (*kept[:unit], not kept[unit], *kept[unit + 1 :])
    return kept


def hill_climbing(seed: int, starts: dict[Kept, float], n: int) -> Walk:
    """From the best of `starts` (subsets whose scores are known) to the first better neighbour in random order, and so
    on; where no neighbour is better, from a random subset again."""
    draws = random.Random(seed)
    seen = set(starts)
    current, score = max(starts.items(), key=lambda item: item[1], default=(None, -math.inf))
    while True:
        if current is None:
            if (current := unseen(draws, seen, n)) is None:
                return
            seen.add(current)
            score = yield current
        around = neighbours(current)
        draws.shuffle(around)
        for candidate in around:
            seen.add(candidate)
            of_candidate = yield candidate
            if of_candidate > score:
                current, score = candidate, of_candidate
                break
        else:
            current = None


def annealing(seed: int, starts: dict[Kept, float], n: int, budget: int) -> Walk:
    """Simulated annealing from the best of `starts`: a random neighbour that is worse by x is gone to with probability
    exp(-x / T). T falls geometrically from HOT to COLD over the first `budget` different subsets."""
    draws = random.Random(seed)
    seen = set(starts)
    current, score = max(starts.items(), key=lambda item: item[1], default=(None, -math.inf))
    idle = 0
    while True:
        if current is None or idle > PATIENCE * n:
            if (current := unseen(draws, seen, n)) is None:
                return
            seen.add(current)
            score = yield current
            idle = 0
        candidate = draws.choice(neighbours(current))
        idle = idle + 1 if candidate in seen else 0
        seen.add(candidate)
        of_candidate = yield candidate
        T = HOT * (COLD / HOT) ** min(1.0, (len(seen) - len(starts)) / budget)
        if of_candidate >= score or draws.random() < math.exp((of_candidate - score) / T):
            current, score = candidate, of_candidate

"""From results to verdicts: holds, does not hold, not resolved, and what would resolve it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mars.lab.report import units
from mars.lab.report.statistics import Difference, paired, spread, t_quantile
from mars.lab.study.choice import Ladder, ladders
from mars.lab.study.definition import Claim, Comparison, Study
from mars.lab.study.results import Result

State = Literal["holds", "does not hold", "not resolved"]
MOST = 1000  # seeds that anybody would ask for
SIGNS = (1, -1, -1, 1)  # of the arms of a comparison, in its difference
_t = cache(t_quantile)


@dataclass(frozen=True)
class Judged:
    """What the results say about a comparison."""

    comparison: Comparison
    state: State
    difference: Difference | None  # of losses; of log rates for a claim about rates
    why: str = ""  # it is not resolved
    more: int | None = None  # seeds that would probably resolve it
    doubted: tuple[str, ...] = ()  # arms without whose promises it would be resolved

    @property
    def settled(self) -> bool:
        return self.state != "not resolved"


def judge(
    study: Study, results: Sequence[Result], failed: Mapping[str, str] | None = None
) -> list[Judged]:
    """A verdict for each comparison of a study. ``failed``: arms, and where that is told."""
    found = ladders(study, results)
    return [_judge(c, found, study.seeds, failed or {}) for c in study.comparisons]


def _judge(
    c: Comparison, found: Mapping[str, Ladder], seeds: int, failed: Mapping[str, str]
) -> Judged:
    differences = _differences(c, found)
    d = paired(differences, dict.fromkeys(differences, 0.0)) if differences else None
    for own in (found[label] for label in c.arms):
        name = own.arm.name
        if own.best is None:
            return Judged(c, "not resolved", d, f"{name} {_why_none(own, failed)}")
        if not own.bracketed:
            ended = "" if own.missing() else ", and its ladder ends there"
            return Judged(c, "not resolved", d, f"{name}'s best rate is not bracketed yet{ended}")
        if c.claim.kind == "rate" and not own.sloped:
            why = f"a rate beside {name}'s best diverged, so that nothing is known between the two"
            return Judged(c, "not resolved", d, why)
    n = len(differences)
    if d is None or n < seeds or d.low is None or d.high is None:
        return Judged(c, "not resolved", d, f"{n} of {seeds} seeds have been run", seeds - n)
    state = _state(d.low, d.high, c.claim)
    if state != "not resolved":
        doubted = _other_rates(c, found, d.low, d.high) if c.claim.kind != "rate" else {}
        if doubted:
            why = max(doubted.values())[1]
            return Judged(c, "not resolved", d, why, doubted=tuple(doubted))
        return Judged(c, state, d)
    low, high = _claimed(c.claim)
    needed = seeds_needed(list(differences.values()), low, high)
    if needed is None:
        why = "the interval contains the claim's limit, and no number of seeds can be named"
        return Judged(c, "not resolved", d, why)
    more = units.count(needed - n, "more seed")
    said = f"about {more}" if needed <= MOST else f"more than {MOST} seeds"
    why = f"the interval contains the claim's limit; {said} would resolve it"
    return Judged(c, "not resolved", d, f"{why} if mean and spread stay", needed - n)


def _why_none(ladder: Ladder, failed: Mapping[str, str]) -> str:
    """Why there is no rate of an arm to judge it by."""
    if ladder.losses:
        return "diverged at every rate"
    where = failed.get(ladder.arm.label)
    return "has no run yet" if where is None else f"failed at every rate tried ({where})"


def _differences(c: Comparison, found: Mapping[str, Ladder]) -> dict[int, float]:
    """By seed, what the claim is about."""
    values = [_values(c.claim, found[label]) for label in c.arms]
    shared = set.intersection(*(set(own) for own in values))
    return {
        seed: math.fsum(sign * own[seed] for sign, own in zip(SIGNS, values, strict=False))
        for seed in sorted(shared)
    }


def _other_rates(
    c: Comparison, found: Mapping[str, Ladder], low: float, high: float
) -> dict[str, tuple[float, str]]:
    """The arms that may undo what an interval says, by rates that are not known well: by how much
    each may end lower, and why.
    """
    for sign in (1, -1):
        own = [label for s, label in zip(SIGNS, c.arms, strict=False) if s == sign]
        promised = {label: promise for label in own if (promise := _promise(found[label]))}
        gains = math.fsum(gain for gain, _ in promised.values())
        moved = (low - gains, high) if sign > 0 else (low, high + gains)
        if _state(*moved, c.claim) != _state(low, high, c.claim):
            return promised
    return {}


def _promise(ladder: Ladder) -> tuple[float, str] | None:
    """How much lower an arm may end at another rate than its best, and why."""
    name, promises = ladder.arm.name, []
    if (between := ladder.possible()) is not None:
        rate, gain = between
        why = f"{name} may end {_small(gain)} lower at {rate:g}, between two rates tried"
        promises.append((gain, why))
    if (hinted := ladder.hinted()) is not None:
        rate, gain, seeds = hinted
        known = units.count(seeds, "seed")
        why = f"{name} ended {_small(gain)} lower at {rate:g}, with {known} so far"
        promises.append((gain, why))
    return max(promises, default=None)


def _small(gain: float) -> str:
    return f"{gain:.3f}" if gain >= 5e-4 else f"{gain:.1g}"


def _state(low: float, high: float, claim: Claim) -> State:
    """What an interval says about a claim."""
    least, most = _claimed(claim)
    if least < low and high < most:
        return "holds"
    return "does not hold" if high < least or low > most else "not resolved"


def _values(claim: Claim, ladder: Ladder) -> dict[int, float]:
    best = ladder.best
    own = {} if best is None else ladder.losses[best]
    if claim.kind != "rate":
        return own
    vertices = {seed: ladder.vertex(seed) for seed in own}
    return {seed: math.log(v) for seed, v in vertices.items() if v is not None}


def _claimed(claim: Claim) -> tuple[float, float]:
    """Between what the difference lies, if the claim is true."""
    if claim.kind == "lower":
        return -math.inf, -claim.by
    if claim.kind == "within":
        return -claim.by, claim.by
    return math.log(claim.by) - math.log(2) / 2, math.log(claim.by) + math.log(2) / 2


def seeds_needed(differences: Sequence[float], low: float, high: float) -> int | None:
    """The seeds at which the interval would no longer contain a limit, mean and spread unchanged.

    More than ``MOST`` is returned as MOST + 1. None: the mean lies on a limit.

    >>> seeds_needed([-0.03, 0.01, 0.0], -float("inf"), 0.0)
    40
    """
    own = spread(differences)
    if own is None or own.sd is None:
        return None
    distance = min(abs(own.mean - limit) for limit in (low, high) if math.isfinite(limit))
    if distance == 0:
        return None
    sd, numbers = own.sd, range(max(own.n, 2), MOST + 1)
    # The interval narrows with every seed: halving finds the first number at which it is enough.
    return numbers.start + bisect_left(
        numbers, True, key=lambda n: _t(n - 1) * sd / math.sqrt(n) < distance
    )

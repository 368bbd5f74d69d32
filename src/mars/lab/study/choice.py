"""An arm's rates and the best of them, from the results so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mars.lab.report.statistics import spread
from mars.lab.study.definition import SPAN, Arm, Study
from mars.lab.study.results import Result

CLOSE = 1.1  # a rate this much farther than the next rung still counts as next
NEAR = 2.0  # standard deviations within which two rates may be equally good


@dataclass(frozen=True)
class Ladder:
    """The final losses of one arm, by rate and seed; infinite where a run diverged."""

    arm: Arm
    losses: dict[float, dict[int, float]]
    noise: float = 0.01  # standard deviation of a final loss over seeds

    @property
    def best(self) -> float | None:
        """The rate with the lowest mean loss, of those with the most seeds.

        A rate at which any seed diverged is none. One with fewer seeds that is lower by more than
        noise on those takes the lead at once. None: every rate diverged, or nothing was run.
        """
        alive = {lr: own for lr, own in self.losses.items() if math.isfinite(sum(own.values()))}
        most = max((len(own) for own in alive.values()), default=0)
        means = {
            lr: math.fsum(own.values()) / len(own) for lr, own in alive.items() if len(own) == most
        }
        leader = min(means, key=lambda lr: (means[lr], lr), default=None)
        if leader is None:
            return None
        lead = {lr: self._behind(lr, leader) for lr in alive}
        first = min(lead, key=lambda lr: (lead[lr], lr))
        return first if lead[first] < -NEAR else leader

    def _behind(self, lr: float, other: float) -> float:
        """How much worse a rate is than another, on the seeds that both have; in noise."""
        own, theirs = self.losses[lr], self.losses[other]
        shared = own.keys() & theirs.keys()
        if not shared or not math.isfinite(sum(own.values())):
            return math.inf
        worse = math.fsum(own[s] - theirs[s] for s in shared) / len(shared)
        return worse * math.sqrt(len(shared)) / self.noise

    def beside(self, lr: float) -> tuple[float | None, float | None]:
        """The tried rates next below and above; None where the next rung was not tried."""
        reach = self.arm.factor * CLOSE
        below = max((r for r in self.losses if lr / reach <= r < lr), default=None)
        above = min((r for r in self.losses if lr < r <= lr * reach), default=None)
        return below, above

    def behind(self, lr: float) -> float:
        """How much worse than the best a rate is, in noise; infinitely, if it diverged."""
        best = self.best
        return math.inf if best is None else self._behind(lr, best)

    def _side(self, up: bool) -> tuple[bool, list[int]]:
        """Is the best rate bracketed on a side, and if not, which rung is missing?"""
        best = self.best
        assert best is not None
        tried = [lr for lr in self.losses if (lr > best if up else lr < best)]
        if self.beside(best)[up] is None:
            return False, [self._next(best, up)]
        if any(self.behind(lr) > NEAR for lr in tried):
            return True, []
        # All of them may be as good: the valley goes on.
        return False, [self._next(max(tried) if up else min(tried), up)]

    def _next(self, lr: float, up: bool) -> int:
        """The rung beyond a rate. One that a study with another ladder tried lies between two: the
        next after the nearest may be too far to be beside it, and then it is the nearest."""
        step, reach = 1 if up else -1, self.arm.factor * CLOSE
        rung = self.arm.rung(lr) + step
        return rung if lr / reach <= self.arm.rate(rung) <= lr * reach else rung - step

    @property
    def bracketed(self) -> bool:
        """Was a lower and a higher rate tried that are worse than the best by more than noise?"""
        return self.best is not None and self._side(True)[0] and self._side(False)[0]

    def missing(self) -> list[float]:
        """Rates to try next, until the best is bracketed or the ladder ends; of two, the one nearer
        to the first guess before the other.
        """
        if not self.losses:
            return [self.arm.rate(0), self.arm.rate(1)]
        if self.best is None:
            rungs = [self.arm.rung(min(self.losses)) - 1]
        else:
            rungs = self._side(True)[1] + self._side(False)[1]
        rates = [self.arm.rate(rung) for rung in sorted(rungs, key=abs) if abs(rung) <= SPAN]
        return [lr for lr in rates if lr not in self.losses]

    def rivals(self) -> list[float]:
        """Rates whose loss is so near the best one's that further seeds may change the choice."""
        best = self.best
        return sorted(lr for lr in self.losses if lr != best and self.behind(lr) <= NEAR)

    @property
    def sloped(self) -> bool:
        """Whether no run at the rates beside the best diverged: one that did has no slope."""
        sides = self.beside(self.best) if self.best is not None else ()
        return all(math.isfinite(sum(self.losses[lr].values())) for lr in sides if lr is not None)

    def vertex(self, seed: int) -> float | None:
        """The best rate of one seed between rungs: a parabola in log(lr) through three of them."""
        best = self.best
        below, above = self.beside(best) if best is not None else (None, None)
        if best is None or below is None or above is None or not self.sloped:
            return None
        if any(seed not in self.losses[lr] for lr in (below, best, above)):
            return None
        points = [(math.log(lr), self.losses[lr][seed]) for lr in (below, best, above)]
        (a, fa), (b, fb), (c, fc) = points
        left, right = (fb - fa) / (b - a), (fc - fb) / (c - b)
        if right <= left:  # not a valley: for this seed the better end of the three
            return math.exp(a if fa < fc else c)
        # The slope of the parabola is left at the middle of the first pair, right at the second's.
        top, end = (a + b) / 2, (b + c) / 2
        return math.exp(min(max(top - left * (end - top) / (right - left), a), c))


def ladders(study: Study, results: Sequence[Result]) -> dict[str, Ladder]:
    """Every arm's ladder."""
    losses: dict[str, dict[float, dict[int, float]]] = {
        arm.label: defaultdict(dict) for arm in study.arms
    }
    for result in results:
        if result.arm in losses:
            losses[result.arm][result.lr].setdefault(result.seed, result.loss)
    found = {arm.label: Ladder(arm, dict(losses[arm.label])) for arm in study.arms}
    sizes = {arm.label: study.size(arm) for arm in study.arms}
    noise = _noise(found, sizes)
    guess = median(noise.values()) if noise else study.noise
    return {
        label: replace(ladder, noise=noise.get(sizes[label], guess))
        for label, ladder in found.items()
    }


def _noise(found: dict[str, Ladder], sizes: dict[str, Any]) -> dict[Any, float]:
    """The spread of final losses over seeds at best rates: the median of the arms of one size.

    Larger batches mean fewer steps, and runs that scatter more.
    """
    known = defaultdict(list)
    for label, ladder in found.items():
        best = ladder.best
        own = spread(list(ladder.losses[best].values())) if best is not None else None
        if own is not None and own.sd:
            known[sizes[label]].append(own.sd)
    return {size: median(spreads) for size, spreads in known.items()}

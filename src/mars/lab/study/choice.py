"""An arm's rates and the best of them, from the results so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mars.lab.report.statistics import spread
from mars.lab.study.definition import SPAN, Arm, Study
from mars.lab.study.results import Result

CLOSE = 1.1  # a rate this much farther than the next rung still brackets


@dataclass(frozen=True)
class Ladder:
    """The final losses of one arm, by rate and seed; infinite where a run diverged."""

    arm: Arm
    losses: dict[float, dict[int, float]]

    @property
    def best(self) -> float | None:
        """The rate with the lowest mean loss, of those with the most seeds.

        A rate at which any seed diverged is none. Before any rate has further seeds, the first
        seed decides. None: every rate diverged, or nothing was run.
        """
        alive = {lr: own for lr, own in self.losses.items() if math.isfinite(sum(own.values()))}
        most = max((len(own) for own in alive.values()), default=0)
        means = {
            lr: math.fsum(own.values()) / len(own) for lr, own in alive.items() if len(own) == most
        }
        return min(means, key=lambda lr: (means[lr], lr), default=None)

    def beside(self, lr: float) -> tuple[float | None, float | None]:
        """The tried rates next below and above; None where the next rung was not tried."""
        reach = self.arm.factor * CLOSE
        below = max((r for r in self.losses if lr / reach <= r < lr), default=None)
        above = min((r for r in self.losses if lr < r <= lr * reach), default=None)
        return below, above

    @property
    def bracketed(self) -> bool:
        """Was a lower and a higher rate tried than the best?"""
        return self.best is not None and None not in self.beside(self.best)

    def missing(self) -> list[float]:
        """Rates to try next, until the best is bracketed or the ladder ends."""
        first, second = self.arm.rate(0), self.arm.rate(1)
        if not self.losses:
            return [first, second]
        best = self.best
        if best is None:
            rungs = [self.arm.rung(min(self.losses)) - 1]
        else:
            rung, (below, above) = self.arm.rung(best), self.beside(best)
            rungs = [rung + 1] * (above is None) + [rung - 1] * (below is None)
        rates = [self.arm.rate(rung) for rung in rungs if abs(rung) <= SPAN]
        return [lr for lr in rates if lr not in self.losses]

    def rivals(self, noise: float) -> list[float]:
        """Rates whose loss is so near the best one's that further seeds may change the choice."""
        best = self.best
        if best is None:
            return []
        found = []
        for lr, own in self.losses.items():
            shared = own.keys() & self.losses[best].keys()
            if lr == best or not shared or not math.isfinite(sum(own.values())):
                continue
            behind = math.fsum(own[s] - self.losses[best][s] for s in shared) / len(shared)
            near = lr in self.beside(best) and behind <= 2 * noise / math.sqrt(len(shared))
            if near or behind < 0:
                found.append(lr)
        return sorted(found)

    def vertex(self, seed: int) -> float | None:
        """The best rate of one seed between rungs: a parabola in log(lr) through three of them."""
        best = self.best
        below, above = self.beside(best) if best is not None else (None, None)
        if best is None or below is None or above is None:
            return None
        if any(math.isinf(loss) for lr in (below, above) for loss in self.losses[lr].values()):
            return best  # a side that diverged has no slope
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
    return {
        arm.label: Ladder(arm, {lr: dict(own) for lr, own in losses[arm.label].items()})
        for arm in study.arms
    }


def noise(study: Study, found: dict[str, Ladder]) -> float:
    """The spread of final losses over seeds at best rates, pooled; the study's guess before."""
    squares, freedom = 0.0, 0
    for ladder in found.values():
        best = ladder.best
        own = spread(list(ladder.losses[best].values())) if best is not None else None
        if own is not None and own.sd is not None:
            squares += own.sd**2 * (own.n - 1)
            freedom += own.n - 1
    return math.sqrt(squares / freedom) if freedom else study.noise

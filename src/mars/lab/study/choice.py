"""An arm's rates and the best of them, from the results so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from mars.lab.report.statistics import spread
from mars.lab.study.definition import SPAN, Arm, Study
from mars.lab.study.results import Result

CLOSE = 1.1  # a rate this much farther than the next rung still counts as next
NEAR = 2.0  # standard deviations within which two rates may be equally good
HALF = 0.5  # of a rung: how far from the best rate a better one is looked for in the end

Point = tuple[float, float]


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
        """The tried rates a rung below and above, or next to that; None where none was tried."""
        reach = self.arm.factor * CLOSE
        below = min((r for r in self.losses if lr / reach <= r < lr), default=None)
        above = max((r for r in self.losses if lr < r <= lr * reach), default=None)
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

    def hinted(self) -> tuple[float, float, int] | None:
        """The rate with fewer seeds than the best that was lower on these by more than noise, by
        how much, and how many they are; None if there is none.
        """
        best = self.best
        if best is None:
            return None
        few = [lr for lr, own in self.losses.items() if len(own) < len(self.losses[best])]
        lr = min(few, key=self.behind, default=best)
        if self.behind(lr) >= -1:
            return None
        seeds = len(self.losses[lr].keys() & self.losses[best].keys())
        return lr, -self.behind(lr) * self.noise / math.sqrt(seeds), seeds

    @property
    def sloped(self) -> bool:
        """Whether no run at the rates beside the best diverged: one that did has no slope."""
        sides = self.beside(self.best) if self.best is not None else ()
        return all(math.isfinite(sum(self.losses[lr].values())) for lr in sides if lr is not None)

    def vertex(self, seed: int) -> float | None:
        """The best rate of one seed between rungs: a parabola in log(lr) through three of them."""
        points = self._beside_best([seed])
        if points is None:
            return None
        (a, fa), _, (c, fc) = points
        found = lowest(points)
        if found is None:  # not a valley: for this seed the better end of the three
            return math.exp(a if fa < fc else c)
        return math.exp(min(max(found[0], a), c))

    def between(self, least: float) -> tuple[float, float] | None:
        """The rate half a rung from the best, where the parabola of ``vertex`` is lower, and by how
        much it is, as far as the rates beyond allow it; None where that is no more than ``least``,
        or where a rate so near has been tried.
        """
        best = self.best
        if best is None or not self.bracketed:
            return None
        tried = [lr for lr in (best, *self.beside(best)) if lr is not None]
        points = self._beside_best(self._shared(tried))
        found = lowest(points) if points is not None else None
        if points is None or found is None or not points[0][0] < found[0] < points[2][0]:
            return None  # nothing is promised, or only beyond the rates that it is seen from
        lr = self._half(up=found[0] > points[1][0])
        if lr is None:
            return None
        gain = min(points[1][1] - found[1], self._room(lr))
        return (lr, gain) if gain > least else None

    def possible(self) -> tuple[float, float] | None:
        """The rate half a rung from the best where most may be gained, and how much, if the loss
        need not rise on one side as it does on the other; None where nothing may be.
        """
        if self.best is None or not self.bracketed:
            return None
        rates = [lr for lr in (self._half(up=False), self._half(up=True)) if lr is not None]
        found = [(lr, min(self._beyond_best(lr), self._room(lr))) for lr in rates]
        found += [promised] if (promised := self.between(0.0)) is not None else []
        likely = [pair for pair in found if pair[1] > 0]
        return max(likely, key=lambda pair: pair[1], default=None)

    def _beyond_best(self, lr: float) -> float:
        """How much lower than at the best rate the loss is at one behind it, if the parabola on
        which it has fallen so far has its bottom there: so it may be beside a cliff, where one
        through the rates on both sides has its bottom on the wrong one.
        """
        best = self.best
        assert best is not None
        fallen = [other for other in self.losses if (other < best) == (lr > best) and other != best]
        near = min(fallen, key=lambda other: abs(math.log(other / best)))
        seeds = self._shared([near, best])
        if not seeds or not math.isfinite(sum(self.losses[near].values())):
            return 0.0  # nothing has fallen from where a run diverged
        (a, fa), (b, fb) = self._point(near, seeds), self._point(best, seeds)
        reach, bottom = abs(b - a), abs(math.log(lr) - b)
        return (fa - fb) * bottom**2 / ((reach + bottom) ** 2 - bottom**2)

    def _half(self, up: bool) -> float | None:
        """The rate half a rung above or below the best; None if one so near has been tried."""
        best = self.best
        assert best is not None
        side = 1 if up else -1
        rungs = [side * math.log(other / best, self.arm.factor) for other in self.losses]
        if any(0 < rung < HALF * CLOSE for rung in rungs):
            return None
        return float(f"{best * self.arm.factor ** (side * HALF):.3g}")

    def _room(self, lr: float) -> float:
        """How much lower than at the best rate the loss can be at one between it and the next.

        Not lower than the line that leads there through the two rates beyond, if it bends upwards
        everywhere: beside a cliff a parabola promises far more than that. Infinite where less was
        tried.
        """
        best = self.best
        assert best is not None
        side = 1 if lr > best else -1
        beyond = sorted((r for r in self.losses if side * r > side * best), key=lambda r: side * r)
        seeds = self._shared([best, *beyond[:2]])
        if len(beyond) < 2 or not seeds:
            return math.inf
        (_, low), (a, fa), (z, fz) = (self._point(r, seeds) for r in (best, *beyond[:2]))
        if not math.isfinite(fa + fz):
            return math.inf
        return low - (fa + (fz - fa) / (z - a) * (math.log(lr) - a))

    def _shared(self, rates: Sequence[float]) -> list[int]:
        """The seeds that were run at all of these rates."""
        return sorted(set.intersection(*(set(self.losses[lr]) for lr in rates)))

    def _point(self, lr: float, seeds: Sequence[int]) -> Point:
        return math.log(lr), fmean(self.losses[lr][seed] for seed in seeds)

    def _beside_best(self, seeds: Sequence[int]) -> list[Point] | None:
        """log(lr) and mean loss of the best rate and of those beside it, if all have the seeds."""
        best = self.best
        rates = (*self.beside(best), best) if best is not None else (None,)
        known = sorted(lr for lr in rates if lr is not None)
        if None in rates or not self.sloped or not seeds:
            return None
        if any(seed not in self.losses[lr] for lr in known for seed in seeds):
            return None
        return [self._point(lr, seeds) for lr in known]


def lowest(points: Sequence[Point]) -> Point | None:
    """The bottom of the parabola through three points from left to right; None: it is no valley."""
    (a, fa), (b, fb), (c, fc) = points
    left, right = (fb - fa) / (b - a), (fc - fb) / (c - b)
    if right <= left:
        return None
    # The slope of the parabola is left at the middle of the first pair, right at the second's.
    top, end = (a + b) / 2, (b + c) / 2
    x = top - left * (end - top) / (right - left)
    return x, fb - (right - left) / (c - a) * (b - x) ** 2


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

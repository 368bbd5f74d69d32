"""Sensitivity to the learning rate: the final loss by rate, from runs or from a committed grid."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.lab.errors import LabError
from mars.lab.report.runs import RunLog


@dataclass(frozen=True)
class RatePoint:
    """One learning rate."""

    lr: float
    losses: dict[int, float]  # or errors, by seed, of the runs that got to their end
    dead: int = 0  # diverged or failed

    @property
    def mean(self) -> float | None:
        return math.fsum(self.losses.values()) / len(self.losses) if self.losses else None


@dataclass(frozen=True)
class Sensitivity:
    """The rates of one optimizer in rising order."""

    label: str
    optimizer: str
    points: tuple[RatePoint, ...]
    best: float | None
    source: str = "runs"  # or the command that made the grid

    @property
    def bracketed(self) -> bool | None:
        """Was a lower and a higher rate than the best one tried to its end? None: one rate."""
        if self.best is None or len(self.points) < 2:
            return None
        return self.tried[0] < self.best < self.tried[-1]

    @property
    def tried(self) -> list[float]:
        """The rates at which a run came to an end, in rising order."""
        return [point.lr for point in self.points if point.losses or point.dead]


def from_runs(label: str, runs: Sequence[RunLog]) -> Sensitivity:
    """The rates at which these runs (one optimizer) were trained."""
    by_rate: dict[float, list[RunLog]] = defaultdict(list)
    for run in runs:
        by_rate[run.lr].append(run)
    points = []
    for lr, members in sorted(by_rate.items()):
        losses = {run.seed: run.score for run in members if run.score is not None}
        dead = sum(run.status == "diverged" for run in members)
        points.append(RatePoint(lr, losses, dead))
    return Sensitivity(label, runs[0].optimizer, tuple(points), best_rate(points))


def best_rate(points: Sequence[RatePoint]) -> float | None:
    """The rate with the lowest mean over the seeds that all candidates share.

    A rate at which a seed diverged is a candidate only if that happened at every rate. The best is
    looked for again among rates that have all its seeds: one that was tried once must not leave a
    single seed to choose between others that were tried often.

    >>> once = [RatePoint(1e-3, {0: 3.2}), RatePoint(8e-3, {0: 3.3})]
    >>> often = [RatePoint(2e-3, {0: 3.1, 1: 3.0}), RatePoint(4e-3, {0: 3.0, 1: 3.4})]
    >>> best_rate(once + often)
    0.002
    """
    ended = [point for point in points if point.losses]
    alive = [point for point in ended if not point.dead] or ended
    if not alive:
        return None
    shared = set.intersection(*(set(point.losses) for point in alive))

    def mean(point: RatePoint) -> float:
        losses = [point.losses[s] for s in sorted(shared)] or list(point.losses.values())
        return math.fsum(losses) / len(losses)

    best = min(alive, key=mean)
    rivals = [point for point in alive if point.losses.keys() >= best.losses.keys()]
    return best.lr if len(rivals) == len(alive) else best_rate(rivals)


def read_rates(path: str | Path) -> dict[str, Any]:
    """The committed learning-rate grid of a recipe, a JSON file."""
    try:
        rates = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LabError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(rates, dict) or not isinstance(rates.get("optimizers"), dict):
        raise LabError(f"{path}: a file of rates must have an object 'optimizers'")
    try:
        from_grid(rates)
    except LabError as error:
        raise LabError(f"{path}: {error}") from error
    return rates


def from_grid(rates: Mapping[str, Any]) -> list[Sensitivity]:
    """The sensitivity curves of a committed grid; null is a run that diverged."""
    source = str(rates.get("command") or rates.get("recipe") or "a committed grid")
    curves = []
    for name, entry in rates["optimizers"].items():
        try:
            points = [
                _grid_point(float(lr), losses)
                for lr, losses in sorted(_scores(entry).items(), key=lambda pair: float(pair[0]))
            ]
            best = entry.get("best")
            best = best_rate(points) if best is None else float(best)
            label = str(entry.get("label") or name)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LabError(
                f"optimizer {name!r}: needs 'losses', an object of rate: list of losses"
            ) from error
        curves.append(Sensitivity(label, str(name), tuple(points), best, source))
    return curves


def _scores(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Final losses by rate, or of images the shares of errors."""
    found: Mapping[str, Any] = entry["errors"] if "errors" in entry else entry["losses"]
    return found


def _grid_point(lr: float, losses: Sequence[float | None]) -> RatePoint:
    known = {i: float(v) for i, v in enumerate(losses) if v is not None and math.isfinite(v)}
    return RatePoint(lr, known, dead=len(losses) - len(known))

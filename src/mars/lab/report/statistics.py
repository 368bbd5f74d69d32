"""The statistics of few seeds: paired differences, and an interval that says how little we know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Spread:
    """Values over seeds."""

    n: int
    mean: float
    sd: float | None  # sample standard deviation; None for one value
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences with its 95% confidence interval (None for one pair)."""

    n: int
    mean: float
    low: float | None
    high: float | None

    @property
    def resolved(self) -> bool | None:
        """Does the interval exclude zero? None: one pair cannot tell."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


def spread(values: Sequence[float]) -> Spread | None:
    """
    >>> spread([1.0, 3.0])
    Spread(n=2, mean=2.0, sd=1.4142135623730951, low=1.0, high=3.0)
    """
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else None
    return Spread(n, mean, sd, min(values), max(values))


def paired(
    ours: Mapping[int, float], theirs: Mapping[int, float], grain: float = 0.0
) -> Difference | None:
    """ours − theirs on the seeds that both have.

    ``grain`` is what values are multiples of, as accuracies are of one image: that pairs agree to
    the last digit then says little of noise, so no spread counts for less.

    >>> paired({0: 1.0, 1: 2.0, 5: 9.0}, {0: 1.5, 1: 2.5})
    Difference(n=2, mean=-0.5, low=-0.5, high=-0.5)
    """
    both = spread([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    if both is None:
        return None
    if both.sd is None:
        return Difference(1, both.mean, None, None)
    half = t_quantile(both.n - 1) * max(both.sd, grain) / math.sqrt(both.n)
    return Difference(both.n, both.mean, both.mean - half, both.mean + half)


CONFIDENCE = 0.95


def t_quantile(df: int) -> float:
    """The t with P(|T| ≤ t) = 95 %.

    >>> round(t_quantile(1), 3), round(t_quantile(2), 3), round(t_quantile(9), 3)
    (12.706, 4.303, 2.262)
    """
    low, high = 0.0, 1.0
    while _t_within(high, df) < CONFIDENCE:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if _t_within(middle, df) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _t_within(t: float, df: int) -> float:
    """P(|T| ≤ t) for whole degrees of freedom: a finite sum in θ = atan(t/√df)."""
    angle = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    if df % 2:
        term = total = cosine if df > 1 else 0.0
        for k in range(3, df - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        return (angle + sine * total) * 2 / math.pi
    term = total = 1.0
    for k in range(2, df - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return sine * total


def first_reach(x: NDArray[np.float64], y: NDArray[np.float64], target: float) -> float | None:
    """The x at which a falling curve first comes down to the target, by straight lines.

    >>> first_reach(np.array([0.0, 10.0, 20.0]), np.array([4.0, 3.0, 1.0]), 2.0)
    15.0
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    # A mean of these very numbers, rounded otherwise, is reached.
    reached = np.flatnonzero(y <= target + 1e-12 * abs(target))
    if not len(reached):
        return None
    i = int(reached[0])
    if i == 0:
        return float(x[0])
    part = min(1.0, (y[i - 1] - target) / (y[i - 1] - y[i]))
    return float(x[i - 1] + part * (x[i] - x[i - 1]))

"""Fewer points for a drawing, without losing what the eye looks for: the extremes."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from mars.lab.report.runs import Series


def keep(series: Series, columns: tuple[str, ...], limit: int) -> NDArray[np.intp]:
    """At most ~limit indices: ends, and the lowest and highest of each column in every bucket."""
    n = len(series["step"])
    if n <= limit:
        return np.arange(n)
    columns = tuple(name for name in columns if name in series)
    buckets = max(1, (limit - 2) // (2 * max(1, len(columns))))
    edges = np.linspace(0, n, buckets + 1).astype(np.intp)
    chosen = {0, n - 1}
    for low, high in itertools.pairwise(edges):
        for name in columns:
            part = series[name][low:high]
            if np.isfinite(part).any():
                chosen |= {int(low + np.nanargmin(part)), int(low + np.nanargmax(part))}
            elif high > low:
                chosen.add(int(low))
    return np.array(sorted(chosen), dtype=np.intp)


def local_mean(values: NDArray[np.float64], at: NDArray[np.intp]) -> NDArray[np.float64]:
    """The mean around each kept index: extremes alone would bias a smoothed curve."""
    n = len(values)
    half = max(1, round(n / max(1, len(at))))
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    low, high = np.clip(at - half, 0, n), np.clip(at + half + 1, 0, n)
    count = counts[high] - counts[low]
    total = sums[high] - sums[low]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)

"""From log-likelihoods to numbers, as lm-eval 0.4.13 computes them.

With Lᵢ the log-likelihood of choice i and nᵢ its characters, `acc` asks whether argmax Lᵢ is the
right choice, `acc_norm` whether argmax Lᵢ/nᵢ is; ties go to the first. Of a last word, `acc` asks
whether every token of it is the likeliest one, and `perplexity` is exp(−mean L). The standard error
of a mean is s/√n with s² = Σ(xᵢ−x̄)²/(n−1); of MMLU, pooled over its subjects; of a perplexity p,
p·s/√n by the delta method (lm-eval draws bootstrap samples for it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mars.lab.evaluation.scoring import Score
from mars.lab.evaluation.tasks import Task

Values = npt.NDArray[np.float64]
LARGEST = 709.0  # of which a float has the exponential


@dataclass(frozen=True)
class Result:
    """What a model got on a task, item by item."""

    task: str
    metric: str
    """The one that stands for the task."""
    values: dict[str, Values]
    """Of each item: acc, acc_norm; loglikelihood where there is a perplexity."""
    groups: list[str]
    chance: float | None

    def mean(self, metric: str) -> float:
        return float(self.values[metric].mean())

    def error(self, metric: str) -> float | None:
        """The standard error of the mean."""
        return standard_error(self.values[metric], self.groups)

    @property
    def perplexity(self) -> tuple[float, float | None] | None:
        """With its standard error."""
        if "loglikelihood" not in self.values:
            return None
        value = math.exp(min(-self.mean("loglikelihood"), LARGEST))
        error = self.error("loglikelihood")
        return value, None if error is None else value * error


def result(task: Task, scores: Sequence[Score]) -> Result:
    """The scores of all pairs of a task, item after item, to values of its items."""
    values: dict[str, list[float]] = {}
    place = 0
    for item in task.items:
        own = scores[place : place + len(item.pairs)]
        place += len(own)
        for metric, value in _values(own, item.label, item.lengths).items():
            values.setdefault(metric, []).append(value)
    arrays = {metric: np.array(v) for metric, v in values.items()}
    groups = [item.group for item in task.items]
    return Result(task.name, task.metric, arrays, groups, task.chance)


def _values(own: Sequence[Score], label: int | None, lengths: list[int]) -> dict[str, float]:
    logs = np.array([score.loglikelihood for score in own])
    if label is None:
        return {"acc": float(own[0].greedy), "loglikelihood": float(logs[0])}
    return {
        "acc": float(logs.argmax() == label),
        "acc_norm": float((logs / np.maximum(1, lengths)).argmax() == label),
    }


def standard_error(values: Values, groups: Sequence[str] = ()) -> float | None:
    """Of the mean of all; None where there are too few items.

    Where they are of several groups, deviations are from the mean of the own group (pooled).

    >>> standard_error(np.array([0.0, 1.0, 1.0, 0.0]))
    0.28867513459481287
    """
    parts = [values[np.array(groups) == name] for name in dict.fromkeys(groups)] or [values]
    if min(len(part) for part in parts) < 2:
        return None
    squares = sum(float(((part - part.mean()) ** 2).sum()) for part in parts)
    return math.sqrt(squares / (len(values) - len(parts)) / len(values))


def difference(a: Result, b: Result) -> tuple[float, float | None]:
    """How much better b is than a on the same items, with the standard error of that (paired)."""
    d = b.values[b.metric] - a.values[a.metric]
    return float(d.mean()), standard_error(d, a.groups)


def average(
    pairs: Sequence[tuple[float, float | None]],
) -> tuple[float, float | None]:
    """The mean over tasks, each of the same weight, and its standard error."""
    mean = sum(value for value, _ in pairs) / len(pairs)
    errors = [error for _, error in pairs if error is not None]
    if len(errors) < len(pairs):
        return mean, None
    return mean, math.sqrt(sum(error**2 for error in errors)) / len(pairs)

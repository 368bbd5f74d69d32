"""What runs are judged by and counted in: losses over tokens, or accuracies over epochs.

Inside, lower is always better: a *score* is the loss, or the share of images that were told wrong.
Here it becomes what people read.
"""

from __future__ import annotations

from dataclasses import dataclass

from mars.lab.report import units
from mars.lab.report.statistics import Difference, Spread


@dataclass(frozen=True)
class Measure:
    """How a report speaks of text or of images."""

    unit: str  # what a step has so many of: tokens, images
    progress: str  # the column of a log that says how far a run is
    progress_words: str  # the same as people say it
    name: str  # of what is compared
    score: str  # of what a grid of rates shows
    best: str  # its highest or lowest
    beyond: str  # where a better one lies

    def value(self, score: float | None) -> str:
        """A score as people read it."""
        return units.loss(score)

    def shown(self, difference: Difference) -> Difference:
        """A difference of scores in the units of what is compared."""
        return difference

    def signed(self, value: float | None) -> str:
        return units.signed(value)

    def gap(self, difference: Difference) -> str:
        """How far apart, without a sign."""
        return f"{abs(difference.mean):.{units.DECIMALS}f}"

    def far(self, progress: float | None) -> str:
        """How far a run is."""
        return units.tokens(progress)


class _Accuracy(Measure):
    def value(self, score: float | None) -> str:
        return units.accuracy(None if score is None else 1.0 - score)

    def shown(self, difference: Difference) -> Difference:
        """In percentage points, more is better."""
        low, high = difference.low, difference.high
        return Difference(
            difference.n,
            -100 * difference.mean,
            None if high is None else -100 * high,
            None if low is None else -100 * low,
        )

    def signed(self, value: float | None) -> str:
        return units.signed(value, 2)

    def gap(self, difference: Difference) -> str:
        return f"{100 * abs(difference.mean):.2f} points"

    def far(self, progress: float | None) -> str:
        return "–" if progress is None else f"{progress:.1f}"


TEXT = Measure(
    "tokens", "tokens", "tokens", "validation loss", "validation loss", "lowest", "below"
)
IMAGES = _Accuracy("images", "epoch", "epochs", "accuracy", "error rate", "highest", "above")


def of(unit: object) -> Measure:
    """The measure of a log by what it counts; old logs do not say, and count tokens."""
    return IMAGES if unit == "images" else TEXT


def percent(values: Spread | None) -> str:
    """Shares over seeds, in percent without the sign, for a table.

    >>> percent(Spread(2, 0.95287, 0.0012, 0.952, 0.954))
    '95.29±0.12'
    """
    if values is None:
        return "–"
    spread = "" if values.sd is None else f"±{100 * values.sd:.2f}"
    return f"{100 * values.mean:.2f}{spread}"

"""How many runs at once on one device: found by trying, while they train."""

from __future__ import annotations

from collections.abc import Sequence

WORTH = 1.08  # more runs at once must do this much more work together
READINGS = 2  # of each run, after the number of runs changed
LIMIT = 3  # runs at once that are tried on a GPU


class Packing:
    """Begins with one run, adds another as long as all together get more done.

    >>> packing = Packing()
    >>> packing.observe([1.0]), packing.observe([0.7, 0.7]), packing.observe([0.5, 0.5, 0.4])
    (2, 3, 2)
    """

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots or 1
        self.settled = slots is not None
        self.total: dict[int, float] = {}

    def observe(self, speeds: Sequence[float | None]) -> int:
        """Take the speeds of the runs in progress; how many there should be."""
        known = [speed for speed in speeds if speed is not None]
        if self.settled or len(known) != self.slots or len(speeds) != self.slots:
            return self.slots
        self.total[self.slots] = sum(known)
        if self.slots > 1 and self.total[self.slots] < WORTH * self.total[self.slots - 1]:
            self.fewer()
        elif self.slots == LIMIT:
            self.settled = True
        else:
            self.slots += 1
        return self.slots

    def fewer(self) -> None:
        """So many do not go together: one less, for good."""
        self.slots = max(1, self.slots - 1)
        self.settled = True

"""Launches whose norms are completed outside: other ranks, launches or engines hold the rest.

Between `begin` and `finish` the sums of squares of what is here are computed by a launch of their
own, leave as a vector, and come back as scales: nothing in a launch could wait for another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mars.engines.batch import Batch
from mars.engines.fused import launch, sums
from mars.engines.fused import layout as at
from mars.engines.fused.host import upload


class Sums(NamedTuple):
    """What there is to add up: of which rows, in items of which size, the sums of a row where."""

    work: Tensor
    rows: Tensor
    item: int
    first: int  # a column of the table


class Outside(launch.Launch):
    """A launch between whose parts norms travel."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__(batches)
        self.together = True  # every update reads both scales
        self.spans: dict[int, slice] = {}  # the rows of a batch
        first = 0
        for b in batches:
            b.launch = self
            self.spans[id(b)] = slice(first, first + len(b.x))
            first += len(b.x)
        normed = [b.max_grad_norm is not None for b in batches for _ in b.x]
        clipped = [bool(b.h) and b.k.clip is not None for b in batches for _ in b.x]
        sizes = [x.numel() for b in batches for x in b.x]
        self.asked = (
            self._sums(normed, sizes, launch.NORM_ITEM, at.NORM_FIRST.value),
            self._sums(clipped, sizes, launch.EXACT_ITEM, at.EXACT_FIRST.value),
        )
        self.found: dict[bool, Tensor] = {}  # norms of this step

    def _sums(self, asked: list[bool], sizes: list[int], item: int, first: int) -> Sums:
        rows = [i for i, wanted in enumerate(asked) if wanted]
        parts = [launch.items_of(at.NORM, i, sizes[i], item) for i in rows]
        work = torch.cat(parts) if parts else torch.empty(0, 2)
        return Sums(
            upload(work, torch.int32, self.device), upload(rows, torch.int64, self.device), item,
            first,
        )  # fmt: skip

    def _schedule(self, sizes: Sequence[int], flags: Sequence[int]) -> Tensor:
        order = reversed(range(len(sizes)))  # what the norms read last is still in the cache
        item = launch.UPDATE_ITEM
        return torch.cat([launch.items_of(at.UPDATE, i, sizes[i], item, True) for i in order])

    def begin(self, *args: Any) -> None:
        self.found = {}  # whatever became of the step before
        super().begin(*args)

    def norms(self, batch: Batch, corrected: bool) -> Tensor:
        """‖g‖ or ‖c‖ of what is here of each tensor of the batch, in float64."""
        if corrected not in self.found:
            work, rows, item, first = self.asked[corrected]
            parts = self.sums[corrected]
            lengths = torch.zeros(self.n, dtype=torch.float64, device=self.device)
            with self.on_device():
                sums.measure[(len(work),)](
                    self.table, self.now[1], work, self.n, self.figures, parts, corrected,
                    launch.GRAD[self.dtype], self.forms[0], item, first, launch.BLOCK,
                    **launch.OPTIONS,
                )  # fmt: skip
                sums.lengths[(len(rows),)](
                    self.table, rows, parts, lengths, first, **launch.OPTIONS
                )
            self.found[corrected] = lengths
        return self.found[corrected][self.spans[id(batch)]]

    def shrink(self, batch: Batch, factor: Tensor) -> None:
        """Multiply the gradients of the batch."""
        self.figures[self.spans[id(batch)], at.G_SCALE.value] = factor

    def clip(self, batch: Batch, length: Tensor | None) -> None:
        """Divide c by its length where that is above 1: of each tensor, or of all together."""
        if length is not None:
            scale = length.clamp(min=1.0).reciprocal()
            self.figures[self.spans[id(batch)], at.C_SCALE.value] = scale

    def finish(self) -> None:
        """Do everything else: both scales of every tensor are known."""
        self.counters[at.PHASE.value].fill_(at.KNOWN.value)
        self.step(False, self.zero, False)

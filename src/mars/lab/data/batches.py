"""Which tokens are in which batch: a pure function of (seed, step, position).

An epoch is a random order of the windows phase + k·context, k = 0 … windows − 1, of context + 1
tokens each. They overlap by the one token that is the last target of one and the first input of the
next, so every token between the first and the last window is predicted exactly once an epoch. The
phase is drawn anew each epoch, so windows are not cut at the same places again; what it leaves over
at both ends is less than two contexts.

Ranks, micro-batches and resumed runs all read rows by their number, so none of them can change the
data. The order is a sort of Philox's raw words, which numpy promises to keep; its `permutation` it
does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mars.lab.data.shards import Tokens
from mars.lab.errors import LabError

Rows = tuple[Tensor, Tensor]


class Batches:
    """The batches of a training run.

    Args:
        tokens: the stream to cut into windows.
        context: targets in a window (a row).
        batch_size: rows of one optimizer step, over all ranks and micro-batches.
        seed: of the order, 0 … 2⁶⁴ − 1.
    """

    def __init__(self, tokens: Tokens, context: int, batch_size: int, seed: int) -> None:
        _check_length(tokens, context)
        if batch_size < 1:
            raise LabError(f"batch_size must be at least 1, not {batch_size}")
        if not 0 <= seed < 1 << 64:
            raise LabError(f"seed must be 0 … 2**64 - 1, not {seed}")
        self.tokens = tokens
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.windows = max(1, len(tokens) // context - 1)
        self._epochs: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> Rows:
        """Inputs and targets, int64 (rows, context), of the rows start … stop of a step's batch."""
        stop = self.batch_size if stop is None else stop
        if step < 0 or not 0 <= start <= stop <= self.batch_size:
            raise IndexError(f"step {step}, rows {start} … {stop} of {self.batch_size}")
        first = step * self.batch_size
        return _read(self.tokens, self.starts(first + start, first + stop), self.context)

    def starts(self, first: int, last: int) -> list[int]:
        """Where the rows first … last begin, counted from the start of the run."""
        found = []
        for row in range(first, last):
            epoch, k = divmod(row, self.windows)
            phase, order = self._epoch(epoch)
            found.append(phase + int(order[k]) * self.context)
        return found

    def _epoch(self, epoch: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Phase and order of an epoch; the last two are kept, for batches across the border."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                self._epochs.pop(next(iter(self._epochs)))
            words = _words(self.seed, epoch, self.windows + 1)
            phases = min(self.context, len(self.tokens) - self.windows * self.context)
            order = np.argsort(words[1:], kind="stable")
            self._epochs[epoch] = int(words[0] % np.uint64(phases)), order
        return self._epochs[epoch]


class Validation:
    """Fixed windows, evenly spaced from end to end, the same for every run; never overlapping."""

    def __init__(self, tokens: Tokens, context: int, sequences: int) -> None:
        _check_length(tokens, context)
        if sequences < 1:
            raise LabError(f"validation needs at least 1 sequence, not {sequences}")
        self.tokens = tokens
        self.context = context
        self.count = min(sequences, (len(tokens) - 1) // context)

    def __len__(self) -> int:
        return self.count

    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        """Inputs and targets, int64 (rows, context), of the windows start … stop."""
        stop = self.count if stop is None else stop
        if not 0 <= start <= stop <= self.count:
            raise IndexError(f"rows {start} … {stop} of {self.count}")
        room, gaps = len(self.tokens) - 1 - self.context, max(1, self.count - 1)
        starts = [i * room // gaps for i in range(start, stop)]
        return _read(self.tokens, starts, self.context)


def shuffled(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """The numbers 0 … count − 1 in the random order of an epoch.

    >>> sorted(shuffled(0, 3, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(_words(seed, epoch, count), kind="stable")


def _words(seed: int, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    return np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)


def _check_length(tokens: Tokens, context: int) -> None:
    if context < 1:
        raise LabError(f"context must be at least 1, not {context}")
    if len(tokens) < context + 1:
        raise LabError(
            f"{tokens.source} has {len(tokens)} tokens, fewer than one context of {context} and "
            "its target: take more data or a smaller context (--model.block-size)"
        )


def _read(tokens: Tokens, starts: Sequence[int], context: int) -> Rows:
    block = np.empty((len(starts), context + 1), np.int64)
    for row, start in zip(block, starts, strict=True):
        row[:] = tokens.read(start, start + context + 1)
    both = torch.from_numpy(block)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()

"""One parameter set after the other, one row for each candidate, skipped ones included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from mars.bench.candidates import Candidate, baseline, candidates
from mars.bench.measure import Tensors, measure, quick_release, release, settle
from mars.bench.shapes import PARAMETER_SETS

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A line of the table. Without ``skipped``, ``ms`` and ``ratio`` are there."""

    parameters: str
    name: str
    on: str  # "all" parameters or the "hidden" matrices
    skipped: str | None = None
    ms: float | None = None
    spread: float | None = None  # of ms: what the middle half of the steps differs by, as a share
    beside_ms: float | None = None  # of the baseline on the same parameters, before and after it
    ratio: float | None = None  # to that
    gpu_ms: float | None = None
    gpu_beside_ms: float | None = None
    gpu_ratio: float | None = None
    state: float | None = None  # bytes a parameter, as is floor
    floor: float | None = None
    bandwidth: float | None = None  # bytes a second that floor and time mean
    of_copy: float | None = None  # that, as a share of what a copy reaches
    extra: int | None = None  # bytes


@dataclass(frozen=True)
class Base:
    """Whom ratios are to, as last timed: again after each, for a machine has slow minutes."""

    candidate: Candidate
    row: Row


@dataclass(frozen=True)
class Settings:
    """What is the same for all rows."""

    device: torch.device
    dtype: torch.dtype
    repeat: int
    grad_norm: float
    copy: float  # bytes a second


def selected(on_gpu: bool, only: Sequence[str]) -> list[Candidate]:
    """The candidates that ``only`` names, whole or in part (all, if empty); and baselines."""
    everyone = candidates(on_gpu)
    names = {c.name.lower() for c in everyone}

    def asked(name: str) -> bool:
        """By its whole name, or by a part that is nobody's whole name."""
        return any(s == name or (s not in names and s in name) for s in map(str.lower, only))

    found = [c for c in everyone if not only or asked(c.name.lower())]
    needed = {baseline(on_gpu, c.hidden).name for c in found} | {c.name for c in found}
    return [c for c in everyone if c.name in needed]


def rows_of(name: str, chosen: Sequence[Candidate], settings: Settings) -> Iterator[Row]:
    """Time the candidates on a parameter set. Nothing that one of them raises stops the others."""
    settle()
    shapes = PARAMETER_SETS[name]()
    made, reason = _attempt(
        lambda: Tensors(shapes, settings.dtype, settings.device, settings.grad_norm)
    )
    bases: dict[str, Base] = {}
    with quick_release():
        for candidate in chosen:
            on = "hidden" if candidate.hidden else "all"
            row = Row(name, candidate.name, on, skipped=reason)
            if made is not None:
                count = sum(shapes[i].numel for i in made.chosen(candidate.hidden))
                row = _timed(row, candidate, made, count, settings)
                release(settings.device)
            base = bases.setdefault(on, Base(candidate, row))  # the first of its kind
            again = base.row.ms is not None and base.candidate is not candidate
            if made is not None and row.ms is not None and again:
                after = _timed(base.row, base.candidate, made, count, settings)
                release(settings.device)
                bases[on] = replace(base, row=after if after.skipped is None else base.row)
            yield _compared(row, base.row, bases[on].row)


def _compared(row: Row, before: Row, after: Row) -> Row:
    """A row with its ratios to the baseline, which was timed before it and after it."""
    if row.ms is None or before.ms is None or after.ms is None:
        return row
    beside = (before.ms + after.ms) / 2
    row = replace(row, beside_ms=beside, ratio=row.ms / beside)
    if row.gpu_ms is None or before.gpu_ms is None or after.gpu_ms is None:
        return row
    beside = (before.gpu_ms + after.gpu_ms) / 2
    return replace(row, gpu_beside_ms=beside, gpu_ratio=row.gpu_ms / beside)


def _timed(row: Row, candidate: Candidate, tensors: Tensors, count: int, settings: Settings) -> Row:
    found, reason = _attempt(lambda: measure(candidate, tensors, settings.repeat))
    if found is None:
        return replace(row, skipped=reason)
    bandwidth = None
    if found.floor is not None:
        bandwidth = count * found.floor / (1e-3 * (found.gpu_ms or found.ms))
    return replace(
        row, ms=found.ms, spread=found.spread, gpu_ms=found.gpu_ms, state=found.state,
        floor=found.floor, extra=found.extra, bandwidth=bandwidth,
        of_copy=None if bandwidth is None else bandwidth / settings.copy,
    )  # fmt: skip


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or why there is none, in a line. The exception and what it holds are let go."""
    try:
        return work(), None
    except (torch.OutOfMemoryError, MemoryError):
        return None, "out of memory"
    except Exception as error:
        text = str(error).strip()
        if "DefaultCPUAllocator" in text:  # which raises a RuntimeError
            return None, "out of memory"
        return None, text.splitlines()[0] if text else type(error).__name__

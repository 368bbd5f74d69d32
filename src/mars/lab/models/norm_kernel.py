# mypy: ignore-errors
"""The Triton kernels of norms.py: rows go once through the registers, in either direction.

A fixed number of programs share the rows out, each its own in a fixed order. The gradient of the
weight is summed by every program for its rows and then over programs: no atomics, so that the same
inputs give the same bits. Mean and deviation are computed anew from the sum, which the backward
pass reads anyway. Arithmetic is in float32; the norm is that of the sum as it is stored.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Shape(NamedTuple):
    """How rows are shared out."""

    rows: int  # that a program takes at a time
    warps: int  # of a program
    programs: int | None  # on a multiprocessor; None: as many as there are rows
    stages: int  # 1: loads go straight to registers; else through shared memory, ahead of their use


def forward_shape(width: int) -> Shape:
    # Nothing is summed over rows, so a program need not live longer than one: 4 to 8 % faster.
    _, rows, warps = _tile(width)
    return Shape(rows, warps, None, 1)


def backward_shape(width: int) -> Shape:
    # Left to itself, the assembler moves loads down to their use, to save registers: three waits a
    # row. Programs are as many as find room for their registers, of which a thread has 95 to 168.
    block, rows, warps = _tile(width)
    return Shape(rows, warps, 12 if warps == 1 else 16 // warps, 3 if block <= 4096 else 1)


def _tile(width: int) -> tuple[int, int, int]:
    """A row, filled up to a power of two; rows and warps of a program: two vectors of 16 bytes a
    thread."""
    block = triton.next_power_of_2(width)
    return block, max(1, 512 // block), max(1, block // 512)


@triton.jit
def _normalised(s, inside, eps, D: tl.constexpr):
    """(s - mean)/deviation of every row, zero outside, and 1/deviation."""
    mean = tl.sum(s, 1, keep_dims=True) / D
    centred = tl.where(inside, s - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / D + eps)
    return centred * inverse, inverse


@triton.jit
def _forward(
    x, y, weight, total, normed, n_rows, eps, ADD: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < n_rows) & inside
        at = rows.to(tl.int64) * D + columns
        s = tl.load(x + at, mask=mask, other=0.0)
        if ADD:
            addend = tl.load(y + at, mask=mask, other=0.0)
            s = (s.to(tl.float32) + addend.to(tl.float32)).to(total.dtype.element_ty)
            tl.store(total + at, s, mask=mask)
        unit, _ = _normalised(s.to(tl.float32), inside, eps, D)
        tl.store(normed + at, (unit * w).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    d_normed, d_total, total, weight, dx, parts, n_rows, eps, ADD: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((1, BLOCK), tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, n_rows, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < n_rows) & inside
        at = rows.to(tl.int64) * D + columns
        s = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_normed + at, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            stream = tl.load(d_total + at, mask=mask, other=0.0)
        unit, inverse = _normalised(s, inside, eps, D)
        d_weight += tl.sum(d * unit, 0, keep_dims=True)
        d *= w
        along = tl.sum(d * unit, 1, keep_dims=True) / D
        d = (d - tl.sum(d, 1, keep_dims=True) / D - unit * along) * inverse
        if ADD:
            d += stream.to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    tl.store(parts + tl.program_id(0) * D + columns, d_weight, mask=inside)


@triton.jit
def _sum(parts, out, n_rows, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        mask = (rows < n_rows) & (columns < D)
        total += tl.load(parts + rows * D + columns, mask=mask, other=0.0)
    tl.store(out + columns, tl.sum(total, 0, keep_dims=True), mask=columns < D)


def forward(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (nothing, if there is no y) and the norm of the sum; all contiguous."""
    total = x.new_empty(0) if y is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    rows, programs, sizes = _launch(x, forward_shape(x.shape[-1]))
    if rows:
        with torch.cuda.device_of(x):
            _forward[(programs,)](
                x, x if y is None else y, weight, total, normed, rows, eps, ADD=y is not None,
                **sizes,
            )  # fmt: skip
    return total, normed


def backward(
    d_normed: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum, to which that of the stream (d_total) is added, and of the weight."""
    dx, width = torch.empty_like(total), total.shape[-1]
    rows, programs, sizes = _launch(total, backward_shape(width))
    stream = d_normed if d_total is None else d_total
    parts = total.new_empty(programs, width, dtype=torch.float32)
    d_weight = total.new_empty(width, dtype=torch.float32)
    with torch.cuda.device_of(total):
        if rows:
            _backward[(programs,)](
                d_normed, stream, total, weight, dx, parts, rows, eps, ADD=d_total is not None,
                **sizes,
            )  # fmt: skip
        # Few columns a program, so that many read what has just been written, still in the cache.
        _sum[(triton.cdiv(width, 16),)](
            parts, d_weight, programs, D=width, ROWS=256, COLUMNS=16, num_warps=8
        )
    return dx, d_weight


def _launch(t: Tensor, shape: Shape) -> tuple[int, int, dict[str, int]]:
    """Rows of a tensor, programs for them and sizes for the compiler."""
    width = t.shape[-1]
    rows = t.numel() // width
    programs = triton.cdiv(rows, shape.rows)
    if shape.programs is not None:
        programs = min(programs, shape.programs * _multiprocessors(t.device))
    sizes = {"D": width, "BLOCK": triton.next_power_of_2(width), "ROWS": shape.rows}
    return rows, programs, {**sizes, "STAGES": shape.stages, "num_warps": shape.warps}


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # in the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count

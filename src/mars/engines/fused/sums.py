"""Sums of squares by launches of their own, for norms that are completed outside (outside.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from mars.engines.fused import layout as at
from mars.engines.fused.access import add_up
from mars.engines.fused.kernel import squares


@triton.jit
def measure(
    table, gradients, work, n_tensors, figures, sums, CORRECTED: tl.constexpr, GRAD: tl.constexpr,
    H_FORM: tl.constexpr, ITEM: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σg² or Σc² of one item."""
    entry = tl.load(work + 2 * tl.program_id(0))
    item = tl.load(work + 2 * tl.program_id(0) + 1)
    i = (entry & 0xFFFFFFF).to(tl.int64)
    row, figure = table + i * at.ROW, figures + i * at.FIGURES
    gradient, last = tl.load(gradients + i), tl.load(gradients + n_tensors + i)
    n, exponents = tl.load(row + at.NUMEL), tl.load(row + at.H_EXP)
    kappa, scale = tl.load(figure + at.KAPPA), tl.load(figure + at.G_SCALE)
    start = item.to(tl.int64) * ITEM
    if (((gradient | last) & 15) == 0) & (start + ITEM <= n):
        part = squares(
            gradient, last, exponents, start, n, kappa, scale, True, CORRECTED, GRAD, H_FORM, ITEM,
            BLOCK,
        )  # fmt: skip
    else:
        part = squares(
            gradient, last, exponents, start, n, kappa, scale, False, CORRECTED, GRAD, H_FORM,
            ITEM, BLOCK,
        )  # fmt: skip
    tl.store(sums + tl.load(row + FIRST) + item, part)


@triton.jit
def lengths(table, rows, sums, out, FIRST: tl.constexpr):
    """The norm of a tensor, from the sums of its items."""
    i = tl.load(rows + tl.program_id(0))
    row = table + i * at.ROW
    count = tl.load(row + FIRST + 1).to(tl.int32)
    tl.store(out + i, tl.sqrt(add_up(sums + tl.load(row + FIRST), count)))

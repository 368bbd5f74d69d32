# mypy: ignore-errors
"""The Triton kernels of 8-bit operands: a tile is read once, and written in both orders.

The transposed tile goes through shared memory, so that both are written in whole pieces of memory:
a tile must be 32 bytes wide at least, each way. The outputs may be of any dtype, for tests.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mars.lab.models.loss_kernel import LOG2E

ROWS, COLUMNS, WARPS = 64, 128, 4  # of a tile


@triton.jit
def _tile(n_rows, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows and columns of this program's tile; neighbours take tiles one below the other."""
    down = tl.cdiv(n_rows, BLOCK_R)
    tile = tl.program_id(0)
    at_r = (tile % down) * BLOCK_R + tl.arange(0, BLOCK_R)
    at_c = (tile // down) * BLOCK_C + tl.arange(0, BLOCK_C)
    return at_r, at_c


@triton.jit
def _store(x, rows, columns, at_r, at_c, n_rows, n_columns, row_stride, column_stride):
    at = at_r.to(tl.int64)[:, None] * row_stride + at_c[None, :]
    inside = (at_r < n_rows)[:, None] & (at_c < n_columns)[None, :]
    tl.store(rows + at, x.to(rows.dtype.element_ty), mask=inside)
    at = at_c.to(tl.int64)[:, None] * column_stride + at_r[None, :]
    inside = (at_c < n_columns)[:, None] & (at_r < n_rows)[None, :]
    tl.store(columns + at, tl.trans(x).to(columns.dtype.element_ty), mask=inside)


@triton.jit
def _cast(
    x, factor, rows, columns, n_rows, n_columns, x_stride, row_stride, column_stride,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    at_r, at_c = _tile(n_rows, BLOCK_R, BLOCK_C)
    inside = (at_r < n_rows)[:, None] & (at_c < n_columns)[None, :]
    at = at_r.to(tl.int64)[:, None] * x_stride + at_c[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    _store(value, rows, columns, at_r, at_c, n_rows, n_columns, row_stride, column_stride)


@triton.jit
def _gradient(
    logits, targets, sums, rows, columns, n_rows, n_columns, x_stride, row_stride, column_stride,
    ignore, factor, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    at_r, at_c = _tile(n_rows, BLOCK_R, BLOCK_C)
    inside = (at_r < n_rows)[:, None] & (at_c < n_columns)[None, :]
    target = tl.load(targets + at_r, mask=at_r < n_rows, other=ignore)
    sum_ = tl.load(sums + at_r, mask=at_r < n_rows, other=0.0)
    at = at_r.to(tl.int64)[:, None] * x_stride + at_c[None, :]
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    d = tl.exp2(x * LOG2E - sum_[:, None])
    d = (d - tl.where(at_c[None, :] == target.to(tl.int32)[:, None], 1.0, 0.0)) * factor
    d = tl.where((target != ignore)[:, None], d, 0.0)
    _store(d, rows, columns, at_r, at_c, n_rows, n_columns, row_stride, column_stride)


def cast(x_RC: Tensor, factor: Tensor, rows_RC: Tensor, columns_CR: Tensor) -> None:
    """Write x times the factor, a number on the device, in both orders."""
    _over_tiles(_cast, x_RC, (factor,), rows_RC, columns_CR, ())


def gradients(
    logits_CV: Tensor, targets_C: Tensor, sums_C: Tensor, rows_CV: Tensor, columns_VC: Tensor,
    ignore_index: int, factor: float,
) -> None:  # fmt: skip
    """Write the gradient of the losses' sum by the logits, times a factor, in both orders.

    `sums` are what `loss_kernel.losses_and_sums` has written.
    """
    _over_tiles(
        _gradient, logits_CV, (targets_C, sums_C), rows_CV, columns_VC, (ignore_index, factor)
    )


def _over_tiles(kernel, x, before, rows, columns, after) -> None:
    n_rows, n_columns = x.shape
    tiles = triton.cdiv(n_rows, ROWS) * triton.cdiv(n_columns, COLUMNS)
    if tiles:
        kernel[(tiles,)](
            x, *before, rows, columns, n_rows, n_columns, x.stride(0), rows.stride(0),
            columns.stride(0), *after, BLOCK_R=ROWS, BLOCK_C=COLUMNS, num_warps=WARPS,
        )  # fmt: skip

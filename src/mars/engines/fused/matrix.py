"""Newton–Schulz on stacks: matrices of one shape, or of its transpose, are iterated together.

`gather` writes momenta, divided by their lengths and turned so that rows ≤ columns, into a stack;
`symmetric` forms the products that equal their transposes, one half of them; `scatter` takes the
step. In which order they are formed, matrices.py says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mars.engines.fused import layout as k
from mars.engines.fused import lean
from mars.engines.fused.access import pointer
from mars.engines.fused.halves import join, split


@triton.jit
def _square(matrices, table, short, long, TALL: tl.constexpr, TILE: tl.constexpr):
    """This program's tile: (tensor, row of the table, indices in it and in the stack, masks)."""
    number = tl.program_id(1)
    tensor = tl.load(matrices + 2 * number)
    cols = short if TALL else long
    rows = long if TALL else short
    across = tl.cdiv(cols, TILE)
    r = (tl.program_id(0) // across * TILE + tl.arange(0, TILE)).to(tl.int64)
    c = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    inside = r[:, None] * cols + c[None, :]
    mask = ((r[:, None] < rows) & (c[None, :] < cols)) != 0  # a bool for the interpreter too
    first = number.to(tl.int64) * rows * cols
    if TALL:  # in the stack it lies the other way
        stacked = first + c[:, None].to(tl.int64) * rows + r[None, :]
        turned = ((c[:, None] < cols) & (r[None, :] < rows)) != 0
    else:
        stacked = first + inside
        turned = mask
    return tensor, table + tensor * k.ROW, inside, mask, stacked, turned


@triton.jit
def _gather(
    matrices, table, gradients, figures, stack, short, long, ROUNDS_FIRST: tl.constexpr,
    TALL: tl.constexpr, GRAD: tl.constexpr, M_FORM: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    tensor, row, inside, mask, stacked, turned = _square(matrices, table, short, long, TALL, TILE)
    figure = figures + tensor * k.FIGURES
    address = tl.load(row + k.M)
    if M_FORM == lean.EIGHT_BITS:
        code = tl.load(pointer(address, tl.uint8) + inside, mask=mask, other=0)
        exponents = pointer(tl.load(row + k.M_EXP), tl.uint8)
        top = tl.load(exponents + inside // lean.GROUP, mask=mask, other=32).to(tl.int32)
        m = lean.value(code, top, True)
    else:
        form: tl.constexpr = tl.bfloat16 if M_FORM == lean.BFLOAT16 else tl.float32
        pointers = pointer(address, form) + inside
        if ALIGNED:
            pointers = tl.multiple_of(pointers, [1, 16])
        m = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if (tl.load(row + k.FLAGS) & k.HAS_H) == 0:  # the state holds n; m = n + γg
        mix = tl.load(figure + k.MIX) * tl.load(figure + k.FIGURE_SIGN)
        mix *= tl.load(figure + k.G_SCALE) * tl.load(figure + k.UNSCALE)
        g = pointer(tl.load(gradients + tensor), GRAD)
        m += mix * tl.load(g + inside, mask=mask, other=0.0).to(tl.float32)
    eps = 1e-7
    if not ROUNDS_FIRST:  # ‖m/(1−β₁)‖ + ε
        eps = tl.load(figure + k.FIGURE_EPS) * tl.load(figure + k.WEIGHT1)
    x = (m / (tl.load(figure + k.M_NORM) + eps)).to(stack.dtype.element_ty)
    if TALL:
        tl.store(stack + stacked, x.T, mask=turned)
    else:
        tl.store(stack + stacked, x, mask=turned)


@triton.jit
def gather(
    matrices, table, gradients, figures, stack, short, long, ROUNDS_FIRST: tl.constexpr,
    GRAD: tl.constexpr, M_FORM: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Momenta, divided by their lengths, into the stack."""
    if tl.load(matrices + 2 * tl.program_id(1) + 1) != 0:
        _gather(
            matrices, table, gradients, figures, stack, short, long, ROUNDS_FIRST, True, GRAD,
            M_FORM, ALIGNED, TILE,
        )  # fmt: skip
    else:
        _gather(
            matrices, table, gradients, figures, stack, short, long, ROUNDS_FIRST, False, GRAD,
            M_FORM, ALIGNED, TILE,
        )  # fmt: skip


@triton.jit
def _scatter(
    matrices, table, figures, stack, short, long, scales, found_inf, TALL: tl.constexpr,
    GRAD: tl.constexpr, ALIGNED: tl.constexpr, AMP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tensor, row, inside, mask, stacked, turned = _square(matrices, table, short, long, TALL, TILE)
    u = tl.load(stack + stacked, mask=turned, other=0.0).to(tl.float32)
    if TALL:
        u = u.T
    if AMP:
        mask = tl.where(tl.load(found_inf) == 0, mask, False)
    figure = figures + tensor * k.FIGURES
    decay, rate = tl.load(figure + k.FIGURE_DECAY), tl.load(figure + k.RATE)
    u *= tl.load(scales + tl.program_id(1))
    high_at = pointer(tl.load(row + k.X), GRAD) + inside
    if ALIGNED:
        high_at = tl.multiple_of(high_at, [1, 16])
    high = tl.load(high_at, mask=mask, other=0.0)
    if GRAD == tl.float32:
        tl.store(high_at, high - rate * (u + decay * high), mask=mask)
    else:
        low_at = pointer(tl.load(row + k.LOW), tl.int16) + inside
        if ALIGNED:
            low_at = tl.multiple_of(low_at, [1, 16])
        x = join(high, tl.load(low_at, mask=mask, other=0), GRAD)
        x -= rate * (u + decay * x)
        high, low = split(x, GRAD)
        tl.store(high_at, high, mask=mask)
        tl.store(low_at, low, mask=mask)


@triton.jit
def scatter(
    matrices, table, figures, stack, short, long, scales, found_inf, GRAD: tl.constexpr,
    ALIGNED: tl.constexpr, AMP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The step of the parameters, by what the stack has become."""
    if tl.load(matrices + 2 * tl.program_id(1) + 1) != 0:
        _scatter(
            matrices, table, figures, stack, short, long, scales, found_inf, True, GRAD, ALIGNED,
            AMP, TILE,
        )  # fmt: skip
    else:
        _scatter(
            matrices, table, figures, stack, short, long, scales, found_inf, False, GRAD, ALIGNED,
            AMP, TILE,
        )  # fmt: skip


@triton.jit
def symmetric(
    left, right, C, O, M, K, alpha, beta, diagonal, ADD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """O = α·S·Rᵀ + β·C + diagonal·1 for stacks S and R of (M, K); O and C equal their transposes.

    ``left`` and ``right`` describe S and R as tall matrices, in blocks of (BM, BK) and (BN, BK).
    Tiles on or below the diagonal are computed, and written twice.
    """
    number = tl.program_id(1)
    i = 0
    j = tl.program_id(0)
    width = (BM - 1) // BN + 1  # tiles of row i: those that begin at or before its last diagonal
    while j >= width:
        j -= width
        i += 1
        width = (i * BM + BM - 1) // BN + 1
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        a = left.load([number * M + i * BM, first])
        b = right.load([number * M + j * BN, first])
        total = tl.dot(a, b.T, total)
    total *= alpha
    r, c = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    C += number.to(tl.int64) * M * M
    O += number.to(tl.int64) * M * M
    here = r[:, None].to(tl.int64) * M + c[None, :]
    there = c[:, None].to(tl.int64) * M + r[None, :]
    if (j * BN + BN <= i * BM) & (i * BM + BM <= M):  # all of it below the diagonal
        if ADD:
            total += beta * tl.load(C + here).to(tl.float32)
        result = total.to(O.dtype.element_ty)
        tl.store(O + here, result)
        tl.store(O + there, result.T)
    else:
        below = tl.where(r[:, None] < M, r[:, None], -1) >= c[None, :]
        if ADD:
            total += beta * tl.load(C + here, mask=below, other=0.0).to(tl.float32)
            total += tl.where(r[:, None] == c[None, :], diagonal, 0.0)
        result = total.to(O.dtype.element_ty)
        tl.store(O + here, result, mask=below)
        above = c[:, None] < tl.where(r[None, :] < M, r[None, :], -1)
        tl.store(O + there, result.T, mask=above)

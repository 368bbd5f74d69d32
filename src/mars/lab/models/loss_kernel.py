# mypy: ignore-errors
"""The Triton kernel of the loss: rows of logits become their losses and, in place, gradients.

A program takes a row. The first pass finds the logarithm of the summed exponentials, the second
writes softmax minus one-hot where the logits were; what it reads is still in the cache (a row of
GPT-2 is 100 KB, and a few hundred rows are in work), so memory sees one read and one write.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16
LANE = tl.constexpr(8)  # neighbours that one thread loads at once: 16 bytes of a 16-bit dtype
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _row(
    logits, targets, losses, sums, stride, n_columns, ignore,
    GRADS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    # A target out of range is no address: its loss is NaN, which shows.
    known = (target >= 0) & (target < n_columns)
    chosen = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
    lanes = tl.arange(0, BLOCK // LANE)
    columns = lanes[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Each lane keeps its own maximum and sum, in powers of two; they meet once, at the end.
    top = tl.full((BLOCK // LANE,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, n_columns, BLOCK):
        inside = start + columns < n_columns
        x = tl.load(logits + start + columns, mask=inside, other=float("-inf"))
        x = x.to(tl.float32) * LOG2E
        higher = tl.maximum(top, tl.max(x, 1))
        # A lane that has seen minus infinities alone must not make a NaN of their difference.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp2(top - highest), 0)
    lse = highest + tl.log2(total)
    kept = target != ignore
    tl.store(losses + row, tl.where(kept, lse * LN2 - chosen, 0.0))
    if SUMS:
        tl.store(sums + row, lse)
    if GRADS:
        for start in range(0, n_columns, BLOCK):
            at = start + columns
            inside = at < n_columns
            x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
            d = tl.exp2(x * LOG2E - lse) - tl.where(at == target, 1.0, 0.0)
            d = tl.where(kept, d, 0.0)
            tl.store(logits + at, d.to(logits.dtype.element_ty), mask=inside)


def losses_and_gradients(
    logits_CV: Tensor, targets_C: Tensor, losses_C: Tensor, ignore_index: int, grads: bool
) -> None:
    """Write each row's loss; if `grads`, turn the logits into the gradient of the losses' sum."""
    _over_rows(logits_CV, targets_C, losses_C, losses_C, ignore_index, GRADS=grads, SUMS=False)


def losses_and_sums(
    logits_CV: Tensor, targets_C: Tensor, losses_C: Tensor, sums_C: Tensor, ignore_index: int
) -> None:
    """Write each row's loss, and the logarithm to base 2 of its summed exponentials."""
    _over_rows(logits_CV, targets_C, losses_C, sums_C, ignore_index, GRADS=False, SUMS=True)


def _over_rows(logits_CV, targets_C, losses_C, sums_C, ignore_index, **which) -> None:
    rows, columns = logits_CV.shape
    if rows:
        _row[(rows,)](
            logits_CV, targets_C, losses_C, sums_C, logits_CV.stride(0), columns, ignore_index,
            **which, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

"""Matrix products in 8 bits: half of the bytes of 16, at up to twice the speed, from Ada on.

Weights and hidden states have 3 bits of mantissa (e4m3) and a scale for the whole tensor, made anew
from its largest element; the gradient of the logits has 2 bits and a wider range (e5m2), and a
fixed scale, since it lies between -1 and 1. Sums are in float32.

Such a product takes both of its operands with the axis that is summed over contiguous. The head has
three products, over the width, the vocabulary and the tokens, so that every operand is wanted in
both orders. On a CPU they are emulated: the same rounding, a product in float32.

Letters: R and C rows and columns, M and N those of a product, K what is summed over.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = torch.finfo(E4M3).max  # 448
SMALLEST = 2.0**-100  # of what a scale is made from: zeros alone shall not divide by zero
# By which softmax minus one-hot is multiplied: 1 becomes 2¹⁵, of 57344 that e5m2 has, and what it
# rounds to zero is below 2⁻³². A uniform softmax over GPT-2's vocabulary is 2⁻¹⁵·⁶.
GRADIENT = 2.0**15
SIDE = 16  # every side of a product on a GPU is a multiple of it


class Operand(NamedTuple):
    """A matrix in 8 bits, as it is and transposed; times its scale it is the one that was meant."""

    rows_RC: Tensor
    columns_CR: Tensor
    scale: Tensor  # float32, without dimensions, on the device

    def part(self, rows: slice) -> Operand:
        """Some of the rows."""
        return Operand(self.rows_RC[rows], self.columns_CR[:, rows], self.scale)


def rounded(x_RC: Tensor) -> Operand:
    """A matrix in e4m3. One that is not finite makes the scale so, and everything after it."""
    x_RC = x_RC.contiguous()
    low, high = x_RC.aminmax()  # in one pass; a NaN stays one
    largest = torch.maximum(high, -low).float().clamp(min=SMALLEST)
    out = Operand(*empty(x_RC, E4M3), largest / LARGEST)
    # Triton 3.6 loses every other row of what it transposes here if the input is float32.
    kernel = kernels() if x_RC.is_cuda and x_RC.element_size() == 2 else None
    if kernel is not None:
        kernel.cast(x_RC, LARGEST / largest, out.rows_RC, out.columns_CR)
    else:
        store(x_RC.float() * (LARGEST / largest), out)
    return out


def gradient_like(logits_CV: Tensor) -> Operand:
    """Memory for the gradient of logits, and its scale."""
    scale = torch.full((), 1 / GRADIENT, device=logits_CV.device)
    return Operand(*empty(logits_CV, E5M2), scale)


def empty(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for a matrix in both orders."""
    rows, columns = x_RC.shape
    return x_RC.new_empty(rows, columns, dtype=dtype), x_RC.new_empty(columns, rows, dtype=dtype)


def store(scaled_RC: Tensor, out: Operand) -> None:
    """Round what has been scaled, by torch."""
    out.rows_RC.copy_(scaled_RC)
    out.columns_CR.copy_(out.rows_RC.T)


def multiply(
    out_MN: Tensor, a_MK: Tensor, b_NK: Tensor, scales: tuple[Tensor, Tensor], *,
    add: bool = False, fast: bool = False,
) -> None:  # fmt: skip
    """out = a·bᵀ, or out += a·bᵀ, times both scales.

    With `fast` a GPU sums with fewer bits, about 14: enough for logits, which are rounded to fewer.
    """
    if add:
        more_MN = torch.empty_like(out_MN)
        multiply(more_MN, a_MK, b_NK, scales, fast=fast)
        out_MN += more_MN
    elif a_MK.is_cuda:
        torch._scaled_mm(
            a_MK, b_NK.T, *scales, out_dtype=out_MN.dtype, use_fast_accum=fast, out=out_MN
        )
    else:
        out_MN.copy_(a_MK.float() @ b_NK.float().T * (scales[0] * scales[1]))


@cache
def kernels() -> ModuleType | None:
    """The Triton kernels, where there is Triton."""
    try:
        from mars.lab.models import float8_kernel
    except ImportError:
        return None
    return float8_kernel

"""Mean cross-entropy of a linear head, without ever holding all logits.

The logits of GPT-2 small at 32 x 1024 tokens are 3.3 GB in bfloat16 and twice that in float32; a
plain loss keeps several such tensors. Here rows are taken in chunks: logits, loss and, if
somebody will ask for them, the gradients of the hidden states and of the head, all in the forward
pass; the backward pass only scales them. One chunk of logits exists at a time, and becomes its
own gradient in place.

Letters: N rows (tokens), D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mars.lab.models import float8
from mars.lab.models.cublaslt import multiply
from mars.lab.models.products import wide

# Bytes of a chunk of logits on a CPU, where it should not push everything else out of the caches.
# On a GPU it is a share of the memory, 2 GB of an H200: each chunk reads and writes the gradient of
# the head once, so that few are better than many; 16384 rows of GPT-2 lose 1 % to all at once.
CPU_BYTES = 1 << 25
GPU_SHARE = 64


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, ignore_index: int = -100,
    fp8: bool = False,
) -> Tensor:  # fmt: skip
    """``F.cross_entropy(F.linear(hidden, weight), targets)``: the mean loss, in float32.

    The product is computed in autocast's dtype, if it is on, else in that of `hidden`; its
    logarithm of summed exponentials in float32 (float64 for float64), and the gradient of
    `weight` is summed over chunks in the same. The gradient of the logits before it is scaled,
    softmax minus one-hot, is rounded to the dtype of the product: in float16 nothing of it is lost
    to a small 1/N, and the factor of a GradScaler need not be known beforehand.

    With `fp8` all three products are in 8 bits (float8.py), logits and what is summed as before.
    On a GPU every side must then be a multiple of 16.

    Targets equal to `ignore_index` count neither in the loss nor in the mean. Can be
    differentiated once.
    """
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(device))
    wanted = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    op: Any = torch.ops.mars_lab.linear_cross_entropy
    loss: Tensor = op(hidden_ND, weight_VD, targets_N, ignore_index, wanted, fp8)[0]
    return loss


def chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Rows of a chunk: equal parts; if there are several, multiples of 128, a tile of a product."""
    chunks = -(-rows // max(128, budget // row_bytes))
    return max(1, rows) if chunks <= 1 else -(-rows // (chunks * 128)) * 128


def _budget(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BYTES
    return torch.cuda.get_device_properties(device).total_memory // GPU_SHARE


def _compute(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, ignore_index: int, grads: bool,
    fp8: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, 1/count, and the gradients of the sum of losses (empty unless asked for)."""
    exact = wide(hidden_ND.dtype)
    rows, vocabulary = len(hidden_ND), len(weight_VD)
    losses_N = torch.empty(rows, dtype=exact, device=hidden_ND.device)
    d_hidden = torch.empty_like(hidden_ND) if grads else hidden_ND.new_empty(0)
    d_weight = torch.zeros if rows == 0 else torch.empty
    d_weight_VD = d_weight(weight_VD.shape if grads else (0,), dtype=exact, device=hidden_ND.device)
    row_bytes = vocabulary * hidden_ND.element_size()
    size = chunk_rows(rows, row_bytes, _budget(hidden_ND.device))
    buffer_CV = hidden_ND.new_empty(min(size, rows), vocabulary)
    head = (_Head8 if fp8 and rows else _Head)(hidden_ND, weight_VD, buffer_CV, grads)
    for first in range(0, rows, size):
        part = slice(first, min(first + size, rows))
        logits_CV = buffer_CV[: part.stop - first]
        head.losses(logits_CV, part, targets_N[part], losses_N[part], ignore_index)
        if grads:
            head.gradients(d_hidden[part], d_weight_VD, part, add=first > 0)
    inverse = 1 / (targets_N != ignore_index).sum().to(exact)
    return losses_N.sum() * inverse, inverse, d_hidden, d_weight_VD


class _Head:
    """The products of a chunk, in the dtype of the hidden states."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, buffer_CV: Tensor, grads: bool
    ) -> None:
        self.hidden_ND, self.weight_VD = hidden_ND, weight_VD.to(hidden_ND.dtype)
        self.d_CV, self.grads = buffer_CV, grads

    def losses(
        self, logits_CV: Tensor, part: slice, targets_C: Tensor, losses_C: Tensor, ignore: int
    ) -> None:
        """Fill logits and losses, and keep the gradient of the losses' sum by the logits."""
        multiply(logits_CV, self.hidden_ND[part], self.weight_VD.T)
        self.d_CV = _rows(logits_CV, targets_C, losses_C, ignore, self.grads)

    def gradients(self, d_hidden_CD: Tensor, d_weight_VD: Tensor, part: slice, add: bool) -> None:
        multiply(d_hidden_CD, self.d_CV, self.weight_VD)
        multiply(d_weight_VD, self.d_CV.T, self.hidden_ND[part], add=add)


class _Head8:
    """The same in 8 bits; of a chunk there are two more tensors, of half the size.

    As many chunks as without: the gradient of the head cannot be added to by a product here, so
    that each one more reads and writes it once more.
    """

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, buffer_CV: Tensor, grads: bool
    ) -> None:
        self.hidden = float8.rounded(hidden_ND)
        self.weight = float8.rounded(weight_VD.to(hidden_ND.dtype))
        self.buffer = float8.gradient_like(buffer_CV) if grads else None

    def losses(
        self, logits_CV: Tensor, part: slice, targets_C: Tensor, losses_C: Tensor, ignore: int
    ) -> None:
        own, scales = self.hidden.part(part), (self.hidden.scale, self.weight.scale)
        float8.multiply(logits_CV, own.rows_RC, self.weight.rows_RC, scales, fast=True)
        self.d = None if self.buffer is None else self.buffer.part(slice(len(logits_CV)))
        _rows_fp8(logits_CV, targets_C, losses_C, ignore, self.d)

    def gradients(self, d_hidden_CD: Tensor, d_weight_VD: Tensor, part: slice, add: bool) -> None:
        d, hidden, weight = self.d, self.hidden.part(part), self.weight
        assert d is not None
        float8.multiply(d_hidden_CD, d.rows_RC, weight.columns_CR, (d.scale, weight.scale))
        scales = (d.scale, hidden.scale)
        float8.multiply(d_weight_VD, d.columns_CR, hidden.columns_CR, scales, add=add)


def _rows(
    logits_CV: Tensor, targets_C: Tensor, losses_C: Tensor, ignore_index: int, grads: bool
) -> Tensor:
    """Write the losses; return the gradient of their sum, in the memory of the logits."""
    kernel = _kernel() if logits_CV.is_cuda and logits_CV.dtype != torch.float64 else None
    if kernel is not None:
        kernel.losses_and_gradients(logits_CV, targets_C, losses_C, ignore_index, grads)
        return logits_CV
    kept_C = targets_C != ignore_index
    index_C1 = targets_C.where(kept_C, 0).long()[:, None]
    exact_CV = logits_CV.to(losses_C.dtype)  # the same tensor, if it is exact already
    sum_C = exact_CV.logsumexp(1)
    losses_C.copy_((sum_C - exact_CV.gather(1, index_C1)[:, 0]).where(kept_C, 0))
    if grads:
        exact_CV.sub_(sum_C[:, None]).exp_()
        exact_CV.scatter_add_(1, index_C1, exact_CV.new_full((1, 1), -1.0).expand_as(index_C1))
        exact_CV.mul_(kept_C[:, None])
        logits_CV.copy_(exact_CV)
    return logits_CV


def _rows_fp8(
    logits_CV: Tensor, targets_C: Tensor, losses_C: Tensor, ignore_index: int,
    d: float8.Operand | None,
) -> None:  # fmt: skip
    """Write the losses and, in 8 bits, the gradient of their sum."""
    usable = logits_CV.is_cuda and logits_CV.dtype != torch.float64
    kernel, kernel8 = (_kernel(), float8.kernels()) if usable else (None, None)
    if kernel is None or kernel8 is None:
        exact_CV = logits_CV.to(losses_C.dtype)
        exact_CV = _rows(exact_CV, targets_C, losses_C, ignore_index, d is not None)
        if d is not None:
            float8.store(exact_CV * float8.GRADIENT, d)
        return
    sums_C = torch.empty_like(losses_C)
    kernel.losses_and_sums(logits_CV, targets_C, losses_C, sums_C, ignore_index)
    if d is not None:
        kernel8.gradients(
            logits_CV, targets_C, sums_C, d.rows_RC, d.columns_CR, ignore_index, float8.GRADIENT
        )


@cache
def _kernel() -> ModuleType | None:
    """The Triton kernel, where there is Triton."""
    try:
        from mars.lab.models import loss_kernel
    except ImportError:
        return None
    return loss_kernel


# An operator, so that torch.compile takes the loop as a whole and autocast stays outside.
@torch.library.custom_op(
    "mars_lab::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, bool grads, bool fp8)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _operator(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, grads: bool, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(hidden.device.type, enabled=False):
        return _compute(hidden, weight, targets, ignore_index, grads, fp8)


@_operator.register_fake
def _shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, grads: bool, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exact = wide(hidden.dtype)
    scalar = hidden.new_empty((), dtype=exact)
    d_hidden = torch.empty_like(hidden) if grads else hidden.new_empty(0)
    d_weight = hidden.new_empty(weight.shape if grads else (0,), dtype=exact)
    return scalar, torch.empty_like(scalar), d_hidden, d_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.weight_dtype = inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def _scale(ctx: Any, upstream: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        raise RuntimeError("linear_cross_entropy can be differentiated only once")
    if upstream is None:
        return (None,) * 6
    inverse, d_hidden, d_weight = ctx.saved_tensors
    factor = upstream * inverse
    # A factor without dimensions is rounded to 16 bits, which would scale this gradient alone; by
    # one with a dimension the product is in float32, without a copy of the gradient in it.
    wanted_hidden, wanted_weight = ctx.needs_input_grad[:2]
    grad_hidden = (d_hidden * factor.view(1)).to(d_hidden.dtype) if wanted_hidden else None
    grad_weight = (d_weight * factor).to(ctx.weight_dtype) if wanted_weight else None
    return grad_hidden, grad_weight, None, None, None, None


_operator.register_autograd(_scale, setup_context=_save)

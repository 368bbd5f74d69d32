"""The sum of a residual stream and its LayerNorm, in one pass over memory each way.

What has to be moved of a sum and a norm is four tensors forward (x and y in, the sum and its norm
out) and four backward (the gradients of both and the sum in, the gradient of x, which is that of y,
out). The compiler makes several kernels of it, and one more that reads all again for the gradient
of the weight.

Used on CUDA for 16-bit streams and norms without bias, where there is Triton; for everything else,
F.layer_norm. The operators run on a CPU too, in any precision: that is how they are tested.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mars.lab.models.products import product_dtype, wide

ops: Any = torch.ops.mars_lab

TRITON = find_spec("triton") is not None
WIDEST = 8192  # of the rows that a program can hold


def add_norm(x: Tensor, y: Tensor | None, layer: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """``x + y`` (x itself, if there is no y) and ``layer`` of it."""
    if not fits(x, y, layer):
        return plain_add_norm(x, y, layer)
    total, normed = ops.add_norm(x, y, layer.weight, layer.eps)
    return (x if y is None else total), normed


def plain_add_norm(x: Tensor, y: Tensor | None, layer: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The same by torch's operators."""
    total = x if y is None else x + y
    shape, weight, bias = layer.normalized_shape, layer.weight, layer.bias
    return total, F.layer_norm(total, shape, weight, bias, layer.eps)


def fits(x: Tensor, y: Tensor | None, layer: nn.LayerNorm) -> bool:
    """Is there a kernel for these?"""
    return (
        TRITON
        and x.dtype == product_dtype(x)
        and (y is None or y.dtype == x.dtype)
        and x.shape[-1] <= WIDEST
        and not isinstance(layer.bias, Tensor)
    )


def _by_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


@torch.library.custom_op(
    "mars_lab::add_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? y, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def _add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum (empty without y: an operator may not return its input) and its norm."""
    x, y = x.contiguous(), None if y is None else y.contiguous()
    if _by_kernel(x):
        from mars.lab.models import norm_kernel

        both: tuple[Tensor, Tensor] = norm_kernel.forward(x, y, weight, eps)
        return both
    total = x if y is None else x + y
    normed = (_normalised(total, eps)[0] * weight).to(x.dtype)
    return (x.new_empty(0) if y is None else total), normed


@_add_norm.register_fake
def _(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    whole = x.new_empty(x.shape)
    return (x.new_empty(0) if y is None else torch.empty_like(whole)), whole


@torch.library.custom_op(
    "mars_lab::add_norm_gradients",
    mutates_args=(),
    schema="(Tensor d_normed, Tensor? d_total, Tensor total, Tensor weight, float eps)"
    " -> (Tensor, Tensor)",
)
def _add_norm_gradients(
    d_normed: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Of the sum, all told (d_total is what arrives for it from elsewhere), and of the weight."""
    d_normed, total = d_normed.contiguous(), total.contiguous()
    d_total = None if d_total is None else d_total.contiguous()
    if _by_kernel(total):
        from mars.lab.models import norm_kernel

        both: tuple[Tensor, Tensor] = norm_kernel.backward(d_normed, d_total, total, weight, eps)
        return both
    unit, inverse = _normalised(total, eps)
    d = d_normed.to(unit.dtype)
    d_weight = (d * unit).flatten(0, -2).sum(0)
    d = d * weight
    along = (d * unit).mean(-1, keepdim=True)
    d = (d - d.mean(-1, keepdim=True) - unit * along) * inverse
    return (d if d_total is None else d + d_total).to(total.dtype), d_weight


@_add_norm_gradients.register_fake
def _(
    d_normed: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape, dtype=wide(total.dtype))


def _normalised(total: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(t - mean)/deviation of every row and 1/deviation, in the dtype of sums."""
    exact = total.to(wide(total.dtype))
    centred = exact - exact.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * inverse, inverse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, y, weight, eps = inputs
    ctx.set_materialize_grads(False)
    ctx.eps, ctx.sums = eps, y is not None
    ctx.save_for_backward(x if y is None else output[0], weight)


def _backward(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None
) -> tuple[Tensor | None, ...]:
    dx = d_total if ctx.sums else None
    if d_normed is None:
        return dx, dx, None, None
    total, weight = ctx.saved_tensors
    dx, d_weight = ops.add_norm_gradients(d_normed, dx, total, weight, ctx.eps)
    return dx, (dx if ctx.sums else None), d_weight.to(weight.dtype), None


_add_norm.register_autograd(_backward, setup_context=_save)

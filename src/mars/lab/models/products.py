"""The matrix products of a layer in 16 bits, with weight gradients that come out in float32.

Autocast rounds the gradient of a weight to 16 bits, only to add it to a float32 one. The product
that makes it has it in float32; here it is written so, which is more exact and saves a kernel for
each weight. The MLP goes as one piece, so that GELU can be part of its products (cublaslt.py).

Used on CUDA for 16-bit products of layers without bias; for everything else, torch's layers. The
operators run on a CPU too, in any precision: that is how they are tested.

Letters: N rows (tokens), D width, F inner width, I and O widths in and out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mars.lab.models.cublaslt import WRITES_FLOAT32, gelu_gradient, gelu_product, multiply

ops: Any = torch.ops.mars_lab


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """``layer(x)``."""
    dtype = product_dtype(x)
    if dtype is None or _biased(layer):
        y: Tensor = layer(x)
        return y
    weight = layer.weight
    y = ops.linear(x.flatten(0, -2).to(dtype), weight, weight.detach().to(dtype))
    return y.view(*x.shape[:-1], -1)


def heads(x: Tensor, layer: nn.Linear) -> tuple[Tensor, ...]:
    """``layer(x).chunk(3, dim=-1)``: queries, keys and values.

    Their gradients arrive as three tensors, and each is multiplied as it is. To put them side by
    side first took the compiler 0.18 ms a block of GPT-2 small on an H200, the products 0.33 ms.
    """
    dtype = product_dtype(x)
    if dtype is None or _biased(layer):
        return tuple(layer(x).chunk(3, dim=-1))
    weight = layer.weight
    parts = Heads.apply(x.flatten(0, -2).to(dtype), weight, weight.detach().to(dtype))
    return tuple(part.view(*x.shape[:-1], -1) for part in parts)


def gelu_mlp(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """``down(F.gelu(up(x), approximate="tanh"))``."""
    dtype = product_dtype(x)
    if dtype is None or _biased(up) or _biased(down):
        y: Tensor = down(F.gelu(up(x), approximate="tanh"))
        return y
    halves = (layer.weight.detach().to(dtype) for layer in (up, down))
    y = ops.gelu_mlp(x.flatten(0, -2).to(dtype), up.weight, down.weight, *halves)[0]
    return y.view(*x.shape[:-1], -1)


def _biased(layer: nn.Linear) -> bool:
    return isinstance(layer.bias, Tensor)


def product_dtype(x: Tensor) -> torch.dtype | None:
    """The 16-bit dtype of products with x on a CUDA device; None where torch's layers are used."""
    if not x.is_cuda or not WRITES_FLOAT32:
        return None
    on = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if on else x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(len(a), b.shape[1])
    multiply(out, a, b)
    return out


def _weight_gradient(dy_NO: Tensor, x_NI: Tensor) -> Tensor:
    d_weight_OI = dy_NO.new_empty(dy_NO.shape[1], x_NI.shape[1], dtype=wide(dy_NO.dtype))
    multiply(d_weight_OI, dy_NO.T, x_NI)
    return d_weight_OI


# Operators, so that torch.compile takes each as it is. The weight is there to receive the
# gradient, `half` is what is multiplied.


@torch.library.custom_op(
    "mars_lab::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor half) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor, half: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return _product(x, half.T)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, half: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], half.shape[0])


@torch.library.custom_op(
    "mars_lab::linear_gradients",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor half) -> (Tensor, Tensor)",
)
def _linear_gradients(dy: Tensor, x: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        return _product(dy, half), _weight_gradient(dy, x)


@_linear_gradients.register_fake
def _(dy: Tensor, x: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), half.new_empty(half.shape, dtype=wide(dy.dtype))


def _save_linear(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, half = inputs
    ctx.weight_dtype = weight.dtype
    ctx.save_for_backward(x, half)


def _backward_linear(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = ops.linear_gradients(dy, *ctx.saved_tensors)
    return dx, dw.to(ctx.weight_dtype), None


_linear.register_autograd(_backward_linear, setup_context=_save_linear)


class Heads(torch.autograd.Function):
    """Three views of one product: an operator may not return views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(x, half)
        return tuple(ops.linear(x, weight, half).chunk(3, dim=1))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ops.heads_gradients(*dy, *ctx.saved_tensors)
        return dx, dw.to(ctx.weight_dtype), None


@torch.library.custom_op(
    "mars_lab::heads_gradients",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor x, Tensor half) -> (Tensor, Tensor)",
)
def _heads_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, half: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dw = torch.empty_like(x), half.new_empty(half.shape, dtype=wide(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        parts = zip((dq, dk, dv), half.chunk(3), dw.chunk(3), strict=True)
        for i, (dy, own, d_own) in enumerate(parts):
            multiply(dx, dy, own, add=i > 0)
            multiply(d_own, dy.T, x)
    return dx, dw


@_heads_gradients.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), half.new_empty(half.shape, dtype=wide(x.dtype))


@torch.library.custom_op(
    "mars_lab::gelu_mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor up, Tensor down, Tensor up_half, Tensor down_half)"
    " -> (Tensor, Tensor, Tensor)",
)
def _gelu_mlp(
    x: Tensor, up: Tensor, down: Tensor, up_half: Tensor, down_half: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        h_NF, g_NF = gelu_product(x, up_half)
        return _product(g_NF, down_half.T), h_NF, g_NF


@_gelu_mlp.register_fake
def _(
    x: Tensor, up: Tensor, down: Tensor, up_half: Tensor, down_half: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    y, h = x.new_empty(x.shape[0], down.shape[0]), x.new_empty(x.shape[0], up.shape[0])
    return y, h, torch.empty_like(h)


@torch.library.custom_op(
    "mars_lab::gelu_mlp_gradients",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor h, Tensor g, Tensor up_half, Tensor down_half)"
    " -> (Tensor, Tensor, Tensor)",
)
def _gelu_mlp_gradients(
    dy: Tensor, x: Tensor, h: Tensor, g: Tensor, up_half: Tensor, down_half: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        d_down = _weight_gradient(dy, g)
        dh_NF = gelu_gradient(dy, down_half, h)
        return _product(dh_NF, up_half), _weight_gradient(dh_NF, x), d_down


@_gelu_mlp_gradients.register_fake
def _(
    dy: Tensor, x: Tensor, h: Tensor, g: Tensor, up_half: Tensor, down_half: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    sums = wide(dy.dtype)
    d_up, d_down = (half.new_empty(half.shape, dtype=sums) for half in (up_half, down_half))
    return torch.empty_like(x), d_up, d_down


def _save_mlp(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    x, up, down, up_half, down_half = inputs
    ctx.set_materialize_grads(False)
    ctx.weight_dtypes = up.dtype, down.dtype
    ctx.save_for_backward(x, *output[1:], up_half, down_half)


def _backward_mlp(ctx: Any, dy: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    dx, d_up, d_down = ops.gelu_mlp_gradients(dy, *ctx.saved_tensors)
    return dx, d_up.to(ctx.weight_dtypes[0]), d_down.to(ctx.weight_dtypes[1]), None, None


_gelu_mlp.register_autograd(_backward_mlp, setup_context=_save_mlp)

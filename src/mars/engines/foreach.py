"""The foreach engine: multi-tensor torch operations, and nothing read back by the host."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

import torch
from torch import Tensor

from mars.engines.batch import Batch
from mars.rule import KINDS, MATRIX, matrix_shape
from mars.rule.adamw import unbiased
from mars.rule.estimator import kappa
from mars.rule.halves import join, split


def wide(tensors: list[Tensor], like: Tensor) -> list[Tensor]:
    """The tensors in the arithmetic's dtype; the same ones if they have it already."""
    if all(t.dtype == like.dtype for t in tensors):
        return tensors
    return [t.to(like.dtype) for t in tensors]


def corrected(batch: Batch) -> list[Tensor]:
    """c = g + κ(g − h), freshly allocated."""
    g, h = wide(batch.g, batch.m[0]), wide(batch.h, batch.m[0])
    weight = kappa(batch.k.gamma, batch.k.beta1)
    if not isinstance(weight, Tensor):
        return list(torch._foreach_lerp(h, g, 1.0 + weight))  # h + (1+κ)(g − h), in one pass
    c = list(torch._foreach_sub(g, h))
    torch._foreach_mul_(c, weight)
    torch._foreach_add_(c, g)
    return c


def norms(batch: Batch) -> list[Tensor]:
    return list(torch._foreach_norm(corrected(batch)))


def clip_(c: list[Tensor], lengths: Tensor) -> None:
    """c̃ = c / max(1, length), each by its own or all by one."""
    lengths = lengths.clamp(min=1.0)
    torch._foreach_div_(c, list(lengths.unbind()) if lengths.ndim else lengths)


def _estimate(batch: Batch, length: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Average into m; return (m, c̃), where c̃ is g itself if there is no correction to store."""
    k = batch.k
    g = wide(batch.g, batch.m[0])
    if not batch.h:
        c = list(torch._foreach_neg(g)) if k.maximize else g
        if not KINDS[batch.kind].corrected:
            torch._foreach_lerp_(batch.m, c, 1.0 - float(k.beta1))
            return batch.m, c
        torch._foreach_mul_(batch.m, k.beta1)
        torch._foreach_add_(batch.m, torch._foreach_mul(c, (1.0 - k.beta1) * (1.0 - k.gamma)))
        m = list(torch._foreach_mul(c, k.gamma))
        torch._foreach_add_(m, batch.m)
        return m, c
    c = corrected(batch)
    if k.clip is not None:
        clip_(c, torch.stack(torch._foreach_norm(c)) if length is None else length)
    if k.maximize:
        torch._foreach_neg_(c)
    torch._foreach_lerp_(batch.m, c, 1.0 - float(k.beta1))
    return batch.m, c


def _adamw(batch: Batch, m: list[Tensor], c: list[Tensor]) -> list[Tensor]:
    k, steps = batch.k, batch.steps()
    square = wide(batch.g, batch.m[0]) if k.raw else c
    torch._foreach_mul_(batch.v, k.beta2)
    torch._foreach_addcmul_(batch.v, square, square, 1.0 - float(k.beta2))
    if batch.v_max:
        torch._foreach_maximum_(batch.v_max, batch.v)
    # (1−β₁ᵗ)·(√v/√(1−β₂ᵗ) + ε), multiplied out: one pass less.
    both: list[list[Any]] = [[unbiased(beta, t) for t in steps] for beta in (k.beta1, k.beta2)]
    b1, b2 = both  # all floats or all 0-d tensors, as foreach wants them
    denominator = list(torch._foreach_sqrt(batch.v_max or batch.v))
    torch._foreach_mul_(denominator, [p / q**0.5 for p, q in zip(b1, b2, strict=True)])
    torch._foreach_add_(denominator, [k.eps * p for p in b1])
    return list(torch._foreach_div(m, denominator))


def _lion(batch: Batch, m: list[Tensor], c: list[Tensor]) -> list[Tensor]:
    u = list(torch._foreach_sign(m))
    torch._foreach_add_(u, torch._foreach_mul(m, 0.0))  # NaN shows
    return u


def orthogonal(batch: Batch, matrices: list[Tensor]) -> list[Tensor]:
    """Newton–Schulz on stacks of matrices of one shape, of which some may be stacks already."""
    k = batch.k
    stacks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        stacks[matrix.shape[-2:]].append(i)
    out = list(matrices)
    for shape, members in stacks.items():
        own = [matrices[i].reshape(prod(matrices[i].shape[:-2]), *shape) for i in members]
        stack = MATRIX[batch.kind].orthogonal(torch.cat(own), k.beta1, k.eps, k.ns)
        for i, part in zip(members, stack.split([len(part) for part in own]), strict=True):
            out[i] = part.reshape(matrices[i].shape)
    return out


def scaled(batch: Batch, matrices: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """u from (parts of) orthogonal matrices of these shapes, freshly allocated."""
    scale = MATRIX[batch.kind].scale
    wide = [matrix.to(m.dtype) for matrix, m in zip(matrices, batch.m, strict=True)]
    return list(torch._foreach_mul(wide, [scale(*shape[-2:]) for shape in shapes]))


def _orthogonal(batch: Batch, m: list[Tensor], c: list[Tensor]) -> list[Tensor]:
    shapes = [matrix_shape(tensor.shape, batch.k.stacked) for tensor in m]
    matrices = [tensor.reshape(shape) for tensor, shape in zip(m, shapes, strict=True)]
    u = scaled(batch, orthogonal(batch, matrices), shapes)
    return [matrix.reshape(tensor.shape) for matrix, tensor in zip(u, m, strict=True)]


DIRECTIONS = {
    "mars-adamw": _adamw,
    "mars-lion": _lion,
    "plain-adamw": _adamw,
    **dict.fromkeys(MATRIX, _orthogonal),
}


def step(batch: Batch, length: Tensor | None) -> None:
    m, c = begin(batch, length)
    finish(batch, DIRECTIONS[batch.kind](batch, m, c))


def begin(batch: Batch, length: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """The elementwise part before the direction: (m, c̃)."""
    if batch.host_t:
        # A number would be wrapped once a tensor. Made here: a fake mode takes no tensor of before.
        one = torch.tensor(1.0, dtype=torch.float32, device="cpu")
        torch._foreach_add_(batch.t, one, alpha=1.0)
    else:
        torch._foreach_add_(batch.t, 1)
    return _estimate(batch, length)


def finish(batch: Batch, u: list[Tensor]) -> None:
    """The elementwise part after it; u is overwritten."""
    k, x = batch.k, batch.x
    if batch.low:
        x = [join(high, low) for high, low in zip(batch.x, batch.low, strict=True)]
    if k.decay != 0:  # a float: tensor decay is for differentiable steps, which loop
        torch._foreach_add_(u, x, alpha=float(k.decay))
    if isinstance(k.lr, Tensor):
        torch._foreach_mul_(u, k.lr)
        torch._foreach_sub_(x, u)
    else:
        torch._foreach_add_(x, u, alpha=-k.lr)
    split_into(batch, x)
    if batch.h and batch.keep_g:
        torch._foreach_copy_(batch.h, batch.g)


def split_into(batch: Batch, x: list[Tensor]) -> None:
    """Take new float32 values apart into 16-bit parameters and their low halves, if it has any."""
    if not batch.low:
        return
    for high, low, value in zip(batch.x, batch.low, x, strict=True):
        for half, part in zip((high, low), split(value, high.dtype), strict=True):
            half.copy_(part)

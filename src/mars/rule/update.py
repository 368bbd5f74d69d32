"""One MARS step of one tensor: the whole algorithm on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mars.rule import adamw, lion, moonlight, shampoo
from mars.rule.estimator import Scalar, average, average_without_h, clip, correct, norm
from mars.rule.newton_schulz import NewtonSchulz


class Kind(NamedTuple):
    """What a type needs: a corrected gradient, a second moment, a matrix."""

    corrected: bool = True
    second_moment: bool = False
    matrix: bool = False


KINDS = {
    "mars-adamw": Kind(second_moment=True),
    "mars-lion": Kind(),
    "mars-shampoo": Kind(matrix=True),
    "mars-m": Kind(matrix=True),
    "plain-adamw": Kind(corrected=False, second_moment=True),
}


class Matrix(Protocol):
    """What the file of a matrix type has, for engines that put its direction together."""

    # Muon's order: m is rounded to the dtype of Newton–Schulz, then divided by its length, with an
    # ε that is fixed. Else ‖m/(1−β₁)‖ + ε is the length, and what is divided by it is rounded.
    ROUNDS_FIRST: bool

    def scale(self, rows: int, cols: int) -> float:
        """By what an orthogonal matrix of this size is multiplied."""

    def orthogonal(self, m: Tensor, beta1: Scalar, eps: float, ns: NewtonSchulz) -> Tensor:
        """NS of a matrix, or of a stack of them."""

    def direction(self, m: Tensor, beta1: Scalar, eps: float, ns: NewtonSchulz) -> Tensor:
        """u: both together."""

    def flops(self, short: int, long: int) -> int:
        """Multiplications and additions of one step of the iteration."""


MATRIX: dict[str, Matrix] = {"mars-shampoo": shampoo, "mars-m": moonlight}


class Hyper(NamedTuple):
    """The hyper-parameters of a step."""

    lr: Scalar
    beta1: Scalar
    beta2: Scalar
    eps: float
    decay: Scalar
    gamma: Scalar = 0.0
    clip: str | None = None  # "tensor", "global" or None
    maximize: bool = False
    raw: bool = False  # second moment of g instead of c
    stacked: bool = False  # tensors of more dimensions are stacks of matrices, not (first, rest)
    ns: NewtonSchulz = NewtonSchulz()


class Moments(NamedTuple):
    """What a tensor carries from step to step; None where its type does not need it."""

    m: Tensor
    v: Tensor | None = None
    v_max: Tensor | None = None


def matrix_shape(shape: Sequence[int], stacked: bool) -> tuple[int, ...]:
    """A tensor as a matrix, (first, rest); stacked, as many of them, in its last two dimensions."""
    return tuple(shape) if stacked else (shape[0], prod(shape[1:]))


def update(
    kind: str, x: Tensor, g: Tensor, h: Tensor | None, s: Moments, t: Scalar, k: Hyper,
    length: Tensor | None = None,
) -> tuple[Tensor, Moments]:  # fmt: skip
    """Return the new x and moments after step t (1 at first).

    ``h`` is the last gradient; None asks for the form that needs none (no clip, no c²).
    ``length`` is the norm to clip by; None takes ‖c‖₂ of this tensor.
    """
    if k.maximize:
        g, h = -g, (None if h is None else -h)
    m, v, v_max = s
    c, n = g, None
    if not KINDS[kind].corrected:
        m = average(m, g, k.beta1)
    elif h is None:
        n, m = average_without_h(m, g, k.gamma, k.beta1)  # n is what the state holds
    else:
        c = correct(g, h, k.gamma, k.beta1)
        if k.clip is not None:
            c = clip(c, norm(c) if length is None else length)
        m = average(m, c, k.beta1)

    if v is not None:  # the kinds with a second moment
        v = adamw.second_moment(v, g if k.raw else c, k.beta2)
        v_max = torch.maximum(v_max, v) if v_max is not None else None
        denominator = v if v_max is None else v_max
        u = adamw.direction(m, denominator, t, k.beta1, k.beta2, k.eps)
    elif kind == "mars-lion":
        u = lion.direction(m)
    else:
        M = m.reshape(matrix_shape(m.shape, k.stacked))
        u = MATRIX[kind].direction(M, k.beta1, k.eps, k.ns).reshape(m.shape)

    x = x - k.lr * (u + k.decay * x)
    return x, Moments(m if n is None else n, v, v_max)

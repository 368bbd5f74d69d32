"""MARS-Shampoo: the momentum, orthogonalised."""

from __future__ import annotations

import math

from torch import Tensor

from mars.rule.estimator import Scalar
from mars.rule.newton_schulz import NewtonSchulz

ROUNDS_FIRST = False


def scale(rows: int, cols: int) -> float:
    """√max(1, rows/cols): tall matrices get a longer step."""
    return math.sqrt(max(1.0, rows / cols)) if cols else 1.0


def orthogonal(m: Tensor, beta1: Scalar, eps: float, ns: NewtonSchulz) -> Tensor:
    """NS(m/(1−β₁)). The iteration normalises, so that 1/(1−β₁) matters only beside ε."""
    return ns.shampoo(m / (1.0 - beta1), eps)


def direction(m: Tensor, beta1: Scalar, eps: float, ns: NewtonSchulz) -> Tensor:
    """u = √max(1, rows/cols)·NS(m/(1−β₁)) for a matrix m (or a stack of them)."""
    rows, cols = m.shape[-2:]
    return scale(rows, cols) * orthogonal(m, beta1, eps, ns)


def flops(short: int, long: int) -> int:
    """Three products with X, as its own order has them."""
    return 6 * short * short * long

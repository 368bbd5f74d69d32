"""MARS-M: Muon with Moonlight's scale, so that a step has about the RMS of an AdamW step."""

from __future__ import annotations

import math

from torch import Tensor

from mars.rule.estimator import Scalar
from mars.rule.newton_schulz import NewtonSchulz

ROUNDS_FIRST = True


def scale(rows: int, cols: int) -> float:
    """0.2·√max(rows, cols): an orthogonal matrix of that size then has an RMS near 0.2."""
    return 0.2 * math.sqrt(max(rows, cols))


def orthogonal(m: Tensor, beta1: Scalar, eps: float, ns: NewtonSchulz) -> Tensor:
    """NS(m), with an ε of Muon's own."""
    return ns.muon(m)


def direction(m: Tensor, beta1: Scalar, eps: float, ns: NewtonSchulz) -> Tensor:
    """u = 0.2·√max(rows, cols)·NS(m) for a matrix m (or a stack of them)."""
    rows, cols = m.shape[-2:]
    return scale(rows, cols) * orthogonal(m, beta1, eps, ns)


def flops(short: int, long: int) -> int:
    """Two products with X, and one of its Gram matrix with itself."""
    return 4 * short * short * long + 2 * short**3

"""MARS-AdamW: a diagonal preconditioner. Plain AdamW is the same rule on c = g."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mars.rule.estimator import Scalar


def second_moment(v: Tensor, c: Tensor, beta2: Scalar) -> Tensor:
    """v ← β₂·v + (1−β₂)·c²."""
    return beta2 * v + (1.0 - beta2) * c * c


def unbiased(beta: Scalar, t: Scalar) -> Scalar:
    """1 − βᵗ; where t is a tensor, of float32, without the cancellation."""
    if isinstance(t, Tensor) and not isinstance(beta, Tensor):
        return -torch.expm1(t * (math.log(beta) if beta else -math.inf))
    return 1.0 - beta**t


def direction(m: Tensor, v: Tensor, t: Scalar, beta1: Scalar, beta2: Scalar, eps: float) -> Tensor:
    """u = (m/(1−β₁ᵗ)) / (√v/√(1−β₂ᵗ) + ε)."""
    m_hat = m / unbiased(beta1, t)
    return m_hat / (v.sqrt() / unbiased(beta2, t) ** 0.5 + eps)

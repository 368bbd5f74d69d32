"""The variance-reduced gradient estimate: correct, clip, average."""

from __future__ import annotations

import torch
from torch import Tensor

Scalar = float | Tensor


def kappa(gamma: Scalar, beta1: Scalar) -> Scalar:
    """κ = γ·β₁/(1−β₁), the weight of the correction."""
    return gamma * (beta1 / (1.0 - beta1))


def noise_ratio(gamma: Scalar, beta1: Scalar) -> float:
    """Var(c)/Var(g) if g and h had independent noise: (1+κ)² + κ².

    >>> round(noise_ratio(0.025, 0.95), 2)
    2.4
    """
    k = float(kappa(gamma, beta1))
    return (1 + k) ** 2 + k**2


def correct(g: Tensor, h: Tensor, gamma: Scalar, beta1: Scalar) -> Tensor:
    """c = g + κ·(g − h)."""
    return g + kappa(gamma, beta1) * (g - h)


def norm(c: Tensor) -> Tensor:
    """‖c‖₂ over the whole tensor, as a 0-d tensor on its device (never read by the host)."""
    length: Tensor = torch.linalg.vector_norm(c)
    return length


def clip(c: Tensor, length: Tensor) -> Tensor:
    """c̃ = c / max(1, length), where the length is ‖c‖₂ of this tensor, or of all of them."""
    return c / length.clamp(min=1.0)


def average(m: Tensor, c: Tensor, beta1: Scalar) -> Tensor:
    """m ← β₁·m + (1−β₁)·c."""
    if isinstance(beta1, Tensor):  # lerp wants its weight in m's dtype
        return beta1 * m + (1.0 - beta1) * c
    return torch.lerp(m, c, 1.0 - beta1)


def average_without_h(n: Tensor, g: Tensor, gamma: Scalar, beta1: Scalar) -> tuple[Tensor, Tensor]:
    """The same average for an unclipped approximate step, without storing h.

    n ← β₁·n + (1−β₁)(1−γ)·g and m = n + γ·g. Equal to ``correct`` then ``average`` while γ is
    constant (proof in docs/math.md); n takes m's place in the state. Returns (n, m).
    """
    n = beta1 * n + (1.0 - beta1) * (1.0 - gamma) * g
    return n, n + gamma * g

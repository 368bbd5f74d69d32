"""MARS-Lion: every coordinate moves by the same amount."""

from torch import Tensor


def direction(m: Tensor) -> Tensor:
    """u = sign(m); the sign of a NaN would be 0, and x would stand still and look sound."""
    return m.sign() + 0 * m

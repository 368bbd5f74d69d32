"""MARS-Lion: every coordinate moves by the same amount."""

from torch import Tensor


def direction(m: Tensor) -> Tensor:
    """u = sign(m)."""
    return m.sign()

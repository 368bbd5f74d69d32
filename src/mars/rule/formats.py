"""Lean formats of state: bfloat16 rounded stochastically, and 8 bits with shared exponents.

An average like m ← β·m + (1−β)·c moves by less than half a unit of a short format, so rounding to
nearest would freeze it. Stochastic rounding goes up with the probability of what is cut off, which
is right on average. Its random bits are a hash of the element's index, the step and the buffer: the
same on every engine, machine and run.

8 bits are a float with 3 bits of mantissa whose exponent is counted down from the largest of its
group of 128: for signed values 15 powers of two, for the second moment (no sign) 31. What is
smaller is linear, down to an eighth of the smallest power. A second moment above 0 never becomes 0,
for the step divides by it. A group with a value that is not finite decodes to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128  # elements that share an exponent
_MASK = 0xFFFFFFFF


def _mixed(z: Tensor) -> Tensor:
    """A bijection of 32 bits that leaves no pattern (int64 holds them, products wrap)."""
    z = z ^ (z >> 16)
    z = (z * 0x7FEB352D) & _MASK
    z = z ^ (z >> 15)
    z = (z * 0x846CA68B) & _MASK
    return z ^ (z >> 16)


def random_bits(like: Tensor, t: Tensor | float, salt: int) -> Tensor:
    """32 bits for each element of ``like``, flat, as int64."""
    count = torch.as_tensor(t, device=like.device).to(torch.int64)
    index = torch.arange(like.numel(), device=like.device) & _MASK
    return _mixed(index ^ _mixed((count * 4 + salt) & _MASK))


def to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically."""
    whole = x.contiguous().view(torch.int32).to(torch.int64) & _MASK
    rounded = ((whole + (bits.view(x.shape) & 0xFFFF)) >> 16).masked_fill(x.isnan(), 0x7FC0)
    return rounded.to(torch.uint16).view(torch.bfloat16)


def _grouped(x: Tensor) -> Tensor:
    """Flat, filled up with zeros, (groups, GROUP)."""
    flat = x.reshape(-1)
    return pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def _float(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def encode(x: Tensor, bits: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 to (codes of x's shape, one exponent a group), both uint8."""
    slots = 14 if signed else 30
    value, noise = _grouped(x), _grouped(bits >> 12)
    size = value.abs()
    whole = size.view(torch.int32).to(torch.int64)
    top = (whole >> 23).amax(1, keepdim=True).clamp(min=slots + 2)
    low = top - slots
    normal = ((whole + noise) >> 20) - (low << 3)
    smallest = _float((low + 1) << 23)
    small = (((size + smallest).view(torch.int32) + noise) >> 20) - ((low + 1) << 3)
    q = torch.where((whole >> 23) > low, normal, small)
    q = torch.where(top == 255, 0, q)
    q = torch.where(value < 0, q + 128, q) if signed else torch.where(size > 0, q.clamp(min=1), q)
    return q.view(-1)[: x.numel()].view(x.shape).to(torch.uint8), top.view(-1).to(torch.uint8)


def decode(code: Tensor, exponents: Tensor, signed: bool) -> Tensor:
    """What `encode` took apart, as float32."""
    slots = 14 if signed else 30
    codes, top = _grouped(code).to(torch.int64), exponents.to(torch.int64).view(-1, 1)
    q, low = (codes & 127 if signed else codes), top - slots
    smallest = (low + 1) << 23
    small = _float(smallest + (q << 20)) - _float(smallest)
    value = torch.where(q < 8, small, _float((q + (low << 3)) << 20))
    if signed:
        value = torch.where(codes > 127, -value, value)
    value = value.masked_fill(top == 255, float("nan"))
    return value.view(-1)[: code.numel()].view(code.shape)

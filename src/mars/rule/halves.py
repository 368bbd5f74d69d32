"""A 16-bit parameter and its low half: together one float32.

A bfloat16 weight has 8 significant bits, so an update under 1/512 of it rounds away. The state
therefore holds 16 more bits (``param_low_bf16`` or ``param_low_fp16``, int16, 2 bytes a weight);
the pair is a float32 that is updated exactly, while the model sees its rounding. If the weight is
changed from outside, the low half stays what it is: a shift of at most half a unit in the last
place.
"""

from __future__ import annotations

import torch
from torch import Tensor

# float16 has 10 explicit mantissa bits and a smallest exponent (as frexp counts) of -13.
_FP16_BITS, _FP16_MIN_EXPONENT = 11, -13
# One count of the low half, in units of the last place of the high half: 2^-15 keeps half a unit
# (2^14 counts) inside int16 and is finer than float32 itself (2^-13).
_FP16_COUNTS = 15


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 that ``split`` took apart."""
    if high.dtype == torch.bfloat16:
        # Beside a zero the low half is never negative, unless the weight was set to 0 from outside;
        # borrowing from a zero's bits would make a NaN.
        low = torch.where(high == 0, low.clamp(min=0), low)
        bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
        return bits.view(torch.float32)
    value = high.float()
    return value + torch.ldexp(low.float(), _fp16_unit_exponent(value))


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round the float32 x to ``dtype`` and return (high, low), low as int16."""
    if dtype == torch.bfloat16:
        bits = x.view(torch.int32)
        high = (bits + 0x8000) >> 16  # to nearest; ties go away from zero, so low fits int16
        low = bits - (high << 16)
        rounded = high.to(torch.int16).view(torch.bfloat16)
        broken = x.isnan()  # adding to a NaN's bits may wrap into a number
        return torch.where(broken, x.to(dtype), rounded), low.masked_fill(broken, 0).to(torch.int16)
    rounded = x.to(dtype)
    value = rounded.float()
    low = torch.ldexp(x - value, -_fp16_unit_exponent(value)).round()
    return rounded, torch.nan_to_num(low, nan=0.0, posinf=0.0, neginf=0.0).to(torch.int16)


def _fp16_unit_exponent(value: Tensor) -> Tensor:
    """log₂ of one count of the low half beside the float16 ``value``."""
    exponent = torch.frexp(value).exponent.masked_fill(value == 0, _FP16_MIN_EXPONENT)
    return exponent.clamp(min=_FP16_MIN_EXPONENT) - (_FP16_BITS + _FP16_COUNTS)

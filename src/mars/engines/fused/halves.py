"""16-bit parameters inside kernels: the same bits as `mars.rule.halves` gives."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power(exponent):
    """2 to this power, for what float32 has as a normal number."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fp16_unit(value):
    """log₂ of one count of the low half beside a float16 value."""
    exponent = ((value.to(tl.int32, bitcast=True) >> 23) & 255) - 126
    return tl.maximum(tl.where(value == 0, -13, exponent), -13) - 26


@triton.jit
def join(high, low, dtype: tl.constexpr):
    """The float32 of a parameter and its low half; of a float32 parameter, itself."""
    if dtype == tl.float32:
        return high
    elif dtype == tl.bfloat16:
        bits = high.to(tl.int16, bitcast=True).to(tl.int32)
        rest = low.to(tl.int32)
        rest = tl.where((bits & 0x7FFF) == 0, tl.maximum(rest, 0), rest)
        return ((bits << 16) + rest).to(tl.float32, bitcast=True)
    else:
        value = high.to(tl.float32)
        return value + low.to(tl.float32) * _power(_fp16_unit(value))


@triton.jit
def split(x, dtype: tl.constexpr):
    """Round float32 to the parameter's dtype: (high, low)."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16  # to nearest; ties go away from zero, so low fits int16
        low = tl.where(x == x, bits - (high << 16), 0)
        high = tl.where(x == x, high, 0x7FC0)
        return high.to(tl.int16).to(tl.bfloat16, bitcast=True), low.to(tl.int16)
    else:
        high = x.to(tl.float16)
        value = high.to(tl.float32)
        count = (x - value) * _power(-_fp16_unit(value))
        count = (count + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
        finite = (value - value) == 0
        return high, tl.where(finite, count, 0.0).to(tl.int16)

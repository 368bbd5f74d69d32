"""Lean formats inside kernels: the same bits as `mars.rule.formats` gives."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # elements that share an exponent, as mars.rule.formats has it
PLAIN, BFLOAT16, EIGHT_BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _mixed(z):
    z ^= z >> 16
    z *= 0x7FEB352D
    z ^= z >> 15
    z *= 0x846CA68B
    return z ^ (z >> 16)


@triton.jit
def random_bits(index, t, SALT: tl.constexpr):
    """32 bits that depend on the element, the step and the buffer alone."""
    seed = _mixed(t.to(tl.uint32) * 4 + SALT)
    return _mixed(index.to(tl.uint32) ^ seed)


@triton.jit
def to_bfloat16(x, bits):
    """Stochastic rounding: up with the probability of what is cut off."""
    whole = x.to(tl.uint32, bitcast=True)
    rounded = (whole + (bits & 0xFFFF)) >> 16
    rounded = tl.where(x == x, rounded, 0x7FC0)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def value(code, top, SIGNED: tl.constexpr):
    """8-bit codes, each with the exponent of its group, as float32."""
    slots: tl.constexpr = 14 if SIGNED else 30
    low = top - slots
    code = code.to(tl.int32)
    q = (code & 127) if SIGNED else code
    smallest = (low + 1) << 23
    small = _float(smallest + (q << 20)) - _float(smallest)
    size = tl.where(q < 8, small, _float((q + (low << 3)) << 20))
    if SIGNED:
        size = tl.where(code > 127, -size, size)
    return tl.where(top == 255, float("nan"), size)


@triton.jit
def of_groups(top, BLOCK: tl.constexpr):
    """The exponents of groups, for each element."""
    groups: tl.constexpr = BLOCK // GROUP
    return tl.reshape(tl.broadcast_to(top[:, None], (groups, GROUP)), (BLOCK,))


@triton.jit
def decode(code, exponents, n, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """8-bit codes and the address of their groups' exponents, as float32."""
    groups: tl.constexpr = BLOCK // GROUP
    i = tl.arange(0, groups)
    top = tl.load(exponents + i, mask=i * GROUP < n, other=32).to(tl.int32)
    return value(code, of_groups(top, BLOCK), SIGNED)


@triton.jit
def encode(x, bits, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """float32 to (8-bit codes, exponents of the groups)."""
    groups: tl.constexpr = BLOCK // GROUP
    slots: tl.constexpr = 14 if SIGNED else 30
    size = tl.abs(x)
    whole = size.to(tl.int32, bitcast=True)
    top = tl.max(tl.reshape(whole >> 23, (groups, GROUP)), axis=1)
    top = tl.maximum(top, slots + 2)
    wide = of_groups(top, BLOCK)
    low = wide - slots
    noise = (bits >> 12).to(tl.int32)
    normal = ((whole + noise) >> 20) - (low << 3)
    smallest = _float((low + 1) << 23)
    small = (((size + smallest).to(tl.int32, bitcast=True) + noise) >> 20) - ((low + 1) << 3)
    q = tl.where((whole >> 23) > low, normal, small)
    q = tl.where(wide == 255, 0, q)
    if SIGNED:
        q = tl.where(x < 0, q + 128, q)
    else:
        q = tl.where(size > 0, tl.maximum(q, 1), q)
    return q.to(tl.uint8), top.to(tl.uint8)

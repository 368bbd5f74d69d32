"""How kernels read and write: vectors, moments in their formats, flags between programs."""

from __future__ import annotations

import triton
import triton.language as tl

from mars.engines.fused import lean
from mars.engines.fused.halves import split

SUMMED = tl.constexpr(1024)  # partial sums added up at a time


@triton.jit
def pointer(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))


@triton.jit
def load(base, offsets, limit, VECTOR: tl.constexpr, HAS: tl.constexpr, EVICT: tl.constexpr):
    """The elements before ``limit``; with VECTOR all or none of them, 16 bytes at a time.

    HAS says whether every tensor of the launch has this buffer (2), some do (1: the limit of the
    others is 0) or none (0).
    """
    pointers = base + offsets
    if VECTOR:
        pointers = tl.multiple_of(pointers, 16)
        if HAS == 2:
            return tl.load(pointers, eviction_policy=EVICT)
        else:
            mask = tl.zeros_like(offsets) < limit
            return tl.load(pointers, mask=mask, other=0, eviction_policy=EVICT)
    else:
        return tl.load(pointers, mask=offsets < limit, other=0, eviction_policy=EVICT)


@triton.jit
def store(base, offsets, value, limit, VECTOR: tl.constexpr):
    pointers = base + offsets
    if VECTOR:
        pointers = tl.multiple_of(pointers, 16)
        tl.store(pointers, value, eviction_policy="evict_first")
    else:
        tl.store(pointers, value, mask=offsets < limit, eviction_policy="evict_first")


@triton.jit
def load_state(
    address, exponents, start, offsets, limit, VECTOR: tl.constexpr, HAS: tl.constexpr,
    EVICT: tl.constexpr, FORM: tl.constexpr, FLOAT: tl.constexpr, SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A buffer of the state as float32; FLOAT is its dtype where it is not lean."""
    if HAS == 0:
        return tl.zeros((BLOCK,), tl.float32)
    elif FORM == lean.EIGHT_BITS:
        code = load(pointer(address, tl.uint8) + start, offsets, limit, VECTOR, HAS, EVICT)
        at = pointer(exponents, tl.uint8) + start // lean.GROUP
        return lean.decode(code, at, limit, SIGNED, BLOCK)
    else:
        form: tl.constexpr = tl.bfloat16 if FORM == lean.BFLOAT16 else FLOAT
        value = load(pointer(address, form) + start, offsets, limit, VECTOR, HAS, EVICT)
        return value.to(tl.float32)


@triton.jit
def store_state(
    address, exponents, start, offsets, limit, value, t, VECTOR: tl.constexpr, FORM: tl.constexpr,
    FLOAT: tl.constexpr, SIGNED: tl.constexpr, SALT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a buffer of the state in its format; returns what a lean one holds, as float32."""
    if FORM == lean.PLAIN:
        store(pointer(address, FLOAT) + start, offsets, value.to(FLOAT), limit, VECTOR)
        return value
    else:
        bits = lean.random_bits(start + offsets, t, SALT)
        if FORM == lean.BFLOAT16:
            rounded = lean.to_bfloat16(value, bits)
            store(pointer(address, tl.bfloat16) + start, offsets, rounded, limit, VECTOR)
            return rounded.to(tl.float32)
        else:
            code, top = lean.encode(value, bits, SIGNED, BLOCK)
            store(pointer(address, tl.uint8) + start, offsets, code, limit, VECTOR)
            i = tl.arange(0, BLOCK // lean.GROUP)
            at = pointer(exponents, tl.uint8) + start // lean.GROUP
            tl.store(at + i, top, mask=i * lean.GROUP < limit)
            return lean.value(code, lean.of_groups(top.to(tl.int32), BLOCK), SIGNED)


@triton.jit
def load_parameter(
    x, low, start, offsets, limit, VECTOR: tl.constexpr, HAS: tl.constexpr, GRAD: tl.constexpr
):  # fmt: skip
    """A parameter and its low half (itself again where it has none)."""
    high = load(pointer(x, GRAD) + start, offsets, limit, VECTOR, HAS, "evict_first")
    rest = high
    if GRAD != tl.float32:
        rest = load(pointer(low, tl.int16) + start, offsets, limit, VECTOR, HAS, "evict_first")
    return high, rest


@triton.jit
def store_parameter(
    value, x, low, start, offsets, limit, VECTOR: tl.constexpr, GRAD: tl.constexpr
):  # fmt: skip
    if GRAD == tl.float32:
        store(pointer(x, GRAD) + start, offsets, value, limit, VECTOR)
    else:
        high, rest = split(value, GRAD)
        store(pointer(x, GRAD) + start, offsets, high, limit, VECTOR)
        store(pointer(low, tl.int16) + start, offsets, rest, limit, VECTOR)


@triton.jit
def add_up(partial, count):
    """Σ of the partial sums, in an order that depends on nothing but their number."""
    total = tl.zeros((SUMMED,), tl.float64)
    for first in range(0, count, SUMMED):
        i = first + tl.arange(0, SUMMED)
        part = tl.load(partial + i, mask=i < count, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float64)
    return tl.sum(total)


@triton.jit
def arrive(counter):
    """Count this item, after its writes; how many came before it."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def publish(phase, value):
    tl.debug_barrier()
    tl.atomic_xchg(phase, value, sem="release")


@triton.jit
def wait_for(phase, wanted):
    """Spin until a phase of at least this is published; the phase."""
    now = tl.atomic_add(phase, 0, sem="acquire")
    while now < wanted:
        now = tl.atomic_add(phase, 0, sem="acquire")
    return now

"""Products of 16-bit matrices by cuBLASLt and ctypes: where torch has no operator, or a slow one.

With GELU, or its derivative, in the epilogue of a product the activations of a GPT's MLP, the
largest tensors of a step but for the logits, are written once instead of written, read and written.
And of plain products torch takes the algorithm that the library proposes first, which is not always
its best: another can be 3 to 12 % faster on an H200, with the same bits.

Algorithms are timed once for each size, and one is taken only if it gives the bits of torch's own
product; with an epilogue, which torch does not have, those of the library's first choice. So what
is computed does not depend on what was timed. Used is the library that torch itself has loaded;
where there is none, where it refuses or gains nothing, torch's operators are.

The GELU is the tanh approximation, as in GPT-2. Row-major (N, F) is cuBLAS's column-major (F, N):
it is given out = a·b as outᵀ = bᵀ·aᵀ.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Can a 16-bit product be written in float32 by torch? (2.8 and later, CUDA)
WRITES_FLOAT32 = "dtype_out" in torch.ops.aten.addmm.overloads()

WORKSPACE = 32 << 20  # bytes; what NVIDIA advises for Hopper
ALIGNMENT = 256  # bytes; what the library takes for granted when it proposes
SMALLEST = 1 << 33  # multiplications, 25 us of an H200: with less the host would lose the gain
REGULAR = 64  # sizes in multiples of it are tried: batches of training have them
MANY = 1 << 21  # 16-bit results, which no two orders of summation round alike
GAIN = 0.03  # by which another must be faster
CHOICES = 8  # algorithms to ask for

HALVES = (torch.float16, torch.bfloat16)
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
COMPUTE_FLOAT32 = 68
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, AUX_POINTER, AUX_LD = 3, 4, 7, 11, 12  # attributes of a product
MAX_WORKSPACE = 1  # attribute of a preference
PLAIN, GELU_AUX, DGELU = 1, 160, 192  # epilogues
ZERO, ONE = c_float(0.0), c_float(1.0)

Kind = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""What a plan knows of a tensor: dtype, shape, strides."""


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Plan(NamedTuple):
    """How to multiply matrices of some kinds. Plans of the same kinds share all but the last."""

    description: c_void_p
    layouts: list[c_void_p]
    heuristic: Heuristic


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a·b, or out += a·b, where out may be wider than a and b."""
    large = a.is_cuda and a.numel() * b.shape[1] >= SMALLEST
    _run(_plan(PLAIN, add, out, a, b) if large else None, add, out, a, b)


def gelu_product(x_ND: Tensor, w_FD: Tensor) -> tuple[Tensor, Tensor]:
    """h = x·wᵀ and GELU(h)."""
    fused = _fused_product(x_ND, w_FD) if _usable(x_ND) else None
    if fused is not None:
        return fused
    h_NF = F.linear(x_ND, w_FD)
    return h_NF, F.gelu(h_NF, approximate="tanh")


def gelu_gradient(dy_ND: Tensor, w_DF: Tensor, h_NF: Tensor) -> Tensor:
    """The gradient of h, when y = GELU(h)·wᵀ."""
    fused = _fused_gradient(dy_ND, w_DF, h_NF) if _usable(dy_ND) else None
    return _gelu_backward(dy_ND @ w_DF, h_NF) if fused is None else fused


def _gelu_backward(dg: Tensor, h: Tensor) -> Tensor:
    dh: Tensor = torch.ops.aten.gelu_backward(dg, h, approximate="tanh")
    return dh


def _fused_product(x_ND: Tensor, w_FD: Tensor) -> tuple[Tensor, Tensor] | None:
    h_NF, g_NF = (x_ND.new_empty(len(x_ND), len(w_FD)) for _ in range(2))
    return (h_NF, g_NF) if _fuse(GELU_AUX, g_NF, x_ND, w_FD.T, h_NF) else None


def _fused_gradient(dy_ND: Tensor, w_DF: Tensor, h_NF: Tensor) -> Tensor | None:
    dh_NF = torch.empty_like(h_NF)
    return dh_NF if _fuse(DGELU, dh_NF, dy_ND, w_DF, h_NF) else None


def _fuse(epilogue: int, *tensors: Tensor) -> bool:
    """Multiply, if there is a plan."""
    plan = _plan(epilogue, False, *tensors)
    if plan is not None:
        _run(plan, False, *tensors)
    return plan is not None


def _usable(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALVES and _checked(x.device, x.dtype)


@cache
def _checked(device: torch.device, dtype: torch.dtype) -> bool:
    """Do both products with GELU agree with torch's on this device? Asked once.

    Not at each size: there they are used even if nothing could be tried.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run a step before capturing a CUDA graph")
    generator = torch.Generator().manual_seed(0)
    x_ND, w_FD, dy_ND, w_DF = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((128, 64), (256, 64), (128, 64), (64, 256))
    )
    want_h_NF = F.linear(x_ND, w_FD)
    want_g_NF = F.gelu(want_h_NF, approximate="tanh")
    want_dh_NF = _gelu_backward(dy_ND @ w_DF, want_h_NF)
    try:
        with torch.cuda.device(device):
            forward = _fused_product(x_ND, w_FD)
            dh_NF = _fused_gradient(dy_ND, w_DF, want_h_NF)
    except RuntimeError:
        return False
    if forward is None or dh_NF is None:
        return False
    pairs = zip((*forward, dh_NF), (want_h_NF, want_g_NF, want_dh_NF), strict=True)
    # Errors of rounding are 2⁻⁹ of a bfloat16; a wrong formula or layout is wrong by 1.
    return all(bool((a.float() - b.float()).norm() <= 0.02 * b.float().norm()) for a, b in pairs)


def _plan(epilogue: int, add: bool, *tensors: Tensor) -> Plan | None:
    """How to multiply these (out, a, b and what an epilogue has besides); None: by torch."""
    device = tensors[0].device
    here = device.index == torch.cuda.current_device()
    if not here or any(t.data_ptr() % ALIGNMENT for t in tensors):
        return None
    return _choice(epilogue, add, device, *((t.dtype, t.shape, t.stride()) for t in tensors))


@cache
def _choice(epilogue: int, add: bool, device: torch.device, *kinds: Kind) -> Plan | None:
    """The fastest of torch's own and those of its bits; of an epilogue, of the library's first."""
    own = [None] if epilogue == PLAIN else []
    timed = regular(*kinds) and not torch.cuda.is_current_stream_capturing()
    if not suitable(*kinds) or (own and not timed):
        return None
    try:
        plans: list[Plan | None] = [*own, *_plans(epilogue, device, *kinds)]
    except (OSError, AttributeError, RuntimeError):
        return None
    if not timed:
        return plans[0]
    try:
        return plans[fastest(_times(plans, add, device, *kinds))]
    except torch.OutOfMemoryError:
        return plans[0]


def suitable(out: Kind, a: Kind, b: Kind, *aux: Kind) -> bool:
    """Would cuBLASLt take such matrices?"""
    half = a[0]
    dtypes = all(t[0] == half for t in (b, *aux)) and out[0] in (half, torch.float32)
    row_major = all(strides[1] == 1 for _, _, strides in (out, *aux))
    fits = all(_fits(shape, strides) for _, shape, strides in (out, a, b, *aux))
    return half in HALVES and dtypes and row_major and fits


def regular(*kinds: Kind) -> bool:
    """Is it worth a trial? Batches of texts of any length come once, and a trial takes 70 products.

    Nor if few results, rounded to 16 bits, could be the same by chance.

    >>> regular((torch.bfloat16, (32768, 768), (768, 1)))
    True
    >>> regular((torch.bfloat16, (655 * 100, 768), (768, 1)))
    False
    >>> regular((torch.bfloat16, (768, 768), (768, 1)))
    False
    """
    dtype, shape, _ = kinds[0]
    certain = dtype == torch.float32 or math.prod(shape) >= MANY
    return certain and not any(n % REGULAR for _, shape, _ in kinds for n in shape)


def _fits(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Does every row, or else every column, lie in one piece and begin at 16 bytes?"""
    if 1 not in strides:
        return False
    rows, _, leading, _ = column_major(shape, strides)
    return leading >= rows and min(shape) > 0 and not any(n % 8 for n in (*shape, leading))


def column_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """Rows, columns and leading dimension as cuBLAS sees a matrix; whether it has to transpose.

    >>> column_major((4, 3), (5, 1)), column_major((3, 4), (1, 5))
    ((3, 4, 5, False), (3, 4, 5, True))
    """
    transposed = strides[1] != 1
    if transposed:
        shape, strides = shape[::-1], strides[::-1]
    return shape[1], shape[0], strides[0], transposed


def fastest(times: Sequence[float]) -> int:
    """Which to take: the first, if it hardly matters.

    >>> fastest([319.0, math.inf, 300.0, 290.0])
    3
    >>> fastest([200.0, 198.0])
    0
    """
    best = min(range(len(times)), key=lambda i: times[i])
    return best if times[best] <= times[0] * (1 - GAIN) else 0


def _times(
    plans: Sequence[Plan | None], add: bool, device: torch.device, *kinds: Kind
) -> list[float]:
    """Milliseconds of each for random matrices; infinite, if its bits are not the first's.

    The product is about 1 in size, where GELU is neither 0 nor a straight line, and the time that
    of a chip at work: on zeros it draws less power. The generator is one of its own, and what is
    allocated, operands and the output twice, is free again after it.
    """
    generator = torch.Generator(device).manual_seed(0)
    out, a, _, *aux = tensors = [_draw(generator, *kind) for kind in kinds]
    a *= a.shape[1] ** -0.5

    def bits(plan: Plan | None) -> list[Tensor]:
        generator.manual_seed(1)
        for tensor in (out, *aux):  # else it may have what the one before has written
            tensor.normal_(generator=generator)
        _run(plan, add, *tensors)
        return [tensor.view(torch.int16) for tensor in (out, *aux)]

    def same(plan: Plan | None) -> bool:
        try:
            return all(map(torch.equal, bits(plan), first))
        except RuntimeError:  # the library can refuse what it has proposed
            return False

    first = [tensor.clone() for tensor in bits(plans[0])]
    running = [i for i, plan in enumerate(plans) if i == 0 or same(plan)]
    calls = [partial(_run, plans[i], add, *tensors) for i in running]
    times = dict(zip(running, _milliseconds(calls), strict=True))
    return [times.get(i, math.inf) for i in range(len(plans))]


def _draw(
    generator: torch.Generator,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Tensor:
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    drawn = torch.randn(size, generator=generator, dtype=dtype, device=generator.device)
    return drawn.as_strided(shape, strides)


def _milliseconds(calls: Sequence[Callable[[], None]]) -> list[float]:
    """The shortest of five each, after two that do not count; in turns, as a chip gets slower."""
    rounds = []
    for _ in range(7):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        rounds.append(marks)
    rounds[-1][-1].synchronize()
    return [
        min(float(marks[i].elapsed_time(marks[i + 1])) for marks in rounds[2:])
        for i in range(len(calls))
    ]


def _run(plan: Plan | None, add: bool, out: Tensor, a: Tensor, b: Tensor, *aux: Tensor) -> None:
    """Multiply by a plan; if there is none, by torch."""
    if plan is None:
        _by_torch(add, out, a, b)
        return
    lib, device, (description, layouts, heuristic) = _library(), a.device, plan
    for tensor in aux:
        pointer = c_void_p(tensor.data_ptr())
        _set(lib.cublasLtMatmulDescSetAttribute, description, AUX_POINTER, pointer)
    workspace = a.new_empty(heuristic.workspace, dtype=torch.uint8)
    status = lib.cublasLtMatmul(
        _handle(device), description, byref(ONE), b.data_ptr(), layouts[0], a.data_ptr(),
        layouts[1], byref(ONE if add else ZERO), out.data_ptr(), layouts[2], out.data_ptr(),
        layouts[2], byref(heuristic), workspace.data_ptr(), heuristic.workspace,
        torch.cuda.current_stream(device).cuda_stream,
    )  # fmt: skip
    _succeed(status)


def _by_torch(add: bool, out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif a.is_cuda and WRITES_FLOAT32:
        torch.addmm(out, a, b, beta=int(add), out_dtype=out.dtype, out=out)
    else:
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.add_(product) if add else out.copy_(product)


def _plans(
    epilogue: int, device: torch.device, out: Kind, a: Kind, b: Kind, *aux: Kind
) -> list[Plan]:
    """What the library proposes, its first choice first."""
    lib = _library()
    description, preference = c_void_p(), c_void_p()
    _succeed(
        lib.cublasLtMatmulDescCreate(byref(description), COMPUTE_FLOAT32, TYPES[torch.float32])
    )
    seen = [column_major(shape, strides) for _, shape, strides in (b, a, out)]
    attributes: list[tuple[int, Any]] = [
        (EPILOGUE, c_int32(epilogue)),
        (TRANSPOSE_A, c_int32(seen[0][3])),
        (TRANSPOSE_B, c_int32(seen[1][3])),
    ]
    for _, _, strides in aux:  # the library asks how well it is aligned before it is known
        attributes += [(AUX_LD, c_int64(strides[0])), (AUX_POINTER, c_void_p(ALIGNMENT))]
    for name, value in attributes:
        _set(lib.cublasLtMatmulDescSetAttribute, description, name, value)
    layouts = []
    for (dtype, *_), (rows, columns, leading, _) in zip((b, a, out), seen, strict=True):
        layout = c_void_p()
        sizes = (c_uint64(rows), c_uint64(columns), c_int64(leading))
        _succeed(lib.cublasLtMatrixLayoutCreate(byref(layout), TYPES[dtype], *sizes))
        layouts.append(layout)
    _succeed(lib.cublasLtMatmulPreferenceCreate(byref(preference)))
    _set(lib.cublasLtMatmulPreferenceSetAttribute, preference, MAX_WORKSPACE, c_uint64(WORKSPACE))
    heuristics, found = (Heuristic * CHOICES)(), c_int(0)
    status = lib.cublasLtMatmulAlgoGetHeuristic(
        _handle(device), description, *layouts, layouts[2], preference, CHOICES, heuristics,
        byref(found),
    )  # fmt: skip
    lib.cublasLtMatmulPreferenceDestroy(preference)
    usable = [h for h in heuristics[: found.value] if not h.state and h.workspace <= WORKSPACE]
    _succeed(status if usable else 15)
    return [Plan(description, layouts, heuristic) for heuristic in usable]


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _succeed(_library().cublasLtCreate(byref(handle)))
    return handle


@cache
def _library() -> ctypes.CDLL:
    """The cuBLASLt that this process has loaded."""
    torch.cuda.current_blas_handle()  # torch loads it late
    found = re.search(r"(/\S*libcublasLt\.so[.\d]*)$", Path("/proc/self/maps").read_text(), re.M)
    lib = ctypes.CDLL(found[1] if found else "libcublasLt.so")
    lib.cublasLtMatmul.argtypes = (*(c_void_p,) * 14, c_size_t, c_void_p)
    return lib


def _set(setter: Callable[..., int], what: c_void_p, name: int, value: Any) -> None:
    _succeed(setter(what, name, byref(value), c_size_t(ctypes.sizeof(value))))


def _succeed(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered with status {status}")

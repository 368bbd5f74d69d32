"""Norms of whole tensors, and of all of them: what the last item of a tensor decides."""

from __future__ import annotations

import triton
import triton.language as tl

from mars.engines.fused import layout as at
from mars.engines.fused.access import SUMMED, publish

SURE = tl.constexpr(1.0 - 1e-5)  # below 1 by more than the rounding of the bound


@triton.jit
def clip_scale(length):
    """1/max(1, ‖c‖); a NaN stays one."""
    return 1.0 / tl.where(length <= 1.0, 1.0, length)


@triton.jit
def decide(figure, phase, h_known):
    """After the last Σg² of a tensor: is the scale 1 for sure, as |1+κ|‖g‖ + |κ|‖h‖ ≤ 1?"""
    kappa = tl.load(figure + at.KAPPA)
    g_norm = tl.load(figure + at.G_NORM, cache_modifier=".cg")
    h_norm = tl.load(figure + at.H_NORM)
    bound = tl.abs(1.0 + kappa) * g_norm + tl.abs(kappa) * h_norm
    sure = (bound <= SURE) & (h_known != 0)
    publish(phase, tl.where(sure, at.KNOWN, at.NEEDS_EXACT))


@triton.jit
def _many(table, n_tensors, hypers, figures, first):
    """SUMMED tensors from the first: (mask, figures, hyper-parameters, clipped, by all of them)."""
    i = first + tl.arange(0, SUMMED)
    inside = i < n_tensors
    row = table + i * at.ROW
    hyper = hypers + tl.load(row + at.HYPER, mask=inside, other=0) * at.HYPERS
    clipped = (tl.load(row + at.FLAGS, mask=inside, other=0) & at.CLIPPED) != 0
    shared = tl.load(hyper + at.GLOBAL) != 0
    return inside, figures + i * at.FIGURES, hyper, clipped, shared


@triton.jit
def decide_all(table, n_tensors, n_clipped, hypers, counters, figures, total, h_known):
    """After the last Σg² of all tensors: the norm of all gradients, and the same question."""
    squares = tl.zeros((SUMMED,), tl.float64)
    for first in range(0, n_tensors, SUMMED):
        inside, figure, hyper, _, _ = _many(table, n_tensors, hypers, figures, first)
        g_norm = tl.load(figure + at.G_NORM, mask=inside, other=0.0, cache_modifier=".cg")
        limit = tl.load(hyper + at.MAX_NORM)
        g_norm = tl.where(limit > 0, g_norm, 0.0).to(tl.float64)
        squares += g_norm * g_norm
    norm = tl.sqrt(tl.sum(squares))
    tl.store(total, norm.to(tl.float32))
    bounds = tl.zeros((SUMMED,), tl.float64)
    unsure = tl.zeros((SUMMED,), tl.int32)
    for first in range(0, n_tensors, SUMMED):
        inside, figure, hyper, clipped, shared = _many(table, n_tensors, hypers, figures, first)
        # As torch's clip_grad_norm_ has it. A NaN passes, and shows.
        limit = tl.load(hyper + at.MAX_NORM)
        ratio = limit / (norm + 1e-6)
        g_scale = tl.where(limit > 0, tl.where(ratio >= 1.0, 1.0, ratio), 1.0).to(tl.float32)
        tl.store(figure + at.G_SCALE, g_scale, mask=inside)
        g_norm = tl.load(figure + at.G_NORM, mask=inside, other=0.0, cache_modifier=".cg")
        h_norm = tl.load(figure + at.H_NORM, mask=inside, other=0.0)
        kappa = tl.load(figure + at.KAPPA, mask=inside, other=0.0)
        bound = tl.abs(1.0 + kappa) * g_scale * g_norm + tl.abs(kappa) * h_norm
        square = tl.where(clipped, tl.where(shared, bound, 0.0), 0.0).to(tl.float64)
        bounds += square * square
        unsure += tl.where(clipped, tl.where(bound <= SURE, 0, 1), 0)
    sure = (tl.sum(unsure) == 0) & (tl.sqrt(tl.sum(bounds)) <= SURE) & (h_known != 0)
    sure = sure | (n_clipped == 0)
    publish(counters + at.PHASE, tl.where(sure, at.KNOWN, at.NEEDS_EXACT))


@triton.jit
def clip_all(table, n_tensors, hypers, counters, figures):
    """After the last Σc² of all tensors: the scale of each."""
    squares = tl.zeros((SUMMED,), tl.float64)
    for first in range(0, n_tensors, SUMMED):
        inside, figure, _, clipped, shared = _many(table, n_tensors, hypers, figures, first)
        c_norm = tl.load(figure + at.C_NORM, mask=inside, other=0.0, cache_modifier=".cg")
        c_norm = tl.where(clipped, tl.where(shared, c_norm, 0.0), 0.0)
        squares += c_norm.to(tl.float64) * c_norm.to(tl.float64)
    length = tl.sqrt(tl.sum(squares)).to(tl.float32)
    for first in range(0, n_tensors, SUMMED):
        inside, figure, _, _, shared = _many(table, n_tensors, hypers, figures, first)
        c_norm = tl.load(figure + at.C_NORM, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(figure + at.C_SCALE, clip_scale(tl.where(shared, length, c_norm)), mask=inside)
    publish(counters + at.PHASE, at.KNOWN)

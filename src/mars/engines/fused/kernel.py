"""The elementwise kernels: two launches step every tensor, whatever their number and kind.

A launch works through a list of items, each a stretch of one tensor. Programs draw items by a
ticket, in the order of the list, and an item only waits for items before it: nothing can wait for
what has not started. The kinds of items:

- NORM: Σg² of a stretch. The last of a tensor's items adds them up, in a fixed order, and asks
  whether the clip can act at all: ‖c‖ ≤ (1+κ)‖g‖ + κ‖h‖, where ‖h‖ is the ‖g‖ of the step before.
  If that is at most 1, the scale is exactly 1, and h need not be read for the norm.
- EXACT: Σc² of a stretch, for tensors where it could act; nothing to do for the others.
- UPDATE: waits until its tensor's scale is known, then does everything else in one pass.
- SMALL: a tensor of one item: norm and update by the same program.

A norm over all tensors (clip="global", max_grad_norm) holds back every UPDATE until the last
NORM and EXACT. A small launch before that, `prepare`, counts the steps, clears the counters and
turns hyper-parameters into the numbers of each tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mars.engines.fused import layout as at
from mars.engines.fused import norms
from mars.engines.fused.access import (
    add_up,
    arrive,
    load,
    load_parameter,
    load_state,
    pointer,
    publish,
    store,
    store_parameter,
    store_state,
    wait_for,
)  # fmt: skip
from mars.engines.fused.halves import join


@triton.jit
def prepare(
    table, n_tensors, hypers, addresses, counters, figures, grad_scale, found_inf,
    AMP: tl.constexpr, SLACK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Count the steps; make the numbers of each tensor; clear the counters."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < n_tensors
    row, figure = table + i * at.ROW, figures + i * at.FIGURES
    counted = 1.0
    unscale = 1.0
    if AMP:
        counted = tl.where(tl.load(found_inf) != 0, 0.0, 1.0)
        unscale = 1.0 / tl.load(grad_scale)
    steps_at = pointer(tl.load(row + at.T, mask=inside, other=0), tl.float32)
    t = tl.load(steps_at, mask=inside, other=0.0) + counted
    tl.store(steps_at, t, mask=inside)

    number = tl.load(row + at.HYPER, mask=inside, other=0)
    hyper = hypers + number * at.HYPERS
    lr_at = tl.load(addresses + 2 * number)
    gamma_at = tl.load(addresses + 2 * number + 1)
    lr = tl.load(pointer(lr_at, tl.float32), mask=lr_at != 0, other=1.0).to(tl.float64)
    lr *= tl.load(hyper + at.LR)
    gamma = tl.load(pointer(gamma_at, tl.float32), mask=gamma_at != 0, other=0.0).to(tl.float64)
    gamma += tl.load(hyper + at.GAMMA)
    beta1, beta2 = tl.load(hyper + at.BETA1), tl.load(hyper + at.BETA2)
    has_h = (tl.load(row + at.FLAGS, mask=inside, other=0) & at.HAS_H) != 0
    # With h: κ. Without: n ← β₁n + (1−β₁)(1−γ)g and m = n + γg, of which AdamW is the case γ = 0.
    kappa = tl.where(has_h, gamma * (beta1 / (1.0 - beta1)), 0.0)
    steps = tl.maximum(t, 1.0).to(tl.float64)  # 0 only in a first step that is skipped
    unbias1 = 1.0 / (1.0 - tl.exp(steps * tl.load(hyper + at.LN_BETA1)))
    unbias2 = 1.0 / tl.sqrt(1.0 - tl.exp(steps * tl.load(hyper + at.LN_BETA2)))
    tl.store(figure + at.RATE, lr.to(tl.float32), mask=inside)
    tl.store(figure + at.KAPPA, kappa.to(tl.float32), mask=inside)
    tl.store(figure + at.MIX, tl.where(has_h, 0.0, gamma).to(tl.float32), mask=inside)
    tl.store(figure + at.KEEP1, beta1.to(tl.float32), mask=inside)
    tl.store(figure + at.KEEP2, beta2.to(tl.float32), mask=inside)
    tl.store(figure + at.WEIGHT1, (1.0 - beta1).to(tl.float32), mask=inside)
    tl.store(figure + at.WEIGHT2, (1.0 - beta2).to(tl.float32), mask=inside)
    tl.store(figure + at.UNBIAS1, unbias1.to(tl.float32), mask=inside)
    tl.store(figure + at.UNBIAS2, unbias2.to(tl.float32), mask=inside)
    tl.store(figure + at.FIGURE_EPS, tl.load(hyper + at.EPS).to(tl.float32), mask=inside)
    tl.store(figure + at.FIGURE_DECAY, tl.load(hyper + at.DECAY).to(tl.float32), mask=inside)
    tl.store(figure + at.FIGURE_SIGN, tl.load(hyper + at.SIGN).to(tl.float32), mask=inside)
    tl.store(figure + at.FIGURE_RAW, tl.load(hyper + at.RAW).to(tl.float32), mask=inside)
    tl.store(figure + at.UNSCALE, tl.zeros((SIZE,), tl.float32) + unscale, mask=inside)
    tl.store(figure + at.STEP, t, mask=inside)
    # ‖g‖ of the last step is ‖h‖ of this one, but for the rounding of h.
    g_norm = tl.load(figure + at.G_NORM, mask=inside, other=0.0)
    g_scale = tl.load(figure + at.G_SCALE, mask=inside, other=0.0)
    tl.store(figure + at.H_NORM, g_norm * g_scale * SLACK, mask=inside)
    one = tl.full((SIZE,), 1.0, tl.float32)
    tl.store(figure + at.G_SCALE, one, mask=inside)
    tl.store(figure + at.C_SCALE, one, mask=inside)
    zero = tl.zeros((SIZE,), tl.int32)
    for counter in tl.static_range(at.COUNTERS):
        tl.store(counters + at.CONTROL + i * at.COUNTERS + counter, zero, mask=inside)
    tl.store(counters + i, zero, mask=i < at.CONTROL)


@triton.jit
def squares(
    gradient, last, exponents, start, n, kappa, scale, VECTOR: tl.constexpr,
    CORRECTED: tl.constexpr, GRAD: tl.constexpr, H_FORM: tl.constexpr, ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ of g², or of c², over an item."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, ITEM if VECTOR else tl.minimum(ITEM, n - start), BLOCK):
        offsets = tl.arange(0, BLOCK)
        begin = start + first
        limit = n - begin
        g = load(pointer(gradient, GRAD) + begin, offsets, limit, VECTOR, 2, "evict_last")
        c = g.to(tl.float32) * scale
        if CORRECTED:
            h = load_state(
                last, exponents, begin, offsets, limit, VECTOR, 2, "evict_last", H_FORM, GRAD,
                True, BLOCK,
            )  # fmt: skip
            c += kappa * (c - h)
        total += c * c
    return tl.sum(total)


@triton.jit
def _update(
    row, figure, flags, gradient, last, start, n, g_scale, c_scale, copies, VECTOR: tl.constexpr,
    ANY: tl.constexpr, ALL: tl.constexpr, GRAD: tl.constexpr, H_FORM: tl.constexpr,
    M_FORM: tl.constexpr, V_FORM: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole step of an item, `mars.rule.update` in one pass; Σm² of it, for matrices."""
    x_at, low_at = tl.load(row + at.X), tl.load(row + at.LOW)
    m_at, m_exp = tl.load(row + at.M), tl.load(row + at.M_EXP)
    v_at, v_exp = tl.load(row + at.V), tl.load(row + at.V_EXP)
    v_max_at, h_exp = tl.load(row + at.V_MAX), tl.load(row + at.H_EXP)
    rate, kappa = tl.load(figure + at.RATE), tl.load(figure + at.KAPPA)
    mix, weight1 = tl.load(figure + at.MIX), tl.load(figure + at.WEIGHT1)
    keep1, keep2 = tl.load(figure + at.KEEP1), tl.load(figure + at.KEEP2)
    weight2, unbias1 = tl.load(figure + at.WEIGHT2), tl.load(figure + at.UNBIAS1)
    unbias2, eps = tl.load(figure + at.UNBIAS2), tl.load(figure + at.FIGURE_EPS)
    decay, t = tl.load(figure + at.FIGURE_DECAY), tl.load(figure + at.STEP)
    raw = tl.load(figure + at.FIGURE_RAW) != 0
    c_scale *= tl.load(figure + at.FIGURE_SIGN)
    has_h, has_v = (flags & at.HAS_H) != 0, (flags & at.HAS_V) != 0
    matrix, keep_g = (flags & at.IS_MATRIX) != 0, (flags & copies) != 0
    # A consumed gradient is the next h: only a rescaled one must be written.
    rescaled = ((flags & at.CONSUME) != 0) & (keep_g == 0) & (g_scale != 1.0)
    # What is true of all tensors of the launch (2), of some (1) or of none (0) is known here.
    h_held: tl.constexpr = (ANY // at.HAS_H) % 2 + (ALL // at.HAS_H) % 2
    v_held: tl.constexpr = (ANY // at.HAS_V) % 2 + (ALL // at.HAS_V) % 2
    x_held: tl.constexpr = 2 - (ANY // at.IS_MATRIX) % 2 - (ALL // at.IS_MATRIX) % 2

    m_squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, ITEM if VECTOR else tl.minimum(ITEM, n - start), BLOCK):
        offsets = tl.arange(0, BLOCK)
        begin = start + first
        limit = n - begin
        # All loads before the first use, so that they are under way together.
        g = load(pointer(gradient, GRAD) + begin, offsets, limit, VECTOR, 2, "evict_first")
        h = load_state(
            last, h_exp, begin, offsets, tl.where(has_h, limit, 0), VECTOR, h_held, "evict_first",
            H_FORM, GRAD, True, BLOCK,
        )  # fmt: skip
        m = load_state(
            m_at, m_exp, begin, offsets, limit, VECTOR, 2, "evict_first", M_FORM, tl.float32, True,
            BLOCK,
        )  # fmt: skip
        v = load_state(
            v_at, v_exp, begin, offsets, tl.where(has_v, limit, 0), VECTOR, v_held, "evict_first",
            V_FORM, tl.float32, False, BLOCK,
        )  # fmt: skip
        if x_held > 0:
            high, low = load_parameter(
                x_at, low_at, begin, offsets, tl.where(matrix, 0, limit), VECTOR, x_held, GRAD
            )

        g = g.to(tl.float32) * g_scale
        c = g
        if h_held > 0:
            c += kappa * (g - h)
        c *= c_scale
        if at.MIXED & ANY:
            m = keep1 * m + weight1 * (c - mix * c)
        else:
            m = keep1 * m + weight1 * c
        held = store_state(
            m_at, m_exp, begin, offsets, limit, m, t, VECTOR, M_FORM, tl.float32, True, 1, BLOCK
        )
        if at.MIXED & ANY:
            m += mix * c
            held += mix * c
        if x_held < 2:  # the norm of what Newton–Schulz will read
            m_squares += held * held
        if x_held > 0:
            if matrix == 0:
                u = m
                if v_held < 2:
                    u = tl.where(m > 0, 1.0, tl.where(m < 0, -1.0, 0.0)) + 0.0 * m  # NaN shows
                if v_held > 0:
                    if has_v:
                        square = c
                        if at.RAW_SQUARE & ANY:
                            square = tl.where(raw, g, c)
                        v = keep2 * v + weight2 * square * square
                        store_state(
                            v_at, v_exp, begin, offsets, limit, v, t, VECTOR, V_FORM, tl.float32,
                            False, 2, BLOCK,
                        )  # fmt: skip
                        if at.HAS_V_MAX & ANY:
                            if v_max_at != 0:
                                top = pointer(v_max_at, tl.float32) + begin
                                old = load(top, offsets, limit, VECTOR, 2, "evict_first")
                                v = tl.maximum(old, v, propagate_nan=tl.PropagateNan.ALL)
                                store(top, offsets, v, limit, VECTOR)
                        u = (m * unbias1) / (tl.sqrt(v) * unbias2 + eps)
                x = join(high, low, GRAD)
                x -= rate * (u + decay * x)
                store_parameter(x, x_at, low_at, begin, offsets, limit, VECTOR, GRAD)
        if (at.KEEP_G | at.CONSUME) & ANY:
            if keep_g:
                store_state(
                    last, h_exp, begin, offsets, limit, g, t, VECTOR, H_FORM, GRAD, True, 3, BLOCK
                )
        if at.CONSUME & ANY:
            if rescaled:
                store(pointer(gradient, GRAD) + begin, offsets, g.to(GRAD), limit, VECTOR)
    return tl.sum(m_squares)


@triton.jit(do_not_specialize=["h_known"])  # 0 in the first step: the second would compile again
def step(
    table, gradients, hypers, work, n_tensors, n_normed, n_clipped, h_known, counters, figures,
    norm_sums, exact_sums, update_sums, total, found_inf, ANY: tl.constexpr, ALL: tl.constexpr,
    GRAD: tl.constexpr, H_FORM: tl.constexpr, M_FORM: tl.constexpr, V_FORM: tl.constexpr,
    TOGETHER: tl.constexpr, AMP: tl.constexpr, BLOCK: tl.constexpr, NORM_ITEM: tl.constexpr,
    EXACT_ITEM: tl.constexpr, UPDATE_ITEM: tl.constexpr,
):  # fmt: skip
    """Do one item of the list of work."""
    ticket = tl.atomic_add(counters + at.TICKET, 1, sem="relaxed")
    entry = tl.load(work + 2 * ticket)
    item = tl.load(work + 2 * ticket + 1)
    op, i = entry >> 28, (entry & 0xFFFFFFF).to(tl.int64)
    row = table + i * at.ROW
    figure = figures + i * at.FIGURES
    counter = counters + at.CONTROL + i * at.COUNTERS
    gradient, last = tl.load(gradients + i), tl.load(gradients + n_tensors + i)
    n, flags = tl.load(row + at.NUMEL), tl.load(row + at.FLAGS)
    kappa = tl.load(figure + at.KAPPA)
    unscale = tl.load(figure + at.UNSCALE)
    copies = at.KEEP_G
    live = True
    if AMP:
        live = tl.load(found_inf) == 0
        copies = at.KEEP_G | at.CONSUME  # the host does not know whether this step is skipped
    if TOGETHER:
        phase = counters + at.PHASE
    else:
        phase = counter + at.TENSOR_PHASE

    if live:
        if op == at.NORM:
            start = item.to(tl.int64) * NORM_ITEM
            if ((gradient & 15) == 0) & (start + NORM_ITEM <= n):
                part = squares(
                    gradient, last, 0, start, n, kappa, unscale, True, False, GRAD, H_FORM,
                    NORM_ITEM, BLOCK,
                )  # fmt: skip
            else:
                part = squares(
                    gradient, last, 0, start, n, kappa, unscale, False, False, GRAD, H_FORM,
                    NORM_ITEM, BLOCK,
                )  # fmt: skip
            sums = norm_sums + tl.load(row + at.NORM_FIRST)
            tl.store(sums + item, part)
            count = tl.load(row + at.NORM_COUNT).to(tl.int32)
            if arrive(counter + at.NORM_DONE) == count - 1:
                length = tl.sqrt(add_up(sums, count)).to(tl.float32)
                tl.store(figure + at.G_NORM, length)
                if TOGETHER:
                    if arrive(counters + at.NORMS) == n_normed - 1:
                        norms.decide_all(
                            table, n_tensors, n_clipped, hypers, counters, figures, total, h_known
                        )
                else:
                    tl.debug_barrier()
                    norms.decide(figure, phase, h_known)
        elif op == at.EXACT:
            start = item.to(tl.int64) * EXACT_ITEM
            if wait_for(phase, at.NEEDS_EXACT) == at.NEEDS_EXACT:
                scale = tl.load(figure + at.G_SCALE, cache_modifier=".cg") * unscale
                exponents = tl.load(row + at.H_EXP)
                if (((gradient | last) & 15) == 0) & (start + EXACT_ITEM <= n):
                    part = squares(
                        gradient, last, exponents, start, n, kappa, scale, True, True, GRAD,
                        H_FORM, EXACT_ITEM, BLOCK,
                    )  # fmt: skip
                else:
                    part = squares(
                        gradient, last, exponents, start, n, kappa, scale, False, True, GRAD,
                        H_FORM, EXACT_ITEM, BLOCK,
                    )  # fmt: skip
                sums = exact_sums + tl.load(row + at.EXACT_FIRST)
                tl.store(sums + item, part)
                count = tl.load(row + at.EXACT_COUNT).to(tl.int32)
                if arrive(counter + at.EXACT_DONE) == count - 1:
                    length = tl.sqrt(add_up(sums, count)).to(tl.float32)
                    tl.store(figure + at.C_NORM, length)
                    if TOGETHER:
                        if arrive(counters + at.EXACTS) == n_clipped - 1:
                            norms.clip_all(table, n_tensors, hypers, counters, figures)
                    else:
                        tl.store(figure + at.C_SCALE, norms.clip_scale(length))
                        publish(phase, at.KNOWN)
        else:
            start = item.to(tl.int64) * UPDATE_ITEM
            g_scale = unscale
            c_scale = 1.0
            if op == at.SMALL:
                exponents = tl.load(row + at.H_EXP)
                part = squares(
                    gradient, last, exponents, start, n, kappa, g_scale, False, True, GRAD,
                    H_FORM, UPDATE_ITEM, BLOCK,
                )  # fmt: skip
                c_scale = norms.clip_scale(tl.sqrt(part))
            elif TOGETHER | ((flags & at.CLIPPED) != 0):
                wait_for(phase, at.KNOWN)
                g_scale *= tl.load(figure + at.G_SCALE, cache_modifier=".cg")
                if (flags & at.CLIPPED) != 0:
                    c_scale = tl.load(figure + at.C_SCALE, cache_modifier=".cg")
            addresses = gradient | last | tl.load(row + at.X) | tl.load(row + at.LOW)
            addresses |= tl.load(row + at.M) | tl.load(row + at.V) | tl.load(row + at.V_MAX)
            if ((addresses & 15) == 0) & (start + UPDATE_ITEM <= n):
                part = _update(
                    row, figure, flags, gradient, last, start, n, g_scale, c_scale, copies, True,
                    ANY, ALL, GRAD, H_FORM, M_FORM, V_FORM, UPDATE_ITEM, BLOCK,
                )  # fmt: skip
            else:
                part = _update(
                    row, figure, flags, gradient, last, start, n, g_scale, c_scale, copies, False,
                    ANY, ALL, GRAD, H_FORM, M_FORM, V_FORM, UPDATE_ITEM, BLOCK,
                )  # fmt: skip
            if (flags & at.IS_MATRIX) != 0:
                sums = update_sums + tl.load(row + at.UPDATE_FIRST)
                tl.store(sums + item, part)
                count = tl.load(row + at.UPDATE_COUNT).to(tl.int32)
                if arrive(counter + at.UPDATE_DONE) == count - 1:
                    tl.store(figure + at.M_NORM, tl.sqrt(add_up(sums, count)).to(tl.float32))

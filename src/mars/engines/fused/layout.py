"""Where everything is: the columns of the tables that kernels read and write."""

from __future__ import annotations

import triton.language as tl

# Kinds of items of work, see kernel.py.
NORM, EXACT, UPDATE, SMALL = (tl.constexpr(i) for i in range(4))

# A row about a tensor (int64): addresses, size, and where the sums of its items are.
X, LOW, H_EXP, M, M_EXP, V, V_EXP, V_MAX, T = (tl.constexpr(i) for i in range(9))
NUMEL, FLAGS, HYPER = (tl.constexpr(i) for i in range(9, 12))
NORM_FIRST, NORM_COUNT, EXACT_FIRST, EXACT_COUNT, UPDATE_FIRST, UPDATE_COUNT = (
    tl.constexpr(i) for i in range(12, 18)
)
ROW = tl.constexpr(18)
HAS_H, HAS_V, HAS_V_MAX, KEEP_G, CONSUME, IS_MATRIX, CLIPPED, MIXED, RAW_SQUARE = (
    tl.constexpr(1 << i) for i in range(9)
)

# A row of hyper-parameters (float64), one a kind and group.
LR, BETA1, BETA2, EPS, DECAY, GAMMA, SIGN, RAW, GLOBAL, MAX_NORM, LN_BETA1, LN_BETA2 = (
    tl.constexpr(i) for i in range(12)
)
HYPERS = tl.constexpr(12)

# Numbers (float32) of a tensor in this step, made of its hyper-parameters and t.
RATE, KAPPA, MIX, KEEP1, WEIGHT1, KEEP2, WEIGHT2 = (tl.constexpr(i) for i in range(7))
UNBIAS1, UNBIAS2, FIGURE_EPS, FIGURE_DECAY, FIGURE_SIGN, FIGURE_RAW, UNSCALE, STEP = (
    tl.constexpr(i) for i in range(7, 15)
)
# And what is found on the way: ‖g‖ of this step and of the last, what g and c are multiplied by,
# ‖c‖, and ‖m‖ of a matrix.
G_NORM, H_NORM, G_SCALE, C_SCALE, C_NORM, M_NORM = (tl.constexpr(i) for i in range(15, 21))
FIGURES = tl.constexpr(21)

# Counters (int32) of a launch, and after them of each tensor: items done, and what is known.
TICKET, NORMS, EXACTS, PHASE = (tl.constexpr(i) for i in range(4))
CONTROL = tl.constexpr(4)
NORM_DONE, EXACT_DONE, UPDATE_DONE, TENSOR_PHASE = (tl.constexpr(i) for i in range(4))
COUNTERS = tl.constexpr(4)
UNKNOWN, NEEDS_EXACT, KNOWN = (tl.constexpr(i) for i in range(3))

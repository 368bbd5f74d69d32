"""MARS-M: Muon with Moonlight's scale, so that a step has about the RMS of an AdamW step."""

from __future__ import annotations

import math

from torch import Tensor

from mars.rule.newton_schulz import NewtonSchulz


def scale(rows: int, cols: int) -> float:
    """0.2·√max(rows, cols): an orthogonal matrix of that size then has an RMS near 0.2."""
    return 0.2 * math.sqrt(max(rows, cols))


def direction(m: Tensor, ns: NewtonSchulz) -> Tensor:
    """u = 0.2·√max(rows, cols)·NS(m) for a matrix m (or a stack of them)."""
    rows, cols = m.shape[-2:]
    return scale(rows, cols) * ns.muon(m)

"""The reference engine: a loop over tensors that calls the rule."""

from __future__ import annotations

import torch
from torch import Tensor

from mars.engines.batch import Batch
from mars.rule import update
from mars.rule.estimator import correct, norm
from mars.rule.halves import join, split
from mars.rule.update import Moments


def step(batch: Batch, length: Tensor | None) -> None:
    torch._foreach_add_(batch.t, 1)  # `t += 1` of a float64 is lost in a compiled step (torch 2.13)
    for i, t in enumerate(batch.steps()):
        x, g = batch.x[i], batch.g[i]
        low = batch.low[i] if batch.low else None
        h = batch.h[i] if batch.h else None
        state = Moments(
            batch.m[i],
            batch.v[i] if batch.v else None,
            batch.v_max[i] if batch.v_max else None,
        )
        wide = x if low is None else join(x, low)
        start = state
        if torch.is_grad_enabled():  # differentiable: backward needs what is overwritten below
            wide = wide.clone()
            start = Moments._make(s if s is None else s.clone() for s in state)
        now, last = g.to(wide.dtype), None if h is None else h.to(wide.dtype)
        if not x.ndim:  # 0-d with an option that is a 0-d tensor would take that one's dtype
            wide, now = wide.reshape(1), now.reshape(1)
            last = None if last is None else last.reshape(1)
            start = Moments._make(None if s is None else s.reshape(1) for s in start)
        wide, new = update(
            batch.kind, wide, now, last, start, t, batch.k,
            length[i] if length is not None and length.ndim else length,
        )  # fmt: skip
        wide = wide.reshape(x.shape)
        for old, value in zip(state, new, strict=True):
            if old is not None and value is not None:
                old.copy_(value.reshape(old.shape))
        if low is None:
            x.copy_(wide)
        else:
            for half, value in zip((x, low), split(wide, x.dtype), strict=True):
                half.copy_(value)
        if h is not None and batch.keep_g:
            h.copy_(g)


def norms(batch: Batch) -> list[Tensor]:
    wide = batch.m[0].dtype
    return [
        norm(correct(g.to(wide), h.to(wide), batch.k.gamma, batch.k.beta1))
        for g, h in zip(batch.g, batch.h, strict=True)
    ]

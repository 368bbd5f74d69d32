"""The CPU engine: torch's fused AdamW kernel on corrected gradients.

Tensors are done in portions, so that what one operation hands to the next is still in a cache, and
the step needs no more memory than for its largest tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mars.engines import foreach
from mars.engines.batch import Batch
from mars.rule import KINDS
from mars.rule.estimator import kappa
from mars.rule.halves import join

# Elements that are done together, or one tensor; of matrices more, so that stacks stay large.
PORTION, MATRICES = 1 << 18, 1 << 20


def step(batch: Batch, length: Tensor | None) -> None:
    assert length is None or not length.ndim  # one a tensor is for sharded ones: not here
    portions = list(_portions(batch))
    room = _room(batch, [rows for rows, fits in portions if fits])
    for rows, fits in portions:
        part = batch.part(rows)
        if fits:
            _adamw(part, length, room)
        else:
            foreach.step(part, length)


def norms(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = list(batch.x)
    for rows, _ in _portions(batch):
        for i, own in zip(rows, foreach.norms(batch.part(rows)), strict=True):
            found[i] = own
    return found


def _portions(batch: Batch) -> Iterator[tuple[list[int], bool]]:
    """Rows that are done together, and whether the kernel takes them."""
    matrix = KINDS[batch.kind].matrix
    order = list(range(len(batch.x)))
    if matrix:  # those of one shape are a stack
        order.sort(key=lambda i: batch.x[i].shape)
    rows: list[int] = []
    size, before = 0, False
    for i in order:
        fits, own = _fits(batch, i), batch.x[i].numel()
        if rows and (size + own > (MATRICES if matrix else PORTION) or fits != before):
            yield rows, before
            rows, size = [], 0
        rows.append(i)
        size, before = size + own, fits
    if rows:
        yield rows, before


def _room(batch: Batch, portions: list[list[int]]) -> Tensor | None:
    """Memory for two copies of the largest tensor, if it is larger than a portion.

    Asked for anew by every operation, it would cost as much as what is done in it.
    """
    most = max((batch.x[rows[0]].numel() for rows in portions), default=0)
    return batch.m[0].new_empty(2, most) if most > PORTION else None


def _fits(batch: Batch, i: int) -> bool:
    """Whether this is AdamW of g or of c̃, and lies in memory as the kernel wants it."""
    if not batch.v or (batch.h and batch.k.raw):  # then m is of c̃ and v of g
        return False
    columns = (batch.x, batch.m, batch.v, batch.v_max, batch.low)
    return all(column[i].is_contiguous() for column in columns if column)


def _adamw(batch: Batch, length: Tensor | None, room: Tensor | None) -> None:
    k = batch.k
    size = batch.x[0].numel()
    own = None if room is None or size <= PORTION else room[:, :size].view(2, *batch.x[0].shape)
    c = foreach.wide(batch.g, batch.m[0])
    if batch.h:
        c = foreach.corrected(batch) if own is None else [_corrected(batch, own[0])]
        if k.clip is not None:
            lengths = torch.stack(torch._foreach_norm(c)) if length is None else length
            if not bool((lengths <= 1.0).all()):  # a CPU may ask; what is not finite is to show
                foreach.clip_(c, lengths)
    x = batch.x
    if batch.low:
        x = [join(high, low) for high, low in zip(batch.x, batch.low, strict=True)]
    # The kernel would round x once for the decay and once for the rest: it steps −lr·λ·x instead.
    lr, decay = float(k.lr), float(k.decay)
    moved = x
    if decay and own is None:
        moved = list(torch._foreach_mul(x, -lr * decay))
    elif decay and own is not None:
        moved = [torch.mul(x[0], -lr * decay, out=own[1])]
    torch._foreach_add_(batch.t, 1)
    # Without h, n = m − γ·h is kept. The kernel makes m of n + γ·g: β₁·(n + γ·g) + (1−β₁)·g.
    ahead = float(k.gamma) if KINDS[batch.kind].corrected and not batch.h else 0.0
    ahead = -ahead if k.maximize else ahead
    if ahead:
        torch._foreach_add_(batch.m, c, alpha=ahead)
    torch._fused_adamw_(
        moved, [tensor.contiguous() for tensor in c], batch.m, batch.v, batch.v_max, batch.t,
        lr=lr, beta1=float(k.beta1), beta2=float(k.beta2), eps=k.eps, weight_decay=0.0,
        amsgrad=bool(batch.v_max), maximize=k.maximize,
    )  # fmt: skip
    if ahead:
        torch._foreach_add_(batch.m, c, alpha=-ahead)
    if decay:
        torch._foreach_add_(x, moved)
    else:  # the kernel writes behind autograd's back; a graph that saved a parameter must notice
        increment_version(batch.x)
    foreach.split_into(batch, x)
    if batch.h and batch.keep_g:
        torch._foreach_copy_(batch.h, batch.g)


def _corrected(batch: Batch, out: Tensor) -> Tensor:
    """c of one tensor, in memory that is there."""
    (g,), (h,) = foreach.wide(batch.g, batch.m[0]), foreach.wide(batch.h, batch.m[0])
    return torch.lerp(h, g, 1.0 + float(kappa(batch.k.gamma, batch.k.beta1)), out=out)

"""From an optimizer to what engines step: its batches, in a plan where they are fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mars.dispatch import (
    capturing,
    clip_gradients,
    engine_for,
    global_length,
    new_batch,
    one_launch,
    shares_norm,
)
from mars.engines import CELLS, Batch
from mars.plan import Plan

if TYPE_CHECKING:
    from mars.optimizer import MARS


def collect(optimizer: MARS, plan: Plan | None) -> tuple[Plan | None, list[tuple[Batch, str]]]:
    """The batches of this step, in a plan where they are fused, else with their engines.

    A plan that is given stays, and what it steps is left out, unless it could now step more.
    """
    compiling = torch.compiler.is_compiling()
    # torch.compile traces foreach; and a plan is made by uploads, which a graph cannot capture.
    may_fuse = optimizer._observer is None and not compiling and not capturing()
    found, members = _batches(optimizer, may_fuse)
    if plan is not None:
        planned = set(map(id, plan.params))
        rest = [
            pair
            for pair, params in zip(found, members, strict=True)
            if not all(id(p) in planned for p in params)
        ]
        if not any(name == "fused" for _, name in rest):
            return plan, rest
    fused = [batch for batch, name in found if name == "fused"]
    made = None
    pairs = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    shared = any(shares_norm(g, p) for g, p in pairs)
    if fused and shared and not (len(fused) == len(found) and one_launch(pairs)):
        found, _ = _batches(optimizer, may_fuse=False)
    elif fused:
        lists = [own for (_, name), own in zip(found, members, strict=True) if name == "fused"]
        made = Plan(optimizer, fused, lists)
    if not compiling:  # a graph of the step must not set attributes
        optimizer._plan = made
    return made, [(batch, name) for batch, name in found if name != "fused"]


def _batches(optimizer: MARS, may_fuse: bool) -> tuple[list[tuple[Batch, str]], list[list[Tensor]]]:
    """All batches, each with its engine, and the parameters of each."""
    batches: list[tuple[Batch, str]] = []
    members: list[list[Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        columns: list[list[Any]] = [[] for _ in range(11)]
        kinds: list[str] = []
        fused: list[bool] = []
        optimizer._init_group(group, may_fuse, kinds, fused, *columns)
        x, t = columns[0], columns[2]
        split: dict[Any, int] = {}
        other = engine_for(group, x)
        for i, kind in enumerate(kinds):
            key = (kind, x[i].device, x[i].dtype, fused[i])
            if key not in split:
                split[key] = len(batches)
                batch = new_batch(kind, group, index, x[i], t[i], fused[i])
                batches.append((batch, "fused" if fused[i] else other))
                members.append([])
            batches[split[key]][0].add(*(column[i] for column in columns))
            members[split[key]].append(x[i])
    for batch, _ in batches:
        batch.view_complex_as_real()
    return batches, members


def step_batches(optimizer: MARS, batches: list[tuple[Batch, str]]) -> None:
    """Step what is not fused."""
    wide = [(b.widened() if b.lean() else b, name) for b, name in batches]
    norm = clip_gradients(batch for batch, _ in wide)
    if norm is not None:
        optimizer._grad_norm = norm
    length = global_length(wide)
    for (narrow, name), (batch, _) in zip(batches, wide, strict=True):
        clip_by = None
        if batch.k.clip == "global" and batch.h:
            clip_by = length[batch.x[0].device].to(batch.m[0].dtype)
        if optimizer._observer is not None:
            optimizer._observer.before(batch, clip_by)
        CELLS[name](batch, clip_by)
        if optimizer._observer is not None:
            optimizer._observer.after(batch)
        if batch is not narrow:
            narrow.narrow(batch)

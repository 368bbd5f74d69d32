"""A step of an optimizer: its batches, in a plan where they are fused, and who steps them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from mars import exact, exchange
from mars.clipping import clip_gradients, clip_lengths
from mars.dispatch import (
    capturing,
    engine_for,
    new_batch,
    one_launch,
    shares_norm,
    steps_now,
)
from mars.engines import CELLS, COLUMNS, Batch, foreach
from mars.plan import Plan
from mars.rule import KINDS, MATRIX, matrix_shape
from mars.sharding import Ranks, flops, here, is_cut
from mars.state import consume_gradients, kind_of, needs_last_grad

if TYPE_CHECKING:
    from mars.optimizer import MARS


def advance(optimizer: MARS, with_closure: bool) -> None:
    """The step, with gradients that are there."""
    plan = optimizer._renewed_plan()
    if plan is None or not plan.complete:
        optimizer._check_gradients()
    approximate = all(group["is_approx"] for group in optimizer.param_groups)
    if not approximate:
        exact.check_protocol(optimizer, with_closure)
    batches: list[tuple[Batch, str]] = []
    if plan is None or not plan.complete:
        plan, batches = collect(optimizer, plan)
    # A GradScaler hands these over if the whole step is fused; see _step_supports_amp_scaling.
    grad_scale = getattr(optimizer, "grad_scale", None)
    found_inf = getattr(optimizer, "found_inf", None)
    if (batches or (plan is not None and plan.outside)) and found_inf is not None:
        for name in ("grad_scale", "found_inf"):  # the scaler would, if this did not raise
            vars(optimizer).pop(name, None)
        raise RuntimeError(
            "a GradScaler left unscaling and skipping to the fused step, and this step is not "
            "all fused (it is compiled, captured, or changed since): use fused=False with it"
        )
    if not approximate or optimizer._exact.holds_last_param:
        exact.remember(optimizer, with_closure)
    if plan is not None:
        plan.run(optimizer, grad_scale, found_inf)
    step_batches(optimizer, batches, plan)
    if plan is not None:
        plan.consume(optimizer, copied=found_inf is not None)
    else:
        consume_gradients(optimizer)


# Dynamo (2.13) cannot trace the groups of a mesh, nor leave a graph with one in its hands.
@_disable_dynamo
def advance_untraced(optimizer: MARS, with_closure: bool) -> None:
    advance(optimizer, with_closure)


def _stepped(optimizer: MARS) -> list[tuple[dict[str, Any], Tensor]]:
    """(group, parameter) of what has a gradient."""
    return [(g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def may_scale(optimizer: MARS) -> bool:
    """Whether all is fused, so that a GradScaler may leave unscaling and skipping to the step."""
    if not all(group["is_approx"] for group in optimizer.param_groups):
        if optimizer._exact.stored_previous:  # a GradScaler asks before every step
            warnings.warn(
                "exact mode under a GradScaler: it unscales p.grad, and not the gradients that "
                "update_previous_grad() has kept, by which the next step will be corrected: those "
                "must be of a loss that is not scaled. bfloat16 needs no scaler",
                stacklevel=4,  # to where scaler.step was called
            )
        return False
    if optimizer._observer is not None:
        return False
    if optimizer._plan is not None and optimizer._plan.outside:
        return False
    pairs = _stepped(optimizer)
    shared = any(shares_norm(g, p) for g, p in pairs)
    if not pairs or any(is_cut(p) for _, p in pairs) or (shared and not _alone(optimizer, pairs)):
        return False
    return all(steps_now(group, p, optimizer._ranks) for group, p in pairs)


def needs_ranks(optimizer: MARS) -> bool:
    """Whether this step needs a norm or a matrix whose parts other ranks have."""
    for group, p in _stepped(optimizer):
        kind = kind_of(p, group)
        normed = group["max_grad_norm"] is not None or (
            group["clip"] is not None and needs_last_grad(kind, group)
        )
        if is_cut(p) and (KINDS[kind].matrix or normed):
            return True
    return False


def _alone(optimizer: MARS, pairs: list[tuple[dict[str, Any], Tensor]]) -> bool:
    """Whether one fused launch has all that these tensors share a norm with."""
    cut = any(is_cut(p) for _, p in pairs)
    return one_launch(pairs) and not optimizer._ranks.partition and not cut


def collect(optimizer: MARS, plan: Plan | None) -> tuple[Plan | None, list[tuple[Batch, str]]]:
    """The batches of this step, in a plan where they are fused, else with their engines.

    A plan that is given stays, and what it steps is left out, unless it could now step more.
    """
    compiling = torch.compiler.is_compiling()
    # torch.compile traces foreach; and a plan is made by uploads, which a graph cannot capture.
    may_fuse = optimizer._observer is None and not compiling and not capturing()
    planned = set() if plan is None else set(map(id, plan.params))
    found, members = _batches(optimizer, may_fuse, planned)
    if plan is not None:
        pairs_of = zip(found, members, strict=True)
        rest = [pair for pair, params in pairs_of if id(params[0]) not in planned]
        if not any(name == "fused" for _, name in rest):
            return plan, rest
    fused = [batch for batch, name in found if name == "fused"]
    made = None
    pairs = _stepped(optimizer)
    if fused:
        alone = len(fused) == len(found) and _alone(optimizer, pairs)
        joint = not alone and any(shares_norm(g, p) for g, p in pairs)
        lists = [own for (_, name), own in zip(found, members, strict=True) if name == "fused"]
        made = Plan(optimizer, fused, lists, joint)
    if not compiling:  # a graph of the step must not set attributes
        optimizer._plan = made
    return made, [(batch, name) for batch, name in found if name != "fused"]


def _batches(
    optimizer: MARS, may_fuse: bool, planned: set[int]
) -> tuple[list[tuple[Batch, str]], list[list[Tensor]]]:
    """All batches, each with its engine, and the parameters of each: all planned, or none."""
    batches: list[tuple[Batch, str]] = []
    members: list[list[Tensor]] = []
    if not torch.compiler.is_compiling():  # which would compile anew for other gradients
        _part_gradients(optimizer)
    first = 0
    for index, group in enumerate(optimizer.param_groups):
        columns: list[list[Any]] = [[] for _ in COLUMNS]
        kinds: list[str] = []
        fused: list[bool] = []
        layouts: list[Any] = []
        optimizer._init_group(group, may_fuse, kinds, fused, layouts, *columns)
        x, t = columns[0], columns[2]
        stepped = [(i, p) for i, p in enumerate(group["params"], first) if p.grad is not None]
        first += len(group["params"])
        split: dict[Any, int] = {}
        other = _other_engine(group, x)
        for i, kind in enumerate(kinds):
            spread = layouts[i] is not None
            place, p = stepped[i]
            key = (kind, x[i].device, x[i].dtype, fused[i], spread, id(p) in planned)
            if key not in split:
                split[key] = len(batches)
                batch = new_batch(kind, group, index, x[i], t[i], fused[i])
                engine = "foreach" if spread or _shared(optimizer, batch) else other
                batches.append((batch, "fused" if fused[i] else engine))
                members.append([])
            batches[split[key]][0].add(*(column[i] for column in columns))
            if spread:
                batches[split[key]][0].layouts.append(layouts[i])
            batches[split[key]][0].places.append(place)
            members[split[key]].append(p)
    for batch, _ in batches:
        batch.view_complex_as_real()
    return batches, members


def _part_gradients(optimizer: MARS) -> None:
    """Gradients may be one tensor, or lie in one place; who consumes it needs one of its own."""
    if not any(group["consume_grads"] for group in optimizer.param_groups):
        return
    pairs = _stepped(optimizer)
    places = [_place(p.grad) for _, p in pairs if p.grad is not None]
    count = Counter(places)
    for (group, p), place in zip(pairs, places, strict=True):
        if group["consume_grads"] and count[place] > 1:
            count[place] -= 1
            p.grad = p.grad.clone()  # type: ignore[union-attr]


def _place(g: Tensor) -> tuple[int, int]:
    """Where its numbers begin; a fake tensor has this, too."""
    own = here(g)
    return own.untyped_storage()._cdata, int(own.storage_offset())


def _other_engine(group: dict[str, Any], x: list[Tensor]) -> str:
    """What steps these tensors of a group where fused does not."""
    name = engine_for(group, x)
    differentiable = torch.is_grad_enabled()  # the optimizer is
    return "reference" if name == "cpu" and differentiable else name


def step_batches(optimizer: MARS, batches: list[tuple[Batch, str]], plan: Plan | None) -> None:
    """Step what is not fused, and end what the plan has only begun.

    Matrices that other ranks work on travel while this rank steps everything else.
    """
    groups, ranks, observer = optimizer.param_groups, optimizer._ranks, optimizer._observer
    outside = [] if plan is None else plan.outside
    batches = [*batches, *((b, "fused") for _, own in outside for b in own)]
    norm = clip_gradients(batches, groups, ranks)
    if norm is not None:
        if optimizer._grad_norm is None:  # a rank without gradients of its own
            optimizer._grad_norm = torch.zeros_like(norm, dtype=torch.float32)
        optimizer._grad_norm.copy_(norm)
    elif optimizer._grad_norm is not None and not _norms(plan):
        optimizer._grad_norm.zero_()  # nothing that is clipped by it has a gradient
    lengths = clip_lengths(batches, groups, ranks)
    away = [_shared(optimizer, batch) for batch, _ in batches]
    # Decoded as a whole where somebody else works on it, or looks on.
    wide = [
        b.widened() if (gone or observer is not None) and b.launch is None and b.lean() else b
        for (b, _), gone in zip(batches, away, strict=True)
    ]
    finish = None
    if observer is None and any(away):
        travellers = [(wide[i], lengths[i]) for i, gone in enumerate(away) if gone]
        finish = _sent(travellers, ranks)
    for batch, (narrow, name), clip_by, gone in zip(wide, batches, lengths, away, strict=True):
        if gone and observer is None:
            continue
        if observer is not None:
            observer.before(batch, clip_by)
        if gone:
            _sent([(batch, clip_by)], ranks)()
        elif batch.launch is not None:
            batch.launch.clip(batch, clip_by)
        elif batch is narrow and batch.lean():  # what has been decoded has wider buffers, too
            _step_lean(batch, name, clip_by)
        else:
            CELLS[name](batch, clip_by)
        if observer is not None:
            observer.after(batch)
    for launch, _ in outside:
        launch.finish()
    if finish is not None:
        finish()
    for (narrow, _), batch in zip(batches, wide, strict=True):
        if batch is not narrow:
            narrow.narrow(batch)


def _step_lean(batch: Batch, name: str, length: Tensor | None) -> None:
    """By an engine that knows wide buffers alone: some tensors are decoded at a time."""
    for rows in batch.portions():
        part = batch.part(rows)
        wide = part.widened()
        own = length[rows[0] : rows[-1] + 1] if length is not None and length.ndim else length
        CELLS[name](wide, own)
        part.narrow(wide)


def _norms(plan: Plan | None) -> bool:
    """Whether the fused step writes the norm of the gradients."""
    return plan is not None and any(launch.normed for launch, _ in plan.launches)


def _sent(travellers: list[tuple[Batch, Tensor | None]], ranks: Ranks) -> Callable[[], None]:
    """Average the momenta and send them to their owners; calling the result ends the step."""
    batches = [batch for batch, _ in travellers]
    jobs = [_jobs(batch, foreach.begin(batch, length)[0]) for batch, length in travellers]
    arrive = exchange.start(list(chain(*jobs)), ranks)

    def finish() -> None:
        arrive()
        for batch, own in zip(batches, jobs, strict=True):
            shapes = [job.matrix for job in own]
            foreach.finish(batch, foreach.scaled(batch, [job.arrived() for job in own], shapes))

    return finish


def _jobs(batch: Batch, m: list[Tensor]) -> list[exchange.Job]:
    """Newton–Schulz in 16 bits rounds its result, in Muon's order its input: no more is sent."""
    wide, short = m[0].dtype, getattr(torch, batch.k.ns.dtype)
    back = short if short.itemsize < wide.itemsize else wide
    there = back if MATRIX[batch.kind].ROUNDS_FIRST and short != torch.float16 else wide
    solve = partial(foreach.orthogonal, batch)
    jobs = []
    for i, part in enumerate(m):
        layout = batch.layouts[i] if batch.layouts else None
        shape = tuple(part.shape) if layout is None else layout.shape
        matrix = matrix_shape(shape, batch.k.stacked)
        cost = flops(batch.kind, matrix, batch.k.ns.steps)
        jobs.append(exchange.Job(part, shape, matrix, layout, cost, solve, there, back))
    return jobs


def _shared(optimizer: MARS, batch: Batch) -> bool:
    """Whether ranks share the Newton–Schulz of this batch."""
    return KINDS[batch.kind].matrix and (len(batch.layouts) > 0 or optimizer._ranks.replicate)

"""Exact mode: the last gradient is that of this batch at the previous parameters.

Two ways to the same trajectory. ``step(closure)`` keeps the previous parameters
(``last_param``) and evaluates the closure there and here. The authors' protocol needs no such
copy: the caller evaluates the *next* batch before the step and stores its gradients
(``previous_grad``), which after the step are gradients at the previous parameters.

The closure should change nothing but gradients: what it accumulates elsewhere (gradients of
parameters that this optimizer does not have, running statistics of batch norm) it does twice.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from mars.state import kind_of, needs_last_grad

logger = logging.getLogger("mars")

if TYPE_CHECKING:
    from torch import Tensor

    from mars.optimizer import MARS


class Memory:
    """What is known beyond the state of tensors, since the optimizer was made or loaded."""

    def __init__(self, optimizer: MARS) -> None:
        states = [optimizer.state.get(p, {}) for p in optimizer._all()]
        self.previous_is_new = any("previous_grad" in own for own in states)
        self.stored_previous = False  # since the last step
        self.holds_last_param = any("last_param" in own for own in states)
        # What the last gradients are: "fresh", "used" by a step, or "repeated".
        self.last_grads = "used" if self.holds_last_param else "fresh"
        # Tensors with which the protocol began after other steps: their last gradient is of those.
        self.begun: set[Tensor] = set()
        self.refused = False  # the last step was: who then follows the protocol begins it anew


def _corrected(optimizer: MARS) -> list[Tensor]:
    """The parameters whose last gradient comes from an evaluation of its own."""
    return [
        p
        for group in optimizer.param_groups
        if not group["is_approx"]
        for p in group["params"]
        if needs_last_grad(kind_of(p, group), group)
    ]


def _states(optimizer: MARS) -> list[tuple[Tensor, dict[str, Any]]]:
    """(parameter, state) of every parameter that has been stepped."""
    found = ((p, optimizer.state.get(p, {})) for p in optimizer._all())
    return [(p, own) for p, own in found if "step" in own]


def evaluate(optimizer: MARS, closure: Callable[[], Any]) -> Any:
    """The loss and gradients at x; in exact mode, before that, last gradients at x₋₁."""
    corrected = _corrected(optimizer)
    if not corrected:
        return closure()
    if optimizer._ranks.partition:
        raise RuntimeError(
            'exact mode with a closure needs all parameters here, and with ranks="partition" this '
            "rank has some: call update_previous_grad() and update_last_grad() of the optimizer "
            "inside instead (docs/distributed.md)"
        )
    moved = {p: own["last_param"] for p, own in _states(optimizer) if "last_param" in own}
    if moved:
        _evaluate_there(optimizer, closure, moved)
    loss = closure()
    _without_correction(optimizer, [p for p in corrected if p not in moved])
    return loss


def _without_correction(optimizer: MARS, lost: list[Tensor]) -> None:
    """c = g once, for those of these that have been stepped: what h they have is of before."""
    stepped = dict(_states(optimizer))
    lost = [p for p in lost if p in stepped]
    for p in lost:
        if p.grad is not None:
            with torch.no_grad():  # laid out as p, which the gradient of a DTensor need not be
                stepped[p]["last_grad"] = torch.zeros_like(p).copy_(p.grad)
    if lost:
        warnings.warn(
            f"exact mode: nothing of the previous parameters for {len(lost)} tensors (their state "
            "comes from approximate mode, from another protocol or from a partial checkpoint); "
            "this one step is taken without correction",
            stacklevel=_level_of_the_caller(),
        )


def _level_of_the_caller() -> int:
    """Of a warning, so that it points to where step was called, whatever has wrapped step."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _root(frame) in ("mars", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _forked(params: list[Tensor]) -> AbstractContextManager[None]:
    """Afterwards, random numbers go on from here, on the CPU and where the parameters are."""
    places = {p.device for p in params}
    kind = next((place.type for place in places if place.type in ("mps", "xpu")), "cuda")
    devices = {place.index for place in places if place.type == kind}
    if torch.cuda.is_initialized() and kind == "cuda":  # parameters may be offloaded to the CPU
        devices.add(torch.cuda.current_device())
    return torch.random.fork_rng(devices=sorted(devices), device_type=kind)


def _evaluate_there(
    optimizer: MARS, closure: Callable[[], Any], there: dict[Tensor, Tensor]
) -> None:
    """Evaluate at the previous parameters; leave ours, their gradients and the RNG as they were."""
    everyone = optimizer._all()
    here = {p: p.detach().clone() for p in there}
    gradients = [p.grad for p in everyone]
    try:
        with torch.no_grad():
            for p, value in there.items():
                p.copy_(value)
        for p in everyone:
            p.grad = None
        torch.clear_autocast_cache()  # weights that an autocast around the step has cast before
        with _forked(everyone):  # the other sees the same random numbers
            closure()
        optimizer._check_gradients()
        with torch.no_grad():
            for p in _corrected(optimizer):
                if p in there:
                    own, h = optimizer.state[p], torch.zeros_like(p) if p.grad is None else p.grad
                    own["last_grad"] = _store(own.get("last_grad"), h)
    finally:
        with torch.no_grad():
            for p, value in here.items():
                p.copy_(value)
        torch.clear_autocast_cache()
        for p, g in zip(everyone, gradients, strict=True):
            p.grad = g


# What a compiled graph sets on the optimizer is lost, and inductor (2.13) copies x to last_param
# when it has been stepped already: this stays outside. (torch.optim uses the decorator, too.)
@_disable_dynamo
def remember(optimizer: MARS, with_closure: bool) -> None:
    """Before the update: keep x for the next closure, or make the protocol's buffer."""
    corrected, memory = _corrected(optimizer), optimizer._exact
    stored, memory.stored_previous = memory.stored_previous, False
    if with_closure and corrected:
        # All of them, also those that AdamW trains: the next h is a gradient at the whole of x.
        for p, own in _states(optimizer):
            own["last_param"] = _store(own.get("last_param"), p)
            if not stored:  # of steps of the protocol, which this is none of
                own.pop("previous_grad", None)
        memory.previous_is_new = memory.previous_is_new and stored
        memory.last_grads = "used"
        memory.holds_last_param = True
        return
    if memory.holds_last_param:  # of a step that will no longer be the previous one
        for _, own in _states(optimizer):
            own.pop("last_param", None)
        memory.holds_last_param = False
    if not corrected:
        return
    # A step at lr = 0 (DCP makes the state by one) leaves the parameters where h was taken.
    if any(p.grad is not None for p in corrected) and not all(
        _is_zero(group["lr"]) for group in optimizer.param_groups
    ):
        memory.last_grads = "used"
    for p in corrected:
        own = optimizer.state.get(p, {})
        if "step" in own and "previous_grad" not in own:
            own["previous_grad"] = torch.zeros_like(own["last_grad"])


@_disable_dynamo
def check_protocol(optimizer: MARS, with_closure: bool) -> None:
    """Refuse an exact step whose last gradients are those of the step before."""
    corrected = _corrected(optimizer)
    if with_closure or all(p.grad is None for p in corrected):
        return
    memory = optimizer._exact
    # Of approximate steps or closures: those of the protocol leave its buffer.
    found = ((p, optimizer.state.get(p, {})) for p in corrected)
    lost = {p for p, own in found if "previous_grad" not in own or p in memory.begun}
    # A tensor that has not been stepped has no h that could be of another batch.
    known = [p for p in corrected if p.grad is not None and "step" in optimizer.state.get(p, {})]
    begins = bool(memory.begun) and lost.issuperset(known)
    if memory.last_grads == "fresh" or begins:
        memory.begun.clear()
        _without_correction(optimizer, [p for p in corrected if p in lost])
        return
    if memory.last_grads == "used":
        memory.refused = True
        raise RuntimeError(
            "is_approx=False needs the gradients of this batch at the previous parameters. Call "
            "optimizer.step(closure), or update_previous_grad() before and update_last_grad() "
            "after each step; or set is_approx=True"
        )
    logger.warning(
        "exact mode: update_last_grad() was called without a new update_previous_grad(); this step "
        "is corrected by old gradients"
    )


def store_previous(optimizer: MARS) -> None:
    """previous_grad ← p.grad."""
    corrected, memory = _corrected(optimizer), optimizer._exact
    if corrected:
        optimizer._check_gradients()
        memory.previous_is_new = memory.stored_previous = True
    for p in corrected:
        if p.grad is not None:
            own = optimizer.state[p]
            if "step" in own and (memory.refused or "previous_grad" not in own):
                memory.begun.add(p)
            own["previous_grad"] = _store(own.get("previous_grad"), p.grad)
        elif "previous_grad" in optimizer.state.get(p, {}):
            optimizer.state[p]["previous_grad"].zero_()  # as for a closure: not that of before
    memory.refused = False


def promote_previous(optimizer: MARS) -> None:
    """last_grad ← previous_grad."""
    memory = optimizer._exact
    if memory.previous_is_new:
        memory.last_grads, memory.refused = "fresh", False
    elif memory.last_grads == "used":
        memory.last_grads = "repeated"
    memory.previous_is_new = False
    for p in _corrected(optimizer):
        own = optimizer.state.get(p, {})
        if "step" in own and "previous_grad" in own:  # before its first step h is 0, by definition
            own["last_grad"] = _store(own.get("last_grad"), own["previous_grad"])


def _is_zero(lr: Any) -> bool:
    """Known without asking a GPU."""
    return (not isinstance(lr, torch.Tensor) or lr.device.type == "cpu") and float(lr) == 0


def _store(buffer: Tensor | None, value: Tensor) -> Tensor:
    """Copy the value into the buffer, made if there is none."""
    return value.detach().clone() if buffer is None else buffer.copy_(value)

"""Exact mode: the last gradient is that of this batch at the previous parameters.

Two ways to the same trajectory. ``step(closure)`` keeps the previous parameters
(``last_param``) and evaluates the closure there and here. The authors' protocol needs no such
copy: the caller evaluates the *next* batch before the step and stores its gradients
(``previous_grad``), which after the step are gradients at the previous parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mars.state import kind_of, needs_last_grad

if TYPE_CHECKING:
    from torch import Tensor

    from mars.optimizer import MARS


def _is_exact(optimizer: MARS) -> bool:
    return not all(group["is_approx"] for group in optimizer.param_groups)


def _corrected(optimizer: MARS) -> list[Tensor]:
    """The parameters whose last gradient comes from an evaluation of its own."""
    return [
        p
        for group, p in optimizer.parameters_with_group()
        if not group["is_approx"] and needs_last_grad(kind_of(p, group), group)
    ]


def evaluate(optimizer: MARS, closure: Callable[[], Any]) -> Any:
    """The loss and gradients at x; in exact mode, before that, last gradients at x₋₁."""
    if not _is_exact(optimizer):
        return closure()
    moved = {p: own["last_param"] for p, own in optimizer.state.items() if "last_param" in own}
    if moved:
        _evaluate_there(optimizer, closure, moved)
    loss = closure()
    lost = [p for p in _corrected(optimizer) if p not in moved and p in optimizer.state]
    for p in lost:
        if p.grad is not None:
            optimizer.state[p]["last_grad"] = p.grad.detach().clone()
    if lost:
        warnings.warn(
            f"exact mode: no previous parameters for {len(lost)} tensors (their state comes from "
            "approximate mode, from the protocol methods or from a partial checkpoint); this one "
            "step is taken without correction",
            stacklevel=4,
        )
    return loss


def _evaluate_there(
    optimizer: MARS, closure: Callable[[], Any], there: dict[Tensor, Tensor]
) -> None:
    """Evaluate at the previous parameters; leave parameters, gradients and RNG as they were."""
    everyone = [p for _, p in optimizer.parameters_with_group()]
    devices = sorted({p.device.index for p in everyone if p.device.type == "cuda"})
    here = {p: p.detach().clone() for p in there}
    gradients = [p.grad for p in everyone]
    try:
        with torch.no_grad():
            for p, value in there.items():
                p.copy_(value)
        for p in everyone:
            p.grad = None
        with torch.random.fork_rng(devices=devices):  # the second evaluation sees the same numbers
            closure()
        with torch.no_grad():
            for p in _corrected(optimizer):
                if p in there:
                    h = optimizer.state[p]["last_grad"]
                    h.zero_() if p.grad is None else h.copy_(p.grad)
    finally:
        with torch.no_grad():
            for p, value in here.items():
                p.copy_(value)
        for p, g in zip(everyone, gradients, strict=True):
            p.grad = g


def remember(optimizer: MARS, with_closure: bool) -> None:
    """Before the update: keep x for the next closure, or make the protocol's buffer."""
    if not _is_exact(optimizer):
        return
    if with_closure:
        # All of them, also those that AdamW trains: the next h is a gradient at the whole of x.
        for p, own in optimizer.state.items():
            if "step" in own:
                own["last_param"] = _store(own.get("last_param"), p)
        return
    # A step at lr = 0 (DCP makes the state by one) leaves the parameters where h was taken.
    optimizer._h_is_current = all(float(group["lr"]) == 0 for group in optimizer.param_groups)
    for p in _corrected(optimizer):
        own = optimizer.state.get(p, {})
        if "step" in own and "previous_grad" not in own:
            own["previous_grad"] = torch.zeros_like(own["last_grad"])


def check_protocol(optimizer: MARS, with_closure: bool) -> None:
    """Refuse an exact step whose last gradients are those of the step before."""
    if not with_closure and not optimizer._h_is_current and _is_exact(optimizer):
        raise RuntimeError(
            "is_approx=False needs the gradients of this batch at the previous parameters. Call "
            "optimizer.step(closure), or update_previous_grad() before and update_last_grad() "
            "after each step; or set is_approx=True"
        )


def store_previous(optimizer: MARS) -> None:
    """previous_grad ← p.grad."""
    if not _is_exact(optimizer):
        return
    optimizer._check_gradients()
    for p in _corrected(optimizer):
        if p.grad is not None:
            own = optimizer.state[p]
            own["previous_grad"] = _store(own.get("previous_grad"), p.grad)


def promote_previous(optimizer: MARS) -> None:
    """last_grad ← previous_grad."""
    if not _is_exact(optimizer):
        return
    optimizer._h_is_current = True
    for p in _corrected(optimizer):
        own = optimizer.state.get(p, {})
        if "previous_grad" in own:
            own["last_grad"] = _store(own.get("last_grad"), own["previous_grad"])


def _store(buffer: Tensor | None, value: Tensor) -> Tensor:
    """Copy the value into the buffer, made if there is none."""
    return value.detach().clone() if buffer is None else buffer.copy_(value)

"""torch.optim.Muon as the laboratory runs it: on convolutions too, and replayed as a CUDA graph.

What a step computes is torch's own, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mars.lab.graphs import WARM, Recorded
from mars.lab.optimizer_state import parts


class Muon(torch.optim.Muon):
    """torch.optim.Muon, which takes matrices alone, for convolutions too: as (out, all the rest).

    It sees parameters and momentum through views, so nothing is copied. A channels-last weight has
    its columns in another order; what is orthogonal stays so in any.

    Torch starts 35 kernels for every matrix, one after the other. Where gradients stay at their
    addresses (``replayed``), all that does not depend on the learning rate becomes a CUDA graph.
    """

    _replayed: Replayed | None = None  # a copy has none: it steps as torch does

    def __init__(self, params: Iterable[Tensor], **options: Any) -> None:
        params = list(params)
        super().__init__([as_matrix(p.detach(), p) for p in params], **options)
        self.param_groups[0]["params"] = params

    def replayed(self) -> None:
        """From now on gradients stay where they are: replay what is computed from them."""
        self._replayed = Replayed(self)

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        """What a step is given: parameters, gradients, momentum, here as matrices."""
        given = _given(group)
        for p in given:
            known = self.state[p].get("momentum_buffer")
            if known is None or known.stride() != p.stride():  # as the parameter lies in memory
                own = torch.zeros_like(p) if known is None else torch.empty_like(p).copy_(known)
                self.state[p]["momentum_buffer"] = own
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [as_matrix(t, p) for t, p in zip(tensors, given, strict=True)]
        if self._replayed is not None:
            self._replayed.stand_in(lists[0])
        return has_complex

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self._replayed is None:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._replayed.step()
        return loss

    def orthogonalise(self) -> None:
        """All of torch's step but what is done to the parameters, at a rate of 1."""
        rates = [group["lr"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["lr"] = 1.0
            super().step()
        finally:
            for group, lr in zip(self.param_groups, rates, strict=True):
                group["lr"] = lr


class StandIn:
    """Takes a parameter's place in torch's step, and keeps what would be done to it."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.shape = matrix, matrix.shape
        self.update, self.scale = matrix, 0.0

    def mul_(self, factor: float) -> None:
        """The decay, which depends on the rate: `apply` does it."""

    def add_(self, update: Tensor, *, alpha: float) -> None:
        self.update, self.scale = update, alpha

    def apply(self, lr: float, weight_decay: float) -> None:
        """What torch does, by the very operations."""
        self.matrix.mul_(1 - lr * weight_decay)
        self.matrix.add_(self.update, alpha=lr * self.scale)


class Replayed:
    """The steps of a Muon whose gradients and momentum stay where they are."""

    def __init__(self, optimizer: Muon) -> None:
        self.optimizer = optimizer
        self.matrices: list[StandIn] = []
        self.fixed: list[Any] = []  # what a graph has fixed: addresses, options
        self.passed = 0
        self.recorded: Recorded | None = None

    def stand_in(self, matrices: list[Any]) -> None:
        """Put others in the parameters' places."""
        matrices[:] = [StandIn(matrix) for matrix in matrices]
        self.matrices += matrices

    def step(self) -> None:
        if self._changed():
            self.passed, self.recorded = 0, None
        if self.recorded is None:
            self.matrices = []
            if self.passed < WARM:
                self.optimizer.orthogonalise()
                self.passed += 1
            else:  # which computes nothing
                self.recorded = Recorded(self.optimizer.orthogonalise, ())
        if self.recorded is not None:
            self.recorded.replay(())
        matrices = iter(self.matrices)
        for group in self.optimizer.param_groups:
            for _ in _given(group):
                next(matrices).apply(group["lr"], group["weight_decay"])

    def _changed(self) -> bool:
        """Since the last step: is anything elsewhere, new or gone, or set to another value?"""
        now: list[Any] = []
        for group in self.optimizer.param_groups:
            now += [value for name, value in group.items() if name not in APPLIED]
            for p in _given(group):
                momentum = self.optimizer.state[p].get("momentum_buffer", p)
                now += [t.data_ptr() for t in (p, p.grad, momentum) if t is not None]
        before, self.fixed = self.fixed, now
        return before != now


# Of a group, what is used outside the graph, or by nobody.
APPLIED = ("params", "lr", "initial_lr", "weight_decay")


def _given(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def replay_steps(optimizer: torch.optim.Optimizer) -> None:
    """Where gradients stay at their addresses: a Muon in it, if any, replays its steps."""
    for part in parts(optimizer):
        if isinstance(part, Muon):
            part.replayed()


def as_matrix(t: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape of ``like`` as a matrix; a view, if they lie in memory alike."""
    if t.ndim > 2 and not like.is_contiguous():  # channels-last
        t = t.movedim(1, -1)
    return t.flatten(1) if t.ndim > 2 else t

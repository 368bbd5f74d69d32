"""The fused engine's plan: what one step leaves for the next, as long as nothing has changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_, is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mars import state
from mars.dispatch import capturing, set_numbers
from mars.engines import Batch
from mars.options import CHECKS
from mars.sharding import here, is_sharded, laid_out_alike

if TYPE_CHECKING:
    from mars.engines.fused.launch import Launch
    from mars.engines.fused.outside import Outside
    from mars.optimizer import MARS

# Options that are numbers, and may change from step to step without a new plan.
NUMBERS = frozenset({
    "lr", "betas", "eps", "weight_decay", "gamma", "lr_1d", "betas_1d", "weight_decay_1d",
    "base_lr", "initial_lr", "max_grad_norm",
})  # fmt: skip

STRUCTURE = tuple(name for name in CHECKS if name not in NUMBERS)  # not notes, which may change

_grad, _version, _dtype = attrgetter("grad"), attrgetter("_version"), attrgetter("dtype")
_dense, _negated = Tensor.is_contiguous, Tensor.is_neg  # of a COO tensor the first is False
_shape = attrgetter("shape")


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether these are the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def _structure(group: dict[str, Any]) -> list[Any]:
    """All options but numbers, and whether those are tensors."""
    kept = [dict(value) if type(value) is dict else value for value in map(group.get, STRUCTURE)]
    numbers = (group["lr"], group["gamma"])
    kept += [len(group["params"]), group["max_grad_norm"] is None]
    return [*kept, *((n.dtype, n.device) if isinstance(n, Tensor) else None for n in numbers)]


class Plan:
    """Batches of tensors that fused steps, with their launches; renewed, not remade, each step.

    Renewing must cost little for each tensor, so it asks in bulk: the same parameters and state
    dicts, the same tensors in them at the same addresses (somebody may offload them), parameters
    of the same shape, gradients that are dense and of the same dtype.
    """

    def __init__(
        self, optimizer: MARS, batches: list[Batch], members: list[list[Tensor]], joint: bool
    ) -> None:
        """``joint``: others than one launch have tensors in a norm that the step needs."""
        from mars.engines.fused.launch import Launch, forms
        from mars.engines.fused.outside import Outside

        self.batches = batches
        self.structure = [_structure(group) for group in optimizer.param_groups]
        self.everyone = optimizer._all()
        self.idle = [p for p in self.everyone if p.grad is None]
        self.params = [p for batch in members for p in batch]
        self.sharded = any(map(is_sharded, self.params))
        self.complete = len(self.params) + len(self.idle) == len(self.everyone)
        self.states = list(optimizer.state.values())
        self.own = [optimizer.state[p] for p in self.params]
        self._note_buffers()
        self.shapes = list(map(_shape, self.params))
        self.versions: list[int] | None = None  # of last gradients, once their norms are known
        self.consumes = any(b.consume for b in batches)
        # In exact mode h is not the gradient of the step before.
        self.repeats = all(b.keep_g or b.consume for b in batches if b.h)
        alike: dict[Any, list[Batch]] = {}
        for b in batches:
            outside = joint or bool(b.layouts)
            alike.setdefault((outside, b.x[0].device, b.x[0].dtype), []).append(b)
        norm = optimizer._grad_norm
        if norm is not None and norm.device != batches[0].x[0].device:  # of other tensors before
            optimizer._grad_norm = norm.to(batches[0].x[0].device)
        self.launches: list[tuple[Launch, list[Batch]]] = []
        self.outside: list[tuple[Outside, list[Batch]]] = []
        for (outside, *_), group in alike.items():
            parts = [group] if len(forms(group)) == 1 else [[b] for b in group]
            if outside:
                self.outside += [(Outside(part), part) for part in parts]
            else:
                self.launches += [(Launch(part, optimizer._grad_norm), part) for part in parts]

    def _buffers(self) -> list[Tensor]:
        """What the state holds; of people's notes nothing."""
        if self.noted:
            return [held for own in self.own for name, held in own.items() if name in state.OURS]
        return list(chain.from_iterable(map(dict.values, self.own)))

    def _here(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(map(here, tensors)) if self.sharded else tensors

    def _addresses_held(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._here(self.params + self.buffers)))

    def _note_buffers(self) -> None:
        self.noted = any(own.keys() - state.OURS for own in self.own)
        self.buffers = self._buffers()
        self.addresses = self._addresses_held()

    def renew(self, optimizer: MARS) -> bool:
        """Take this step's gradients and numbers. False if anything else has changed."""
        groups = optimizer.param_groups
        gradients = list(map(_grad, self.params))
        if self.consumes:
            held = [here(g) for g in map(_grad, self.everyone) if g is not None]
            if any(g.layout is not torch.strided for g in held):
                return False
            whole = [g for g in held if g.numel()]
            if len(set(map(Tensor.data_ptr, whole))) < len(whole):
                return False  # two of them are one
        if (
            list(map(_structure, groups)) != self.structure
            or not _same(optimizer._all(), self.everyone)
            or not _same(list(optimizer.state.values()), self.states)
            or not _same(self._buffers(), self.buffers)
            or self._addresses_held() != self.addresses
            or list(map(_shape, self.params)) != self.shapes
            or not all(map(_dense, self._here(self.params)))
            or not all(map(partial(is_not, None), gradients))
            or any(p.grad is not None for p in self.idle)
            or (self.sharded and not all(map(laid_out_alike, self.params, gradients)))
        ):
            return False
        gradients = self._here(gradients)
        first = 0
        for batch in self.batches:
            own = gradients[first : first + len(batch.x)]
            first += len(batch.x)
            if set(map(_dtype, own)) != {batch.x[0].dtype} or not all(map(_dense, own)):
                return False
            if any(map(_negated, own)):
                return False
            batch.g = own
            set_numbers(batch, groups[batch.group], batch.x[0], fused=True)
        return True

    def _addresses(self, batches: list[Batch]) -> tuple[list[int], list[int]]:
        """Of gradients, and of last gradients (0 where there is none)."""
        g = [address for b in batches for address in map(Tensor.data_ptr, b.g)]
        h = [
            address
            for b in batches
            for address in (map(Tensor.data_ptr, b.h) if b.h else [0] * len(b.x))
        ]
        return g, h

    def ready(self) -> bool:
        """Whether a graph could capture this step: nothing would have to be uploaded."""
        everything = [*self.launches, *self.outside]
        return all(launch.ready(own, *self._addresses(own)) for launch, own in everything)

    def run(self, optimizer: MARS, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Queue the launches; of those whose norms are completed outside, the beginning."""
        versions = [version for b in self.batches for version in map(_version, b.h)]
        graph = capturing()
        if graph and self not in optimizer._captured:
            optimizer._captured.append(self)  # the graph replays on what it holds
        # A replay neither asks who has written to h since nor tells that it has.
        graphs = graph or any(group["capturable"] for group in optimizer.param_groups)
        known = versions == self.versions and self.repeats and not graphs
        for launch, own in self.launches:
            launch.run(own, *self._addresses(own), known, grad_scale, found_inf, graph)
        for outside, own in self.outside:
            outside.begin(own, *self._addresses(own), outside.one, outside.zero, False, graph)
        # Kernels write behind autograd's back; a graph that saved a parameter must notice.
        increment_version(self.params)
        if self.sharded:
            increment_version(self._here(self.params))
        self.versions = versions
        if not graph:
            for batch in self.batches:
                batch.g = []  # else they would outlive zero_grad, beside those of the next pass

    def consume(self, optimizer: MARS, copied: bool) -> None:
        """Let gradients become last gradients, where the group says so."""
        if not any(g["consume_grads"] for g in optimizer.param_groups):
            return
        state.consume_gradients(optimizer, copied)
        first = 0
        for batch in self.batches:
            if batch.h:
                own = self.own[first : first + len(batch.x)]
                batch.h = self._here([buffers["last_grad"] for buffers in own])
            first += len(batch.x)
        self._note_buffers()
        self.versions = [version for b in self.batches for version in map(_version, b.h)]

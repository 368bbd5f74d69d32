"""The passes of a step as CUDA graphs: the host launches one thing, not hundreds of kernels.

A graph repeats the very kernels that were recorded, at the very addresses. So the batch is copied
to where the recorded one lay, and gradients lie where the recorded ones do, in memory that belongs
to the graphs: they become ``p.grad`` again after each replay, whoever has set that to None.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

WARM = 3  # passes that run as they are: they compile, choose kernels, allocate workspaces


class Recorded:
    """One pass, recorded with a batch like those to come; nothing is computed by recording."""

    def __init__(
        self,
        compute: Callable[..., Any],
        batch: tuple[Tensor, ...],
        pool: Recorded | None = None,
    ) -> None:
        gc.collect()  # graphs of an earlier run: they must not die while this one is recorded
        self.batch = tuple(part.clone() for part in batch)
        self.graph = torch.cuda.CUDAGraph()
        shared = None if pool is None else pool.graph.pool()
        # Other threads may go on with what they do: writing a checkpoint, reading data.
        with torch.cuda.graph(self.graph, pool=shared, capture_error_mode="thread_local"):
            self.result = compute(*self.batch)

    def replay(self, batch: tuple[Tensor, ...]) -> Any:
        for ours, given in zip(self.batch, batch, strict=True):
            ours.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.result


class Graphs:
    """Calls ``compute(*batch)``, which returns a loss and leaves gradients; soon by replaying it.

    The first micro-batch of a step makes gradients, the others add to them: a graph for each. The
    loss that is returned is overwritten by the next call.
    """

    def __init__(self, compute: Callable[..., Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self.compute, self.parameters = compute, [p for p in parameters if p.requires_grad]
        self.passed = {True: 0, False: 0}
        self.recorded: dict[bool, Recorded] = {}
        self.gradients: list[Tensor | None] = []

    def __call__(self, batch: tuple[Tensor, ...], first: bool) -> Tensor:
        if first not in self.recorded and not self._record(batch, first):
            self.passed[first] += 1
            return self.compute(*batch)
        loss: Tensor = self.recorded[first].replay(batch)
        if first:
            for p, gradient in zip(self.parameters, self.gradients, strict=True):
                p.grad = gradient
        return loss

    def _record(self, batch: tuple[Tensor, ...], first: bool) -> bool:
        # What adds must add to the memory of what was made.
        if self.passed[first] < WARM or (not first and True not in self.recorded):
            return False
        self.recorded[first] = Recorded(self.compute, batch, self.recorded.get(True))
        if first:
            self.gradients = [p.grad for p in self.parameters]
        return True

"""What an engine steps: parallel lists of tensors of one kind, one device and one dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mars.rule import Hyper
from mars.rule.estimator import Scalar


@dataclass
class Batch:
    """Tensors that one cell steps together. A buffer that the kind does not hold is empty."""

    kind: str
    k: Hyper
    group: int  # index of the parameter group, for diagnostics
    host_t: bool  # steps are counted on the host, so reading them waits for nothing
    keep_g: bool  # after the step h becomes g (approximate mode); else somebody else writes h
    x: list[Tensor] = field(default_factory=list)
    g: list[Tensor] = field(default_factory=list)
    t: list[Tensor] = field(default_factory=list)
    m: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    v_max: list[Tensor] = field(default_factory=list)
    h: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)  # low halves of 16-bit parameters

    def add(self, *row: Tensor | None) -> None:
        """Append one tensor with its buffers, in the order of the lists."""
        columns = (self.x, self.g, self.t, self.m, self.v, self.v_max, self.h, self.low)
        for column, tensor in zip(columns, row, strict=True):
            if tensor is not None:
                column.append(tensor)

    def view_complex_as_real(self) -> None:
        """Let the engine see real tensors, one dimension more, over the same memory."""
        if self.x[0].is_complex():
            for column in (self.x, self.g, self.m, self.v, self.v_max, self.h):
                column[:] = [torch.view_as_real(tensor) for tensor in column]

    def steps(self) -> list[Scalar]:
        """t of each tensor: floats where the host counts, 0-d tensors elsewhere."""
        return [float(t) for t in self.t] if self.host_t else list(self.t)


class Cell(Protocol):
    """Steps a batch in place; ``length`` is the global norm to clip by, None for each its own."""

    def __call__(self, batch: Batch, length: Tensor | None) -> None: ...

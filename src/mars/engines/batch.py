"""What an engine steps: parallel lists of tensors of one kind, one device and one dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from mars.rule import Hyper, formats
from mars.rule.estimator import Scalar

# The lists of a batch, in the order of a row: a tensor with its gradient, steps and buffers.
COLUMNS = ("x", "g", "t", "m", "v", "v_max", "h", "m_exp", "v_exp", "h_exp", "low")

DECODED = 1 << 22  # elements of tensors whose lean buffers are decoded at one time


class Norms(Protocol):
    """A launch that leaves norms over more than itself to others: see fused/outside.py."""

    def norms(self, batch: Batch, corrected: bool) -> Tensor:
        """Of c, or of the gradients: one a tensor."""

    def shrink(self, batch: Batch, factor: Tensor) -> None:
        """Shorten the gradients."""

    def clip(self, batch: Batch, length: Tensor | None) -> None:
        """Clip by these lengths, instead of by its own."""


@dataclass
class Batch:
    """Tensors that one cell steps together. A buffer that the kind does not hold is empty."""

    kind: str
    k: Hyper
    group: int  # index of the parameter group, for diagnostics
    host_t: bool  # steps are counted on the host, so reading them waits for nothing
    keep_g: bool  # after the step h becomes g (approximate mode); else somebody else writes h
    consume: bool = False  # after the step the gradient's own memory is h
    max_grad_norm: float | None = None
    ratio: float = 1.0  # of this kind's rate to the group's; k.lr has it, but in fused
    x: list[Tensor] = field(default_factory=list)
    g: list[Tensor] = field(default_factory=list)
    t: list[Tensor] = field(default_factory=list)
    m: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    v_max: list[Tensor] = field(default_factory=list)
    h: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)  # low halves of 16-bit parameters
    m_exp: list[Tensor] = field(default_factory=list)  # exponents of buffers of 8 bits
    v_exp: list[Tensor] = field(default_factory=list)
    h_exp: list[Tensor] = field(default_factory=list)
    layouts: list[Any] = field(default_factory=list)  # of sharded tensors, see mars.sharding
    places: list[int] = field(default_factory=list)  # of all tensors, among all parameters
    launch: Norms | None = None  # of a fused batch whose norms are completed outside

    def add(self, *row: Tensor | None) -> None:
        """Append one tensor with its buffers, in the order of COLUMNS."""
        for name, tensor in zip(COLUMNS, row, strict=True):
            if tensor is not None:
                getattr(self, name).append(tensor)

    @property
    def wide(self) -> torch.dtype:
        """What it is computed in, and what moments have that are not kept in fewer bits."""
        return torch.float32 if self.low else self.x[0].dtype

    def part(self, rows: list[int]) -> Batch:
        """Some of the tensors."""
        lists = ((name, getattr(self, name)) for name in (*COLUMNS, "layouts", "places"))
        own: dict[str, Any] = {n: [c[i] for i in rows] if c else [] for n, c in lists}
        return replace(self, **own)

    def view_complex_as_real(self) -> None:
        """Let the engine see real tensors, one dimension more, over the same memory."""
        if self.x[0].is_complex():
            for column in (self.x, self.g, self.m, self.v, self.v_max, self.h):
                column[:] = [torch.view_as_real(tensor) for tensor in column]

    def lean(self) -> bool:
        """Whether any buffer is kept in fewer bits than the arithmetic has."""
        moments = {self.m[0].dtype, self.v[0].dtype if self.v else self.wide}
        return moments != {self.wide} or bool(self.h and self.h[0].dtype != self.x[0].dtype)

    def portions(self) -> Iterator[list[int]]:
        """Rows whose decoded buffers there is room for at one time: one, if it is a large one."""
        rows: list[int] = []
        total = 0
        for i, x in enumerate(self.x):
            total += x.numel()
            if rows and total > DECODED:
                yield rows
                rows, total = [], x.numel()
            rows.append(i)
        yield rows

    def widened(self) -> Batch:
        """The same batch with lean buffers decoded, for engines that know only wide ones."""
        return replace(
            self,
            m=[_wide(c, e, True).to(self.wide) for c, e in zip_longest(self.m, self.m_exp)],
            v=[_wide(c, e, False).to(self.wide) for c, e in zip_longest(self.v, self.v_exp)],
            h=[_wide(c, e, True).to(self.wide) for c, e in zip_longest(self.h, self.h_exp)],
        )

    def narrow(self, wide: Batch) -> None:
        """Take over what `widened` has become, in this batch's formats."""
        for i, t in enumerate(self.t):
            _narrow(self.m, self.m_exp, i, wide.m[i], t, True, salt=1)
            if self.v:
                _narrow(self.v, self.v_exp, i, wide.v[i], t, False, salt=2)
            if self.h and self.keep_g:
                if self.h[i].dtype == self.x[i].dtype:
                    self.h[i].copy_(wide.h[i])  # a gradient in its own dtype
                else:
                    _narrow(self.h, self.h_exp, i, wide.h[i], t, True, salt=3)

    def steps(self) -> list[Scalar]:
        """t of each tensor: floats where the host counts, 0-d tensors elsewhere (in a graph, too,
        where dynamo shows every group as capturable).
        """
        return [float(t) for t in self.t] if self.host_t else list(self.t)


def _wide(value: Tensor, exponents: Tensor | None, signed: bool) -> Tensor:
    if exponents is not None:
        return formats.decode(value, exponents, signed)
    return value.clone() if value.dtype != torch.bfloat16 else value.float()


def _narrow(
    values: list[Tensor], exponents: list[Tensor], i: int, wide: Tensor, t: Tensor, signed: bool,
    salt: int,
) -> None:  # fmt: skip
    if exponents:
        bits = formats.random_bits(wide, t, salt)
        code, exponent = formats.encode(wide.float(), bits, signed)
        values[i].copy_(code)
        exponents[i].copy_(exponent)
    elif values[i].dtype == torch.bfloat16:
        values[i].copy_(formats.to_bfloat16(wide.float(), formats.random_bits(wide, t, salt)))
    else:
        values[i].copy_(wide)


class Cell(Protocol):
    """Steps a batch in place.

    ``length`` is what to clip by: one norm, or one a tensor (1-D); None: each tensor by its own.
    """

    def __call__(self, batch: Batch, length: Tensor | None) -> None: ...

"""What the correction does to your gradients: enough to tune γ by. Costs nothing when not asked."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mars.engines import Batch
from mars.explain import unwrapped
from mars.rule import KINDS
from mars.rule.estimator import correct, noise_ratio, norm
from mars.rule.halves import join
from mars.sharding import whole_sums
from mars.table import format_table

if TYPE_CHECKING:
    from mars.optimizer import MARS


@dataclass(frozen=True)
class Reading:
    """The diagnostics of one group over the observed steps. None: nothing to measure it by.

    Attributes:
        name: of the group.
        steps: observed.
        tensors: that MARS corrects.
        clipped: share of (tensor, step) pairs that were clipped.
        c_norm: mean ‖c‖₂ before clipping.
        cosine: mean cosine between g and the last gradient.
        update_rms: RMS of the change of a parameter in a step.
        variance_ratio: Var(c) / Var(g) over the observed steps (two at least).
        independent: (1+κ)² + κ², that ratio if g and h had independent noise.
        expected: the same over so few steps. In approximate mode successive c share a gradient, so
            that their mean follows them less, and they seem to vary more.
    """

    name: str
    steps: int
    tensors: int
    clipped: float | None
    c_norm: float | None
    cosine: float | None
    update_rms: float
    variance_ratio: float | None
    independent: float | None
    expected: float | None


@dataclass
class _Tensor:
    """Running sums for one tensor, of deviations from its first sample: no cancellation."""

    first: tuple[Tensor, Tensor]
    sums: tuple[Tensor, Tensor]
    squares: list[Tensor]
    n: int = 0

    @classmethod
    def of(cls, g: Tensor, c: Tensor) -> _Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=g.device)
        first = (g.clone(), c.clone())
        return cls(first, (torch.zeros_like(g), torch.zeros_like(c)), [zero, zero.clone()])

    def add(self, *sample: Tensor) -> None:
        self.n += 1
        for i, value in enumerate(sample):
            deviation = value - self.first[i]
            self.sums[i].add_(deviation)
            self.squares[i] += deviation.double().square().sum()

    def spread(self) -> tuple[float, float]:
        """Σ‖g − ḡ‖² and Σ‖c − c̄‖²."""
        g, c = (
            float(square - total.double().square().sum() / self.n)
            for square, total in zip(self.squares, self.sums, strict=True)
        )
        return g, c


@dataclass
class _Group:
    """Running sums for one group; tensors stay on their device until they are read."""

    independent: float | None = None
    clipped: list[Tensor] = field(default_factory=list)
    c_norm: list[Tensor] = field(default_factory=list)
    cosine: list[Tensor] = field(default_factory=list)
    moved: list[Tensor] = field(default_factory=list)  # Σ Δx² of a batch
    elements: int = 0
    tensors: dict[Tensor, _Tensor] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """That have a last gradient."""
        return max((t.n for t in self.tensors.values()), default=0)


class Diagnosis:
    """Observes the steps taken inside its ``with`` block. Read it as a table or by `readings`."""

    def __init__(self, optimizer: MARS) -> None:
        optimizer = unwrapped(optimizer)
        if not hasattr(optimizer, "_observer"):
            raise TypeError(f"diagnose takes a MARS optimizer, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._groups: dict[int, _Group] = defaultdict(_Group)
        self._before: list[Tensor] = []
        self._last: dict[Tensor, Tensor] = {}  # last gradients of tensors whose state has none
        self._steps = 0

    def __enter__(self) -> Diagnosis:
        if self._optimizer._observer is not None:
            raise RuntimeError("this optimizer is being diagnosed already")
        self._optimizer._observer = self
        self._hook = self._optimizer.register_step_post_hook(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._optimizer._observer = None
        self._hook.remove()

    def _count(self, *_: Any) -> None:
        self._steps += 1

    @torch.no_grad()
    def before(self, batch: Batch, length: Tensor | None) -> None:
        """Called by the optimizer with what it is about to step."""
        self._before = [x.clone() for x in _values(batch)]
        if not KINDS[batch.kind].corrected:
            return
        group = self._groups[batch.group]
        group.independent = noise_ratio(batch.k.gamma, batch.k.beta1)
        wide = batch.m[0].dtype
        lengths: list[Tensor] = []  # ‖c‖², ‖g‖², ‖h‖² and g·h of each tensor, or of its part here
        layouts: list[Any] = []
        for i, g in enumerate(batch.g):
            key = batch.t[i]  # one a parameter, written in place, never a view
            h = batch.h[i] if batch.h else self._last.get(key)
            if not batch.h:
                self._last[key] = g.clone()
            if h is None or float(batch.t[i]) == 0:
                continue  # no last gradient yet: c = (1+κ)g says nothing about noise
            g, h = g.to(wide), h.to(wide)
            c = correct(g, h, batch.k.gamma, batch.k.beta1)
            lengths += [norm(v).double().square() for v in (c, g, h)]
            lengths.append((g * h).sum())
            layouts += [batch.layouts[i] if batch.layouts else None] * 4
            if key not in group.tensors:
                group.tensors[key] = _Tensor.of(g, c)
            group.tensors[key].add(g, c)
        whole = whole_sums(lengths, layouts)
        for cc, gg, hh, gh in zip(*(whole[i::4] for i in range(4)), strict=True):
            group.c_norm.append(cc.sqrt())
            if batch.k.clip is not None:
                shared = length if batch.k.clip == "global" else None
                group.clipped.append((cc.sqrt() if shared is None else shared) > 1.0)
            group.cosine.append(gh / (gg * hh).sqrt())

    @torch.no_grad()
    def after(self, batch: Batch) -> None:
        """Called by the optimizer with what it has stepped."""
        group = self._groups[batch.group]
        pairs = zip(self._before, _values(batch), strict=True)
        moved = [(new - old).double().square().sum() for old, new in pairs]
        layouts = batch.layouts or [None] * len(moved)
        group.moved += whole_sums(moved, layouts)
        group.elements += sum(
            x.numel() if layout is None else math.prod(layout.shape)
            for x, layout in zip(batch.x, layouts, strict=True)
        )
        self._before = []

    @property
    def readings(self) -> list[Reading]:
        """One reading a group, in the order of ``param_groups``. Waits for the device."""
        out = []
        for i, options in enumerate(self._optimizer.param_groups):
            group = self._groups[i]
            spreads = [t.spread() for t in group.tensors.values() if t.n >= 2]
            noise = sum(g for g, _ in spreads)
            moved = sum(float(m) for m in group.moved)
            out.append(Reading(
                name=str(options.get("name", i)),
                steps=self._steps,
                tensors=len(group.tensors),
                clipped=_mean(group.clipped),
                c_norm=_mean(group.c_norm),
                cosine=_mean(group.cosine),
                update_rms=math.sqrt(moved / group.elements) if group.elements else 0.0,
                variance_ratio=sum(c for _, c in spreads) / noise if noise > 0 else None,
                independent=group.independent,
                expected=shown_over(group.independent, group.steps if options["is_approx"] else 0),
            ))  # fmt: skip
        return out

    def __str__(self) -> str:
        head = ("group", "steps", "tensors", "clipped", "|c|", "cos(g, h)", "update RMS",
                "Var(c)/Var(g)", "if independent")  # fmt: skip
        rows = [head]
        if not self._steps:
            return "no step was observed: take some within `with mars.diagnose(optimizer) as d:`"
        for r in self.readings:
            rows.append((
                r.name, str(r.steps), str(r.tensors),
                "-" if r.clipped is None else f"{r.clipped:.0%}", _format(r.c_norm),
                _format(r.cosine), _format(r.update_rms), _format(r.variance_ratio),
                _format(r.expected),
            ))  # fmt: skip
        return format_table(rows, right=tuple(range(1, len(head))))


def _values(batch: Batch) -> list[Tensor]:
    """The parameters at full precision."""
    if not batch.low:
        return batch.x
    return [join(high, low) for high, low in zip(batch.x, batch.low, strict=True)]


def shown_over(independent: float | None, steps: int) -> float | None:
    """(1+κ)² + κ² as so many steps of approximate mode show it (0: as it is, exact mode's, too).

    Of n values whose neighbours have the covariance a, the variance about their own mean is 2a/n
    less; here a = −κ(1+κ).

    >>> shown_over(2.4, 4)
    2.75
    """
    if independent is None or not steps:
        return independent
    return independent + (independent - 1) / steps


def _mean(values: list[Tensor]) -> float | None:
    """The mean of those that are numbers (a zero gradient has no cosine)."""
    if not values:
        return None
    numbers = [x for x in torch.stack([v.double().cpu() for v in values]).tolist() if x == x]
    return sum(numbers) / len(numbers) if numbers else None


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def diagnose(optimizer: MARS) -> Diagnosis:
    """Observe the steps taken inside a ``with`` block.

    ``Var(c)/Var(g)`` is what γ costs: how much more noise the corrected gradient has than the
    gradient, over the observed steps (take twenty or so; parameters should move little between
    them). In approximate mode it is near (1+κ)² + κ², in exact mode near 1 if steps are short. On
    several processes all must observe, or none. ``cos(g, h)`` says
    whether the two gradients have anything in common, ``clipped`` how often the clip acts. What
    to do about it: docs/math.md. Of sharded tensors, ``Var(c)/Var(g)`` is that of this rank's part.

    Args:
        optimizer: a ``mars.MARS``, also one that Accelerate or Lightning has wrapped.

    Examples:
        >>> import torch, mars
        >>> w = torch.ones(2, 2, requires_grad=True)
        >>> optimizer = mars.MARS([w], lr=1e-3)
        >>> with mars.diagnose(optimizer) as d:
        ...     for _ in range(3):
        ...         w.grad = torch.full_like(w, 0.1)
        ...         optimizer.step()
        >>> d.readings[0].clipped, d.readings[0].tensors
        (0.0, 1)
    """
    return Diagnosis(optimizer)

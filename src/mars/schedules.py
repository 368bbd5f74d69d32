"""Schedules of γ. The optimizer reads ``group["gamma"]`` at each step; these move it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class constant:
    """The same γ at every step."""

    gamma: float

    def __call__(self, step: int) -> float:
        return self.gamma


@dataclass(frozen=True)
class linear:
    """From ``start`` at step 0 to ``end`` at ``steps``, straight; then ``end``."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * _progress(step, self.steps)


@dataclass(frozen=True)
class cosine:
    """From ``start`` at step 0 to ``end`` at ``steps``, half a cosine; then ``end``."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        weight = 0.5 * (1.0 - math.cos(math.pi * _progress(step, self.steps)))
        return self.start + (self.end - self.start) * weight


def _progress(step: int, steps: int) -> float:
    return min(1.0, step / steps) if steps > 0 else 1.0


class GammaScheduler:
    """Set γ of every group from a function of the step; use it like a learning-rate scheduler.

    Args:
        optimizer: the optimizer whose groups have a ``gamma``.
        schedule: a function step → γ (`constant`, `linear`, `cosine` or your own), or a list of
            them, one a group.

    Examples:
        >>> import torch, mars
        >>> optimizer = mars.MARS([torch.zeros(2, 2, requires_grad=True)])
        >>> scheduler = mars.GammaScheduler(optimizer, mars.schedules.linear(0.1, 0.0, steps=10))
        >>> for _ in range(5):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> optimizer.param_groups[0]["gamma"]
        0.05
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | Sequence[Schedule]) -> None:
        if not all("gamma" in group for group in optimizer.param_groups):
            raise TypeError(f"{type(optimizer).__name__} has no gamma: GammaScheduler is for MARS")
        several = isinstance(schedule, (list, tuple)) and all(map(callable, schedule))
        if not callable(schedule) and not several:
            raise TypeError(
                f"schedule must be a function step -> gamma or a list of them, not {schedule!r}; "
                "for a fixed value use mars.schedules.constant"
            )
        self.optimizer = optimizer
        self.schedule = schedule if callable(schedule) else list(schedule)
        self._go_to(0)

    def step(self) -> None:
        """Call after each ``optimizer.step()``."""
        self._go_to(self.last_step + 1)

    def get_last_gamma(self) -> list[float]:
        """γ of each group, as it is now."""
        return [float(group["gamma"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The position; the functions are yours to construct again."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if set(state_dict) != {"last_step"}:
            raise ValueError(
                f"not the state of a GammaScheduler: it has {sorted(map(str, state_dict))}"
            )
        self._go_to(int(state_dict["last_step"]))

    def _go_to(self, step: int) -> None:
        """Set every γ; a wrong one changes nothing."""
        count = len(self.optimizer.param_groups)
        schedules = [self.schedule] * count if callable(self.schedule) else self.schedule
        if len(schedules) != count:
            raise ValueError(f"schedule: {len(schedules)} functions for {count} parameter groups")
        values = [float(schedule(step)) for schedule in schedules]
        for value in values:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"Invalid gamma: {value} at step {step} (a schedule must return a "
                    "finite number, at least 0)"
                )
        seen: set[int] = set()
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            if isinstance(group["gamma"], Tensor) and id(group["gamma"]) in seen:
                group["gamma"] = group["gamma"].clone()  # a default, or loaded: one for all groups
            seen.add(id(group["gamma"]))
            if isinstance(group["gamma"], Tensor):
                group["gamma"].fill_(value)
            else:
                group["gamma"] = value
        self.last_step = step

"""What a person sees of a stretch: a bar a run in a terminal, a line at its ends elsewhere."""

from __future__ import annotations

import time
from typing import Any

from mars.lab.progress import Shown
from mars.lab.report import units


class Display(Shown):
    """Runs in progress, how many are to come, and the time left."""

    def __init__(self, deadline: float | None) -> None:
        super().__init__()
        self.deadline = deadline
        self.done = 0
        self.lines: dict[str, Any] = {}

    def columns(self) -> list[Any]:
        from rich.progress import BarColumn, TextColumn

        status = TextColumn("{task.percentage:3.0f}% {task.fields[status]}")
        return [TextColumn("{task.description:40}"), BarColumn(), status]

    def add(self, name: str, steps: int) -> None:
        if self.bar is not None:
            self.lines[name] = self.bar.add_task(name, total=steps, status="")
        else:
            self.say(f"{name}: {steps} steps begun")

    def advance(self, name: str, step: int, left: float | None) -> None:
        """A run stands at a step; all that is known to be wanted takes so long."""
        if self.bar is not None and name in self.lines:
            self.bar.update(self.lines[name], completed=step, status=self._left(left))

    def end(self, name: str, text: str, to_come: int, left: float | None) -> None:
        """A run has ended."""
        self.done += 1
        if self.bar is not None and name in self.lines:
            self.bar.remove_task(self.lines.pop(name))
        rest = f"; {to_come} to come so far, {self._left(left)}" if to_come else ""
        self.say(f"[{self.done}] {name}: {text}{rest}")

    def _left(self, left: float | None) -> str:
        """Of the work, or of the stretch if that ends first."""
        parts = [] if left is None else [left]
        if self.deadline is not None:
            parts.append(max(0.0, self.deadline - time.monotonic()))
        return f"{units.seconds(max(1.0, round(min(parts))))} left" if parts else ""

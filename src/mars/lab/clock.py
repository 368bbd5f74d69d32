"""Time of training, and the optimizer's part of it, without making a GPU wait at every step."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Runs while steps are taken, stands while the run validates, saves or is observed.

    A *lap* is what lies between two records of the log; it may be interrupted.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None
        self.seconds = 0.0  # of training, over all laps and resumes
        self.begun: float | None = None
        self.lap_seconds, self.lap_steps, self.lap_optimizer = 0.0, 0, 0.0
        self.means = (0.0, 0.0)  # of the last lap that had steps
        self.spans: list[tuple[Any, Any]] = []  # of the optimizer, not yet added up
        self.span: Any = None

    def _wait(self) -> float:
        if self.cuda is not None:
            torch.cuda.synchronize(self.cuda)
        return time.perf_counter()

    def start(self) -> None:
        self.begun = self._wait()

    def read(self) -> float:
        """Seconds so far. A GPU finishes its work first."""
        if self.begun is not None:
            now = self._wait()
            passed, self.begun = now - self.begun, now
            self.seconds += passed
            self.lap_seconds += passed
        return self.seconds

    @property
    def running(self) -> bool:
        return self.begun is not None

    def stop(self) -> None:
        self.read()
        self.begun = None
        self._collect()

    def _collect(self) -> None:
        spans, self.spans = self.spans, []
        for begun, ended in spans:
            self.lap_optimizer += (
                ended - begun if self.cuda is None else begun.elapsed_time(ended) / 1e3
            )

    def lap(self) -> tuple[float, float]:
        """Mean seconds of a step since the last lap, and of the optimizer's part in it."""
        self.read()
        self._collect()
        if self.lap_steps:
            self.means = self.lap_seconds / self.lap_steps, self.lap_optimizer / self.lap_steps
        self.lap_seconds, self.lap_steps, self.lap_optimizer = 0.0, 0, 0.0
        return self.means

    def credit(self) -> None:
        """A step was taken while the clock stood: count it as long as the steps before it."""
        self.spans = []
        self.seconds += self.lap_seconds / self.lap_steps if self.lap_steps else self.means[0]

    # The optimizer's part of a step: events on a GPU, read when it has finished anyway.

    def _now(self) -> Any:
        if self.cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def optimizer_begins(self) -> None:
        self.span = self._now()

    def optimizer_ends(self) -> None:
        self.spans.append((self.span, self._now()))

"""In a worker process: one run to its end, and the line that is kept of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from mars.lab import workers
from mars.lab.config import Run
from mars.lab.log import NAME
from mars.lab.report.runs import RunLog
from mars.lab.report.runs import read as read_log
from mars.lab.report.summary import typical
from mars.lab.study.results import Key, Result


@dataclass(frozen=True)
class Order:
    """A run to do."""

    key: Key
    name: str
    run: Run
    fingerprint: dict[str, str]
    at_once: int
    command: str


@dataclass(frozen=True)
class Ended:
    """How it ended: with a result, stopped by somebody, or failed for a reason."""

    result: Result | None = None
    failed: str | None = None


def attempt(order: Order) -> Ended:
    """Train, or go on training. A run that fails is told, and does not stop the others."""
    began = time.monotonic()
    resumed = Path(order.run.directory, NAME).exists()
    status, text = workers.train_one(order.name, order.run, order.command)
    if status == "failed":
        return Ended(failed=text)
    if status == "stopped":
        return Ended()
    log = read_log(Path(order.run.directory) / NAME)
    wall = None if resumed else time.monotonic() - began
    return Ended(result_of(order, log, wall, text))


def result_of(order: Order, log: RunLog, wall: float | None, text: str) -> Result:
    """What is kept of a finished run."""
    arm, lr, seed = order.key
    losses = log.valid["loss"]
    finite = losses[np.isfinite(losses)]
    step, own = typical(log.train, "step_seconds"), typical(log.train, "optimizer_seconds")
    memory = log.train.get("memory", np.array([]))
    memory = memory[np.isfinite(memory)]
    return Result(
        arm=arm,
        lr=lr,
        seed=seed,
        status="diverged" if log.final is None else "done",
        final=_short(log.final),
        fingerprint=order.fingerprint,
        best=_short(float(finite.min())) if len(finite) else None,
        curve={
            name: [_short(float(v)) for v in log.valid[name][np.isfinite(losses)]]  # type: ignore[misc]
            for name in ("step", "tokens", "seconds", "loss")
        },
        seconds=_short(log.seconds),
        wall=_short(wall),
        step_seconds=_short(step),
        optimizer_share=_short(own / step) if own is not None and step else None,
        tokens=int(log.progress),
        memory=float(memory.max()) if len(memory) else None,
        at_once=order.at_once,
        variance_ratio=_short(_reading(log, "variance_ratio")),
        independent=_short(_reading(log, "independent")),
        text=text,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _reading(log: RunLog, name: str) -> float | None:
    """The mean of the diagnostics over a run, each group by its number of tensors."""
    total = weight = 0.0
    for record in log.diagnostics:
        for group in record.get("groups") or []:
            value, tensors = group.get(name), group.get("tensors") or 0
            if isinstance(value, (int, float)) and math.isfinite(value):
                total, weight = total + value * tensors, weight + tensors
    return total / weight if weight else None


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")

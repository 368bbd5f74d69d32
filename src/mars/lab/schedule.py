"""The learning rate over time: a pure function of the step, so resuming needs no state."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from mars.lab.config import Schedule
from mars.lab.errors import LabError

# multistep: after these shares of the steps the rate is a tenth of what it was, as in the usual
# 200 epochs of CIFAR (100 and 150).
MILESTONES, FALL = (0.5, 0.75), 0.1

# The fields that each shape reads.
READS: dict[str, tuple[str, ...]] = {
    "cosine": ("warmup_steps", "min_lr"),
    "wsd": ("warmup_steps", "decay_share"),
    "exp": ("warmup_steps", "min_lr"),
    "linear": ("warmup_steps", "min_lr"),
    "constant": ("warmup_steps",),
    "multistep": ("warmup_steps",),
    "onecycle": ("rise_share",),
}


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """The rate at ``step`` (from 0) of ``steps``, as a share of the peak."""
    if schedule.shape == "onecycle":
        rising = schedule.rise_share * steps
        up = (step + 1) / rising if rising else 1.0
        return max(0.0, min(1.0, up, (steps - step) / (steps - rising)))
    if step < schedule.warmup_steps:
        # The authors start at 0, where the first step would move nothing.
        return (step + 1) / schedule.warmup_steps
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "multistep":
        return FALL ** sum(step >= share * steps for share in MILESTONES)
    if schedule.shape == "wsd":
        falling = schedule.decay_share * steps
        return 1.0 if step < steps - falling else max(0.0, (steps - step) / falling)
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    height: float = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": 1.0 - progress,
        "exp": 0.9 ** (100 * progress),
    }[schedule.shape]
    return schedule.min_lr + (1.0 - schedule.min_lr) * height


def remember_peaks(optimizer: Optimizer) -> None:
    """Keep each group's rate as its peak, where torch's own schedulers keep it."""
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise LabError(f"{type(optimizer).__name__} has no lr in its groups to be scheduled")
        group.setdefault("initial_lr", group["lr"])


def set_rate(optimizer: Optimizer, share: float) -> None:
    """Set every group's rate to its share of the peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share

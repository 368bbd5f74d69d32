"""How long a run will take: from runs that are finished, or a guess that errs on the long side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mars.lab import tasks
from mars.lab.config import Run
from mars.lab.models import peak_flops
from mars.lab.study.definition import Arm, Study
from mars.lab.study.results import Result

RESERVE = 1.1  # runs of the same arm do not take exactly the same time
FEWER = 0.75  # of its time a run takes with fewer beside it: 0.63 alone of two on an H200
GPU_SHARE, GPU_START = 0.2, 60.0  # of the peak that is used, seconds to compile
CPU_FLOPS, CPU_START = 5e9, 5.0  # of one thread


def estimate(
    study: Study, results: Sequence[Result], arm: Arm, at_once: int, device: torch.device
) -> tuple[float, bool]:
    """Seconds of a run of an arm, and whether they were measured (or guessed)."""
    own = [s for r in results if r.arm == arm.label and (s := _seconds(r, at_once))]
    if own:
        return RESERVE * math.fsum(own) / len(own), True
    work = _work(study, arm)
    others = [
        s * work / _work(study, study.arm(r.arm))
        for r in results
        if r.arm in {a.label for a in study.arms} and (s := _seconds(r, at_once))
    ]
    if others:
        return RESERVE * max(others), True
    return guess(study.run(arm), device) * at_once, False


def _seconds(result: Result, at_once: int) -> float | None:
    """What a finished run took, or would have taken beside so many."""
    if result.status != "done":
        return None
    took = result.wall or result.seconds
    return None if took is None else took * max(FEWER, at_once / result.at_once)


def _work(study: Study, arm: Arm) -> float:
    """Of a run, in gradients of a sequence."""
    run = study.run(arm)
    return run.loop.steps * run.loop.batch_size * (2.0 if run.optimizer.exact else 1.0)


def guess(run: Run, device: torch.device) -> float:
    """Seconds of a run that nothing is known of."""
    task, gradients = tasks.of(run), 2 if run.optimizer.exact else 1
    work = float(run.loop.steps * task.per_step * gradients * task.flops)
    if device.type == "cuda":
        return GPU_START + work / (GPU_SHARE * (peak_flops(device) or 50e12))
    return CPU_START + work / (CPU_FLOPS * (run.loop.threads or 1))

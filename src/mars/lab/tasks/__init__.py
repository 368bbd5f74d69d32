"""Tasks: what differs between training a GPT on text and a network on images; the loop is one."""

from __future__ import annotations

import functools
import math

from mars.lab.config import AnyRun, Data, ImageData, ImageModel, Model, Run
from mars.lab.errors import LabError
from mars.lab.tasks.base import Batch, Source, Task
from mars.lab.tasks.images import Vision
from mars.lab.tasks.language import Language

__all__ = ["Batch", "Source", "Task", "Vision", "of", "with_steps"]


def of(run: Run) -> Task:
    """The task of a configuration; its data are not opened yet."""
    return Vision(run) if isinstance(run.model, ImageModel) else Language(run)


def with_steps(run: AnyRun) -> AnyRun:
    """The run with the steps that its epochs take, if it is given in epochs; opens the data."""
    if run.loop.epochs is None:
        return run
    epochs = run.loop.epochs
    if not 0 < epochs < math.inf:
        raise LabError(f"loop.epochs must be above 0, it is {epochs:g}")
    steps = math.ceil(epochs * _epoch_rows(run.model, run.data) / run.loop.batch_size - 1e-6)
    return run.replace(loop={"steps": max(1, steps), "epochs": epochs})


@functools.cache
def _epoch_rows(model: Model | ImageModel, data: Data | ImageData) -> int:
    return of(Run(model=model, data=data)).open().epoch_rows

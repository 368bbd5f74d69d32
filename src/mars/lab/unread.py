"""Options that were asked for and that nothing would read: refused, as they would do nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mars.explain import trained
from mars.lab import parallel, tasks
from mars.lab.config import Run
from mars.lab.errors import LabError
from mars.lab.optimizers import build, find
from mars.lab.schedule import READS

Asked = dict[str, dict[str, Any]]  # fields by part, as `arguments.asked` has them


def refuse(asked: Asked, runs: Iterable[Run], begun: Path) -> None:
    """A LabError for a field that was asked for and that none of the runs reads.

    What has been begun, as the file ``begun`` tells, goes on by the words it was begun with.
    """
    if asked.get("loop", {}).get("shards") and not parallel.launched():
        raise LabError(
            f"loop.shards is {asked['loop']['shards']}, but this is one process: start it with "
            "`torchrun --nproc_per_node=N -m mars.lab train`, or leave it out"
        )
    if begun.exists():
        return
    different = list({str((run.optimizer, run.schedule)): run for run in runs}.values())
    for name, value in asked.get("schedule", {}).items():
        if name != "shape" and (value or name != "warmup_steps"):  # none is what onecycle has
            _refuse_schedule(name, {run.schedule.shape for run in different})
    own = asked.get("optimizer", {})
    if own.get("weight_decay") and not any(_decays(run) for run in different):
        raise LabError(
            f"optimizer.weight_decay is no option of {different[0].optimizer.name}: leave it out, "
            "or let the class take a weight_decay"
        )
    if own.get("weight_decay_1d") and not any(_decays_rest(run) for run in different):
        raise LabError(
            f"optimizer.weight_decay_1d: {different[0].optimizer.name} trains nothing that would "
            "decay by it (norms and biases never decay): leave it out"
        )


def _refuse_schedule(name: str, shapes: set[str]) -> None:
    """Name the field, the shape that does not read it, and those that do."""
    if any(name in READS[shape] for shape in shapes):
        return
    *most, last = [shape for shape, fields in READS.items() if name in fields]
    able = f"{', '.join(most)} and {last}" if most else last
    raise LabError(
        f"schedule.{name} is not read by {' and '.join(sorted(shapes))}, but by {able}: leave it "
        "out, or choose another --schedule.shape"
    )


def _decays(run: Run) -> bool:
    """Whether the optimizer takes a decay: all do, but for some of the users' own."""
    return "weight_decay" in find(run.optimizer.name).uses


def _decays_rest(run: Run) -> bool:
    """Whether any group would decay otherwise by another decay of what is no matrix."""
    found = []
    for decay in (0.25, 0.5):
        own = run.replace(optimizer={"weight_decay_1d": decay}).optimizer
        groups = build(tasks.of(run).miniature(), own).param_groups
        # A group of MARS keeps it under a name of its own, also where nothing reads it.
        found.append([
            trained(p, group)[2] if "mars_type" in group else group.get("weight_decay")
            for group in groups
            for p in group["params"]
        ])  # fmt: skip
    return found[0] != found[1]

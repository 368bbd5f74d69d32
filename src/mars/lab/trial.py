"""One trial of a search: its runs, watched, and stopped early where they lag behind the others."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mars.lab import log, workers
from mars.lab.config import Run
from mars.lab.errors import LabError, unexpected
from mars.lab.progress import Progress
from mars.lab.rundir import RunDirectory
from mars.lab.search import open_study
from mars.lab.session import score
from mars.lab.train import train

if TYPE_CHECKING:
    import optuna

POSITION = ("step", "tokens", "images", "epoch", "seconds")  # where a run stands, in a record
State = Literal["complete", "pruned", "diverged", "stopped"]


@dataclass(frozen=True)
class Order:
    """A trial to run, as it is sent to a worker."""

    search: Path  # directory with the study
    number: int
    runs: tuple[Run, ...]  # the same settings, a run for each seed
    first_pruning: int | None
    command: str
    show: bool = False  # a bar, if there is a terminal


@dataclass(frozen=True)
class Ended:
    """How a trial ended. ``loss`` is the mean over seeds of the last validation (images: error)."""

    state: State
    loss: float | None
    seconds: float  # of training


class _Stop(Exception):
    """Thrown by who watches a run, to end it."""


class Watcher:
    """Sees the records of a run; tells Optuna of its losses and ends it if they are bad."""

    def __init__(self, trial: optuna.Trial | None, steps: int) -> None:
        self.trial, self.steps = trial, steps
        known = trial.study.get_trials(deepcopy=False)[trial.number] if trial else None
        self.told = set(known.intermediate_values) if known else set()
        self.state: State | None = None
        self.place: dict[str, Any] = {"step": 0, "seconds": 0.0}
        self.loss: float | None = None

    def __call__(self, record: dict[str, Any]) -> None:
        workers.answer()
        if record["kind"] in ("header", "tick"):
            return
        self.place = {name: record[name] for name in POSITION if name in record}
        if record["kind"] == "end" and record["status"] == "diverged":
            self.state = "diverged"
        if record["kind"] == "valid" and record["step"] > 0:
            self._validated(record["step"], score(record))

    def _validated(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self.state = "diverged"
            raise _Stop
        self.loss = loss
        if self.trial is None:
            return
        if step not in self.told:  # a run that goes on after a kill does some steps again
            self.trial.report(loss, step)
        if step < self.steps and self.trial.should_prune():
            self.state = "pruned"
            raise _Stop


def attempt(order: Order) -> Ended:
    """Run a trial to its end. What is wrong with every trial alike is a LabError."""
    import optuna

    study = open_study(order.search, order.first_pruning)
    own = study.get_trials(deepcopy=False)[order.number]
    trial = optuna.Trial(study, own._trial_id)
    losses, seconds = [], 0.0
    for number, run in enumerate(order.runs):
        # Curves of different seeds do not compare step by step: the first alone is judged.
        watcher = Watcher(trial if number == 0 else None, run.loop.steps)
        state = _train(run, watcher, order)
        seconds += watcher.place["seconds"]
        if state != "complete":
            return Ended(state, watcher.loss, seconds)
        assert watcher.loss is not None
        losses.append(watcher.loss)
    return Ended("complete", math.fsum(losses) / len(losses), seconds)


def _train(run: Run, watcher: Watcher, order: Order) -> State:
    with workers.at_work(run):  # no error leaves it with the run in its traceback
        return _watched(run, watcher, order)


def _watched(run: Run, watcher: Watcher, order: Order) -> State:
    bar = Progress(run.loop.steps) if order.show and sys.stderr.isatty() else nullcontext()
    try:
        with bar as shown:

            def watch(record: dict[str, Any]) -> None:
                if shown is not None:
                    shown(record)
                watcher(record)

            outcome = train(run, command=order.command, watch=watch)
    except _Stop:
        _end_log(run, watcher)
        assert watcher.state is not None
        return watcher.state
    except LabError:
        if watcher.state != "diverged":
            raise
        return "diverged"
    except Exception as error:  # of an optimizer of somebody's, say
        raise LabError(unexpected(error, Path(run.directory))) from error
    if outcome.status == "stopped":
        return "stopped"
    watcher.loss = outcome.score
    if watcher.place["step"] == 0:  # it was complete before: its log knows how long it took
        watcher.place["seconds"] = log.ended(Path(run.directory))["seconds"]
    return "complete" if watcher.loss is not None else "diverged"


def _end_log(run: Run, watcher: Watcher) -> None:
    """The last record of a log that nobody is writing to any more."""
    text = f"{watcher.state} at step {watcher.place['step']} of {run.loop.steps}"
    status = "stopped" if watcher.state == "pruned" else "diverged"
    with RunDirectory(run.directory).lock(), log.Log(Path(run.directory)) as file:
        file.write("end", **watcher.place, status=status, valid=watcher.loss, text=text)

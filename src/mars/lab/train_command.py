"""`mars train` as it is typed: its words, what is shown on the way, and what is said in the end."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.lab import arguments, log, moved, unread
from mars.lab.config import Run, read_config
from mars.lab.describe import describe
from mars.lab.errors import INTERRUPTED, LabError, unexpected
from mars.lab.parallel import own_rank
from mars.lab.progress import Progress
from mars.lab.report import fit, units
from mars.lab.rundir import refuse_other
from mars.lab.session import Outcome
from mars.lab.train import check_directory, train


@dataclass(frozen=True, kw_only=True)
class TrainArgs(Run):
    """Train one model by one optimizer."""

    dry_run: bool = False
    """Print the resolved configuration, routing, memory and budget, and stop."""


def train_command(words: list[str]) -> int:
    """The command line of a training."""
    command = shlex.join(["mars", "train", *words])
    args, run = _read(words)
    if args.dry_run:
        _check_there(run)
        text = fit.fold(describe(run), fit.room(), "    ")
        sys.stdout.write(text + "\n" if own_rank() == 0 else "")
        return 0
    if own_rank() > 0:
        train(run, command=command, extend=True)
        return 0
    moved.follow([run])
    begun = (Path(run.directory) / log.NAME).exists()
    with Progress(run.loop.steps, begun) as progress:
        try:
            outcome = train(run, command=command, watch=progress, extend=True)
        except (LabError, OSError):
            raise
        except Exception as error:
            raise LabError(unexpected(error, Path(run.directory))) from error
    return _tell(outcome, run)


def _check_there(run: Run) -> None:
    """Refuse the directory that the training would refuse. Nothing is written."""
    directory = Path(run.directory)
    refuse_other(directory, "config.json")
    if not moved.would_follow(run):
        check_directory(run, directory, True)


def _read(words: list[str]) -> tuple[TrainArgs, Run]:
    """What the words ask for, and the run that follows from it."""
    what = "Train one model by one optimizer; if interrupted, run the same command to resume."
    recipe, words = arguments.recipe_of(words, None, "mars train", what)
    base = arguments.base_run(recipe, words)
    about = (
        f"Train: {recipe}. Every field can be overridden. --optimizer NAME is short for "
        "--optimizer.name NAME, and brings the recipe's settings for it."
    )
    args = arguments.parse(TrainArgs, words, f"mars train {recipe}", about, base)
    # A run directory keeps its schedule; a recipe's warm-up shrinks with its steps.
    if Path(recipe).is_dir():
        args = arguments.counted(args, base)
        if args.directory == base.directory:
            _not_fewer(args, base)
    else:
        args = arguments.fitted(args, base)
    run = arguments.as_run(args)
    if not Path(recipe).is_dir() and not any("warmup" in word for word in words):
        told = ":" in recipe or "warmup_steps" in arguments.written(recipe, "schedule")
        run = _extending(run, base if told else None)
    asked = arguments.asked(words, args)
    unread.refuse(asked, [run], Path(run.directory) / "config.json")
    _tell_rate(run, asked.get("optimizer", {}), arguments.written(recipe, "optimizer"))
    return args, run


def _tell_rate(run: Run, asked: dict[str, Any], written: dict[str, Any]) -> None:
    """Say that a rate of matrices, asked for or of a JSON file, leaves all else at another's."""
    own = asked if {"lr", "lr_1d"} & set(asked) else written
    if "lr" in own and "lr_1d" not in own and run.optimizer.lr_1d is not None and own_rank() == 0:
        sys.stderr.write(
            "! optimizer.lr is for matrices: optimizer.lr_1d, for all else, stays "
            f"{run.optimizer.lr_1d:g}\n"
        )


def _not_fewer(run: Run, begun: Run) -> None:
    """Refuse to go on with a run to fewer steps than it was begun for."""
    if run.loop.steps < begun.loop.steps:
        raise LabError(
            f"{run.directory} holds a run with loop.steps = {begun.loop.steps}, not "
            f"{run.loop.steps}: it can go on to more, not to fewer; choose another --keep.out"
        )


def _extending(run: Run, told: Run | None) -> Run:
    """With the warm-up that the run in its directory has had, if there is one.

    ``told`` is a recipe that says how long it is: the run keeps it only if it was begun by that.
    """
    path = Path(run.directory) / "config.json"
    if not path.is_file():
        return run
    begun = read_config(path)
    _not_fewer(run, begun)
    if told is not None:
        then = arguments.fitted(told.replace(loop={"steps": begun.loop.steps}), told)
        if begun.schedule.warmup_steps not in (w.schedule.warmup_steps for w in (then, told)):
            return run
    return run.replace(schedule={"warmup_steps": begun.schedule.warmup_steps})


def _tell(outcome: Outcome, run: Run) -> int:
    """Say how the run ended; the exit status."""
    last = "last " * (outcome.status == "stopped")  # it was measured some steps ago
    loss = "" if outcome.valid is None else f", {last}validation loss {units.loss(outcome.valid)}"
    right = "" if outcome.accuracy is None else f", accuracy {units.accuracy(outcome.accuracy)}"
    sys.stdout.write(f"{outcome.status} at step {outcome.step}{loss}{right}: {outcome.directory}\n")
    if outcome.status != "stopped":
        return 0
    saved = run.keep.save_every is not None
    where = "resumes from there" if saved else "starts again: keep.save_every is None"
    sys.stdout.write(f"the same command {where}\n")
    # torchrun would take another status than 0 for a failure, and start all again.
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else INTERRUPTED

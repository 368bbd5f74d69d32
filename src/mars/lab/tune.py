"""`mars tune`: search learning rate, weight decay, γ and warm-up of an optimizer on a recipe."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars.lab import arguments, findings, moved, search, tasks, unread, workers
from mars.lab.config import Run
from mars.lab.crew import Crew, WorkerDied, stop, watched
from mars.lab.errors import INTERRUPTED, LabError, check_name
from mars.lab.findings import Findings
from mars.lab.hardware import choose_device
from mars.lab.optimizers import build
from mars.lab.pool import cores, threads
from mars.lab.report import units
from mars.lab.rundir import RunDirectory
from mars.lab.train import check_unchanged, open_if_there
from mars.lab.trial import Ended, Order, attempt

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, kw_only=True)
class TuneArgs(Run):
    """Search the settings of an optimizer."""

    trials: int = 20
    """Settings to try; the first are the best measured for a like model, then the recipe's own."""
    search: tuple[search.Name, ...] | None = None
    """What to vary; by default lr, weight_decay and, for MARS, gamma. A longer warm-up may allow a
    higher rate: lr warmup_steps searches both."""
    seeds: int = 1
    """Runs of each trial, which is judged by their mean."""
    prune: bool = True
    """Stop a run whose validation loss (images: error rate) is above the median of earlier runs
    (not where warmup_steps is searched: those that rise longer are behind at first)."""
    jobs: int | None = None
    """Trials at the same time; by default up to one a core on a CPU, one on a GPU."""
    checkpoints: bool = False
    """Keep checkpoints of all trials; by default those of the best."""


def tune_command(words: list[str]) -> int:
    """The command line of a search."""
    command = shlex.join(["mars", "tune", *words])
    what = "Search rate, weight decay, gamma or warm-up of one optimizer, by short trainings."
    recipe, words = arguments.recipe_of(words, None, "mars tune", what)
    base = arguments.base_run(recipe, words)
    about = (
        f"Search settings of an optimizer on {recipe}, around those of the recipe. Every field "
        "can be overridden. The same command resumes a search that was interrupted. It is "
        "kept in --out, by default runs/tune-RECIPE-OPTIMIZER."
    )
    args = arguments.parse(TuneArgs, words, f"mars tune {recipe}", about, base)
    args = arguments.fitted(args, base)
    chosen = args.keep.out if args.keep.out != base.keep.out else None
    name = args.optimizer.name.replace(":", ".")
    usual = f"runs/tune-{check_name('recipe', base.recipe)}-{name}" if chosen is None else chosen
    directory = Path(usual).expanduser()
    run, asked = arguments.as_run(args), arguments.asked(words, args)
    unread.refuse(asked, [run], directory / "tune.json")
    return tune(args, directory, command)


def tune(args: TuneArgs, directory: Path, command: str) -> int:
    """Search, or go on searching, then tell."""
    for name in ("trials", "seeds", "jobs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise LabError(f"--{name} must be 1 or more, not {value}")
    search.require_optuna()
    run = arguments.as_run(args)
    ranges = search.space(run, args.search)
    on_cpu = choose_device(run.loop.device).type == "cpu"
    # A search learns from what is complete: most of it should come after something is.
    jobs = args.jobs or (min(cores(), max(1, args.trials // 4)) if on_cpu else 1)
    if jobs > 1 and run.loop.threads is None:
        run = run.replace(loop={"threads": threads(jobs)})
    first, said = search.starts(ranges, search.advice(run, ranges))
    found = Findings(directory, run, ranges, args.seeds, command)
    moved.follow([run.replace(keep={"out": str(t), "resume": True}) for t in found.begun()])
    found.compare()
    if begun := found.begun():
        _check_begun(run, begun)
    else:
        _check(run)
    if not (directory / "study").exists():
        sys.stderr.write(said + "\n")
    with RunDirectory(directory, "tune.json").lock():
        complete = Search(args, found, jobs, first).go()
    if not complete:
        sys.stdout.write("stopped; the same command resumes from here\n")
    return 0 if complete else INTERRUPTED


def _check(run: Run) -> None:
    """Open the data, make the optimizer: what is wrong with every trial is told before the first.

    The directory would keep it, and refuse the command that has it right.
    """
    task = tasks.of(tasks.with_steps(run))
    task.open()
    build(task.miniature(), run.optimizer)


def _check_begun(run: Run, begun: Sequence[Path]) -> None:
    """Refuse to compare trials on other data with those that there are, finished ones too."""
    task = open_if_there(tasks.with_steps(run))
    for trial in begun:
        check_unchanged(run, trial, task)


class _Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Search:
    """A search under way: asks for settings, has them tried, notes how that ended."""

    def __init__(
        self, args: TuneArgs, found: Findings, jobs: int, first: Sequence[dict[str, float]]
    ) -> None:
        self.args, self.findings, self.jobs, self.first = args, found, jobs, first
        self.run, self.ranges, self.directory = found.run, found.ranges, found.directory
        self.first_pruning = search.first_pruning(self.run, self.ranges) if args.prune else None
        search.repair(self.directory)
        self.study = search.open_study(self.directory, self.first_pruning)
        self.active: dict[Future[Ended], optuna.Trial] = {}
        self.began: dict[int, float] = {}
        self.took: list[float] = []  # wall time of trials that ended

    def go(self) -> bool:
        """Run trials until there are enough; False if somebody stopped it."""
        self.findings.write(self.study)
        stopped = False
        with workers.terminable(), self._executor() as pool:
            try:
                with watched(pool) as look:
                    while self._fill(pool, stopped):
                        look()
                        for future in wait(self.active, 1.0, FIRST_COMPLETED).done:
                            trial = self.active.pop(future)
                            stopped |= self._end(trial, self._how(trial, future))
            except KeyboardInterrupt:
                stopped = True
                self._stop(pool)
        self.findings.write(self.study)
        sys.stdout.write(self.findings.tell(self.study) + "\n")
        return not stopped

    def _executor(self) -> Executor:
        if self.jobs == 1:
            return _Here()
        return Crew(self.jobs)

    def _how(self, trial: optuna.Trial, future: Future[Ended]) -> Ended:
        try:
            return future.result()
        except WorkerDied as error:
            text = f"trial-{trial.number:04d}: {error}; the same command resumes from here"
            raise LabError(text) from error

    def _stop(self, pool: Executor) -> None:
        """Have runs in progress saved, and note what ended all the same."""
        sys.stderr.write("stopping: runs in progress are saved\n")
        stop(pool)
        for future, trial in self.active.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                self._end(trial, future.result())

    def _fill(self, pool: Executor, stopped: bool) -> bool:
        """Begin as many trials as there is room for; whether any is under way."""
        while not stopped and len(self.active) < self.jobs:
            trial = self._next()
            if trial is None:
                break
            self.began[trial.number] = time.monotonic()
            self.active[pool.submit(attempt, self._order(trial))] = trial
        return bool(self.active)

    def _next(self) -> optuna.Trial | None:
        """A trial that an interruption left, or a new one; None if there are enough."""
        import optuna
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        busy = {trial.number for trial in self.active.values()}
        for trial in trials:
            if trial.state == TrialState.RUNNING and trial.number not in busy:
                left = optuna.Trial(self.study, trial._trial_id)
                search.suggest(left, self.ranges)
                return left
        if sum(trial.state != TrialState.WAITING for trial in trials) >= self.args.trials:
            return None
        return search.next_trial(self.study, self.ranges, self.run.loop.seed, self.first)

    def _folders(self, number: int) -> list[Path]:
        names = findings.folders(number, self.run, self.args.seeds)
        return [self.directory / name for name in names]

    def _order(self, trial: optuna.Trial) -> Order:
        tried = search.at(self.run, self.ranges, trial.params)
        runs = tuple(
            tried.replace(
                loop={"seed": self.run.loop.seed + i}, keep={"out": str(folder), "resume": True}
            )
            for i, folder in enumerate(self._folders(trial.number))
        )
        show = self.jobs == 1
        command = self.findings.command
        return Order(self.directory, trial.number, runs, self.first_pruning, command, show)

    def _end(self, trial: optuna.Trial, ended: Ended) -> bool:
        """Note how a trial ended; whether it was somebody who stopped it."""
        from optuna.trial import TrialState

        if ended.state == "stopped":
            return True
        for name in ("state", "loss", "seconds"):
            trial.set_user_attr(name, getattr(ended, name))
        if ended.state == "complete":
            self.study.tell(trial, ended.loss)
        else:  # that training diverges at a rate tells the sampler something: pruned, not failed
            self.study.tell(trial, state=TrialState.PRUNED)
        self.took.append(time.monotonic() - self.began[trial.number])
        self.findings.write(self.study)
        self._tidy()
        self._say(trial, ended)
        return False

    def _tidy(self) -> None:
        """Checkpoints of trials that have ended, but for the best, are of no more use."""
        if self.args.checkpoints:
            return
        best = findings.best(self.study)
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state.is_finished() and trial.number != best:
                for folder in self._folders(trial.number):
                    shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _say(self, trial: optuna.Trial, ended: Ended) -> None:
        many = self.args.trials
        finished = sum(t.state.is_finished() for t in self.study.get_trials(deepcopy=False))
        loss = f"{search.judged_by(self.run)} {units.loss(ended.loss)}"
        text = {"complete": loss, "pruned": f"pruned, {loss}", "diverged": "diverged"}[ended.state]
        if findings.best(self.study) == trial.number:
            text += ", the best so far"
        if finished < many:
            left = (many - finished) * math.fsum(self.took) / len(self.took) / self.jobs
            text += f"; {units.seconds(left)} left"
        values = ", ".join(f"{n} {units.rate(v)}" for n, v in trial.params.items())
        sys.stderr.write(f"[{finished}/{many}] trial-{trial.number:04d}, {values}: {text}\n")
        sys.stderr.flush()

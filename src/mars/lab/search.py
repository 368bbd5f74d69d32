"""What a search varies, and where it remembers what it tried: an Optuna study in a file."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from mars.lab import tasks
from mars.lab.config import Model, Run
from mars.lab.errors import LabError
from mars.lab.optimizers import REGISTRY
from mars.lab.recipes.settings import Recommendation, at_rate, recommended, seen
from mars.lab.rundir import drop_torn_line

if TYPE_CHECKING:
    import optuna

Name = Literal["lr", "lr_1d", "weight_decay", "gamma", "warmup_steps"]
WARMUP = "warmup_steps"  # whole steps, and a field of the schedule; the others are the optimizer's

WIDTH = 8.0  # a range around the recipe's value: it times and divided by this
PUBLISHED_GAMMA = 0.025
STARTUP = 6  # trials before the sampler and the pruner trust what they saw
EDGE = 0.05  # share of a range that counts as its edge


@dataclass(frozen=True)
class Range:
    """Where a setting is looked for; ``own`` is the recipe's value, which is in it."""

    own: float
    low: float
    high: float
    log: bool
    most: float = math.inf  # nothing lies beyond this

    def place(self, value: float) -> float:
        """Where in the range a value lies: 0 is the lower end, 1 the upper.

        >>> Range(1.0, 0.25, 4.0, log=True).place(1.0)
        0.5
        """
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def space(run: Run, names: Sequence[Name] | None = None) -> dict[str, Range]:
    """The range of every setting to search; by default rate, decay and, for MARS, γ."""
    o = run.optimizer
    uses = REGISTRY[o.name].uses if o.name in REGISTRY else frozenset[str]()
    if names is None:
        names = ("lr", "weight_decay", "gamma") if "gamma" in uses else ("lr", "weight_decay")
    if not names:
        raise LabError(f"--search names nothing to search: {', '.join(get_args(Name))}")
    for name in names:
        if name in ("gamma", "lr_1d") and o.name in REGISTRY and name not in uses:
            raise LabError(f"--search {name}: {o.name} has no such option")
    gamma = PUBLISHED_GAMMA if o.gamma is None else o.gamma
    ranges = {
        "lr": lambda: _around(o.lr, "lr"),
        "lr_1d": lambda: _around(o.lr if o.lr_1d is None else o.lr_1d, "lr_1d"),
        # No logarithm of 0: a recipe without decay is searched evenly from 0 up.
        "weight_decay": lambda: (
            _around(o.weight_decay, "weight_decay")
            if o.weight_decay
            else Range(0.0, 0.0, 0.3, log=False)
        ),
        "gamma": lambda: Range(gamma, min(0.0, gamma), max(0.2, 2 * gamma), log=False),
        WARMUP: lambda: _warmup(run),
    }
    return {name: ranges[name]() for name in dict.fromkeys(names)}


def judged_by(run: Run) -> str:
    """What a trial is judged by."""
    return "validation loss" if isinstance(run.model, Model) else "error rate"


def _around(own: float, name: str) -> Range:
    if not own > 0:
        raise LabError(f"optimizer.{name} is {own}: a search around it needs a value above 0")
    return Range(own, own / WIDTH, own * WIDTH, log=True)


def _warmup(run: Run) -> Range:
    """In whole steps: from none, or an eighth of the recipe's, up to half of the steps."""
    if run.schedule.shape == "onecycle":
        raise LabError(f"--search {WARMUP}: onecycle has a rise of its own (schedule.rise_share)")
    own, half = run.schedule.warmup_steps, tasks.with_steps(run).loop.steps // 2
    low = max(1, int(own / WIDTH)) if own else 0
    high = max(own, half, low + 1)
    return Range(own, low, high, log=own > 0, most=high)


def at(run: Run, ranges: Mapping[str, Range], values: Mapping[str, float]) -> Run:
    """The run with these settings, to four digits; lr_1d keeps its proportion to lr."""
    fields = {
        name: value if value == ranges[name].own else float(f"{value:.4g}")
        for name, value in values.items()
        if name != WARMUP
    }
    if WARMUP in values:
        run = run.replace(schedule={WARMUP: round(values[WARMUP])})
    own = run.optimizer
    if "lr" in fields and "lr_1d" not in fields and fields["lr"] != own.lr:
        fields |= at_rate(own, fields["lr"])
    return run.replace(optimizer=dict(fields))


def at_edge(found: Range, value: float) -> str | None:
    """ "lower" or "upper", if a value lies at that end of its range and more lies beyond."""
    place = found.place(value)
    if place > 1 - EDGE and found.high < found.most:
        return "upper"
    return "lower" if place < EDGE and found.low > 0 else None


def require_optuna() -> None:
    """A LabError if it is not there."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise LabError("mars tune needs optuna: pip install optuna") from error


def repair(directory: Path) -> None:
    """Undo what a killed search can leave: a torn last line, a lock. Own the directory first."""
    with contextlib.suppress(FileNotFoundError):
        (directory / "study.lock").unlink()
    with contextlib.suppress(FileNotFoundError), open(directory / "study", "r+b") as file:
        drop_torn_line(file.fileno())


def open_study(directory: Path, first_pruning: int | None) -> optuna.Study:
    """The study in a directory. From ``first_pruning`` steps on, a run below the median stops."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the telling is ours
    pruner = (
        optuna.pruners.NopPruner()
        if first_pruning is None
        else optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=first_pruning)
    )
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(directory / "study"))),
        study_name="tune",
        direction="minimize",
        load_if_exists=True,
        pruner=pruner,
    )


def first_pruning(run: Run, ranges: Mapping[str, Range]) -> int:
    """Steps before a run may be stopped: curves cross early on, and while rates rise."""
    longest = ranges[WARMUP].high if WARMUP in ranges else run.schedule.warmup_steps
    return max(run.loop.steps // 3, 2 * round(longest))


def advice(run: Run, searched: Collection[str]) -> Recommendation | None:
    """What was measured for a model and tokens like the run's, with all else as the run has it."""
    free = ["lr_1d / lr" if name == "lr_1d" else name for name in searched]
    return recommended(run.optimizer, tasks.of(run).parameters, *seen(run), free=free)


def starts(
    ranges: Mapping[str, Range], advice: Recommendation | None
) -> tuple[list[dict[str, float]], str]:
    """The first settings to try, what was recommended and the recipe's own; and a word on that."""
    own = {name: found.own for name, found in ranges.items()}
    first = "first: the recipe's own settings"
    if advice is None:
        return [own], f"{first}; no grid here had this optimizer with these options"
    values = {name: advice.setting.optimizer.get(name, value) for name, value in own.items()}
    if values == own:
        return [own], f"{first}, which are recommended: {advice}"
    for name, found in ranges.items():
        if not found.low <= values[name] <= found.high:
            limits = f"{found.low:.3g} to {found.high:.3g}"
            text = f"recommended, but {name} {values[name]:g} is not within {limits}: {advice}"
            return [own], f"{first}; {text}"
    differ = [name for name in own if name == "lr" or values[name] != own[name]]
    now, then = (", ".join(f"{n} {start[n]:g}" for n in differ) for start in (values, own))
    how = f"{advice.evidence}; {advice.source}"
    return [values, own], f"first the recommended {now} ({how}); then the recipe's own {then}"


def next_trial(
    study: optuna.Study, ranges: Mapping[str, Range], seed: int, first: Sequence[dict[str, float]]
) -> optuna.Trial:
    """A new trial with its settings; the first ones are given.

    A trial's random numbers depend on the seed and its own number alone, so that a search that was
    interrupted draws what it would have drawn.
    """
    from optuna.samplers import TPESampler

    trials = study.get_trials(deepcopy=False)
    number = len(trials)
    if number < len(first) and first[number] not in [trial.params for trial in trials]:
        study.enqueue_trial(first[number])
    study.sampler = TPESampler(seed=(seed * 1_000_003 + number) % 2**32, n_startup_trials=STARTUP)
    trial = study.ask()
    suggest(trial, ranges)
    return trial


def option(name: str) -> str:
    """Of the command line, for a setting that is searched."""
    part = "schedule" if name == WARMUP else "optimizer"
    return f"--{part}.{name.replace('_', '-')}"


def suggest(trial: optuna.Trial, ranges: Mapping[str, Range]) -> dict[str, float]:
    """A trial's settings; drawn the first time, remembered from then on."""
    return {
        name: trial.suggest_int(name, int(found.low), int(found.high), log=found.log)
        if name == WARMUP
        else trial.suggest_float(name, found.low, found.high, log=found.log)
        for name, found in ranges.items()
    }

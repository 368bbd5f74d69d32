"""`mars race`: several optimizers on the same model, initial weights and batches."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mars.lab import arguments, moved, recipes, search, tasks, unread
from mars.lab.config import Run, check, read_config, to_json
from mars.lab.differences import first_difference
from mars.lab.errors import INTERRUPTED, LabError, UsageError, check_name
from mars.lab.hardware import choose_device
from mars.lab.log import NAME as LOG
from mars.lab.optimizers import build, foreign
from mars.lab.pool import Job, cores, run_all, threads
from mars.lab.recipes import settings, yours
from mars.lab.report import Summary, units
from mars.lab.rundir import RunDirectory, write_json
from mars.lab.train import check_unchanged, finished, open_if_there

FIELD = ("adamw", "lion", "muon", "mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
BASELINE = "adamw"
GRID = "--rates 0.25 0.5 1 2 4"
Make = Callable[[str], Run]
Asked = dict[str, dict[str, Any]]  # fields by part: what somebody wants for all


@dataclass(frozen=True, kw_only=True)
class RaceArgs(Run):
    """Race optimizers."""

    optimizers: tuple[str, ...] = FIELD
    """To race: registered names, or your own as package.module:Class; NAME@0.01 sets a rate."""
    seeds: int = 2
    """Seeds 0, 1, …: initial weights and batches, the same for all optimizers."""
    rates: tuple[float, ...] = (1.0,)
    """Multiples of the recipe's rate to run each optimizer at: 0.25 0.5 1 2 4 is a grid."""
    jobs: int | None = None
    """Runs at the same time; by default one a core on a CPU, one on a GPU."""
    report: bool = True
    """Write report.html in the end."""


def race_command(words: list[str]) -> int:
    """The command line of a race."""
    if any(word.partition("=")[0] == "--recipe" for word in words):
        raise UsageError(
            "--recipe is a label, which a race has no use for: the recipe is the first word, as in "
            "`mars race gpt-50m`"
        )
    words = _as_begun(words)
    command = shlex.join(["mars", "race", *words])
    recipe, words = arguments.recipe_of(words, "gpt-tiny", "mars race")
    if "--optimizer.name" in words:
        raise UsageError("a race takes several optimizers: --optimizers NAME NAME …")
    base = arguments.base_run(recipe, words)
    about = (
        f"Race optimizers on {recipe}. What you override counts for all of them; else each has "
        "its own tuned settings (defaults of optimizer options below are those of "
        f"{base.optimizer.name}). The first word may be another recipe (`mars train --help` lists "
        "them), or the directory of a race, to go on with it. Results go to --out, by default "
        "runs/race-RECIPE."
    )
    args = arguments.parse(RaceArgs, words, f"mars race {recipe}", about, base)
    return race(args, base, arguments.asked(words, args), command, _maker(recipe, words))


def _maker(recipe: str, words: list[str]) -> Make | None:
    """What makes a recipe of somebody's for an optimizer, if it is one for every optimizer."""
    if ":" not in recipe or Path(recipe).exists() or not yours.is_for_all(recipe):
        return None
    return lambda name: arguments.base_run(recipe, ["--optimizer.name", name, *words])


def _as_begun(words: list[str]) -> list[str]:
    """The words of a race whose directory comes first, with what is said after it."""
    if not words or not (file := Path(words[0], "race.json")).exists():
        return words
    try:
        _, _, *begun = shlex.split(json.loads(file.read_text())["command"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise LabError(
            f"{file} is damaged: give the race's options, and --out {words[0]}"
        ) from None
    if begun and begun[0].endswith(".json") and not Path(begun[0]).exists():
        raise LabError(
            f"{file}: the race was begun with {begun[0]}, which is not here: go on where it is"
        )
    more = arguments.shorthands(["--keep.out", *words])  # it may have been moved since
    said = {word for word in more if word.startswith("--")}
    kept: list[str] = []
    option = ""
    for word in arguments.shorthands(begun):
        option = word if word.startswith("--") else option
        kept += [] if option in said else [word]
    return [*kept, *more]


def plan(
    args: RaceArgs, base: Run, asked: Asked, directory: Path, make: Make | None = None
) -> list[Job]:
    """One run for every optimizer, rate and seed, ordered so that first results come early."""
    if not args.optimizers:
        raise LabError("a race needs at least one optimizer")
    if args.seeds < 1 or not args.rates or not all(0 < rate < math.inf for rate in args.rates):
        raise LabError("a race needs at least one seed and rates above 0")
    if args.jobs is not None and args.jobs < 1:
        raise LabError(f"--jobs must be 1 or more, not {args.jobs}")
    asked = {part: fields for part, fields in asked.items() if part != "keep"}
    jobs = []
    for seed in range(args.loop.seed, args.loop.seed + args.seeds):
        for entrant in args.optimizers:
            own = _entrant(entrant, base, asked, make)
            for rate in args.rates:
                multiple = float(f"{rate * own.optimizer.lr:.3g}")
                job = own if rate == 1 else _at_rate(own, multiple)
                folder = f"{job.optimizer.name.replace(':', '.')}-lr{job.optimizer.lr:.12g}-s{seed}"
                kept = {**_kept(args), "out": str(directory / folder)}
                jobs.append(Job(folder, check(job.replace(loop={"seed": seed}, keep=kept))))
    for name, count in Counter(made.name for made in jobs).items():
        if count > 1:
            raise LabError(f"{name} is asked for twice")
    return jobs


def _entrant(text: str, base: Run, asked: Asked, make: Make | None) -> Run:
    """The run of ``NAME`` or ``NAME@RATE``: its recipe, what a file overrides, what was asked."""
    name, at, rate = text.partition("@")
    if at and not rate:
        raise LabError(f"{text!r} is not NAME@RATE: the rate is missing")
    known = base.recipe in recipes.RECIPES
    if name == base.optimizer.name:
        own = base
    elif make is not None:
        own = make(name)
    elif known:
        # A file may override the recipe for all; its optimizer's settings are for that one alone.
        inherited = arguments.changes(recipes.make(base.recipe, base.optimizer.name), base)
        others = {part: v for part, v in inherited.items() if part not in ("keep", "optimizer")}
        own = recipes.make(base.recipe, name).replace(**others)
    else:
        own = recipes.elsewhere(base, name)
    before = own
    own = arguments.counted(own.replace(**asked), before)
    if "warmup_steps" not in asked.get("schedule", {}):
        own = arguments.fitted(own, before)
    chosen = rate or known or make is not None or name == base.optimizer.name
    if not chosen and not {"lr", "lr_1d"} & set(asked.get("optimizer", {})):
        own = _as_measured(check(own))
    if not rate:
        return own
    try:
        if not 0 < float(rate) < math.inf:
            raise LabError(f"{text!r}: a rate must be above 0 and finite")
        return _at_rate(own, float(rate))
    except ValueError:
        raise LabError(f"{text!r} is not NAME@RATE: {rate!r} is not a number") from None


def _as_measured(run: Run) -> Run:
    """At the rate that `mars tune` would try first: measured on a like model, if one was."""
    ranges = search.space(run, ["lr"])
    first, _ = search.starts(ranges, search.advice(run, ranges))
    return _at_rate(run, first[0]["lr"])


def _kept(args: RaceArgs) -> dict[str, Any]:
    return {
        name: getattr(args.keep, name)
        for name in ("tensorboard", "wandb", "save_every", "last", "resume")
    }


def _at_rate(run: Run, lr: float) -> Run:
    return run.replace(optimizer=settings.at_rate(run.optimizer, lr))


def _check_optimizers(jobs: list[Job], directory: Path) -> None:
    """Make each optimizer once, for a miniature: what is wrong is told before anybody trains."""
    runs = {str(job.run.optimizer): job.run for job in jobs}.values()
    names = dict.fromkeys(run.optimizer.name for run in runs)
    for run in runs:
        name = run.optimizer.name
        lacking = foreign(run.optimizer)
        if lacking and len(names) > 1:
            raise LabError(
                f"optimizer.{lacking[0]} is no option of {name}, and what you override counts for "
                f"all: race those that lack it first, the others with it into the same --out "
                f"({directory}); `mars report {directory} --baseline {name}` then compares them"
            )
        build(tasks.of(run).miniature(), run.optimizer)


def _check_begun(jobs: list[Job], directory: Path) -> None:
    """Refuse a directory whose runs had other settings: their results are not this race's."""
    for job in jobs:
        try:
            begun = read_config(directory / job.name / "config.json")
        except LabError:  # not begun, or damaged: the run itself will tell
            continue
        difference = first_difference(to_json(begun), to_json(tasks.with_steps(job.run)))
        if difference:
            field, old, new = difference
            raise LabError(
                f"{directory} holds a race with {field} = {old!r}, not {new!r}: "
                "choose another --out"
            )


def _check_data(jobs: list[Job], directory: Path) -> None:
    """Open the data once, all runs have the same: what is wrong is told before anybody trains.

    Runs that are there must have been made of these data, and of optimizers as they are now.
    """
    run = tasks.with_steps(jobs[0].run)
    begun = all((directory / job.name / "config.json").exists() for job in jobs)
    task = open_if_there(run) if begun else tasks.of(run).open()
    for job in jobs:
        check_unchanged(job.run, directory / job.name, task)


def _finished(jobs: list[Job], directory: Path) -> bool:
    return all(finished(tasks.with_steps(job.run), directory / job.name) for job in jobs)


def origins(jobs: list[Job]) -> list[str]:
    """On which runs the recipe's rates were tuned, where those were quite other ones."""
    found: dict[str, list[str]] = {}
    entrants = {(job.run.optimizer.name, job.run.optimizer.lr): job.run for job in jobs}
    for (name, lr), run in entrants.items():
        if run.recipe not in recipes.RECIPES:
            continue
        own = settings.of_recipe(recipes.make(run.recipe, name))
        if own is not None and own.lr == lr:
            count, _, batch = settings.seen(run)
            at = settings.compared(own, run.optimizer, tasks.of(run).parameters, count, batch)
            if at.elsewhere:
                found.setdefault(at.runs, []).append(name)
    return [
        f"the rates{'' if len(names) == len(entrants) else ' of ' + ', '.join(names)} were tuned "
        f"{runs}; a grid: {GRID}"
        for runs, names in found.items()
    ]


def guesses(args: RaceArgs, base: Run, asked: Asked) -> list[str]:
    """Who races on a recipe of somebody's at a rate that nobody chose for it."""
    if base.recipe in recipes.RECIPES or "lr" in asked.get("optimizer", {}):
        return []
    own = base.optimizer.name
    names = [name for name in args.optimizers if "@" not in name and name != own]
    if not names:
        return []
    said = f"the rate{'s' * (len(names) > 1)} of {', '.join(names)}"
    beside = f" ({own} has the recipe's own)" * (own in args.optimizers)
    return [f"{said} {'were' if len(names) > 1 else 'was'} not tuned for {base.recipe}{beside}; "
            f"a grid: {GRID}"]  # fmt: skip


def race(args: RaceArgs, base: Run, asked: Asked, command: str, make: Make | None = None) -> int:
    """Run what has not been run yet, then tell and report."""
    chosen = args.keep.out if args.keep.out != base.keep.out else None
    directory = Path(chosen or f"runs/race-{check_name('recipe', base.recipe)}").expanduser()
    jobs = plan(args, base, asked, directory, make)
    _check_optimizers(jobs, directory)
    unread.refuse(asked, [job.run for job in jobs], directory / "race.json")
    moved.follow([job.run for job in jobs])
    _check_begun(jobs, directory)
    _check_data(jobs, directory)
    notes = origins(jobs) if len(args.rates) == 1 else []
    notes += guesses(args, base, asked) if len(args.rates) == 1 and make is None else []
    several = len({job.run.optimizer.name for job in jobs}) > 1
    if several and len(args.rates) == 1 and "lr" in asked.get("optimizer", {}):
        notes.append(
            "--optimizer.lr is one rate for all, tuned for none, and lr_1d stays what it "
            f"was (NAME@{args.optimizer.lr:g} moves both); a grid: {GRID}"
        )
    sys.stderr.writelines(f"! {note}\n" for note in notes)
    if _finished(jobs, directory):
        sys.stderr.write(f"all runs of {directory} were done already: nothing is run\n")
    device = choose_device(args.loop.device)
    processes = args.jobs or (min(cores(), len(jobs)) if device.type == "cpu" else 1)
    own = {"threads": args.loop.threads or threads(processes)}
    jobs = [replace(j, run=j.run.replace(loop=own)) for j in jobs]
    names = list(dict.fromkeys(job.run.optimizer.name for job in jobs))
    about = {
        "name": f"{base.recipe} race",
        "recipe": base.recipe,
        "optimizers": names,
        "seeds": args.seeds,
        "rates": list(args.rates),
        "baseline": BASELINE if BASELINE in names else names[0],
        "command": command,
        "notes": notes,
    }
    with RunDirectory(directory, "race.json").lock():
        write_json(directory / "race.json", about)
        failed = run_all(jobs, processes, command)
        if failed is None:
            begun = any(directory.glob(f"*/{LOG}"))
            more = f", `mars report {directory}` shows what there is" if begun else ""
            sys.stdout.write(f"stopped; the same command resumes from here{more}\n")
            return INTERRUPTED
        tell(args, directory, jobs, about)
    sys.stderr.writelines(f"mars: error: {line}\n" for line in failures(failed))
    return 1 if failed else 0


def failures(failed: dict[str, str]) -> list[str]:
    """A line for every reason that runs failed for.

    >>> failures({"a": "no memory", "b": "no memory", "c": "boom"})
    ['a and 1 more run: no memory', 'c: boom']
    """
    found: dict[str, list[str]] = {}
    for name, text in failed.items():
        found.setdefault(text, []).append(name)
    return [f"{names[0]}{_more(len(names) - 1)}: {text}" for text, names in found.items()]


def _more(count: int) -> str:
    return f" and {units.count(count, 'more run')}" if count else ""


def grid_of(summary: Summary, about: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a learning-rate grid, as recipes keep it and reports draw it."""
    first, m = summary.runs[0].header, summary.measure
    return {
        "recipe": about["recipe"],
        "command": about["command"],
        "versions": first["versions"],
        "hardware": first["hardware"]["name"],
        m.unit: first[f"{m.unit}_per_step"] * first["steps"],
        "optimizers": {
            curve.optimizer: {
                "label": curve.label,
                "best": curve.best,
                "errors" if m.unit == "images" else "losses": {
                    f"{point.lr:g}": [round(loss, 4) for loss in point.losses.values()]
                    + [None] * point.dead
                    for point in curve.points
                },
            }
            for curve in summary.sensitivity
        },
    }


def tell(args: RaceArgs, directory: Path, jobs: list[Job], about: dict[str, Any]) -> None:
    """The table, and the page."""
    from mars.lab.report import fit, load, summarise, table, write

    here = [directory / job.name for job in jobs if (directory / job.name / LOG).exists()]
    if not here:
        return
    runs = load(here)
    grid = recipes.rates(about["recipe"])
    known = grid if grid["optimizers"] and len(args.rates) == 1 else None
    summary = summarise(runs, baseline=about["baseline"], rates=known)
    sys.stdout.write("\n" + table(summary, fit.room()) + "\n")
    measured = {s.optimizer["name"] for s in settings.read() if s.recipe == about["recipe"]}
    for name in about["optimizers"]:
        if known and name not in measured:
            sys.stdout.write(f"! the rate of {name} is not tuned; a grid: {GRID}\n")
    if len(args.rates) > 1:
        write_json(directory / "rates.json", grid_of(summary, about), indent=1)
    if args.report:
        page = write(directory / "report.html", runs, summary)
        sys.stdout.write(f"\nreport: {page.resolve().as_uri()}\n")
    others = len({log.parent for log in directory.glob(f"*/{LOG}")}) - len(here)
    if others > 0:
        sys.stdout.write(f"({others} earlier runs are here too: `mars report {directory}`)\n")

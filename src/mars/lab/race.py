"""`mars race`: several optimizers on the same model, initial weights and batches."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mars.lab import arguments, recipes
from mars.lab.config import Run
from mars.lab.errors import LabError
from mars.lab.hardware import choose_device
from mars.lab.optimizers import REGISTRY
from mars.lab.pool import Job, cores, run_all
from mars.lab.report import Summary
from mars.lab.rundir import RunDirectory, write_atomically

FIELD = ("adamw", "lion", "muon", "mars-adamw", "mars-lion", "mars-shampoo", "mars-m")
BASELINE = "adamw"


@dataclass(frozen=True, kw_only=True)
class RaceArgs(Run):
    """Race optimizers."""

    optimizers: tuple[str, ...] = FIELD
    """Who races: registered names, or your own as package.module:Class."""
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
    command = shlex.join(["mars", "race", *words])
    recipe, words = arguments.recipe_of(words, "gpt-tiny", "mars race")
    words = arguments.shorthands(words)
    base = arguments.base_run(recipe, words)
    default = arguments.with_defaults(RaceArgs, base)
    about = (
        f"Race optimizers on {recipe}. Fields of the recipe can be overridden; "
        "each optimizer keeps its own tuned settings. Results go to keep.out."
    )
    args = arguments.parse(RaceArgs, words, f"mars race {recipe}", about, default)
    return race(args, base, command)


def plan(args: RaceArgs, base: Run, directory: Path) -> list[Job]:
    """One run for every optimizer, rate and seed, ordered so that first results come early."""
    if args.seeds < 1 or not args.rates or min(args.rates) <= 0:
        raise LabError("a race needs at least one seed and rates above 0")
    asked = arguments.changes(base, arguments.as_run(args))
    asked.pop("keep", None)
    # A file may override the recipe for all; its optimizer's settings are for that one alone.
    known = base.recipe in recipes.RECIPES
    usual = recipes.make(base.recipe, base.optimizer.name) if known else base
    inherited = arguments.changes(usual, base)
    inherited.pop("keep", None)
    inherited.pop("optimizer", None)
    jobs = []
    for seed in range(args.loop.seed, args.loop.seed + args.seeds):
        for name in args.optimizers:
            if name == base.optimizer.name:
                own = base
            elif known:
                own = recipes.make(base.recipe, name).replace(**inherited)
            else:
                own = base.replace(optimizer={"name": name})
            own = own.replace(**asked)
            for rate in args.rates:
                job = _at_rate(own, rate).replace(
                    loop={"seed": seed}, keep={**_kept(args), "out": ""}
                )
                folder = f"{name.replace(':', '.')}-lr{job.optimizer.lr:.3g}-s{seed}"
                jobs.append(Job(folder, job.replace(keep={"out": str(directory / folder)})))
    return jobs


def _kept(args: RaceArgs) -> dict[str, Any]:
    return {
        name: getattr(args.keep, name) for name in ("tensorboard", "wandb", "save_every", "last")
    }


def _at_rate(run: Run, multiple: float) -> Run:
    """The run at another rate; the rate of what is no matrix keeps its proportion."""
    o = run.optimizer
    rates = {"lr": float(f"{o.lr * multiple:.3g}")}
    if o.lr_1d is not None:
        rates["lr_1d"] = float(f"{o.lr_1d * multiple:.3g}")
    return run.replace(optimizer=rates)


def race(args: RaceArgs, base: Run, command: str) -> int:
    """Run what has not been run yet, then tell and report."""
    for name in args.optimizers:
        if name not in REGISTRY and ":" not in name:
            raise LabError(f"unknown optimizer {name!r}; known: {', '.join(sorted(REGISTRY))}")
    directory = Path(args.keep.out or f"runs/race-{base.recipe}")
    jobs = plan(args, base, directory)
    device = choose_device(args.loop.device)
    workers = args.jobs or (min(cores(), len(jobs)) if device.type == "cpu" else 1)
    threads = args.loop.threads or max(1, cores() // workers)
    jobs = [replace(j, run=j.run.replace(loop={"threads": threads})) for j in jobs]
    with RunDirectory(directory).lock():
        about = {
            "name": f"{base.recipe} race",
            "recipe": base.recipe,
            "optimizers": list(args.optimizers),
            "seeds": args.seeds,
            "rates": list(args.rates),
            "baseline": BASELINE if BASELINE in args.optimizers else args.optimizers[0],
            "command": command,
        }
        write_atomically(directory / "race.json", (json.dumps(about, indent=2) + "\n").encode())
        finished = run_all(jobs, workers, command)
        if not finished:
            sys.stdout.write("stopped; the same command goes on from here\n")
            return 0
        return tell(args, directory, about)


def grid_of(summary: Summary, about: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a learning-rate grid, as recipes keep it and reports draw it."""
    first = summary.runs[0].header
    return {
        "recipe": about["recipe"],
        "command": about["command"],
        "versions": first["versions"],
        "hardware": first["hardware"]["name"],
        "tokens": first["tokens_per_step"] * first["steps"],
        "optimizers": {
            curve.optimizer: {
                "label": curve.label,
                "best": curve.best,
                "losses": {
                    f"{point.lr:g}": [round(loss, 4) for loss in point.losses.values()]
                    + [None] * point.dead
                    for point in curve.points
                },
            }
            for curve in summary.sensitivity
        },
    }


def tell(args: RaceArgs, directory: Path, about: dict[str, Any]) -> int:
    """The table, and the page."""
    from mars.lab.recipes.small import rates
    from mars.lab.report import load, summarise, table, write

    runs = load([directory])
    summary = summarise(runs, baseline=about["baseline"])
    sys.stdout.write("\n" + table(summary) + "\n")
    grid = rates(about["recipe"])
    known = grid if grid["optimizers"] and len(args.rates) == 1 else None
    if len(args.rates) > 1:
        outcome = json.dumps(grid_of(summary, about), indent=1) + "\n"
        write_atomically(directory / "rates.json", outcome.encode())
    if args.report:
        page = directory / "report.html"
        write(page, runs, summary, rates=known, title=f"Race: {about['recipe']}")
        sys.stdout.write(f"\nreport: {page.resolve().as_uri()}\n")
    return 0

"""`mars report`: logs in, a table and an HTML file out."""

from __future__ import annotations

import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.lab.errors import LabError
from mars.lab.report import fit, page
from mars.lab.report.compare import is_baseline
from mars.lab.report.rates import read_rates
from mars.lab.report.runs import RunLog, load
from mars.lab.report.summary import summarise
from mars.lab.report.words import table

BASELINE, STUDY = "adamw", "results.jsonl"


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Make a report of runs: a table here, curves in an HTML file that needs nothing else."""

    runs: tuple[Path, ...]
    """Run directories, race directories or log.jsonl files."""
    out: Path | None = None
    """The HTML file; by default report.html in the first of them, runs.html if that is a study."""
    title: str | None = None
    """The page's title; by default the name of the race or recipe."""
    baseline: str | None = None
    """The optimizer to compare with; by default the race's baseline, or adamw."""
    rates: Path | None = None
    """A JSON file with the learning-rate grid that tuned the optimizers, to be drawn too."""
    open: bool = False
    """Open the page in a browser."""


def report_command(args: ReportArgs) -> Path:
    """Write the report, print the table and where the page is."""
    runs = load(args.runs)
    if args.baseline and not any(is_baseline(run, args.baseline) for run in runs):
        there = ", ".join(dict.fromkeys(run.optimizer for run in runs))
        raise LabError(f"--baseline {args.baseline}: no run is by it; there are {there}")
    rates = _known_rates(runs) if args.rates is None else read_rates(args.rates)
    summary = summarise(runs, args.baseline or _baseline(runs), rates)
    out = args.out if args.out is not None else _beside(args.runs[0])
    if out.is_dir():
        out = _beside(out)
    if not out.parent.is_dir():
        raise LabError(f"{out}: the folder {out.parent} does not exist")
    written = page.write(out, runs, summary, title=args.title)
    sys.stdout.write(f"{table(summary, fit.room())}\n\n{written}\n")
    if args.open:
        webbrowser.open(written.resolve().as_uri())
    return written


def _known_rates(runs: list[RunLog]) -> dict[str, Any] | None:
    """The grid of the recipe that these runs are a race of."""
    from mars.lab import recipes

    said = {run.race.get("recipe") for run in runs}
    grid = recipes.rates(str(said.pop())) if len(said) == 1 else {"optimizers": {}}
    return grid if grid["optimizers"] else None


def _baseline(runs: list[RunLog]) -> str:
    said = (run.race.get("baseline") for run in runs)
    return next((name for name in said if isinstance(name, str)), BASELINE)


def _beside(path: Path) -> Path:
    folder = path if path.is_dir() else path.parent
    # A study has a page of its own, in its arms' names.
    return folder / ("runs.html" if (folder / STUDY).exists() else "report.html")

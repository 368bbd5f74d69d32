"""Rewrite src/mars/lab/recipes/settings.json: what grids and studies say is best, and which do.

    python bench/settings.py            # rewrite it, after results were added
    python bench/settings.py --check    # is it what the results say? status 1 if not

Read are the learning-rate grids of recipes (src/mars/lab/recipes/rates/*.json, as `mars race
--rates` writes them) and the results of studies (docs/results/NAME/results.jsonl, as `mars study
NAME --out` writes them): an entry for every optimizer of a grid and every arm of a study.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mars.lab import recipes, tasks
from mars.lab.config import Run
from mars.lab.errors import LabError
from mars.lab.recipes.settings import Setting, at_rate, fields, seen
from mars.lab.report.rates import from_grid, read_rates
from mars.lab.report.statistics import spread
from mars.lab.rundir import write_atomically
from mars.lab.study import fingerprint, questions
from mars.lab.study.choice import ladders
from mars.lab.study.definition import Study
from mars.lab.study.results import Result, Results

ROOT = Path(__file__).parents[1]
FILE = Path("src/mars/lab/recipes/settings.json")
DIGITS = 6  # of a loss
# Words of a race's command that would make its runs other than the recipe says, but for steps.
CHANGES = ("--model.", "--loop.batch", "--loop.epochs", "--optimizer.", "--schedule.")


def setting(run: Run, losses: Sequence[float], count: int | None = None, **more: Any) -> Setting:
    """The entry of a run, at its rate: from the final losses of its seeds."""
    found = spread(losses)
    assert found is not None
    own, unit, batch = seen(run)
    return Setting(
        optimizer=fields(run.optimizer),
        parameters=tasks.of(run).parameters,
        unit=unit,
        seen=count or own,
        batch=batch,
        loss=round(found.mean, DIGITS),
        spread=None if found.sd is None else round(found.sd, DIGITS),
        seeds=found.n,
        **more,
    )


def of_grid(path: Path, source: str) -> Iterator[Setting]:
    """A recipe's committed grid."""
    grid = read_rates(path)
    for word in CHANGES:
        if word in grid["command"]:
            raise LabError(f"{source}: {word}… changes the recipe: its rates are not the recipe's")
    for curve in from_grid(grid):
        if curve.best is None:
            continue
        run = recipes.make(grid["recipe"], curve.optimizer)
        yield setting(
            run.replace(optimizer=at_rate(run.optimizer, curve.best)),
            list(next(p.losses for p in curve.points if p.lr == curve.best).values()),
            count=grid[seen(run)[1]],
            recipe=grid["recipe"],
            rates=len(curve.points),
            bracketed=bool(curve.bracketed),
            source=source,
            arm=curve.optimizer,
            command=grid["command"],
        )


def of_study(study: Study, results: Sequence[Result], source: str) -> Iterator[Setting]:
    """A study's arms, as far as rates were compared: the only one that was run is no best one.

    Without those that have a warm-up of their own, of which a setting says nothing.
    """
    for ladder in ladders(study, results).values():
        if ladder.best is None or len(ladder.losses) < 2:
            continue
        if _warmup(study.run(ladder.arm)) != _warmup(study.base(ladder.arm.optimizer)):
            continue
        yield setting(
            study.run(ladder.arm, ladder.best),
            list(ladder.losses[ladder.best].values()),
            recipe=study.base(ladder.arm.optimizer).recipe,
            rates=len(ladder.losses),
            bracketed=ladder.bracketed,
            source=source,
            arm=ladder.arm.label,
            command=f"mars study {study.name}",
        )


def _warmup(run: Run) -> int:
    """In percent of the steps."""
    return round(100 * run.schedule.warmup_steps / run.loop.steps)


def _runs(s: Setting) -> tuple[Any, ...]:
    """What two entries share that are of the same runs."""
    return str(s.optimizer), s.recipe, s.seen, s.batch, s.loss


def collect(root: Path) -> list[Setting]:
    """Every entry there is, small models first; runs that a study took from one before it, once."""
    found: list[Setting] = []
    for path in sorted((root / FILE.parent / "rates").glob("*.json")):
        found += of_grid(path, path.relative_to(root).as_posix())
    paths = (root / "docs/results" / name / "results.jsonl" for name in questions.STUDIES)
    texts: dict[str, str] = {}  # of a recipe, by its first study: losses of another do not compare
    for path in filter(Path.exists, paths):
        study, results = questions.find(path.parent.name), Results(path.parent).read()
        base = study.base(study.arms[0].optimizer)
        if texts.setdefault(base.recipe, base.data.source) != base.data.source:
            continue
        fingerprint.check(study, results, path.parent)
        known = set(map(_runs, found))
        own = of_study(study, results, path.relative_to(root).as_posix())
        found += [s for s in own if _runs(s) not in known]
    return sorted(found, key=lambda s: (s.unit != "tokens", s.parameters, s.seen, s.source))


def text(found: Sequence[Setting]) -> str:
    return json.dumps([dataclasses.asdict(s) for s in found], indent=1, ensure_ascii=False) + "\n"


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if behind")
    check = parser.parse_args(words).check
    path = root / FILE
    try:
        wanted = text(collect(root))
    except LabError as error:
        sys.exit(f"error: {error}")
    if path.exists() and path.read_text() == wanted:
        return 0
    print(f"{'behind its results' if check else 'rewritten'}: {FILE}")
    if not check:
        write_atomically(path, wanted.encode())
        print("the tables of docs/: python bench/readme_tables.py")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())

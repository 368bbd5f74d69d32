"""Data that are elsewhere than when a run began: known by their sha256, the run goes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mars.lab import tasks
from mars.lab.config import Run, read_config, to_json
from mars.lab.errors import LabError
from mars.lab.log import header
from mars.lab.report import units
from mars.lab.rundir import RunDirectory, write_json


def follow(runs: Sequence[Run]) -> None:
    """Note in the directories of runs, all of the same data, where these are now.

    If they are not the same, or if more is different, nothing is changed: training refuses that.
    """
    there = {Path(run.directory): moved for run in runs if (moved := _moved(run))}
    if not there:
        return
    data = runs[0].data
    same = _same(runs[0], list(there))
    for path in same:
        with RunDirectory(path, "config.json").lock():
            write_json(path / "config.json", to_json(there[path]))
    if same:
        more = f" and {units.count(len(same) - 1, 'more run')}" if len(same) > 1 else ""
        sys.stderr.write(f"the data of {same[0]}{more} are in {data.source} now, and the same\n")


def would_follow(run: Run) -> bool:
    """Whether there is a run in the directory whose data are elsewhere now, and the same."""
    return _moved(run) is not None and bool(_same(run, [Path(run.directory)]))


def _same(run: Run, directories: Sequence[Path]) -> list[Path]:
    """The directories of runs that began with the data that a run names now."""
    task = tasks.of(tasks.with_steps(run)).open()
    return [path for path in directories if _sums(path) == [task.train.sha256, task.valid.sha256]]


def _moved(run: Run) -> Run | None:
    """The run that began in a run's directory, with its data elsewhere; None if nothing moved."""
    written = Path(run.directory) / "config.json"
    if not run.keep.resume or not written.is_file():
        return None
    try:
        begun = read_config(written)
    except LabError:  # damaged: whoever needs it will tell
        return None
    there = begun.replace(data={"source": run.data.source, "valid": run.data.valid})
    return there if there != begun and there.data == run.data else None


def _sums(directory: Path) -> list[str]:
    """The sha256 of the data that the run began with; none if its log is lost or damaged."""
    try:
        begun = header(directory)
        return [begun["data"][name]["sha256"] for name in ("train", "valid")]
    except (LabError, KeyError):
        return []

"""Data that are elsewhere than when a run began: known by their sha256, the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mars.lab import tasks
from mars.lab.config import Run, read_config, to_json
from mars.lab.errors import LabError
from mars.lab.log import read
from mars.lab.rundir import RunDirectory, write_atomically


def follow(run: Run) -> None:
    """Note in the run's directory where its data are now, if they are the same.

    If they are not, or if more is different, nothing is changed: training refuses that.
    """
    directory = Path(run.directory)
    written = directory / "config.json"
    if not run.keep.resume or not written.is_file():
        return
    try:
        begun = read_config(written)
    except LabError:  # damaged: whoever needs it will tell
        return
    there = begun.replace(data={"source": run.data.source, "valid": run.data.valid})
    if there == begun or there.data != run.data:
        return
    task = tasks.of(tasks.with_steps(run)).open()
    if _sums(directory) != [task.train.sha256, task.valid.sha256]:
        return
    with RunDirectory(directory, "config.json").lock():
        write_atomically(written, (json.dumps(to_json(there), indent=2) + "\n").encode())
    sys.stderr.write(f"the data of {directory} are in {run.data.source} now, and the same\n")


def _sums(directory: Path) -> list[str]:
    """The sha256 of the data that the run began with; none if its log is lost or damaged."""
    try:
        header = next(record for record in read(directory) if record["kind"] == "header")
        return [header["data"][name]["sha256"] for name in ("train", "valid")]
    except (LabError, StopIteration, KeyError):
        return []

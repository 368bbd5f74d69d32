"""A race that loses a worker goes on; one that loses its head ends, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from nursery import Nursery
from runs import config, set_length, written

from mars.lab.log import read


class Race:
    """A race of two runs, too long to end by itself."""

    def __init__(self, mars: Nursery, home: Path, jobs: int) -> None:
        self.mars, self.out, self.given = mars, home / "race", home / "unused"
        self.process = mars.start(*self.words(1_000_000, jobs))
        self.jobs = jobs

    def words(self, steps: int, jobs: int) -> list[str]:
        path = written(config(self.given, steps=steps, eval_every=50, log_every=10))
        return [
            "race", str(path), "--optimizers", "adamw@0.01", "mars-adamw", "--seeds", "1",
            "--jobs", str(jobs), "--keep.out", str(self.out), "--keep.save-every", "20",
            "--no-report",
        ]  # fmt: skip

    def workers(self) -> list[int]:
        """Processes that train: they hold the locks. Waits until each has saved something."""
        self.process.until(lambda: len(self._saved()) == self.jobs, 100)
        return [json.loads((folder / "lock").read_text())["pid"] for folder in self._saved()]

    def _saved(self) -> set[Path]:
        return {path.parents[1] for path in self.out.glob("*/checkpoints/step-*")}

    def end(self) -> None:
        """The same command resumes, and ends a little later."""
        length = max(int(p.name[5:13]) for p in self.out.glob("*/checkpoints/step-*")) + 10
        begun = self._saved()
        for folder in begun:
            set_length(folder, length)
        ended = self.mars.run(*self.words(length, 1))
        assert ended.code == 0, ended.err
        logs = {path.parent: read(path.parent) for path in self.out.glob("*/log.jsonl")}
        assert [log[-1]["status"] for log in logs.values()] == ["done", "done"]
        assert all(any(r.get("what") == "resumed" for r in logs[folder]) for folder in begun)


def pid_of(folder: Path) -> int | None:
    """Of the process that trains it, or did."""
    try:
        return int(json.loads((folder / "lock").read_text())["pid"])
    except (OSError, ValueError):  # it is being written
        return None


def gone(pid: int, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_a_worker_killed_for_memory(mars: Nursery, tmp_path: Path) -> None:
    """Its run goes on in a new one, from its checkpoint; killed again, it has failed. The other
    run knows nothing of that.
    """
    race = Race(mars, tmp_path, jobs=2)
    victim, other = race.workers()
    folder = next(f for f in race.out.glob("*/") if pid_of(f) == victim)
    os.kill(victim, signal.SIGKILL)
    race.process.until(lambda: pid_of(folder) not in (None, victim), 60)
    race.process.until(lambda: any(r.get("what") == "resumed" for r in read(folder)), 60)
    told = "its process was ended by SIGKILL (memory?)"
    assert f"starting a run again: {told}\n" == race.process.err.read_text()
    again = pid_of(folder)
    assert again is not None
    os.kill(again, signal.SIGKILL)
    failed = f"[1/2] {folder.name}: failed: {told}"
    race.process.until(lambda: failed in race.process.err.read_text(), 60)
    os.kill(other, 0)
    race.process.send(signal.SIGTERM)
    ended = race.process.wait()
    assert ended.code == 130
    assert "stopped; the same command resumes from here" in ended.out
    assert "Traceback" not in ended.err
    assert gone(other)
    race.end()


@pytest.mark.slow
def test_a_race_whose_main_process_is_killed(mars: Nursery, tmp_path: Path) -> None:
    race = Race(mars, tmp_path, jobs=1)
    (worker,) = race.workers()
    race.process.send(signal.SIGKILL)
    race.process.wait()
    assert gone(worker)
    race.end()

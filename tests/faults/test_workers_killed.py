"""A race that loses a worker, or its head, ends soon, leaves nobody behind, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import config, written

from mars.lab.log import read


class Race:
    """A race of two runs at a time, too long to end by itself."""

    def __init__(self, home: Path) -> None:
        self.out = home / "race"
        given = written(config(home / "unused", steps=1_000_000, eval_every=50, log_every=10))
        self.words = [
            sys.executable, "-m", "mars.lab", "race", str(given), "--optimizers", "adamw",
            "mars-adamw", "--seeds", "1", "--jobs", "2", "--keep.out", str(self.out),
            "--keep.save-every", "20", "--no-report",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            self.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def workers(self) -> list[int]:
        """Processes that train: they hold the locks. Waits until each has saved something."""
        for _ in range(1200):
            saved = {path.parents[1] for path in self.out.glob("*/checkpoints/step-*")}
            if len(saved) == 2:
                return [json.loads((folder / "lock").read_text())["pid"] for folder in saved]
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError("no checkpoints in a minute")

    def end(self) -> None:
        """The same command goes on, and ends a little later."""
        steps = max(int(p.name[5:13]) for p in self.out.glob("*/checkpoints/step-*")) + 10
        done = subprocess.run(
            [*self.words, "--loop.steps", str(steps)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        logs = [read(path.parent) for path in self.out.glob("*/log.jsonl")]
        assert [log[-1]["status"] for log in logs] == ["done", "done"]
        assert all(any(r.get("what") == "resumed" for r in log) for log in logs)


@pytest.fixture
def race(tmp_path: Path) -> Iterator[Race]:
    race = Race(tmp_path)
    yield race
    with contextlib.suppress(ProcessLookupError):
        os.killpg(race.process.pid, signal.SIGKILL)  # whoever is left
    race.process.communicate(timeout=30)


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
def test_a_worker_killed_for_memory(race: Race) -> None:
    victim, other = race.workers()
    os.kill(victim, signal.SIGKILL)
    _, err = race.process.communicate(timeout=60)
    assert race.process.returncode == 1
    assert "mars: error: a worker died (memory?); the same command goes on from here" in err
    assert "Traceback" not in err
    assert gone(other)
    race.end()


@pytest.mark.slow
def test_a_race_whose_main_process_is_killed(race: Race) -> None:
    workers = race.workers()
    race.process.kill()
    race.process.wait(10)
    assert all(gone(pid) for pid in workers)
    race.end()

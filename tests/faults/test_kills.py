"""kill -9: at random times, inside the writing of a checkpoint, and around its rename."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from nursery import Nursery
from runs import assert_alike, given, newest, set_length, steps, texts

NEVER = 1_000_000


def kill_again_and_again(mars: Nursery, folder: Path, kills: int, optimizer: str) -> int:
    """Kill a run at random times, as often as asked, then let it end a few steps later."""
    dice = random.Random(kills)
    path = given(folder, optimizer, steps=NEVER, eval_every=40)
    usual = 0.0  # seconds from the start to the next checkpoint, on this machine, now
    for kill in range(kills):
        begun, process = time.monotonic(), mars.start("train", path)
        if kill == 0:
            process.until(lambda: len(steps(folder)) > 0)
            usual = time.monotonic() - begun
        before = steps(folder)
        time.sleep(dice.uniform(0, 2.5 * usual))
        process.send(signal.SIGKILL)
        assert process.wait().code == -signal.SIGKILL
        if steps(folder) == before:
            usual *= 1.1  # it may be slower now: in the end it must come forward
    end = max(steps(folder)) + 7
    set_length(folder, end)
    ended = mars.run("train", given(folder, optimizer, steps=end, eval_every=40))
    assert ended.code == 0, ended.err
    assert f"done at step {end}" in ended.out
    return end


def check(mars: Nursery, folder: Path, kills: int, optimizer: str) -> None:
    end = kill_again_and_again(mars, folder / "killed", kills, optimizer)
    assert end > kills  # it came forward, though it was never let go on for long
    assert mars.run("train", given(folder / "whole", optimizer, steps=end, eval_every=40)).code == 0
    assert_alike(folder / "killed", folder / "whole")
    assert texts(folder / "killed", "refused") == []  # no kill left a broken checkpoint
    left = [p.name for p in (folder / "killed").rglob("*") if p.name.startswith(".tmp-")]
    assert left == []


@pytest.mark.slow
def test_twelve_kills_change_nothing(mars: Nursery, tmp_path: Path) -> None:
    check(mars, tmp_path, 12, "mars-m")


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["mars-adamw", "mars-m", "exact", "lean", "muon"])
def test_fifty_kills_change_nothing(mars: Nursery, tmp_path: Path, optimizer: str) -> None:
    check(mars, tmp_path, 50, optimizer)


# Kills itself when it is about to do something to a file; half of what was to be written is there.
KILL = """
import os, signal, sys
from mars.lab import sealed
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def audit(event, arguments):
    if event == {event!r} and {path!r} in str(arguments[0]):
        die()
sys.addaudithook(audit)
write = sealed.HashedFile.write
def half(self, data):
    if {event!r} == "write" and {path!r} in str(self._file.name):
        self._file.write(bytes(data)[: len(data) // 2])
        self._file.flush()
        die()
    return write(self, data)
sealed.HashedFile.write = half
"""

# Step 6 is the second checkpoint; the name of a temporary one begins with ".tmp-step-00000006".
MOMENTS = {
    "nothing written yet": ("os.mkdir", ".tmp-step-00000006"),
    "a part of the weights": ("write", "step-00000006-"),
    "half of the manifest": ("write", "manifest.json"),  # already of step 3
    "before the rename": ("os.rename", ".tmp-step-00000006"),
    "between rename and best.json": ("open", ".tmp-best.json"),
    "before best.json is renamed": ("os.rename", ".tmp-best.json"),
    "before the old one is deleted": ("os.rename", "step-00000003"),
    "half of the old one is deleted": ("os.remove", "model.safetensors"),
}


@pytest.fixture(scope="module")
def whole(mars: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 15 steps."""
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    assert mars.run("train", given(folder, steps=15)).code == 0
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_inside_the_writing_of_a_checkpoint(
    mars: Nursery, tmp_path: Path, whole: Path, moment: str
) -> None:
    event, path = MOMENTS[moment]
    folder = tmp_path / "run"
    fault = KILL.format(event=event, path=path)
    ended = mars.run("train", given(folder, steps=15), fault=fault)
    assert ended.code == -signal.SIGKILL, ended.err
    before = steps(folder)
    ended = mars.run("train", given(folder, steps=15))
    assert ended.code == 0, ended.err
    if before:
        assert f"resumed from step-{max(before):08d}" in ended.err
    assert "refused" not in ended.err
    assert_alike(folder, whole)
    assert not [name for name in os.listdir(folder / "checkpoints") if name.startswith(".tmp-")]
    assert newest(folder).name == "step-00000015"

"""Disks that are full, read-only, or fail: the run ends with one line, and loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import Ended, Nursery
from runs import assert_alike, given, newest, set_length, steps

from mars.lab.log import read

LONG = 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 1.5 MB: really full, really read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Fill a disk but for so many bytes."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - leave)))
    return filler


def check_clean_end(ended: Ended, text: str) -> None:
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert ended.err.count("mars: error: ") == 1
    assert text in ended.err.splitlines()[-1]


def check_goes_on(mars: Nursery, folder: Path, whole: Path) -> None:
    """With room again, the same command ends as if nothing had been."""
    assert read(folder)  # whole lines
    left = [path.name for path in folder.rglob("*") if path.name.startswith(".tmp-")]
    assert left == []
    last = newest(folder).name
    ended = mars.run("train", given(folder, steps=LONG, eval_every=20))
    assert ended.code == 0, ended.err
    assert f"resumed from {last}" in ended.err
    assert "refused" not in ended.err
    assert_alike(folder, whole)


@pytest.fixture(scope="module")
def whole(mars: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    assert mars.run("train", given(folder, steps=LONG, eval_every=20)).code == 0
    return folder


def test_a_disk_that_fills_up_during_a_checkpoint(
    mars: Nursery, small_disk: Path, whole: Path
) -> None:
    folder = small_disk / "run"
    assert mars.run("train", given(folder, steps=40, eval_every=20)).code == 0
    size = sum(path.stat().st_size for path in newest(folder).iterdir())
    filler = fill(small_disk, size // 2)
    ended = mars.run("train", given(folder, steps=LONG, eval_every=20))
    check_clean_end(ended, "the disk is full; earlier ones are untouched")
    assert "cannot save checkpoint" in ended.err
    filler.unlink()
    check_goes_on(mars, folder, whole)


def test_a_disk_that_fills_up_during_a_record(
    mars: Nursery, small_disk: Path, tmp_path: Path, whole: Path
) -> None:
    """The log alone lies on the small disk, and every record is longer than the room."""
    folder = tmp_path / "run"
    assert mars.run("train", given(folder, steps=40, eval_every=20)).code == 0
    shutil.move(folder / "log.jsonl", small_disk / "log.jsonl")
    (folder / "log.jsonl").symlink_to(small_disk / "log.jsonl")
    set_length(folder, LONG)
    filler = fill(small_disk, 0)
    # Rewinding replaces the log as a whole, on the run's own disk; not here.
    fault = "from mars.lab.log import Log; Log.rewind = lambda *_: 0"
    ended = mars.run("train", given(folder, steps=LONG, eval_every=20), fault=fault)
    check_clean_end(ended, "log.jsonl: the disk is full")
    filler.unlink()
    check_goes_on(mars, folder, whole)


LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
"""


def test_a_limit_of_file_sizes(mars: Nursery, tmp_path: Path, whole: Path) -> None:
    """As a full disk, and where nothing can be mounted."""
    folder = tmp_path / "run"
    assert mars.run("train", given(folder, steps=40, eval_every=20)).code == 0
    path = given(folder, steps=LONG, eval_every=20)
    ended = mars.run("train", path, fault=LIMIT.format(size=20_000))
    check_clean_end(ended, "the file would be larger than the limit (ulimit -f)")
    check_goes_on(mars, folder, whole)


def test_a_disk_that_is_full_at_the_start(mars: Nursery, small_disk: Path) -> None:
    fill(small_disk, 0)
    ended = mars.run("train", given(small_disk.parent / "x", steps=3), "--keep.out",
                     small_disk / "run")  # fmt: skip
    check_clean_end(ended, "the disk is full; choose another one")
    assert [p.name for p in small_disk.rglob("*") if p.is_file()] == ["filler"]


def test_a_read_only_file_system(mars: Nursery, small_disk: Path, tmp_path: Path) -> None:
    path = given(tmp_path / "x", steps=3)
    done = small_disk / "done"
    assert mars.run("train", path, "--keep.out", done).code == 0
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = mars.run("train", path, "--keep.out", small_disk / "new")
    check_clean_end(ended, "the file system is read-only; choose another one")
    longer = given(tmp_path / "longer", steps=6)
    ended = mars.run("train", longer, "--keep.out", done)
    check_clean_end(ended, "the file system is read-only; choose another one")
    assert "done at step 3" in mars.run("train", path, "--keep.out", done).out  # it is complete


def test_a_file_in_the_way(mars: Nursery, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/run"):
        out = tmp_path / place
        ended = mars.run("train", given(tmp_path / "x", steps=3), "--keep.out", out)
        check_clean_end(ended, "choose another one")
    assert (tmp_path / "file").read_text() == "mine"


# The operating system notices a bad block when it is told to write it, at one file's sync.
BAD_BLOCK = """
import errno, os
fsync = os.fsync
def failing(descriptor):
    if {name!r} in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        raise OSError(errno.EIO, "Input/output error")
    fsync(descriptor)
os.fsync = failing
"""


@pytest.mark.parametrize("name", ["optimizer.pt", "log.jsonl", "checkpoints"])
def test_a_disk_with_a_bad_block(mars: Nursery, tmp_path: Path, whole: Path, name: str) -> None:
    folder = tmp_path / "run"
    assert mars.run("train", given(folder, steps=40, eval_every=20)).code == 0
    fault = BAD_BLOCK.format(name="/" + name)
    ended = mars.run("train", given(folder, steps=LONG, eval_every=20), fault=fault)
    check_clean_end(ended, "Input/output error")
    assert steps(folder)[-1] >= 40
    check_goes_on(mars, folder, whole)

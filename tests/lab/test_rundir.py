"""The run directory: refused early, owned once, never half a file."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars.lab.cli import main
from mars.lab.errors import LabError
from mars.lab.rundir import HOLDS, TEMPORARY, RunDirectory, temporary_name, write_atomically

# Light: no torch in the children.
OWNER = """
import os, sys, time
from mars.lab.rundir import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    if "fork" in sys.argv and os.fork() == 0:
        os.close(1); os.close(2)
        time.sleep(5)
        os._exit(0)
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing past this size fails as on a full disk. Python ignores SIGXFSZ already."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Root may write anywhere, so be somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_owner(tmp_path)
    yield process
    process.kill()
    process.communicate()


def start_owner(path: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OWNER, str(path), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_write_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"one")
    write_atomically(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("stage", ["content", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    if stage != "content":
        monkeypatch.setattr(os, stage, fail)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail if stage == "content" else b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with file_size_limit(1000), pytest.raises(LabError, match=r"cannot write .*a\.json: the file"):
        write_atomically(path, bytes(100_000))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_run_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "a")
    assert os.listdir(run.path) == []
    RunDirectory(run.path)


@pytest.mark.parametrize("file", HOLDS)
def test_a_directory_of_another_kind_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("precious")
    for own in HOLDS:
        if own == file:
            RunDirectory(tmp_path, own)
            continue
        with pytest.raises(LabError, match=rf"holds {HOLDS[file].what} \({file}\): choose another"):
            RunDirectory(tmp_path, own)
    assert os.listdir(tmp_path) == [file]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "gpt-tiny", "--keep.out"],
        ["race", "gpt-tiny", "--optimizers", "adamw", "--keep.out"],
        ["tune", "gpt-tiny", "--search", "lr", "--trials", "1", "--keep.out"],
        ["study", "tiny-clip", "--seconds", "9", "--out"],
    ],
)
def test_no_command_writes_into_prepared_data(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert main([*words, str(tmp_path)]) == 1
    assert f"{tmp_path} holds prepared data" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize("where", ["file", "file/run", "file/deep/run"])
def test_a_file_in_the_way_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(LabError, match=rf"run directory .*{where}: .*file.*choose another"):
        RunDirectory(tmp_path / where)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_read_only_directory_is_refused(inside: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to others than root
        os.chmod(folder, 0o555)
        with not_root(), pytest.raises(LabError, match="no permission to write there"):
            RunDirectory(Path(folder) / inside)
        assert os.listdir(folder) == []


def test_a_full_disk_is_noticed_before_the_start(tmp_path: Path) -> None:
    with file_size_limit(1000), pytest.raises(LabError, match=f"run directory {tmp_path}: .*limit"):
        RunDirectory(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_second_process_is_told_who_the_first_is(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    text = rf"{tmp_path} is in use by process {owner.pid} on host {os.uname().nodename}"
    with pytest.raises(LabError, match=text), RunDirectory(tmp_path).lock():
        pytest.fail("locked twice")
    owner.communicate("")
    with RunDirectory(tmp_path).lock():
        pass


def test_an_owner_that_is_about_to_go_is_waited_for(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    """A worker saves before it follows its killed command."""
    leaving = threading.Timer(0.5, lambda: owner.communicate(""))
    leaving.start()
    with RunDirectory(tmp_path).lock():
        leaving.join()
        assert owner.returncode == 0


def test_a_killed_owner_holds_nothing(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    with RunDirectory(tmp_path).lock():
        pass


def test_a_worker_of_a_killed_owner_holds_nothing(tmp_path: Path) -> None:
    """A forked child shares its parent's flock until it closes the file."""
    owner = start_owner(tmp_path, "fork")
    owner.kill()
    owner.communicate()
    with RunDirectory(tmp_path).lock():
        pass


def test_a_lock_is_released_on_an_error(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(ValueError, match="mine"), run.lock():
        raise ValueError("mine")
    with run.lock(), pytest.raises(LabError, match=f"process {os.getpid()} "), run.lock():
        pass
    with run.lock():
        pass


def test_the_owner_removes_what_killed_writers_left(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints" / "step-00000001"
    kept.mkdir(parents=True)
    (tmp_path / "log.jsonl").write_text("{}\n")
    temporary_name(tmp_path / "config.json").write_text("half")
    torn = temporary_name(kept)
    torn.mkdir()
    (torn / "model.safetensors").write_text("half")
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (tmp_path / f"{TEMPORARY}link").symlink_to(outside)
    with RunDirectory(tmp_path).lock():
        assert sorted(os.listdir(tmp_path)) == ["checkpoints", "elsewhere", "lock", "log.jsonl"]
        assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]

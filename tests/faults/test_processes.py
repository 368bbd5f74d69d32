"""Signals, a closed terminal, a second process in the same directory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from nursery import Nursery, Process
from runs import assert_alike, config, given, newest, set_length, steps, texts, written

from mars.lab.log import read

NEVER = 1_000_000
PROMISE = "will save after this step and stop; Ctrl-C again stops without saving\n"


def begun(process: Process, folder: Path) -> None:
    process.until(lambda: len(steps(folder)) > 0)


def check_whole(mars: Nursery, folder: Path) -> None:
    """Let it go on a little; it is the run that was not stopped."""
    end = max(steps(folder)) + 5
    set_length(folder, end)
    ended = mars.run("train", given(folder, steps=end, eval_every=40))
    assert ended.code == 0, ended.err
    whole = folder.with_name("whole")
    assert mars.run("train", given(whole, steps=end, eval_every=40)).code == 0
    assert_alike(folder, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_ends(mars: Nursery, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    process = mars.start("train", given(folder, steps=NEVER, eval_every=40))
    begun(process, folder)
    process.send(number)
    ended = process.wait()
    assert ended.code == 130, ended.err
    last = read(folder)[-1]
    assert (last["kind"], last["status"]) == ("end", "stopped")
    assert newest(folder).name == f"step-{last['step']:08d}"  # not a step is lost
    _, promised, then = ended.err.partition(f"{number.name}: {PROMISE}")
    assert promised
    assert then.endswith(f"{number.name} at step {last['step']}\n")
    assert "the same command resumes from there" in ended.out
    check_whole(mars, folder)


# When `hold` is there, the next save stands still in the midst of its first file: it says `held`,
# and `asked` when the handler has had a signal.
HELD = """
import os, pathlib, signal, time
folder = pathlib.Path({folder!r})
fsync = os.fsync
def held(descriptor):
    fsync(descriptor)
    if (folder / "hold").exists() and any(folder.glob("run/checkpoints/.tmp-*")):
        (folder / "hold").rename(folder / "held")
        while not signal.getsignal(signal.SIGINT).__self__.asked:
            time.sleep(0.01)
        (folder / "asked").touch()
        time.sleep(1000)
os.fsync = held
"""


def test_a_second_ctrl_c_ends_at_once(mars: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = given(folder, steps=NEVER, eval_every=40)
    process = mars.start("train", path, fault=HELD.format(folder=str(tmp_path)))
    begun(process, folder)
    (tmp_path / "hold").touch()
    process.until((tmp_path / "held").exists)
    process.send(signal.SIGINT)
    process.until((tmp_path / "asked").exists)
    process.until(lambda: process.err.read_text().endswith(f"SIGINT: {PROMISE}"))  # nothing saved
    process.send(signal.SIGINT)
    ended = process.wait()
    assert ended.code == 130, ended.err
    assert "mars: interrupted" in ended.err
    assert "Traceback" not in ended.err
    assert not list(folder.glob("checkpoints/.tmp-*"))
    check_whole(mars, folder)


def test_ctrl_c_promises_no_save_where_there_is_none(mars: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    unsaved = config(folder, steps=NEVER).replace(keep={"save_every": None})
    process = mars.start("train", written(unsaved))
    process.until(lambda: "validation loss" in process.err.read_text())
    process.send(signal.SIGINT)
    ended = process.wait()
    assert ended.code == 130, ended.err
    assert "SIGINT: will stop after this step, without saving (keep.save_every" in ended.err
    assert "starts again" in ended.out
    assert not steps(folder)


def test_ctrl_c_is_answered_beside_the_bar(mars: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reader, slave = os.openpty()
    os.set_blocking(reader, False)
    seen = bytearray()

    def reads(what: bytes) -> bool:
        with contextlib.suppress(BlockingIOError):
            seen.extend(os.read(reader, 100_000))
        return what in seen

    path = given(folder, steps=NEVER, eval_every=40)
    process = mars.start("train", path, err=Path(os.ttyname(slave)))
    process.until(lambda: reads(b"loss "))
    process.send(signal.SIGINT)
    process.until(lambda: reads(b"SIGINT at step"))
    process.until(lambda: reads(b"\n") and "resumes from there" in process.out.read_text())
    os.close(slave)
    process.err = Path(os.devnull)
    assert process.wait().code == 130
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    lines = [line for part in shown.split("\n") for line in part.split("\r")]
    assert lines.count(f"SIGINT: {PROMISE.strip()}") == 1


def test_a_second_process_is_refused_and_the_first_not_disturbed(
    mars: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    path = given(folder, steps=NEVER, eval_every=40)
    first = mars.start("train", path)
    begun(first, folder)
    second = mars.run("train", path)
    assert second.code == 1
    assert f"is in use by process {first.pid} on host" in second.err
    first.send(signal.SIGKILL)  # its lock file stays, its lock does not
    first.wait()
    assert str(first.pid) in (folder / "lock").read_text()
    check_whole(mars, folder)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_training_goes_on_when_nobody_reads_its_output(
    mars: Nursery, tmp_path: Path, kind: str
) -> None:
    """As in `mars train … 2>&1 | tee`, when tee is killed; or a terminal that is gone."""
    folder = tmp_path / "run"
    if kind == "pipe":
        path = tmp_path / "fifo"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        others: list[int] = []
    else:
        reader, slave = os.openpty()
        path, others = Path(os.ttyname(slave)), [slave]
    process = mars.start("train", given(folder, steps=NEVER, eval_every=4), err=path)
    os.set_blocking(reader, False)

    def reads() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 100_000)
        return len(steps(folder)) > 0

    process.until(reads)
    for descriptor in (reader, *others):
        os.close(descriptor)
    at = max(steps(folder))
    process.until(lambda: max(steps(folder)) > at + 12)  # validations were told meanwhile
    process.send(signal.SIGTERM)
    process.err = Path(os.devnull)
    ended = process.wait()
    assert ended.code == 130
    assert len(texts(folder, "interrupted")) == 1
    assert "stopped at step" in ended.out

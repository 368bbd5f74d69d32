"""A preparation that was interrupted, anywhere, ends with the bytes of one that was not."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from data_files import TEXTS, content, documents, jsonl, stream, table

from mars.lab.data import hub, open_tokens, preparation, prepare
from mars.lab.data.hub import Dataset
from mars.lab.data.manifest import load_manifest
from mars.lab.errors import LabError

SLOW = """
    import sys, time
    from mars.lab.data import preparation, prepare
    preparation.BATCH_CHARACTERS = 2000
    prepare(sys.argv[1], sys.argv[2], shard_tokens=700, valid_fraction=0.1, commit_seconds=0,
            progress=lambda *_: time.sleep(float(sys.argv[3])))
    """


def test_killed_runs_go_on_and_end_with_the_same_bytes(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl")
    expected = tmp_path / "expected"
    prepare(str(source), expected, shard_tokens=700, valid_fraction=0.1)
    out, done = tmp_path / "out", 0
    command = [sys.executable, "-c", textwrap.dedent(SLOW), source, out]
    for _ in range(3):
        child = subprocess.Popen([*command, "0.2"])
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if (out / "manifest.json").exists() and load_manifest(out).documents > done:
                    break
                assert child.poll() is None
                time.sleep(0.002)
            time.sleep(0.05)
        finally:
            child.kill()
            child.wait()
        manifest = load_manifest(out)
        assert manifest.documents > done  # each got further, none redid the work
        assert not manifest.complete
        done = manifest.documents
        with pytest.raises(LabError, match="not finished"):
            open_tokens(str(out), "train")
    subprocess.run([*command, "0"], check=True, timeout=60)
    assert content(out) == content(expected)


KILL_AT_EVERY_CALL = """
    import os, signal, sys, traceback
    from mars.lab.data import preparation, prepare
    from mars.lab.data.tokenizers import tokenizer
    preparation.BATCH_CHARACTERS = 2000
    tokenizer("gpt2").encode("warm")
    source, out = sys.argv[1:]

    def run(kill_at):
        calls = 0
        def wrapped(real, before):
            def call(*args):
                nonlocal calls
                calls += 1
                if calls == kill_at and before:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(*args)
                if calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call
        for name in ("replace", "fsync", "unlink", "truncate"):
            setattr(os, name, wrapped(getattr(os, name), kill_at % 2))
        prepare(source, out, shard_tokens=500, valid_fraction=0.2, commit_seconds=0)

    kills, at = 0, 1
    while True:
        child = os.fork()
        if not child:
            try:
                run(at)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status)) if status else print(kills)
            break
        kills, at = kills + 1, at % 24 + 1
    """


def test_a_kill_around_any_call_to_the_disk_changes_no_byte(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl")
    prepare(str(source), tmp_path / "expected", shard_tokens=500, valid_fraction=0.2)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILL_AT_EVERY_CALL), source, tmp_path / "out"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 20
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_a_file_system_that_cannot_sync_directories_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    prepare(str(jsonl(tmp_path / "a.jsonl")), tmp_path / "out", shard_tokens=900)
    assert load_manifest(tmp_path / "out").complete


def test_an_error_in_the_middle_keeps_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 1000)
    lines = jsonl(tmp_path / "a.jsonl").read_bytes()
    size = len(lines)
    (tmp_path / "a.jsonl").write_bytes(lines[:-9] + b"*" * 9)
    with pytest.raises(LabError, match="line 300"):
        prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", commit_seconds=0)
    assert 0 < load_manifest(tmp_path / "out").documents < 300
    (tmp_path / "a.jsonl").write_bytes(lines)
    assert (tmp_path / "a.jsonl").stat().st_size == size
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out")
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["hub", "text", "few"])
def test_an_interrupted_stream_goes_on_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 1500)
    monkeypatch.setattr("mars.lab.data.documents.BLOCK", 400)  # a document in many pieces
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    dataset = Dataset("parquet", data_files=(str(table(tmp_path / "a.parquet")),))
    monkeypatch.setitem(hub.NAMED, "openwebtext", (dataset, 0.1))
    jsonl(tmp_path / "a.jsonl", ["".join(TEXTS[i::9]) for i in range(9)])
    names = {"text": "a.txt", "few": "a.[tj]*"}
    source = "openwebtext" if kind == "hub" else str(tmp_path / names[kind])
    prepare(source, tmp_path / "whole", shard_tokens=999)
    calls = 0

    def interrupt(*_: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise KeyboardInterrupt

    interrupted = 0
    while not interrupted or not load_manifest(tmp_path / "out").complete:
        try:
            prepare(
                source, tmp_path / "out", shard_tokens=999, commit_seconds=0, progress=interrupt
            )
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted > 3
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_an_interruption_after_the_last_batch_takes_nothing_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mars.lab.data.documents.BLOCK", 100)  # the third file: many pieces
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} again, " * 100)
    source, out = str(tmp_path / "*.txt"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(preparation._Preparation, "_end", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(source, out, documents=2, commit_seconds=0)
    prepare(source, out, documents=2)
    assert documents(stream(out, "valid")) == ["a again, ", "b again, "]
    assert documents(stream(out, "train")) == ["a again, " * 99, "b again, " * 99]

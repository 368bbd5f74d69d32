"""Damaged, lost or changed files of a run: configuration, log, data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nursery import Nursery
from runs import TEXT, assert_alike, config, flip, given, losses, texts, written

from mars.lab.log import read


@pytest.fixture(scope="module")
def twelve(mars: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps, and one of 24 that was never disturbed."""
    home = tmp_path_factory.mktemp("files")
    for name, length in (("run", 12), ("whole", 24)):
        assert mars.run("train", given(home / name, steps=length)).code == 0
    return home / "run"


@pytest.fixture
def copy(twelve: Path, tmp_path: Path) -> Path:
    """A copy to harm."""
    shutil.copytree(twelve, tmp_path / "run")
    return tmp_path / "run"


BROKEN = {
    "empty": "",
    "torn": '{"recipe": "min',
    "zeros": "\0" * 300,
    "foreign": "[1, 2]",
    "a wrong field": '{"loop": {"steps": "many"}}',
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_damaged_configuration_is_named(
    mars: Nursery, copy: Path, twelve: Path, content: str
) -> None:
    (copy / "config.json").write_text(BROKEN[content])
    ended = mars.run("train", given(copy, steps=24))
    assert ended.code == 1
    assert "config.json" in ended.err
    assert "repeat the command that started the run" in ended.err
    assert "Traceback" not in ended.err
    if content == "torn":  # as the message says
        (copy / "config.json").unlink()
        assert mars.run("train", given(copy, steps=24)).code == 0
        assert_alike(copy, twelve.with_name("whole"))
        assert json.loads((copy / "config.json").read_text())["loop"]["batch_size"] == 4


def garble(lines: list[bytes]) -> list[bytes]:
    return [*lines[:5], b"\0\0\0garbage\n", *lines[6:]]


LOGS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "torn": (lambda lines: [*lines, b'{"kind": "tr'], ""),
    "zeros at the end": (lambda lines: [*lines, bytes(5000)], ""),
    "garbage inside": (garble, "1 line of log.jsonl dropped: damaged"),
    "a line that is no record": (
        lambda lines: [*lines[:3], b"7\n", b'{"step": "x"}\n', *lines[3:]],
        "1 line of log.jsonl dropped",
    ),
    "no header": (lambda lines: lines[1:], ""),
    "a damaged header": (lambda lines: [lines[0][9:], *lines[1:]], "1 line of log.jsonl dropped"),
    "empty": (lambda lines: [], ""),
}


@pytest.mark.parametrize("harm", LOGS)
def test_a_damaged_log_does_not_stop_the_run(
    mars: Nursery, copy: Path, twelve: Path, harm: str
) -> None:
    act, told = LOGS[harm]
    log = copy / "log.jsonl"
    log.write_bytes(b"".join(act(log.read_bytes().splitlines(keepends=True))))
    ended = mars.run("train", given(copy, steps=24))
    assert ended.code == 0, ended.err
    assert "resumed from step-00000012" in ended.err
    assert told in ended.err
    assert len(texts(copy, "refused")) == (1 if told else 0)
    records = read(copy)  # every line is whole again
    assert records[0]["kind"] == "header"
    assert sum(r["kind"] == "header" for r in records) == 1
    assert set(losses(copy)) <= set(losses(twelve.with_name("whole")))
    assert losses(copy)[-8:] == losses(twelve.with_name("whole"))[-8:]
    page = mars.run("report", copy)
    assert page.code == 0, page.err


def test_a_lost_log_begins_again(mars: Nursery, copy: Path) -> None:
    (copy / "log.jsonl").unlink()
    ended = mars.run("train", given(copy, steps=24))
    assert ended.code == 0, ended.err
    assert "resumed from step-00000012" in ended.err
    assert [r["kind"] for r in read(copy)[:2]] == ["header", "event"]


def test_a_report_from_torn_logs(mars: Nursery, copy: Path, twelve: Path, tmp_path: Path) -> None:
    log = copy / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-70])  # killed while it wrote its last record
    shutil.copytree(twelve, tmp_path / "other")
    ended = mars.run("report", copy, tmp_path / "other", "--out", tmp_path / "page.html")
    assert ended.code == 0, ended.err
    assert "MARS-AdamW" in ended.out
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.fixture
def shards(mars: Nursery, tmp_path: Path) -> Path:
    """The text as shards of tokens."""
    data = tmp_path / "data"
    words = ("--tokenizer", "bytes", "--shard-tokens", "4000", "--valid-fraction", "0.2")
    ended = mars.run("data", TEXT, "--out", data, *words)
    assert ended.code == 0, ended.err
    return data


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def retoken(path: Path) -> None:
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace('"bytes",', '"gpt2",', 1))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, "train_000001.bin is damaged"),
    "short": (cut, "train_000001.bin has"),
    "missing": (lambda path: path.unlink(), "train_000001.bin: the manifest names it"),
    "another tokenizer": (retoken, "wrong tokenizer"),
}


@pytest.mark.parametrize("harm", SPOILED)
def test_a_spoiled_shard_is_named_and_nothing_is_changed(
    mars: Nursery, shards: Path, tmp_path: Path, harm: str
) -> None:
    path = written(config(tmp_path / "run", steps=6).replace(data={"source": str(shards)}))
    assert mars.run("train", path).code == 0
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    act, complaint = SPOILED[harm]
    act(shards / "train_000001.bin")
    longer = written(config(tmp_path / "run", steps=12).replace(data={"source": str(shards)}))
    ended = mars.run("train", longer)
    assert ended.code == 1
    assert complaint in ended.err
    assert "Traceback" not in ended.err
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log


def test_data_that_changed_since_the_run_began(mars: Nursery, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text(TEXT.read_text())
    path = written(config(tmp_path / "run", steps=6).replace(data={"source": str(text)}))
    assert mars.run("train", path).code == 0
    text.write_text(TEXT.read_text().replace("ship", "boat"))
    path = written(config(tmp_path / "run", steps=12).replace(data={"source": str(text)}))
    ended = mars.run("train", path)
    assert ended.code == 1
    assert "has changed since the run in" in ended.err
    text.write_text(TEXT.read_text())
    assert mars.run("train", path).code == 0

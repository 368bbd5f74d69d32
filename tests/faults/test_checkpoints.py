"""A run whose checkpoint is damaged, forged or not its own: it takes another, or says why not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from nursery import Nursery
from runs import assert_alike, config, flip, given, steps, texts, written

from mars.lab import sealed

FILES = ("model.safetensors", "optimizer.pt", "training.pt", "manifest.json")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "empty": lambda path: os.truncate(path, 0),
    "a flipped bit": flip,
    "missing": lambda path: path.unlink(),
}


def seal_again(folder: Path) -> None:
    """Make the manifest agree with what is there: a forger can, an accident cannot."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {name: (folder / name).read_bytes() for name in manifest.pop("files")}
    for name in (*files, "manifest.json"):
        (folder / name).unlink()
    writers = {name: lambda f, data=data: f.write(data) for name, data in files.items()}
    sealed.write(folder, writers, manifest)


@pytest.fixture(scope="module")
def twelve(mars: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 12 steps, and one of 24 that was never disturbed."""
    home = tmp_path_factory.mktemp("checkpoints")
    for name, length in (("run", 12), ("whole", 24)):
        assert mars.run("train", given(home / name, steps=length)).code == 0
    yield home / "run"
    assert steps(home / "run") == [9, 12]  # no test has touched it


@pytest.fixture
def copy(twelve: Path, tmp_path: Path) -> Path:
    """A copy of the run of 12 steps, with checkpoints of 9 and 12, to harm."""
    shutil.copytree(twelve, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_told_and_the_one_before_used(
    mars: Nursery, copy: Path, twelve: Path, name: str, damage: str
) -> None:
    DAMAGES[damage](copy / "checkpoints" / "step-00000012" / name)
    ended = mars.run("train", given(copy, steps=24))
    assert ended.code == 0, ended.err
    assert "resumed from step-00000009" in ended.err
    told = f"checkpoint refused: step-00000012: {name} "
    assert told in ended.err  # on the terminal
    (text,) = texts(copy, "refused")  # and in the log
    assert text.startswith(told)
    assert_alike(copy, twelve.with_name("whole"))


def test_no_intact_checkpoint_at_all(mars: Nursery, copy: Path) -> None:
    for step in (9, 12):
        flip(copy / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    before = sorted(p for p in copy.rglob("*") if p.is_file())
    ended = mars.run("train", given(copy, steps=24))
    assert ended.code == 1
    assert "is intact: remove it to begin again" in ended.err
    for step in (9, 12):
        assert f"step-{step:08d}: model.safetensors does not match its checksum" in ended.err
    assert sorted(p for p in copy.rglob("*") if p.is_file()) == before  # nothing is deleted


class Bomb:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["optimizer.pt", "training.pt"])
def test_a_pickle_bomb_is_refused(mars: Nursery, copy: Path, tmp_path: Path, name: str) -> None:
    """With a manifest that agrees: checksums are against accidents, not against forgery."""
    newest = copy / "checkpoints" / "step-00000012"
    torch.save({"state": Bomb(tmp_path / "boom")}, newest / name)
    seal_again(newest)
    log = (copy / "log.jsonl").read_bytes()
    ended = mars.run("train", given(copy, steps=24))
    assert ended.code == 1
    assert f"{name} is not loaded: it holds more than tensors" in ended.err
    assert not (tmp_path / "boom").exists()
    assert (copy / "log.jsonl").read_bytes() == log


OTHERS = {
    "model": ({"model": {"n_embd": 32}}, "is not of this model: "),
    "optimizer": ({"optimizer": {"name": "lion"}}, "is not of this optimizer: it was saved by"),
    "settings": ({"optimizer": {"lr": 0.5}}, "holds a run with optimizer.lr = 0.01, not 0.5"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(mars: Nursery, copy: Path, other: str) -> None:
    change, complaint = OTHERS[other]
    mine = written(config(copy, steps=24).replace(**change))
    ended = mars.run("train", mine)
    assert ended.code == 1
    assert "holds a run with" in ended.err  # by its configuration
    if other != "settings":  # which config.json alone tells
        (copy / "config.json").unlink()
        ended = mars.run("train", mine)
        assert ended.code == 1
    assert complaint in ended.err
    assert not (copy / "config.json").exists() or other == "settings"
    assert steps(copy) == [9, 12]


def test_times_of_files_are_not_believed(mars: Nursery, copy: Path, twelve: Path) -> None:
    """The newest looks the oldest, and all come from the future: the clock has been set back."""
    future = 4_000_000_000
    for age, path in enumerate(sorted(copy.rglob("*"))):
        os.utime(path, (future - age, future - age))
    fault = "import time; time.time = lambda now=iter(range(10**9, 0, -1)): next(now)"
    ended = mars.run("train", given(copy, steps=24), fault=fault)
    assert ended.code == 0, ended.err
    assert "resumed from step-00000012" in ended.err
    assert_alike(copy, twelve.with_name("whole"))
    assert steps(copy)[-2:] == [21, 24]


# A file system that loses what it said was on disk: every checkpoint lacks a piece when published.
LOSES = """
import os
from mars.lab import sealed
write = sealed.write
def torn(folder, *rest):
    write(folder, *rest)
    os.truncate(folder / "optimizer.pt", 100)
sealed.write = torn
"""


def test_retention_never_deletes_the_last_intact_one(mars: Nursery, copy: Path) -> None:
    """One is to be kept; those that come after it are all broken."""
    os.truncate(copy / "checkpoints" / "step-00000009" / "optimizer.pt", 100)
    (copy / "checkpoints" / "best.json").unlink()  # which would protect it, too
    one = written(config(copy, steps=30, eval_every=100).replace(keep={"last": 1}))
    ended = mars.run("train", one, fault=LOSES)
    assert ended.code == 0, ended.err
    assert 12 in steps(copy)
    longer = written(config(copy, steps=31, eval_every=100).replace(keep={"last": 1}))
    ended = mars.run("train", longer)
    assert ended.code == 0, ended.err
    assert "checkpoint refused: step-00000030: optimizer.pt has 100 bytes" in ended.err
    assert "resumed from step-00000012" in ended.err


def test_a_run_moved_to_another_place(mars: Nursery, copy: Path, twelve: Path) -> None:
    moved = copy.parent / "elsewhere" / "renamed"
    moved.parent.mkdir()
    copy.rename(moved)
    values = json.loads((moved / "config.json").read_text())
    assert values["keep"]["out"] == str(twelve)  # it does not know
    ended = mars.run("train", moved, "--loop.steps", "24")
    assert ended.code == 0, ended.err
    assert "resumed from step-00000012" in ended.err
    assert_alike(moved, twelve.with_name("whole"))

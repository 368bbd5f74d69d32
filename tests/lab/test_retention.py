"""Which checkpoint is the newest, which the best, and which are deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import trained
from torch import nn

from mars.lab import checkpoint, sealed
from mars.lab.errors import LabError


def save_steps(run: Path, *steps: int, **options: Any) -> tuple[nn.Module, Any]:
    model, optimizer = trained()
    for step in steps:
        checkpoint.save(run, step, model, optimizer, {}, **options)
    return model, optimizer


def present(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def refuse(text: str) -> None:
    pytest.fail(text)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ (1 << bit)]))


def test_the_highest_step_is_the_newest_whatever_the_clock_says(tmp_path: Path) -> None:
    save_steps(tmp_path, 9, 100, 99, keep=None)
    for age, step in enumerate((9, 99, 100)):
        os.utime(tmp_path / "checkpoints" / f"step-{step:08d}", (10**9 - age, 10**9 - age))
    assert checkpoint.newest(tmp_path, refuse) == tmp_path / "checkpoints" / "step-00000100"


def test_steps_beyond_eight_digits_are_numbers_still(tmp_path: Path) -> None:
    save_steps(tmp_path, 99_999_999, 100_000_000, keep=None)
    newest = checkpoint.newest(tmp_path, refuse)
    assert newest is not None
    assert newest.name == "step-100000000"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path, refuse) is None
    assert checkpoint.best(tmp_path) is None
    (tmp_path / "checkpoints" / "step-12.backup").mkdir(parents=True)
    assert checkpoint.newest(tmp_path, refuse) is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_are_kept(tmp_path: Path, keep: int) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert present(tmp_path) == [1, 2, 3, 4, 5][-keep:]


@pytest.mark.parametrize("keep", [0, -1])
def test_to_keep_none_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(LabError, match=f"{keep} checkpoints to keep"):
        save_steps(tmp_path, 1, keep=keep)
    assert os.listdir(tmp_path) == []


def test_the_best_is_kept_besides(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, None, 1.0], 1):
        checkpoint.save(tmp_path, step, model, optimizer, {}, keep=2, best=loss)
    assert present(tmp_path) == [2, 5, 6]
    best = checkpoint.best(tmp_path)
    assert best == tmp_path / "checkpoints" / "step-00000002"
    note = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert note == {"step": 2, "loss": 1.0}


def test_the_best_is_of_this_course_of_training(tmp_path: Path) -> None:
    """Begun again from an earlier step; and a step saved again has the loss it has now."""
    save_steps(tmp_path, 9, best=0.1)
    save_steps(tmp_path, 3, best=0.5)
    assert checkpoint.best(tmp_path) == tmp_path / "checkpoints" / "step-00000003"
    save_steps(tmp_path, 3, best=0.7)
    note = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert note == {"step": 3, "loss": 0.7}


@pytest.mark.parametrize("note", ["", "{", "[]", '{"step": 7, "loss": 0.0}'])
def test_a_lost_best_is_replaced(tmp_path: Path, note: str) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "checkpoints" / "best.json").write_text(note)
    assert checkpoint.best(tmp_path) is None
    save_steps(tmp_path, 8, best=5.0)
    assert checkpoint.best(tmp_path) == tmp_path / "checkpoints" / "step-00000008"


def test_broken_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=None)
    os.truncate(tmp_path / "checkpoints" / "step-00000002" / "optimizer.pt", 10)
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    save_steps(tmp_path, 4, keep=2)
    assert present(tmp_path) == [1, 4]


def test_the_one_just_saved_is_kept_whatever_lies_ahead(tmp_path: Path) -> None:
    """Resumed from 2 because 9 was refused; its sizes are right, so it looks valid."""
    save_steps(tmp_path, 1, 9, keep=None)
    flip(tmp_path / "checkpoints" / "step-00000009" / "model.safetensors", 300)
    for step in (3, 4, 5):
        save_steps(tmp_path, step, keep=1)
        assert present(tmp_path) == [step, 9]
        reports: list[str] = []
        newest = checkpoint.newest(tmp_path, reports.append)
        assert newest is not None
        assert newest.name == f"step-{step:08d}"
        assert len(reports) == 1
    save_steps(tmp_path, 9, keep=1)
    assert checkpoint.newest(tmp_path, refuse) == tmp_path / "checkpoints" / "step-00000009"


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    model, optimizer = trained(steps=4)
    path = checkpoint.save(tmp_path, 1, model, optimizer, {"again": True})
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    assert checkpoint.load(path, *trained())["again"]


def test_a_failed_delete_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)
    rename = os.rename

    def stubborn(source: Any, *rest: Any, **options: Any) -> None:
        if "step-00000001" in str(source):
            raise PermissionError(13, "stubborn")
        rename(source, *rest, **options)

    monkeypatch.setattr(os, "rename", stubborn)
    save_steps(tmp_path, 2, 3, keep=1)
    assert present(tmp_path) == [1, 3]
    monkeypatch.undo()
    save_steps(tmp_path, 4, keep=1)
    assert present(tmp_path) == [4]


def test_the_manifest_says_what_wrote_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 7)
    manifest = sealed.verify(tmp_path / "checkpoints" / "step-00000007")
    assert manifest["step"] == 7
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["optimizer"]["class"] == "AdamW"
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.pt", "training.pt"}

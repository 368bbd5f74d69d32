"""What is printed to a terminal of 80 columns: all of it, and no line is longer."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mars.lab.cli import main
from mars.lab.evaluation.metrics import Result
from mars.lab.evaluation.table import table
from mars.lab.report import fit

RESULTS = Path(__file__).parents[2] / "docs" / "results"
Capture = pytest.CaptureFixture[str]
ROWS = [("", "rate", "final loss", "tokens"), ("AdamW", "0.01", "2.5384 ± 0.0125", "100%")]


def test_a_table_that_has_room_stays_whole() -> None:
    assert fit.blocks(ROWS, None) == fit.blocks(ROWS, 36) == [ROWS]  # 5 + 4 + 15 + 6, and gaps


@pytest.mark.parametrize("room", range(5, 36))
def test_every_cell_is_in_one_part_and_the_labels_are_in_all(room: int) -> None:
    parts = fit.blocks(ROWS, room)
    assert len(parts) > 1
    assert [row[0] for part in parts for row in part] == ["", "AdamW"] * len(parts)
    for i, row in enumerate(ROWS):
        assert [cell for part in parts for cell in part[i][1:]] == list(row[1:])
    for part in parts:  # a column that has no room by itself stands alone
        widths = [max(map(len, column)) for column in zip(*part, strict=True)]
        assert sum(widths) + 2 * (len(widths) - 1) <= room or len(widths) == 2


def test_prose_is_folded_between_words() -> None:
    text = "one two-three\n  four\nfive six seven"
    assert fit.fold(text, None) == text
    assert fit.fold(text, 10, "..") == "one\n..two-three\n  four\nfive six\n..seven"


def check(wide: str, narrow: str, room: int) -> None:
    assert max(map(len, wide.splitlines())) > room
    assert max(map(len, narrow.splitlines())) <= room
    assert set(narrow.split()) == set(wide.split())


@pytest.mark.parametrize(
    "words",
    [
        ["report", "docs/results/gpt-50m", "--out", "r.html"],
        ["report", "docs/results/cifar10-resnet18-short", "--out", "r.html"],
        ["plan", "llama-13b", "--gpus", "512", "--gpu", "h200"],
        ["plan", "gpt2-xl", "--gpu", "a100"],
        ["study", "tiny-optimizers", "--verdict-only", "--out", "tiny-optimizers"],
        ["study", "tiny-search", "--verdict-only", "--out", "tiny-search"],
        ["train", "gpt2-small", "--optimizer", "mars-m", "--dry-run"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_commands_print(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(RESULTS.parent)
    if words[0] == "study":
        out = tmp_path / "results"
        shutil.copytree(RESULTS / words[1], out / words[1])
        for path in RESULTS.glob("equivalents-*.json"):  # which the study's own may name
            shutil.copy(path, out)
        monkeypatch.chdir(out)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    wide = capsys.readouterr().out  # as in a pipe or a file
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words) == 0
    check(wide, capsys.readouterr().out, 80)


def test_the_scores_of_several_models() -> None:
    values = np.array([1.0, 0, 0, 1, 1])
    names = ["gpt2-small-adamw", "gpt2-small-mars-adamw", "gpt2-small-muon"]
    own = [
        Result("hellaswag", "acc_norm", {"acc_norm": values}, [""] * 5, 0.25),
        Result("arc_easy", "acc", {"acc": values}, [""] * 5, 0.25),
        Result("lambada_openai", "acc", {"acc": values, "loglikelihood": -values}, [""] * 5, None),
    ]
    wide, narrow = (table(names, [own] * 3, room) for room in (None, 80))
    check(*(re.sub("(?m)^-+$", "", text) for text in (wide, narrow)), room=80)
    assert narrow.count("hellaswag  ") == narrow.count("perplexity") == len(narrow.split("\n\n"))

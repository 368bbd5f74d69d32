"""Options that nothing would read are refused where somebody asks for them, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from mars.lab import race
from mars.lab.cli import main
from mars.lab.config import Schedule, Shape
from mars.lab.recipes import RECIPES
from mars.lab.schedule import READS, factor

Capture = pytest.CaptureFixture[str]
OTHER = {"warmup_steps": 7, "min_lr": 0.9, "decay_share": 0.6, "rise_share": 0.6}


class NoDecay(torch.optim.SGD):
    """An optimizer of a user's that takes no weight decay."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)


@pytest.mark.parametrize("shape", get_args(Shape))
def test_a_shape_reads_what_it_is_said_to_read(shape: Shape) -> None:
    def rates(**fields: Any) -> list[float]:
        schedule = Schedule(**{"shape": shape, "warmup_steps": 3, **fields})
        return [factor(schedule, step, 40) for step in range(40)]

    read = {name for name, value in OTHER.items() if rates(**{name: value}) != rates()}
    assert read == set(READS[shape])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schedule.shape wsd --schedule.min-lr 0.9",
         "schedule.min_lr is not read by wsd, but by cosine, exp and linear: leave it out, or"),
        ("--schedule.shape constant --schedule.min_lr=0.9", "schedule.min_lr is not read by const"),
        ("--schedule.shape onecycle --schedule.min-lr 0.1", "schedule.min_lr is not read by onecy"),
        ("--schedule.shape onecycle --schedule.warmup-steps 20",
         "schedule.warmup_steps is not read by onecycle, but by cosine, wsd, exp, linear, const"),
        ("--schedule.decay-share 0.9", "schedule.decay_share is not read by cosine, but by wsd: "),
        ("--schedule.rise-share 0.9", "schedule.rise_share is not read by cosine, but by onecycle"),
        ("--loop.shards 2", "loop.shards is 2, but this is one process: start it with `torchrun"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "race", "tune"])
def test_a_schedule_names_the_field_and_the_shapes_that_read_it(
    command: str, words: str, message: str, capsys: Capture, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([command, "gpt-tiny", *words.split()]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"mars: error: {message}")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mars-adamw --optimizer.weight-decay-1d 5", "weight_decay_1d: mars-adamw trains nothing"),
        ("mars-m --optimizer.weight-decay-1d 5 --optimizer.options embeddings {'weight_decay':0.3}",
         "weight_decay_1d: mars-m trains nothing"),
        ("test_unread:NoDecay --optimizer.weight-decay 0.5",
         "weight_decay is no option of test_unread:NoDecay: leave it out, or"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "race", "tune"])
def test_a_decay_that_nothing_takes_is_refused(
    command: str, words: str, message: str, capsys: Capture, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    option = "--optimizers" if command == "race" else "--optimizer"
    assert main([command, "gpt-tiny", option, *words.split()]) == 1
    assert capsys.readouterr().err.startswith(f"mars: error: optimizer.{message}")


@pytest.mark.parametrize(
    "words",
    [
        "gpt-tiny --schedule.shape wsd --schedule.decay-share 0.5 --schedule.warmup-steps 9",
        "gpt-tiny --schedule.shape onecycle --schedule.rise-share 0.5 --schedule.warmup-steps 0",
        "gpt-tiny --optimizer mars-m --optimizer.weight-decay-1d 5",
        "gpt-tiny --optimizer muon --optimizer.weight-decay-1d 5",
        "gpt-tiny --optimizer mars-adamw --optimizer.weight-decay-1d 0",
        "gpt-tiny --optimizer mars-adamw --optimizer.weight-decay-1d 5 "
        "--optimizer.options vectors adamw",
        "gpt-tiny --optimizer test_unread:NoDecay --optimizer.weight-decay 0",
        "gpt-tiny --loop.shards None",
        "digits-cnn --optimizer mars-adamw-2d --optimizer.weight-decay-1d 0.3",
        # Whatever they set themselves; larger ones are as the small ones, and slow to lay out.
        *(n for n in RECIPES if not n.startswith("gpt2-") or n.startswith("gpt2-small")),
    ],
)
def test_what_is_read_is_taken(words: str, capsys: Capture) -> None:
    assert main(["train", *words.split(), "--dry-run"]) == 0, capsys.readouterr().err


def test_a_race_takes_what_any_of_its_optimizers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "run_all", lambda *_: None)  # as if somebody stopped it at once
    words = ["--optimizers", "mars-adamw", "mars-m", "--optimizer.weight-decay-1d", "0.3"]
    assert main(["race", "gpt-tiny", *words, "--out", str(tmp_path / "race")]) == 130


@pytest.mark.parametrize(
    ("command", "file", "status"), [("race", "race.json", 130), ("train", "config.json", 0)]
)
def test_what_was_begun_goes_on(
    command: str, file: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the words it was begun with, when nothing was said of them."""
    monkeypatch.setattr(race, "run_all", lambda *_: None)
    words = [command, "gpt-tiny", "--schedule.decay-share", "0.5", "--out", str(tmp_path / "a")]
    words += ["--loop.steps", "2", "--loop.eval-sequences", "2", "--loop.device", "cpu"]
    with monkeypatch.context() as before:
        before.setattr("mars.lab.unread.refuse", lambda *_: None)
        assert main(words) == status
    assert (tmp_path / "a" / file).exists()
    assert main(words) == status

"""Reading logs: what a killed or resumed process leaves, and what is not a log at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import synthetic_logs as logs

from mars.lab.errors import LabError, UsageError
from mars.lab.report.runs import load


def train(step: int, loss: float | None) -> dict:
    return {"kind": "train", **logs.at(step), "loss": loss}


def valid(step: int, loss: float | None, **more: float) -> dict:
    return {"kind": "valid", **logs.at(step), "loss": loss, **more}


def resumed(step: int) -> dict:
    return {"kind": "event", **logs.at(step), "what": "resumed", "text": "went on"}


def test_a_run_is_read_as_arrays(tmp_path: Path) -> None:
    logs.run(tmp_path / "a", "mars-m", seed=3)
    (run,) = load([tmp_path / "a"])
    assert (run.label, run.optimizer, run.seed, run.status) == ("MARS-M", "mars-m", 3, "done")
    assert run.valid["step"].tolist() == list(range(0, 401, 25))
    assert run.final == run.valid["loss"][-1]
    assert (run.step, run.progress) == (400, 400 * logs.PER_STEP)
    assert len(run.diagnostics) == 8
    assert run.train["memory"][0] == 1.5e9
    assert np.isnan(run.train["loss"]).sum() == 0


def test_paths_may_be_runs_races_and_files_and_count_once(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw", "muon"))
    one = race / "muon-s1"
    runs = load([race, one, one / "log.jsonl", os.path.relpath(one)])
    assert sorted(run.path.name for run in runs) == ["adamw-s0", "adamw-s1", "muon-s0", "muon-s1"]
    assert {run.race["recipe"] for run in runs} == {"gpt-tiny"}


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    head = logs.header("adamw")
    path = logs.write(tmp_path / "a", [head, train(5, 4.0)], tail='{"kind":"train","st')
    (run,) = load([path])
    assert run.train["loss"].tolist() == [4.0]
    assert (run.status, run.final, run.ignored) == ("unfinished", None, 0)


def test_a_torn_line_that_a_resume_wrote_after_is_counted(tmp_path: Path) -> None:
    path = logs.write(tmp_path / "a", [logs.header("adamw"), train(5, 4.0)], tail='{"kind":"tr\n')
    with open(path / "log.jsonl", "a") as log:
        log.write(json.dumps(train(10, 3.0)) + "\n")
    (run,) = load([path])
    assert run.train["step"].tolist() == [5, 10]
    assert run.ignored == 1


def test_steps_done_again_after_a_resume_replace_the_first_ones(tmp_path: Path) -> None:
    lines = [
        logs.header("adamw"), train(5, 4.0), train(10, 3.5), valid(10, 3.6), train(15, 3.2),
        valid(15, 3.3), resumed(10), train(15, 3.1), valid(15, 3.25),
    ]  # fmt: skip
    (run,) = load([logs.write(tmp_path / "a", lines)])
    assert run.train["step"].tolist() == [5, 10, 15]
    assert run.train["loss"].tolist() == [4.0, 3.5, 3.1]
    assert run.valid["loss"].tolist() == [3.6, 3.25]
    assert [event["what"] for event in run.events] == ["resumed"]


def test_a_resume_forgets_what_is_not_done_again_yet(tmp_path: Path) -> None:
    lines = [logs.header("adamw"), train(5, 4.0), train(15, 3.2), valid(15, 3.3), resumed(10)]
    (run,) = load([logs.write(tmp_path / "a", lines)])
    assert run.train["step"].tolist() == [5]
    assert len(run.valid["loss"]) == 0


def test_a_stopped_run_that_goes_on_is_not_stopped(tmp_path: Path) -> None:
    body = [train(5, 4.0)]
    stop = {"kind": "end", **logs.at(5), "status": "stopped", "valid": None}
    path = logs.write(tmp_path / "a", [logs.header("adamw"), *body, stop])
    assert load([path])[0].status == "stopped"
    path = logs.write(tmp_path / "a", [logs.header("adamw"), *body, stop, resumed(5), train(9, 3)])
    assert load([path])[0].status == "unfinished"


@pytest.mark.parametrize(
    ("status", "last", "expected"),
    [("done", 3.0, "done"), ("done", None, "diverged"), ("failed", None, "diverged"),
     ("diverged", None, "diverged"), ("stopped", 3.0, "stopped")],
)  # fmt: skip
def test_how_a_run_ended(tmp_path: Path, status: str, last: float | None, expected: str) -> None:
    end = {"kind": "end", **logs.at(10), "status": status, "valid": last}
    lines = [logs.header("adamw"), train(5, 4.0), valid(5, 4.0), train(10, last), end]
    (run,) = load([logs.write(tmp_path / "a", lines)])
    assert run.status == expected
    assert run.final == (3.0 if expected == "done" else None)
    assert run.last == (3.0 if expected == "done" else 4.0)


def test_a_run_that_ended_before_its_first_nan_was_logged_has_diverged(tmp_path: Path) -> None:
    text = "the loss is not finite at step 9: lower the learning rate"
    end = {"kind": "end", **logs.at(9), "status": "failed", "valid": None, "text": text}
    (run,) = load([logs.write(tmp_path / "a", [logs.header("adamw"), train(5, 4.0), end])])
    assert run.status == "diverged"


def test_a_run_that_an_error_broke_off_has_failed_until_it_goes_on(tmp_path: Path) -> None:
    lines = [logs.header("adamw"), train(5, 4.0)]
    path = logs.write(tmp_path / "a", lines)
    trace = (
        "Traceback (most recent call last):\n  File \"first.py\"\nKeyError: 'first'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "own.py", line 3, in step\n    raise\n'
        "ValueError: boom\nand more of it\n"
    )
    (path / "error.txt").write_text(trace)
    (run,) = load([path])
    assert (run.status, run.why, run.final) == ("failed", "ValueError: boom", None)
    logs.write(path, [*lines, resumed(5), train(9, 3.0)])
    os.utime(path / "error.txt", (1e9, 1e9))
    assert load([path])[0].status == "unfinished"
    end = {"kind": "end", **logs.at(10), "status": "done", "valid": 3.0}
    logs.write(path, [*lines, end])
    (path / "error.txt").touch()
    assert (load([path])[0].status, load([path])[0].why) == ("done", "")


def test_null_becomes_nan_and_other_metrics_are_kept(tmp_path: Path) -> None:
    lines = [logs.header("adamw"), valid(0, None), valid(5, 2.0, accuracy=0.5)]
    (run,) = load([logs.write(tmp_path / "a", lines)])
    np.testing.assert_equal(run.valid["loss"], [np.nan, 2.0])
    np.testing.assert_equal(run.valid["accuracy"], [np.nan, 0.5])


def test_unknown_records_and_absurd_values_are_survived(tmp_path: Path) -> None:
    lines = [
        logs.header("adamw"), {"kind": "weather", "step": 1}, {"kind": ["?"]},
        {"kind": "train", "step": 10**400, "loss": "low", "tokens": True, "seconds": None},
    ]  # fmt: skip
    (run,) = load([logs.write(tmp_path / "a", lines)])
    assert np.isnan(run.train["loss"]).all()
    assert (run.step, run.progress) == (0, 0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "empty"),
        ("hello\n", "not a log of mars"),
        ("[1, 2]\n", "not a log of mars"),
        ('{"kind": "train", "step": 1}\n', "does not begin with a header"),
        ('{"kind": "header", "format": 2}\n', "log format 2"),
        ('{"kind": "header", "format": 1, "lr": "x"}\n', "'lr'"),
        ('{"kind": "header", "format": 1, "lr": 1, "seed": 0, "steps": 9}\n', "no optimizer"),
        (b"\x80\x02\xff\n", "not a log of mars"),
    ],
)
def test_what_is_not_a_log_is_named(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(LabError, match=complaint) as caught:
        load([path])
    assert str(path) in str(caught.value)


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="nowhere: no such"):
        load([tmp_path / "nowhere"])
    with pytest.raises(LabError, match=r"no log\.jsonl below"):
        load([tmp_path])
    with pytest.raises(UsageError, match="no run given"):
        load([])


def test_a_race_whose_next_run_has_just_begun_is_read(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw",), seeds=1)
    (race / "muon-s0").mkdir()
    (race / "muon-s0" / "log.jsonl").touch()
    assert [run.optimizer for run in load([race])] == ["adamw"]
    with pytest.raises(LabError, match="empty"):
        load([race / "muon-s0"])

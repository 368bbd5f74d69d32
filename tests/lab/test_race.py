"""A race: fair by construction, resumable, and its table says what the logs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from miniature import run

from mars.lab import arguments
from mars.lab.cli import main
from mars.lab.config import to_json
from mars.lab.log import read
from mars.lab.race import RaceArgs, plan
from mars.lab.report import load, summarise

Capture = pytest.CaptureFixture[str]


def jobs(base_name: str, *words: str) -> dict[str, object]:
    base = arguments.base_run(base_name, [])
    default = arguments.with_defaults(RaceArgs, base)
    args = arguments.parse(RaceArgs, list(words), "mars race", "", default)
    return {job.name: job.run for job in plan(args, base, Path("out"))}


def test_each_optimizer_keeps_its_settings_and_takes_the_overrides() -> None:
    made = jobs(
        "gpt-tiny", "--optimizers", "adamw", "mars-m", "--loop.steps", "7", "--rates", "1", "2"
    )
    assert len(made) == 2 * 2 * 2
    assert {r.loop.steps for r in made.values()} == {7}  # type: ignore[attr-defined]
    assert {r.optimizer.gamma for r in made.values()} == {None, 0.025}  # type: ignore[attr-defined]
    by_rate = sorted(
        (r.optimizer.lr, r.optimizer.lr_1d)  # type: ignore[attr-defined]
        for r in made.values() if r.optimizer.name == "mars-m" and r.loop.seed == 0  # type: ignore[attr-defined]
    )  # fmt: skip
    (low, low_1d), (high, high_1d) = by_rate
    assert high == pytest.approx(2 * low, rel=1e-2)
    assert high_1d / high == pytest.approx(low_1d / low, rel=1e-2)


@pytest.mark.slow
def test_a_race_from_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps({**to_json(run(tmp_path / "unused", steps=8)), "recipe": "mini"}))
    words = [
        "race", str(path), "--optimizers", "adamw", "mars-adamw", "--seeds", "2", "--jobs", "2",
        "--keep.out", str(tmp_path / "race"), "--optimizer", "mars-adamw",
    ]  # fmt: skip
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "[4/4]" in captured.err
    assert "left" in captured.err
    runs = load([tmp_path / "race"])
    assert len(runs) == 4
    # The same first validation for all of a seed: same weights, same batches.
    firsts = {
        (r["seed"], next(x["loss"] for x in read(folder) if x["kind"] == "valid"))
        for folder in (tmp_path / "race").iterdir() if folder.is_dir()
        for r in read(folder)[:1]
    }  # fmt: skip
    assert len(firsts) == 2
    summary = summarise(runs, baseline="adamw")
    for entry in summary.entries:
        ends = [
            read(folder)[-1]["valid"]
            for folder in sorted((tmp_path / "race").iterdir())
            if folder.is_dir() and read(folder)[0]["label"] == entry.label
        ]
        assert f"{sum(ends) / 2:.4f}" in captured.out
    page = (tmp_path / "race" / "report.html").read_text()
    assert "MARS-AdamW" in page
    # Again: nothing is trained, the same table comes out.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "race").rglob("log.jsonl")}
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert captured.out.splitlines()[1:5] == capsys.readouterr().out.splitlines()[1:5]


@pytest.mark.slow
def test_a_run_that_diverges_does_not_stop_the_race(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "given.json"
    path.write_text(
        json.dumps({**to_json(run(tmp_path / "unused", "adamw", steps=12)), "recipe": "m"})
    )
    code = main([
        "race", str(path), "--optimizers", "adamw", "--seeds", "1", "--rates", "1", "1e30",
        "--jobs", "1", "--keep.out", str(tmp_path / "race"),
    ])  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0
    assert "failed: the loss is not finite" in captured.err
    assert "adamw-lr0.01-s0: validation loss" in captured.err

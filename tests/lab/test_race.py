"""A race: fair by construction, resumable, and its table says what the logs say."""

from __future__ import annotations

import html
import json
import multiprocessing
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import own_module
import pytest
import torch
from miniature import run

from gpu import needs_gpu
from mars.lab import arguments, pool, race, search, workers
from mars.lab.cli import main
from mars.lab.config import Run, to_json
from mars.lab.errors import unexpected
from mars.lab.log import read
from mars.lab.race import RaceArgs, origins, plan
from mars.lab.report import load, summarise

Capture = pytest.CaptureFixture[str]


def jobs(base_name: str, *words: str) -> dict[str, Run]:
    base = arguments.base_run(base_name, [])
    args = arguments.parse(RaceArgs, list(words), "mars race", "", base)
    asked = arguments.asked(list(words), args)
    return {job.name: job.run for job in plan(args, base, asked, Path("out"))}


def test_each_optimizer_keeps_its_settings_and_takes_the_overrides() -> None:
    made = jobs(
        "gpt-tiny", "--optimizers", "adamw", "mars-m", "--loop.steps", "7", "--rates", "1", "2"
    )
    assert len(made) == 2 * 2 * 2
    assert {r.loop.steps for r in made.values()} == {7}
    assert {r.optimizer.gamma for r in made.values()} == {None, 0.025}
    by_rate = sorted(
        (r.optimizer.lr, r.optimizer.lr_1d)
        for r in made.values() if r.optimizer.name == "mars-m" and r.loop.seed == 0
    )  # fmt: skip
    (low, low_1d), (high, high_1d) = by_rate
    assert high == pytest.approx(2 * low, rel=1e-2)
    assert high_1d / high == pytest.approx(low_1d / low, rel=1e-2)


def test_threads_are_no_more_than_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [pool.threads(n) for n in (1, 2, 16)] == [8, 4, 1]
    for asked, allowed in (("2", 2), ("3,2", 3), ("0", 4), ("many", 4), ("99", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert pool.threads(2) == allowed, asked


def test_a_rate_is_what_was_asked_for() -> None:
    made = jobs("gpt-tiny", "--optimizers", "adamw@0.01234", "adamw@0.01231", "--seeds", "1")
    assert {r.optimizer.lr for r in made.values()} == {0.01234, 0.01231}


def test_runs_that_are_there_are_refused_where_they_shall_not_go_on() -> None:
    made = jobs("gpt-tiny", "--optimizers", "adamw", "--keep.no-resume")
    assert not any(r.keep.resume for r in made.values())


def test_a_file_overrides_the_recipe_for_all_and_one_optimizers_settings(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    override = {
        "recipe": "gpt-tiny",
        "model": {"n_embd": 32},
        "optimizer": {"name": "muon", "lr": 0.5},
    }
    path.write_text(json.dumps(override))
    made = jobs(str(path), "--optimizers", "adamw", "muon", "--seeds", "1", "--loop.steps", "7")
    settings = {
        r.optimizer.name: (r.model.n_embd, r.loop.steps, r.optimizer.lr) for r in made.values()
    }
    usual = arguments.base_run("gpt-tiny", ["--optimizer.name", "adamw"]).optimizer.lr
    assert settings == {"adamw": (32, 7, usual), "muon": (32, 7, 0.5)}


OWN: dict[str, Any] = {
    "recipe": "mine",
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 256},
    "data": {"source": "tinyshakespeare", "tokenizer": "bytes"},
    "optimizer": {"name": "adamw", "lr": 0.001, "betas": [0.9, 0.9], "weight_decay": 0.3},
    "loop": {"steps": 12, "batch_size": 4},
    "schedule": {"warmup_steps": 2},
}


def test_on_a_recipe_of_ones_own_no_optimizer_has_the_settings_of_another(tmp_path: Path) -> None:
    """They had the rate, betas and decay of the one that the file is for."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps(OWN))
    names = ("adamw", "mars-m", "muon", "lion", "mars-adamw@0.5", "test_race:Mine")
    made = jobs(str(path), "--optimizers", *names, "--seeds", "1")
    own = {r.optimizer.name: r.optimizer for r in made.values()}
    assert own["adamw"] == arguments.base_run(str(path), []).optimizer
    usual = {name: arguments.base_run("gpt-tiny", ["--optimizer.name", name]).optimizer
             for name in own}  # fmt: skip
    for name in names[1:4]:
        assert (own[name].betas, own[name].weight_decay, own[name].gamma) == (
            usual[name].betas, usual[name].weight_decay, usual[name].gamma
        )  # fmt: skip
    # Where `mars tune` would begin: at the best rate of the nearest model of the studies here.
    advised = {r.optimizer.name: search.advice(r, ["lr"]) for r in made.values()}
    for name in ("mars-m", "muon", "lion"):
        found = advised[name]
        assert found is not None
        assert own[name].lr == found.setting.lr
        assert own[name].lr_1d == found.setting.optimizer.get("lr_1d")
    assert own["mars-adamw"].lr == 0.5
    assert own["test_race:Mine"].lr == 0.125
    clipped = ("--optimizers", "adamw", "lion", "--optimizer.max-grad-norm", "0.5")
    assert {r.optimizer.max_grad_norm for r in jobs(str(path), *clipped).values()} == {0.5}
    path.write_text(json.dumps({**OWN, "optimizer": {**OWN["optimizer"], "max_grad_norm": 0.5}}))
    assert {r.optimizer.max_grad_norm for r in jobs(str(path), *clipped[:3]).values()} == {0.5}
    one = jobs(str(path), "--optimizers", "muon", "lion", "--seeds", "1", "--optimizer.lr", "0.7")
    assert {r.optimizer.lr for r in one.values()} == {0.7}


def test_rates_that_nobody_tuned_for_ones_own_recipe_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A race told its ranking without a word."""
    path, out = tmp_path / "own.json", tmp_path / "race"
    path.write_text(json.dumps(OWN))
    words = ["race", str(path), "--seeds", "1", "--loop.steps", "2", "--jobs", "1", "--optimizers"]
    assert main([*words, "adamw", "muon", "lion", "mars-m@0.1", "--out", str(out)]) == 0
    said = capsys.readouterr()
    note = "the rates of muon, lion were not tuned for mine (adamw has the recipe's own); a grid: "
    note += race.GRID
    assert said.err.startswith(f"! {note}\n")
    assert f"! {note}" in " ".join(said.out.split())
    assert html.escape(note) in (out / "report.html").read_text()
    assert json.loads((out / "race.json").read_text())["notes"] == [note]
    monkeypatch.setattr(race, "run_all", lambda *_: None)  # as if somebody stopped it at once
    for more in (
        ["adamw", "muon", "--rates", "0.5", "1"], ["adamw", "muon@0.1"],
        ["muon", "--optimizer.lr", "0.1"],
    ):  # fmt: skip
        assert main([*words, *more, "--out", str(tmp_path / "other")]) == 130
        assert "not tuned for" not in capsys.readouterr().err


def test_what_is_asked_for_counts_even_where_it_equals_the_recipes_value() -> None:
    own = arguments.base_run("gpt-tiny", []).optimizer.lr  # of MARS-AdamW
    words = ("--optimizers", "adamw", "lion", "--seeds", "1", "--optimizer.lr", str(own))
    assert {r.optimizer.lr for r in jobs("gpt-tiny", *words).values()} == {own}


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("gpt-tiny", [], None),
        ("gpt-tiny", ["--loop.steps", "260"], None),
        ("gpt-tiny", ["--loop.steps", "100"],
         "the rates were tuned with 5.0 times more tokens; "),
        ("gpt-tiny", ["--loop.batch-size", "8", "--loop.steps", "1000"],
         "the rates were tuned in batches 2.0 times larger; "),
        ("gpt-tiny", ["--optimizers", "adamw", "muon@0.5", "--loop.steps", "50"],
         "the rates of adamw were tuned with 10 times more tokens; "),
        ("gpt-50m", ["--optimizers", "adamw", "muon"], None),
        ("gpt-50m", ["--optimizers", "adamw", "adopt", "--loop.steps", "2700"],
         "the rates of adamw were tuned with 3.0 times fewer tokens; "),
        ("digits-cnn", ["--loop.epochs", "100"],
         "the rates were tuned with 5.0 times fewer images; "),
        ("gpt2-small", ["--loop.steps", "9", "--schedule.warmup-steps", "1"], None),  # published
    ],
)  # fmt: skip
def test_a_race_says_where_its_rates_were_tuned_on_other_runs(
    recipe: str, words: list[str], said: str | None
) -> None:
    told = origins([pool.Job(name, run) for name, run in jobs(recipe, *words).items()])
    assert told == ([] if said is None else [said + "a grid: --rates 0.25 0.5 1 2 4"])


@pytest.mark.parametrize(("rates", "lines"), [(["1"], 1), (["0.5", "1"], 0)])
def test_that_is_said_before_the_first_run_and_not_of_a_grid(
    rates: list[str], lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(race, "run_all", lambda *_: None)  # as if somebody stopped it at once
    words = ["--optimizers", "adamw", "--loop.steps", "9", "--keep.out", str(tmp_path / "race")]
    assert main(["race", "gpt-tiny", *words, "--rates", *rates]) == 130
    assert capsys.readouterr().err.count("were tuned with 56 times more tokens") == lines


def test_one_rate_for_all_is_said_to_be_tuned_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(race, "run_all", lambda *_: None)
    words = ["gpt-tiny", "--keep.out", str(tmp_path / "race"), "--optimizers"]
    assert main(["race", *words, "adamw", "muon", "--optimizer.lr", "0.1"]) == 130
    assert "one rate for all, tuned for none" in capsys.readouterr().err
    assert main(["race", *words, "muon", "--optimizer.lr", "0.1"]) == 130
    assert "one rate" not in capsys.readouterr().err


@pytest.mark.parametrize("begun", [True, False])
def test_a_race_that_is_stopped_names_its_report_if_there_is_one(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def stopped(work: list[pool.Job], *_: object) -> None:
        if begun:
            Path(work[0].run.directory).mkdir()
            Path(work[0].run.directory, "log.jsonl").write_text("")

    monkeypatch.setattr(race, "run_all", stopped)
    assert main(["race", "gpt-tiny", "--out", str(tmp_path / "race")]) == 130
    said = capsys.readouterr().out
    assert said.startswith("stopped; the same command resumes from here")
    assert ("mars report" in said) == begun


def test_an_error_that_many_runs_have_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(work: list[pool.Job], processes: int, *_: object) -> dict[str, str]:
        with pool.Board(work, processes) as board:
            for job in work:
                board.finish(job.name, f"{pool.FAILED}no memory")
        return dict.fromkeys(board.ended, "no memory")

    monkeypatch.setattr(race, "run_all", fail)
    words = ["--optimizers", "adamw", "muon", "--seeds", "2", "--out", str(tmp_path / "race")]
    assert main(["race", "gpt-tiny", *words]) == 1
    said = capsys.readouterr().err
    assert said.count("no memory") == 2  # when it is new, and at the end
    assert said.count("failed: the same error") == 3
    assert "mars: error: adamw-lr0.005-s0 and 3 more runs: no memory\n" in said


def test_data_that_are_gone_do_not_keep_a_finished_race_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "run_all", lambda *_: {})
    words = ["--optimizers", "adamw", "--seeds", "1", "--out", str(tmp_path / "race")]
    words += ["--data.source", str(tmp_path / "gone.txt")]
    assert main(["race", "gpt-tiny", *words]) == 1
    run_ = tmp_path / "race" / "adamw-lr0.005-s0"
    run_.mkdir(parents=True)
    (run_ / "config.json").write_text("")
    assert main(["race", "gpt-tiny", *words]) == 0


def test_a_race_goes_on_where_its_data_are_now(tmp_path: Path, capsys: Capture) -> None:
    path, text = tmp_path / "given.json", tmp_path / "a.txt"
    path.write_text(json.dumps({**to_json(run(tmp_path / "unused", steps=2)), "recipe": "mini"}))
    text.write_text("To be, or not to be, that is the question. " * 60)
    words = ["race", str(path), "--jobs", "1", "--out", str(tmp_path / "race")]
    words += ["--optimizers", "adamw", "--data.source"]
    assert main([*words, str(text), "--seeds", "1"]) == 0
    text = text.rename(tmp_path / "b.txt")
    capsys.readouterr()
    assert main([*words, str(text), "--seeds", "2"]) == 0
    assert f"are in {text} now, and the same" in capsys.readouterr().err
    text.write_text(text.read_text().upper())
    other = text.rename(tmp_path / "c.txt")
    assert main([*words, str(other), "--seeds", "2"]) == 1
    assert "holds a race with data.source" in capsys.readouterr().err


def test_a_race_that_is_done_is_not_that_of_what_has_changed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tmp_path / "given.json", tmp_path / "a.txt"
    path.write_text(json.dumps({**to_json(run(tmp_path / "unused", steps=2)), "recipe": "mini"}))
    text.write_text("To be, or not to be, that is the question. " * 60)
    own_module.written(tmp_path, monkeypatch)
    words = ["race", str(path), "--jobs", "1", "--out", "race", "--data.source", str(text)]
    words += ["--seeds", "1", "--optimizers", f"{own_module.NAME}@0.01", "adamw@0.01"]
    assert main(words) == 0
    assert "done already" not in capsys.readouterr().err
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == "all runs of race were done already: nothing is run\n"
    assert "AdamW" in captured.out
    before = text.read_text()
    text.write_text(before.upper())
    for more in ([], ["--seeds", "2"]):  # nor is one that goes on
        assert main([*words, *more]) == 1
        captured = capsys.readouterr()
        assert "a.txt (train) has changed since the run in race/own_sgd.Own" in captured.err
        assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    text.write_text(before)
    own_module.written(tmp_path, monkeypatch, "# another one\n")
    assert main(words) == 1
    assert "the module of own_sgd:Own has changed since the run in" in capsys.readouterr().err
    assert main([*words[:-2], "adamw@0.01"]) == 0
    own_module.written(tmp_path, monkeypatch)
    text.unlink()  # what is done needs it no more
    assert main(words) == 0


class Breaks(torch.optim.SGD):
    """Somebody's optimizer with a bug."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise ValueError("boom\nand more of it")


class Remembers(torch.optim.SGD):
    """One whose state no checkpoint can hold."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["when"] = object()


def test_a_state_that_cannot_be_saved_is_told_at_once(tmp_path: Path, capsys: Capture) -> None:
    words = ["--optimizer", f"{__name__}:Remembers", "--keep.out", str(tmp_path / "run")]
    assert main(["train", "gpt-tiny", *words]) == 1
    assert "optimizer.state.0.when is of type object" in capsys.readouterr().err
    assert all(r["step"] <= 1 for r in read(tmp_path / "run")[1:])


def test_a_run_that_fails_leaves_its_traceback(tmp_path: Path) -> None:
    own = run(tmp_path / "run").replace(optimizer={"name": f"{__name__}:Breaks"})
    told = pool._work(pool.Job("mine", own), "mars race")
    assert told == f"failed: ValueError: boom (full traceback: {tmp_path / 'run' / 'error.txt'})"
    assert "in step" in (tmp_path / "run" / "error.txt").read_text()


def test_a_traceback_that_cannot_be_kept_is_one_line_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert unexpected(ValueError("boom\nmore"), tmp_path / "file" / "run") == "ValueError: boom"


def test_so_does_one_that_is_trained_alone(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    words = ["--optimizer", f"{__name__}:Breaks", "--loop.steps", "9", "--keep.out", str(out)]
    assert main(["train", "gpt-tiny", *words]) == 1
    captured = capsys.readouterr().err
    assert f"mars: error: ValueError: boom (full traceback: {out / 'error.txt'})" in captured
    assert "Traceback" not in captured
    assert "in step" in (out / "error.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "-1"], "--jobs must be 1 or more"),
        (["--optimizers"], "at least one optimizer"),
        (["--rates", "nan"], "rates above 0"),
        (["--optimizers", "adamw@inf"], "a rate must be above 0 and finite"),
        (["--loop.epochs", "inf"], "loop.epochs must be above 0"),
        (["--optimizers", "muonn"], "did you mean muon?"),
        (["--optimizers", "adamw", "adamw"], "asked for twice"),
        (["--loop.seed", "-1"], "loop.seed must be 0"),
    ],
)
def test_races_that_make_no_sense(
    words: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["race", *words]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_entrant_may_bring_its_rate() -> None:
    made = jobs("gpt-tiny", "--optimizers", "adamw@0.5", "test_race:Mine", "--seeds", "1")
    rates = {r.optimizer.name: r.optimizer.lr for r in made.values()}
    assert rates == {"adamw": 0.5, "test_race:Mine": 0.125}  # its class's own default


class LosesTheGpu(torch.optim.SGD):
    """Reads beyond the end of a tensor: no kernel of the process runs after that."""

    def step(self, closure=None):
        p = self.param_groups[0]["params"][0]
        p.flatten()[torch.full((1,), p.numel(), device=p.device)].sum().item()


@needs_gpu
def test_a_lost_gpu_is_told_by_the_name_of_the_run(tmp_path: Path, capsys: Capture) -> None:
    words = ["race", "gpt-tiny", "--optimizers", "test_race:LosesTheGpu", "--seeds", "1"]
    where = ["--loop.steps", "4", "--loop.device", "cuda", "--keep.out", str(tmp_path / "race")]
    assert main([*words, *where]) == 1
    said = capsys.readouterr().err
    assert said.count("its process has lost the GPU") == 3  # begun again, on the board, at the end
    assert "mars: error: test_race.LosesTheGpu" in said
    assert "Traceback" not in said


def test_a_worker_whose_gpu_is_lost_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty_cache() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with …")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    text = "^CUDA error: unspecified launch failure: its process has lost the GPU$"
    with pytest.raises(workers.LostGpu, match=text), workers.at_work(run(tmp_path)):
        pass


class Mine(torch.optim.SGD):
    """An optimizer of a user's, without a learning rate that somebody tuned."""

    def __init__(self, params, lr: float = 0.125) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params, lr=lr)


def test_what_is_wrong_with_an_entrant_is_told_before_the_race(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["--optimizers", "adamw", "no.such:Thing"], "No module named 'no'"),
        (["--optimizers", "adamw@fast"], "'fast' is not a number"),
        (["--optimizer", "adamw"], "--optimizers NAME"),
        (["--optimizers", "adamw", "--optimizer.gamma", "0.1"], "gamma is no option of adamw\n"),
        (
            ["--optimizers", "mars-m", "adamw", "--optimizer.gamma", "0.1", "--out", "a"],
            "`mars report a --baseline adamw`",
        ),
    ):
        assert main(["race", *words]) in (1, 2)
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_race_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """SIGTERM to the main process alone: workers save, nobody is left behind, then it goes on."""
    path = tmp_path / "given.json"
    long = run(tmp_path / "unused", steps=1_000_000)
    path.write_text(json.dumps({**to_json(long), "recipe": "mini"}))
    words = [
        sys.executable, "-m", "mars.lab", "race", str(path), "--optimizers", "adamw", "mars-adamw",
        "--seeds", "2", "--jobs", "2", "--keep.out", str(tmp_path / "race"),
    ]  # fmt: skip
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        logs = list((tmp_path / "race").glob("*/log.jsonl"))
        if len([log for log in logs if '"train"' in log.read_text()]) == 2:
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command resumes" in out
    assert err.count("stopping: runs in progress are saved") == 1
    assert "will save" not in err  # what a run answers who sits before it alone
    ends = [read(log.parent)[-1] for log in (tmp_path / "race").glob("*/log.jsonl")]
    assert [end["status"] for end in ends] == ["stopped", "stopped"]
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""
    again = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        resumed = [r["what"] for f in logs for r in read(f.parent) if r["kind"] == "event"]
        if resumed.count("resumed") == 2:
            break
        time.sleep(0.1)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=60)
    assert resumed.count("resumed") == 2


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_nobody_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before the workers have been told of the first."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_drain", interrupted)
    monkeypatch.setattr(pool.Board, "say", interrupted)
    work = [pool.Job(f"r{i}", run(tmp_path / f"r{i}", steps=1_000_000)) for i in range(2)]
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        pool.run_all(work, 2, "")
    for _ in range(100):
        if set(multiprocessing.active_children()) <= before:
            return
        time.sleep(0.1)
    pytest.fail("workers are left")


@pytest.mark.slow
def test_a_race_from_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps({**to_json(run(tmp_path / "unused", steps=8)), "recipe": "mini"}))
    words = [
        "race", str(path), "--optimizers", "adamw", "mars-adamw", "--seeds", "2", "--jobs", "2",
        "--out", str(tmp_path / "race"),
    ]  # fmt: skip
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "[4/4]" in captured.err
    said = "! the rate of adamw was not tuned for mini (mars-adamw has the recipe's own); a grid: "
    assert said in captured.err
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
    assert "MARS-AdamW" in (tmp_path / "race" / "report.html").read_text()

    def rows(out: str) -> str:
        """The table: the words above it say in which directory the race goes on."""
        return out.partition("\noptimizer ")[2].partition("\n\n")[0]

    assert len(rows(captured.out).splitlines()) == 1 + len(summary.entries)
    # Again: nothing is trained, the same table comes out.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "race").rglob("log.jsonl")}
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert rows(captured.out) == rows(capsys.readouterr().out)
    # So it does by the name of its directory, which may have been moved.
    moved = (tmp_path / "race").rename(tmp_path / "moved")
    assert main(["race", str(moved), "--jobs", "1"]) == 0
    assert {p: p.stat().st_mtime_ns for p in moved.rglob("log.jsonl")} == {
        moved / p.relative_to(tmp_path / "race"): at for p, at in before.items()
    }
    assert rows(captured.out) == rows(capsys.readouterr().out)
    about = json.loads((moved / "race.json").read_text())
    assert shlex.split(about["command"])[2:] == [
        str(path), *words[2:7], "--keep.out", str(moved), "--jobs", "1"
    ]  # fmt: skip
    (moved / "race.json").write_text(json.dumps({**about, "command": "mars race gone.json"}))
    assert main(["race", str(moved)]) == 1
    assert "was begun with gone.json, which is not here" in capsys.readouterr().err
    (moved / "race.json").write_text("{")
    assert main(["race", str(moved)]) == 1
    assert "race.json is damaged: give the race's options, and --out" in capsys.readouterr().err
    # What was said of its rates is said with its results.
    note = "the rates were tuned with 8.3 times more tokens"
    (moved / "race.json").write_text(json.dumps({**about, "notes": [note]}))
    assert main(["report", str(moved)]) == 0
    assert note in capsys.readouterr().out
    assert note in (moved / "report.html").read_text()
    moved.rename(tmp_path / "race")
    # With other settings: refused before anything is shown or written.
    page, about = (tmp_path / "race" / name for name in ("report.html", "race.json"))
    kept = page.read_bytes(), about.read_bytes()
    assert main([*words, "--loop.steps", "5"]) == 1
    refused = capsys.readouterr()
    assert "race holds a race with loop.steps = 8, not 5: choose another --out" in refused.err
    assert (refused.out, len(refused.err.splitlines())) == ("", 1)
    assert (page.read_bytes(), about.read_bytes()) == kept


@pytest.mark.slow
def test_a_run_that_diverges_does_not_stop_the_race(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "given.json"
    path.write_text(
        json.dumps({**to_json(run(tmp_path / "unused", "adamw", steps=12)), "recipe": "m"})
    )
    words = [
        "race", str(path), "--optimizers", "adamw", "--seeds", "1", "--rates", "1", "1e30",
        "--jobs", "1", "--keep.out", str(tmp_path / "race"),
    ]  # fmt: skip
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "diverged: the" in captured.err
    assert "adamw-lr0.01-s0: validation loss" in captured.err
    dead = tmp_path / "race" / "adamw-lr1e+28-s0" / "log.jsonl"
    before = dead.read_bytes()
    main(words)  # a result, too, that takes no time a second time
    assert "diverged: the" in capsys.readouterr().err
    assert dead.read_bytes() == before
    main([*words, "--loop.skip-nan"])  # another run: it may end otherwise
    assert dead.read_bytes() != before

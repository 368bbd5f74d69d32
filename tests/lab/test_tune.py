"""Searches: what they try, that they go on after an interruption, what they leave behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import own_module
import pytest
from miniature import run

from mars.lab import arguments, log, search
from mars.lab.config import Run, to_json
from mars.lab.errors import LabError, UsageError
from mars.lab.recipes.settings import Recommendation, read, recommended
from mars.lab.report import load
from mars.lab.rundir import RunDirectory
from mars.lab.search import Range, at, at_edge, space, starts
from mars.lab.trial import Order, attempt
from mars.lab.tune import tune_command


def recipe(folder: Path, name: str = "mars-adamw", **changes: Any) -> str:
    """A miniature as a JSON file."""
    values = to_json(run(folder / "unused", name).replace(**changes))
    values["keep"].pop("out")
    path = folder / "mini.json"
    path.write_text(json.dumps(values))
    return str(path)


def found(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / "tune.json").read_text())
    assert isinstance(values, dict)
    return values


def go(*words: object) -> int:
    return tune_command([*map(str, words), "--jobs", "1"])


def test_a_search_tries_the_recipe_first_and_leaves_a_better_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    # A rate far too low for 12 steps: anything above it is better.
    mini = recipe(tmp_path, optimizer={"lr": 1e-4, "weight_decay": 0.1})
    assert go(mini, "--trials", 5, "--out", out) == 0
    about = found(out)
    trials = about["trials"]
    assert [t["state"] for t in trials] == ["complete"] * 5
    assert trials[0]["values"] == {"lr": 1e-4, "weight_decay": 0.1, "gamma": 0.025}
    losses = [t["loss"] for t in trials]
    assert losses[about["best"]] == min(losses) < losses[0]
    assert len({tuple(t["values"].values()) for t in trials}) == 5
    for name, low, high in (
        ("lr", 1e-4 / 8, 8e-4),
        ("weight_decay", 1 / 80, 0.8),
        ("gamma", 0, 0.2),
    ):
        assert all(low <= t["values"][name] <= high for t in trials)

    runs = {log.path.name: log for log in load([out])}
    assert sorted(runs) == [f"trial-{i:04d}" for i in range(5)]
    for t in trials:
        made = runs[t["runs"][0]]
        assert made.final == t["loss"]
        assert made.lr == pytest.approx(t["values"]["lr"], rel=1e-3)
        assert made.header["config"]["optimizer"]["gamma"] == pytest.approx(
            t["values"]["gamma"], rel=1e-3
        )
        kept = (made.path / "checkpoints").exists()
        assert kept == (t["number"] == about["best"])

    # The result is a recipe: it gives the run of the best trial again.
    best = json.loads((out / "best.json").read_text())
    again = arguments.overridden(best)
    tried = json.loads((out / f"trial-{about['best']:04d}" / "config.json").read_text())
    assert to_json(again)["optimizer"] == {**tried["optimizer"], "betas": again.optimizer.betas}
    assert again.model == run(tmp_path).model
    assert again.loop.steps == 12
    assert again.keep.out is None

    captured = capsys.readouterr()
    assert captured.err.count("trial-") == 5
    assert "[2/5] trial-0001, lr " in captured.err
    assert " left" in captured.err
    assert "the recipe's own" in captured.out
    assert f"mars train {out}/best.json" in captured.out


def test_a_search_may_vary_the_warm_up(tmp_path: Path) -> None:
    out = tmp_path / "search"
    mini = recipe(tmp_path, "adamw", schedule={"warmup_steps": 2})
    words = (mini, "--out", out, "--search", "lr", "warmup_steps")
    assert go(*words, "--trials", 3) == 0
    assert go(*words, "--trials", 5) == 0  # goes on
    trials = found(out)["trials"]
    assert [t["state"] for t in trials] == ["complete"] * 5
    steps = [t["values"]["warmup_steps"] for t in trials]
    assert steps[0] == 2
    assert len(set(steps)) > 2
    assert all(isinstance(n, int) and 1 <= n <= 6 for n in steps)  # of 12
    for t, n in zip(trials, steps, strict=True):
        made = json.loads((out / t["runs"][0] / "config.json").read_text())
        assert made["schedule"]["warmup_steps"] == n
        assert made["optimizer"]["lr"] == pytest.approx(t["values"]["lr"], rel=1e-3)
    best = arguments.overridden(json.loads((out / "best.json").read_text()))
    assert best.schedule.warmup_steps == steps[found(out)["best"]]


def test_a_search_begins_with_what_was_measured_then_with_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    words = ("gpt-tiny", "--optimizer", "muon", "--loop.steps", 2, "--out", out, "--trials")
    assert go(*words, 1) == 0
    assert go(*words, 2) == 0
    first, second = (t["values"] for t in found(out)["trials"])
    assert first == {"lr": 0.032, "weight_decay": 0.1}  # of the study, whose runs are shorter
    assert second == {"lr": 0.016, "weight_decay": 0.1}  # of the recipe's grid
    config = json.loads((out / "trial-0000" / "config.json").read_text())
    assert config["optimizer"]["lr_1d"] == 0.016
    said = capsys.readouterr()
    assert said.err.count("first the recommended ") == 1
    (of,) = (s for s in read() if s.arm == "Muon" and "tiny-search" in s.source)
    told = f"first the recommended lr 0.032 (best of {of.rates} rates by {of.seeds} seeds, "
    assert told in said.err
    source = f"{of.source}, Muon"  # not with lr_1d = 2 lr: not searched
    own = "then the recipe's own lr 0.016\n"
    assert f"75 times more tokens; {source}); {own}" in said.err
    rows = [line for line in said.out.splitlines() if "the recipe's own" in line]
    assert len(rows) == 1
    assert rows[0].startswith("1 ")


def advice(**changes: Any) -> Recommendation | None:
    """What is recommended for AdamW on the miniature."""
    made = of(name="adamw", lr=1e-2, weight_decay=0.1, **changes)
    return recommended(made.optimizer, 363168, 153600)


def test_what_is_recommended_is_tried_where_it_can_be() -> None:
    found = advice()
    assert found is not None
    ranges = space(of(name="adamw", lr=1e-2, weight_decay=0.1))
    own = {"lr": 1e-2, "weight_decay": 0.1}
    first, said = starts(ranges, found)
    assert first == [{"lr": 0.0025, "weight_decay": 0.1}, own]
    assert said.startswith("first the recommended lr 0.0025 (best of ")
    assert said.endswith("); then the recipe's own lr 0.01")
    first, said = starts(space(of(name="adamw", lr=1e-4, weight_decay=0.1)), found)
    assert first == [{"lr": 1e-4, "weight_decay": 0.1}]
    assert "recommended, but lr 0.0025 is not within 1.25e-05 to 0.0008" in said
    same = space(of(name="adamw", lr=0.0025, weight_decay=0.1))
    assert starts(same, found)[0] == [{"lr": 0.0025, "weight_decay": 0.1}]
    assert "which are recommended: lr 0.0025" in starts(same, found)[1]
    assert starts(ranges, None)[0] == [own]
    assert advice(options={"amsgrad": "True"}) is None


def test_a_search_that_goes_on_tries_what_it_would_have_tried(tmp_path: Path) -> None:
    mini = recipe(tmp_path)
    words = (mini, "--search", "lr", "gamma", "--loop.steps", "4")
    go(*words, "--trials", 7, "--out", tmp_path / "whole")
    go(*words, "--trials", 3, "--out", tmp_path / "parts")
    with open(tmp_path / "parts" / "study", "ab") as file:
        file.write(b'{"op_code":4,"tor')  # a kill in the middle of a line
    os.symlink("study", tmp_path / "parts" / "study.lock")  # and while it was locked
    began = time.monotonic()
    go(*words, "--trials", 7, "--out", tmp_path / "parts")
    assert time.monotonic() - began < 20  # Optuna itself would wait 30 seconds for the lock

    def outcome(name: str) -> list[tuple[Any, ...]]:
        return [(t["values"], t["state"], t["loss"]) for t in found(tmp_path / name)["trials"]]

    assert outcome("parts") == outcome("whole")
    assert len(outcome("whole")) == 7


def test_ctrl_c_saves_the_trial_and_the_same_command_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    words = (recipe(tmp_path), "--trials", 2, "--out", out, "--loop.steps", 120)
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.005):
            if list(out.glob("trial-0001/checkpoints/step-*")):
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert go(*words) == 130
    finally:
        over.set()
        thread.join()
    assert "stopped; the same command resumes" in capsys.readouterr().out
    assert [t["state"] for t in found(out)["trials"]] == ["complete", "running"]
    assert log.read(out / "trial-0001")[-1]["status"] == "stopped"

    assert go(*words) == 0
    about = found(out)
    assert [t["state"] for t in about["trials"]] == ["complete", "complete"]
    records = log.read(out / "trial-0001")
    assert [r["what"] for r in records if r["kind"] == "event"][-1] == "resumed"
    assert records[-1]["valid"] == about["trials"][1]["loss"]


def test_divergence_is_a_result_not_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    mini = recipe(tmp_path, "adamw", optimizer={"lr": 1e25, "weight_decay": 0.1})
    assert go(mini, "--trials", 2, "--out", out) == 0
    assert [t["state"] for t in found(out)["trials"]] == ["diverged", "diverged"]
    assert found(out)["best"] is None
    assert not (out / "best.json").exists()
    assert log.read(out / "trial-0000")[-1]["status"] == "diverged"
    said = capsys.readouterr()
    assert "no trial is complete yet: 2 of 2 diverged or failed; lower optimizer.lr" in said.out
    assert "diverged" in said.err


def test_what_is_wrong_with_all_trials_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "search"
    mini = recipe(tmp_path, data={"source": str(tmp_path / "no-such-file.txt")})
    with pytest.raises(LabError, match=r"no-such-file\.txt"):
        go(mini, "--trials", 2, "--out", out)
    with pytest.raises(LabError, match="Invalid beta parameter"):
        go(recipe(tmp_path), "--optimizer.betas", 0.9, 1.5, "--out", out)
    assert not out.exists()  # else it would refuse the command without the mistake


def test_a_run_that_lags_behind_is_pruned_and_closed_properly(tmp_path: Path) -> None:
    study = search.open_study(tmp_path, 4)
    at_all = {step: 1.0 for step in (1, 2, 4, 8, 12)}
    for _ in range(search.STARTUP):
        study.add_trial(optuna.trial.create_trial(value=1.0, intermediate_values=at_all))
    trial = study.ask()
    made = run(tmp_path / "trial")
    ended = attempt(Order(tmp_path, trial.number, (made,), 4, "mars tune"))
    assert ended.state == "pruned"
    assert ended.seconds > 0
    records = log.read(tmp_path / "trial")
    last = records[-1]
    assert (last["kind"], last["status"]) == ("end", "stopped")
    assert last["text"] == "pruned at step 4 of 12"
    assert last["valid"] == ended.loss == records[-2]["loss"]
    with RunDirectory(tmp_path / "trial").lock():  # nobody holds it
        pass
    told = study.trials[-1].intermediate_values
    assert max(told) == 4
    assert 0 not in told


def test_a_tilde_that_no_shell_expanded_means_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in --out=~/search: search and runs are in one place, and old checkpoints go."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert go(recipe(tmp_path), "--trials", 2, "--out=~/search") == 0
    assert not Path("~").exists()
    out = tmp_path / "home" / "search"
    assert len(found(out)["trials"]) == len(list(out.glob("trial-*"))) == 2
    assert len(list(out.glob("trial-*/checkpoints"))) == 1


def test_several_seeds_are_judged_by_their_mean(tmp_path: Path) -> None:
    out = tmp_path / "search"
    go(recipe(tmp_path), "--trials", 1, "--seeds", 2, "--out", out)
    (trial,) = found(out)["trials"]
    runs = {made.path.name: made for made in load([out])}
    assert sorted(runs) == trial["runs"] == ["trial-0000-s0", "trial-0000-s1"]
    assert {made.seed for made in runs.values()} == {0, 1}
    finals = [made.final or 0.0 for made in runs.values()]
    assert finals[0] != finals[1]
    assert trial["loss"] == pytest.approx(sum(finals) / 2, rel=1e-12)


def test_another_search_in_the_same_place_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "search"
    common = [recipe(tmp_path), "--trials", 1, "--out", out, "--search", "lr", "--loop.steps", 4]
    go(*common)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for words, message in (
        ("--loop.steps 5", "loop.steps = 4, not 5"),
        ("--optimizer.betas 0.8 0.9", "optimizer.betas = None"),
        ("--seeds 2", "--seeds 1 --search lr"),
        ("--search gamma", "--seeds 1 --search lr"),
    ):
        with pytest.raises(LabError, match="holds a search with") as refused:
            go(*common, *words.split())
        assert message in str(refused.value)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_search_does_not_go_on_with_an_optimizer_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of both versions were compared, and the better called best."""
    own_module.written(tmp_path, monkeypatch)
    mini = recipe(tmp_path, optimizer={"name": own_module.NAME})
    words = [mini, "--out", "search", "--search", "lr", "--loop.steps", 4, "--trials"]
    go(*words, 1)
    before = {path: path.read_bytes() for path in Path("search").rglob("*") if path.is_file()}
    own_module.written(tmp_path, monkeypatch, "# another one\n")
    with pytest.raises(LabError, match="own_sgd:Own has changed since the search in search began"):
        go(*words, 2)
    assert {path: path.read_bytes() for path in before} == before
    own_module.written(tmp_path, monkeypatch)
    go(*words, 2)
    assert len(found(Path("search"))["trials"]) == 2


def test_a_search_killed_before_its_first_trial_goes_on_where_its_data_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "search"
    text.write_text("To be, or not to be, that is the question. " * 60)
    words = [recipe(tmp_path), "--out", out, "--search", "lr", "--loop.steps", 4, "--trials", 1]

    def killed(*_: object) -> bool:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("mars.lab.tune.Search._fill", killed)
        with pytest.raises(RuntimeError, match="killed"):
            go(*words, "--data.source", text)
    assert found(out)["trials"] == []
    text = text.rename(tmp_path / "b.txt")
    with pytest.raises(LabError, match=r"holds a search with optimizer\.betas"):
        go(*words, "--data.source", text, "--optimizer.betas", 0.8, 0.9)
    go(*words, "--data.source", text)
    assert found(out)["config"]["data"]["source"] == str(text)
    assert len(found(out)["trials"]) == 1
    shutil.rmtree(out / "trial-0000")  # what it was of is not known any more
    with pytest.raises(LabError, match=r"holds a search with data\.source"):
        go(*words, "--data.source", text.rename(tmp_path / "c.txt"))


def test_a_search_goes_on_where_its_data_are_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "search"
    text.write_text("To be, or not to be, that is the question. " * 60)
    words = [recipe(tmp_path), "--out", out, "--search", "lr", "--loop.steps", 4, "--data.source"]
    go(*words, text, "--trials", 2)
    text = text.rename(tmp_path / "b.txt")
    go(*words, text, "--trials", 3)
    first = out / "trial-0000"
    assert f"data of {first} and 1 more run are in {text} now" in capsys.readouterr().err
    about = found(out)
    assert (about["config"]["data"]["source"], len(about["trials"])) == (str(text), 3)
    assert json.loads((out / "best.json").read_text())["data"]["source"] == str(text)
    for trial in out.glob("trial-*/config.json"):
        assert json.loads(trial.read_text())["data"]["source"] == str(text)
    text.write_text(text.read_text().upper())
    with pytest.raises(LabError, match=r"holds a search with data\.source"):
        go(*words, text.rename(tmp_path / "c.txt"), "--trials", 4)


def test_a_search_does_not_go_on_with_data_that_have_changed(tmp_path: Path) -> None:
    """Only a trial that was under way was asked for its data: finished ones were not."""
    text, out = tmp_path / "a.txt", tmp_path / "search"
    text.write_text("To be, or not to be, that is the question. " * 60)
    words = [recipe(tmp_path), "--out", out, "--search", "lr", "--loop.steps", 4, "--data.source"]
    go(*words, text, "--trials", 1)
    before = text.read_text()
    text.write_text(before.upper())
    with pytest.raises(
        LabError, match=r"a\.txt \(train\) has changed since the run in .*trial-0000"
    ):
        go(*words, text, "--trials", 2)
    assert len(list(out.glob("trial-*"))) == 1
    text.write_text(before)
    go(*words, text, "--trials", 2)
    text.unlink()
    go(*words, text, "--trials", 2)  # what is done needs it no more


@pytest.mark.slow
def test_two_trials_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "search"
    words = [recipe(tmp_path), "--trials", "3", "--out", str(out), "--jobs", "2"]
    assert tune_command(words) == 0
    about = found(out)
    assert [t["state"] for t in about["trials"]] == ["complete"] * 3
    assert about["trials"][0]["values"]["lr"] == 1e-2  # nothing like it was measured elsewhere
    assert len({made.final for made in load([out])}) == 3


def test_bad_words_are_refused(tmp_path: Path) -> None:
    mini, out = recipe(tmp_path), tmp_path / "search"
    for option in ("--trials", "--seeds", "--jobs"):
        with pytest.raises(LabError, match=f"{option} must be 1 or more, not 0"):
            tune_command([mini, "--out", str(out), option, "0"])
    with pytest.raises(LabError, match="--search gamma: adamw has no such option"):
        go(recipe(tmp_path, "adamw"), "--out", out, "--search", "gamma")
    with pytest.raises(LabError, match=r"optimizer\.lr must be above 0"):
        go(mini, "--out", out, "--optimizer.lr", "0")
    for word, hint in (("foo", "it can be lr, lr_1d, weight_decay, gamma, warmup_steps"),
                       ("Gama", "did you mean gamma?")):  # fmt: skip
        with pytest.raises(UsageError, match=f"--search {word}: {re.escape(hint)}"):
            go(mini, "--out", out, "--search", "lr", word)
    assert not out.exists()


def of(**optimizer: Any) -> Run:
    return run(Path()).replace(optimizer=optimizer)


def test_ranges_lie_around_the_recipe() -> None:
    assert space(of(lr=0.01, weight_decay=0.1)) == {
        "lr": Range(0.01, 0.01 / 8, 0.08, log=True),
        "weight_decay": Range(0.1, 0.1 / 8, 0.8, log=True),
        "gamma": Range(0.025, 0.0, 0.2, log=False),
    }
    assert list(space(of(name="adamw"))) == ["lr", "weight_decay"]
    assert space(of(weight_decay=0.0), ["weight_decay"]) == {
        "weight_decay": Range(0.0, 0.0, 0.3, log=False)
    }
    assert space(of(gamma=0.2), ["gamma"])["gamma"].high == 0.4
    assert space(of(lr=0.01), ["lr_1d"])["lr_1d"].own == 0.01
    assert list(space(of(name="my.module:Own"))) == ["lr", "weight_decay"]


def test_the_range_of_a_warm_up() -> None:
    def warmup(steps: int, own: int) -> Range:
        made = run(Path()).replace(schedule={"warmup_steps": own}, loop={"steps": steps})
        return space(made, ["warmup_steps"])["warmup_steps"]

    assert warmup(900, 90) == Range(90, 11, 450, log=True, most=450)
    assert warmup(900, 0) == Range(0, 0, 450, log=False, most=450)
    assert warmup(10, 8) == Range(8, 1, 8, log=True, most=8)  # the recipe's own is always in it
    rising = run(Path()).replace(schedule={"shape": "onecycle"})
    with pytest.raises(LabError, match="onecycle has a rise of its own"):
        space(rising, ["warmup_steps"])


def test_nothing_is_pruned_while_some_trial_may_still_warm_up() -> None:
    made = run(Path()).replace(schedule={"warmup_steps": 90}, loop={"steps": 900})
    assert search.first_pruning(made, space(made, ["lr"])) == 300
    assert search.first_pruning(made, space(made, ["lr", "warmup_steps"])) == 900


def test_the_option_that_moves_a_range() -> None:
    assert search.option("weight_decay") == "--optimizer.weight-decay"
    assert search.option("warmup_steps") == "--schedule.warmup-steps"


def test_settings_have_four_digits_but_the_recipes_own_are_exact() -> None:
    third = of(lr=1 / 3, lr_1d=1 / 7)
    ranges = space(third)
    same = at(third, ranges, {"lr": 1 / 3, "weight_decay": 0.0, "gamma": 0.025}).optimizer
    assert (same.lr, same.lr_1d, same.gamma) == (1 / 3, 1 / 7, 0.025)
    twice = at(third, ranges, {"lr": 2 / 3}).optimizer
    assert (twice.lr, twice.lr_1d) == (0.6667, 0.2857)
    alone = at(third, space(third, ["lr", "lr_1d"]), {"lr": 2 / 3, "lr_1d": 0.5}).optimizer
    assert alone.lr_1d == 0.5


def test_the_edge_of_a_range_is_noticed() -> None:
    rate = Range(0.01, 0.001, 0.1, log=True)
    assert at_edge(rate, 0.095) == "upper"
    assert at_edge(rate, 0.0011) == "lower"
    assert at_edge(rate, 0.01) is None
    gamma = Range(0.025, 0.0, 0.1, log=False)
    assert at_edge(gamma, 0.0) is None  # there is nothing below 0
    warmup = Range(90, 11, 450, log=True, most=450)
    assert (at_edge(warmup, 11), at_edge(warmup, 450)) == ("lower", None)
    assert at_edge(gamma, 0.099) == "upper"

"""A real study end to end, its command line, and the variance experiment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_study import HERE, base, result

from mars.lab.cli import main
from mars.lab.crew import Crew
from mars.lab.errors import LabError
from mars.lab.rundir import RunDirectory
from mars.lab.study import (
    Arm,
    Claim,
    Comparison,
    Study,
    command,
    fingerprint,
    stretch,
    times,
    variance_command,
)
from mars.lab.study import variance as v
from mars.lab.study.planner import Stage, Wanted
from mars.lab.study.questions import find
from mars.lab.study.results import Results, failures
from mars.lab.study.variance_command import text, write
from mars.lab.study.variance_kept import NAME as NAME_OF_KEPT
from mars.lab.study.variance_kept import Kept
from mars.lab.study.worker import Ended
from mars.rule.estimator import noise_ratio

Capture = pytest.CaptureFixture[str]


def quick() -> Study:
    """Two arms of a GPT of a few thousand parameters, 12 steps; found by name below."""
    return Study(
        name="quick",
        question="Is MARS lower?",
        prediction="It is.",
        base=base,
        arms=(
            Arm(label="AdamW", optimizer="adamw", lr=1e-2, factor=8.0),
            Arm(label="MARS", optimizer="mars-adamw", lr=1e-2, factor=8.0),
        ),
        comparisons=(Comparison(arm="MARS", baseline="AdamW", claim=Claim(kind="lower")),),
    )


NAME = "test_study:quick"


def kill_after_a_result(out: Path) -> None:
    """Begin the study in a process of its own, and kill it when it has one result."""
    words = [sys.executable, "-m", "mars.lab", "study", NAME, "--out", str(out), "--jobs", "1"]
    process = subprocess.Popen(words, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)
    until(lambda: bool(Results(out).read()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: all(_free(folder) for folder in out.glob("runs/*")))  # workers end by themselves


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def _free(folder: Path) -> bool:
    try:
        with RunDirectory(folder).lock():
            return True
    except LabError:
        return False


@pytest.mark.slow
def test_a_study_from_nothing_to_its_verdict(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    kill_after_a_result(out)
    first = Results(out).read()
    (out / "runs" / "AdamW-lr0.01-s0" / "checkpoints").mkdir(exist_ok=True)  # killed in between
    assert main(["study", NAME, "--out", str(out), "--jobs", "1"]) == 0
    said = capsys.readouterr()
    results = Results(out).read()
    assert results[: len(first)] == first
    assert "AdamW-lr0.01-s0:" not in said.err, "it was run before the kill"
    assert len({r.key for r in results}) == len(results) >= 10
    assert "validation loss" in said.err
    assert "complete" in said.out
    assert "MARS: lower than AdamW — " in (out / "verdict.md").read_text()
    page = (out / "report.html").read_text()
    assert len(page) > 10_000
    assert f">mars study {NAME}<" in page
    assert not list(out.glob("runs/*/checkpoints")), "checkpoints outlive only unfinished runs"
    done = next(r for r in results if r.arm == "MARS" and r.lr == 1e-2 and r.seed == 0)
    assert done.curve["step"][0] == 0
    assert done.curve["step"][-1] == 12
    assert done.curve["loss"][-1] == done.final
    assert done.tokens == 12 * 4 * 16
    later = next(r for r in results if r.arm == "MARS" and r.seed == 2)  # not the one killed
    assert later.wall is not None
    assert later.variance_ratio is not None
    assert set(done.fingerprint) == {"data", "config", "code", "torch", "device", "arm"}

    # The file alone, elsewhere: nothing is run again, and the verdict is the same.
    there = tmp_path / "there"
    there.mkdir()
    (there / "results.jsonl").write_bytes((out / "results.jsonl").read_bytes())
    assert main(["study", NAME, "--out", str(there), "--jobs", "1"]) == 0
    assert capsys.readouterr().err == ""
    assert (there / "verdict.md").read_text() == (out / "verdict.md").read_text()
    assert not (there / "runs").exists()
    assert main(["study", NAME, "--out", str(there), "--verdict-only"]) == 0
    assert "MARS: lower than AdamW — " in capsys.readouterr().out
    kept = (there / "verdict.md").read_bytes()
    assert main(["study", "tiny-clip", "--out", str(there), "--verdict-only"]) == 1
    assert "holds runs of another study, none of tiny-clip" in capsys.readouterr().err
    assert (there / "verdict.md").read_bytes() == kept

    # Runs of a configuration that the study no longer has; or one of other code: both are refused.
    path = there / "results.jsonl"
    lines = path.read_text().splitlines()
    config = json.loads(lines[0])["fingerprint"]["config"]
    path.write_text("\n".join(lines).replace(config, "0ddc0ff1900d") + "\n")
    assert main(["study", NAME, "--out", str(there), "--verdict-only"]) == 1
    assert "their model or schedule differ" in capsys.readouterr().err
    assert (there / "verdict.md").read_bytes() == kept
    record = json.loads(lines[0])
    record["fingerprint"]["code"] = "feedfeedfeed"
    path.write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    before = path.read_bytes()
    assert main(["study", NAME, "--out", str(there), "--jobs", "1"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "their training code differ (feedfeedfeed: 1 run; " in said.err
    assert path.read_bytes() == before


@pytest.fixture(scope="module")
def one_arm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The study run as far as one of its arms goes, two runs at a time; and what was printed."""
    out, said = tmp_path_factory.mktemp("one-arm"), io.StringIO()
    silent = contextlib.redirect_stderr(io.StringIO())
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), silent:
        patch.setenv("HOME", str(out))
        code = main(["study", NAME, "--out=~", "--arms", "AdamW", "--jobs", "2"])
    assert code == 0
    return out, said.getvalue()


@pytest.mark.slow
def test_runs_are_taken_from_another_study(
    one_arm: tuple[Path, str], tmp_path: Path, capsys: Capture
) -> None:
    there, here = one_arm[0], tmp_path / "here"
    other = next(arm for arm in quick().arms if arm.label == "MARS")
    own = Results(there).read()[0]  # as a run of an arm that the other study does not have
    print_ = {**own.fingerprint, "arm": fingerprint.of_arm(quick(), other)}
    Results(there).add([replace(own, arm="MARS", fingerprint=print_)])
    words = ["study", "test_study:renamed", "--out", str(here)]
    assert main([*words, "--take", str(tmp_path / "nowhere")]) == 1
    assert "nowhere/results.jsonl does not exist" in capsys.readouterr().err
    assert not here.exists()
    assert main([*words, "--take", str(there), "--verdict-only"]) == 0
    said, theirs = capsys.readouterr().err, Results(there).read()
    assert {r.arm for r in Results(here).read()} == {"tuned"}
    assert main([*words, "--verdict-only", "--jobs", "1"]) == 1
    assert "--verdict-only runs nothing" in capsys.readouterr().err
    assert main([*words, "--jobs", "1"]) == 0
    said += capsys.readouterr().err
    ours = Results(here).read()
    assert {r.arm for r in ours} == {"tuned", "plain γ"}
    taken = [r for r in ours if r.arm == "tuned"]
    assert [r.curve for r in taken] == [r.curve for r in theirs if r.arm == "AdamW"]
    assert f"{there}: {len(taken)} of its runs are runs of renamed too" in said
    assert "tuned-" not in said, "none was run again"


def test_runs_are_known_by_the_whole_configuration() -> None:
    """batch-50m varies the batch; 64k tokens are what every run of optimizers-50m has."""
    there = Path(__file__).parents[2] / "docs/results/optimizers-50m"
    study, others = find("batch-50m"), Results(there).read()
    known = [find("optimizers-50m")]
    config = fingerprint._hash(study.common())
    here = {**others[-1].fingerprint, "config": config}
    assert config != others[-1].fingerprint["config"]
    declared = fingerprint.equivalents(there)
    found = fingerprint.shared(study, known, others, declared, here)
    assert {r.arm for r in found} == {"AdamW, 64k", "MARS-AdamW, 64k"}
    labels = {"AdamW, 64k": "AdamW", "MARS-AdamW, 64k": "MARS-AdamW (.9, .95)"}
    curves = {(r.arm, r.lr, r.seed): r.curve for r in others}
    assert all(r.curve == curves[labels[r.arm], r.lr, r.seed] for r in found)
    fingerprint.check(study, found, there, here)
    assert not fingerprint.shared(study, [], others, declared, here)
    elsewhere = {**here, "data": "other"}
    assert not fingerprint.shared(study, known, others, declared, elsewhere)
    assert not fingerprint.shared(study, known, others, [], {**here, "code": "1a06bf6656de"})
    config = {"part": "config", "same": ["cccc", others[-1].fingerprint["config"]], "reason": "x"}
    old = [replace(r, fingerprint={**r.fingerprint, "config": "cccc"}) for r in others]
    assert not fingerprint.shared(study, known, old, declared, here)
    assert len(fingerprint.shared(study, known, old, [*declared, config], here)) == len(found)


def test_what_is_declared_in_two_steps_is_the_same() -> None:
    entries = [
        {"part": "code", "same": ["aaaa", "bbbb"], "reason": "x"},
        {"part": "code", "same": ["bbbb", "cccc"], "reason": "y"},
        {"part": "data", "same": ["aaaa", "dddd"], "reason": "z"},
    ]
    same = {fingerprint._canonical("code", value, entries) for value in ("aaaa1", "bbbb", "cccc")}
    assert same == {"aaaa"}
    assert fingerprint._canonical("code", "dddd", entries) == "dddd"


def test_what_the_other_declares_comes_along(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    study = quick()
    for path in (there, here):
        path.mkdir()
    own = result(study, "AdamW", 1e-2, 0, 3.0)
    now = {**own.fingerprint, "config": fingerprint._hash(study.common()), "code": "eeee"}
    Results(there).add([replace(own, fingerprint={**now, "code": "0123456789ab"})])
    entry = {"part": "code", "same": ["0123456789ab", "eeee"], "reason": "a comment"}
    (there / "equivalents.json").write_text(json.dumps([entry]))
    command._take(study, Results(here), (there,), now)
    assert [r.key for r in Results(here).read()] == [own.key]
    assert json.loads((here / "equivalents.json").read_text()) == [entry]
    fingerprint.check(study, Results(here).read(), here, now)


def renamed() -> Study:
    """AdamW under another name, beside an arm of its own."""
    arms = (
        Arm(label="tuned", optimizer="adamw", lr=1e-2, factor=8.0),
        Arm(label="plain γ", optimizer="mars-adamw", lr=1e-2, factor=8.0,
            changes={"optimizer": {"gamma": 0.0}}),
    )  # fmt: skip
    claim = Comparison(arm="plain γ", baseline="tuned", claim=Claim(kind="lower"))
    return replace(quick(), name="renamed", arms=arms, comparisons=(claim,))


def long() -> Study:
    """A run takes longer than the stretch below."""
    changed = {"loop": {"steps": 3_000_000}}
    return replace(quick(), name="long", overrides=changed)


@pytest.mark.slow
def test_a_stretch_ends_in_time_and_is_gone_on_with(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "age", lambda: 0.0)  # pytest began long ago
    for _ in range(2):  # the first time a server may have to begin, too
        began = time.monotonic()
        with Crew(1) as crew:
            crew.submit(abs, -1).result()
    seconds = round(12 + 10 * (time.monotonic() - began))  # to begin takes long on a busy machine
    words = ["study", "test_study:long", "--out", str(tmp_path), "--jobs", "1"]
    began = time.monotonic()
    assert main([*words, "--seconds", str(seconds)]) == 0
    assert time.monotonic() - began < seconds + 1
    assert "the time is up: 1 in progress" in capsys.readouterr().err
    assert Results(tmp_path).read() == []
    (left,) = tmp_path.glob("runs/*/checkpoints/step-*")
    assert int(left.name[5:]) > 0
    (log,) = tmp_path.glob("runs/*/log.jsonl")
    assert '"status": "stopped"' in log.read_text().splitlines()[-1]


def test_an_arm_that_cannot_be_made_here_is_left_out_and_told() -> None:
    good = quick()
    bad = Arm(label="odd", optimizer="mars-adamw", lr=1e-2,
              changes={"optimizer": {"options": {"clip": "sideways"}}})  # fmt: skip
    found = command._cannot(replace(good, arms=(*good.arms, bad)))
    assert list(found) == ["odd"]
    assert "clip" in found["odd"]
    with pytest.raises(LabError, match="clip"):
        command._cannot(replace(good, arms=(bad,), comparisons=()))


@pytest.mark.slow
def test_only_the_arms_asked_for_are_run(one_arm: tuple[Path, str]) -> None:
    assert command._others(quick(), ()) == set()
    assert command._cannot(quick(), {"MARS"}) == {}
    out, said = one_arm
    assert {path.name.split("-")[0] for path in (out / "runs").iterdir()} == {"AdamW"}
    assert not list(out.glob("runs/*/checkpoints"))
    assert "MARS has no run yet" in said  # the verdict says what is not known


def test_arms_are_timed_apart_from_the_runs(tmp_path: Path, capsys: Capture) -> None:
    words = ["study", NAME, "--out", str(tmp_path)]
    assert main([*words, "--times"]) == 0
    said = capsys.readouterr()
    assert "MARS: warming up" in said.err
    assert " a step, optimizer " in said.err
    assert not (tmp_path / "runs").exists()
    found = times.read(quick(), tmp_path, [])
    assert list(found) == ["AdamW", "MARS"]
    assert all(0 < time.optimizer < time.step for time in found.values())
    record = json.loads((tmp_path / "times.json").read_text())
    assert len(record["arms"]["MARS"]["rounds"]) == times.ROUNDS
    # One arm again, as one does where all do not fit the GPU together: the others' times stay.
    assert main([*words, "--times", "--arms", "MARS"]) == 0
    again = times.read(quick(), tmp_path, [])
    assert again["AdamW"] == found["AdamW"]
    assert again["MARS"] != found["MARS"]


def test_a_run_is_begun_beside_another_only_if_both_can_be_finished(tmp_path: Path) -> None:
    here = stretch.Stretch(quick(), tmp_path, HERE, seconds=100)
    want = Wanted(quick().arms[0], 1e-2, 0, Stage.FIRST)
    here.active = {Future(): want}
    here.readings = {want.name: []}
    assert not here._room(90.0)  # nothing is known of its speed
    here.readings, here.share = {want.name: [0.02]}, {want.name: 0.5}
    # 25 s alone, 50 beside another, 55 to be sure
    assert here._room(56.0)
    assert not here._room(54.0)
    assert here._room(None)


@pytest.mark.parametrize(("left", "begun"), [(50.0, 2), (36.0, 1), (30.0, 0)])
def test_what_is_too_late_for_two_may_do_for_one(tmp_path: Path, left: float, begun: int) -> None:
    here = stretch.Stretch(quick(), tmp_path, HERE, seconds=100, jobs=2)
    here.results = [
        result(quick(), arm, 1e-2, 0, 3.0, at_once=2, wall=40.0) for arm in ("AdamW", "MARS")
    ]
    here.display = SimpleNamespace(add=lambda *_: None)
    here.deadline = time.monotonic() + left
    orders = []
    pool = SimpleNamespace(submit=lambda _, order: orders.append(order) or Future())
    assert here._fill(pool) == bool(begun)  # two take 44 s, one alone 33
    assert [order.at_once for order in orders] == [begun] * begun


def test_runs_that_were_out_of_memory_together_are_both_begun_again(tmp_path: Path) -> None:
    here = stretch.Stretch(quick(), tmp_path, HERE, jobs=3)
    here.display = SimpleNamespace(add=lambda *_: None)
    pool = SimpleNamespace(submit=lambda *_: Future())
    assert here._fill(pool)
    begun = list(here.active.values())
    here.active = {}
    assert len(begun) == 3
    for want in begun:
        here._end(want, Ended(failed="CUDA out of memory"))
    assert (here.packing.slots, here.failed) == (2, {})
    here.packing.slots = 1
    assert here._fill(pool)
    (want,) = here.active.values()
    here._end(want, Ended(failed="CUDA out of memory"))  # alone: it does not fit
    assert here.failed == {want.key: "CUDA out of memory"}


def test_a_run_that_another_left_no_memory_is_begun_again(tmp_path: Path) -> None:
    """On a GPU the first begins alone, and another joins it."""
    here = stretch.Stretch(quick(), tmp_path, HERE)
    here.display = SimpleNamespace(add=lambda *_: None)
    here.packing, here.tried = stretch.Packing(), False
    pool = SimpleNamespace(submit=lambda *_: Future())
    assert here._fill(pool)
    ((future, first),) = here.active.items()
    here.packing.slots = 2
    assert here._fill(pool)
    assert len(here.active) == 2
    del here.active[future]
    here._end(first, Ended(failed="CUDA out of memory"))
    assert (here.packing.slots, here.failed) == (1, {})


def test_how_many_go_together_is_remembered(tmp_path: Path) -> None:
    known = [result(quick(), "AdamW", 1e-2, seed, 3.0, at_once=n) for seed, n in enumerate([1, 2])]
    assert stretch.packed([]) is None
    assert stretch.packed(known[:1]) is None
    assert stretch.packed(known) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["clip-50"], 1, "unknown study 'clip-50': did you mean clip-50m?"),
        (["nowhere:nothing"], 1, "study 'nowhere:nothing' cannot be made"),
        (["test_study:base"], 1, "cannot be made"),
        (["test_study:Capture"], 1, "cannot be made"),
        (["nonsense"], 1, "variance; your own: package.module:function"),
        (["--seconds", "9"], 2, "mars study needs a name"),
        (["tiny-clip", "--seconds", "1"], 1, "--seconds must be 5 or more, not 1"),
        (["tiny-clip", "--seeds", "2"], 1, "--seeds must be 3 or more"),
        (["tiny-clip", "--jobs", "0"], 1, "--jobs must be 1 or more"),
        (["tiny-batch", "--arms", "AdamW"], 1, "no arm 'AdamW': AdamW, 1k; MARS-AdamW, 1k"),
        (["tiny-clip", "--times", "--seeds", "4"], 1, "--times goes with --arms, --out,"),
        (["tiny-clip", "--second", "9"], 2, "unrecognized"),
        (["tiny-clip", "--verdict-only"], 1, "runs/study-tiny-clip/results.jsonl does not exist"),
        (["clip-50m", "--out", "x"], 1, "data/text is not there: make it with `mars data"),
        (["clip-50m", "--data", "gone.bin", "--out", "x"], 1, "gone.bin"),
        (["variance", "--seeds", "0"], 1, "--seeds must be 1 or more"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    words: list[str], code: int, said: str, tmp_path: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["study", *words]) == code
    found = capsys.readouterr()
    assert said in found.err
    assert found.err.startswith("mars: error: ")
    assert found.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


class Breaks(torch.optim.SGD):
    """Somebody's optimizer with a bug."""

    def step(self, closure: Any = None) -> Any:
        raise ValueError("boom")


def broken() -> Study:
    arms = (quick().arms[0], Arm(label="Mine", optimizer="test_study:Breaks", lr=1e-2))
    comparison = Comparison(arm="Mine", baseline="AdamW", claim=Claim(kind="lower"))
    return replace(quick(), arms=arms, comparisons=(comparison,))


@pytest.mark.slow
def test_an_arm_that_failed_has_not_only_no_run_yet(tmp_path: Path, capsys: Capture) -> None:
    """The verdict knew nothing of runs that failed, though their tracebacks were kept."""
    words = ["study", "test_study:broken", "--out", str(tmp_path), "--jobs", "1", "--arms"]
    assert main([*words, "Mine"]) == 1
    why = "Mine failed at every rate tried (runs/Mine-lr0.01-s0/error.txt)"
    assert why in " ".join(capsys.readouterr().out.split())
    assert why in (tmp_path / "verdict.md").read_text()
    # Also later, from the files; without them nothing is known of it.
    of = broken()
    made = {**fingerprint.of_study(of), **fingerprint.made_of(of, of.arms[0])}
    Results(tmp_path).add([result(of, "AdamW", 1e-2, 0, 3.0, fingerprint=made)])
    again = ["study", "test_study:broken", "--out", str(tmp_path), "--verdict-only"]
    assert main(again) == 0
    assert why in (tmp_path / "verdict.md").read_text()
    shutil.rmtree(tmp_path / "runs")
    assert main(again) == 0
    assert "Mine has no run yet" in (tmp_path / "verdict.md").read_text()


def test_a_failure_is_of_the_arm_whose_run_it_is_until_that_goes_on(tmp_path: Path) -> None:
    for name in ("A-lr-x-lr0.01-s0", "A-lr1e-05-s0", "B-lr0.01-s12"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "error.txt").write_text("ValueError: boom")
    folders = {"a": "A", "x": "A-lr-x", "b": "B", "c": "C"}
    found = {"a": "A-lr1e-05-s0", "x": "A-lr-x-lr0.01-s0", "b": "B-lr0.01-s12"}
    told = {label: f"runs/{name}/error.txt" for label, name in found.items()}
    assert failures(tmp_path, folders) == told
    os.utime(tmp_path / told.pop("b"), (1e9, 1e9))
    (tmp_path / "runs" / "B-lr0.01-s12" / "log.jsonl").write_text("")
    assert failures(tmp_path, folders) == told
    assert failures(tmp_path / "elsewhere", folders) == {}


OWN = """
from small_study import Arm, base, study

def no_study(): raise KeyError("x")
def wrong(optimizer): return {}["y"]
def no_run(): return study(base=wrong)
def no_field(): return study(arms=(
    Arm(label="AdamW", optimizer="adamw", lr=1e-2),
    Arm(label="MARS", optimizer="mars-adamw", lr=1e-2, changes={"optimizer": {"gama": 0.1}}),
))
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_study", "cannot be made: KeyError: 'x' (own_studies.py, line 4)"),
        ("no_run", "an arm 'AdamW' of which no run can be made: KeyError: 'y' (own_studies.py, l"),
        ("no_field", "an arm 'MARS' of which no run can be made: TypeError: Optimizer.__init__()"),
    ],
)
def test_a_study_of_yours_that_fails_says_what_and_where(
    name: str, said: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_studies.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_studies", raising=False)
    assert main(["study", f"own_studies:{name}", "--out", str(tmp_path / "out")]) == 1
    assert f"study 'own_studies:{name}' " in (found := capsys.readouterr().err)
    assert said in found
    assert not (tmp_path / "out").exists()


def test_the_list_says_what_each_asks_and_how_far_it_is(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own, kept = "runs/study-tiny-optimizers", "docs/results/tiny-optimizers"
    of = find("tiny-optimizers")
    for place, seeds in ((kept, 2), (own, 1)):
        (tmp_path / place).mkdir(parents=True)
        runs = [result(of, "AdamW", 1e-2, seed, 2.5) for seed in range(seeds)]
        Results(tmp_path / place).add(runs)
        assert main(["study"]) == 0
        assert f"[{place}: {seeds} run" in capsys.readouterr().out
    assert main(["study"]) == 0
    said = capsys.readouterr().out
    assert "optimizers-50m\n  A GPT with 51M parameters" in said
    assert kept not in said
    assert "variance" in said
    assert re.search(r"1 run, \d+ wanted next; of \d+ claims \d+ not resolved\]", said)


@pytest.mark.parametrize("name", ["own study / x", "../evil", ".hidden", "a\\b"])
def test_a_study_has_a_name_that_a_directory_can_have(name: str) -> None:
    with pytest.raises(LabError, match=r"^study .* is no name that a directory could have: leave "):
        replace(quick(), name=name)


# The second half of question 2.

SMALL = v.Experiment(
    rates=(1e-5, 1e-2), batches=(4,), seeds=1, betas=(0.9,), gammas=(0.1, 1.0), steps=40,
    windows=64, every=10, redraws=16, early=(10, 20), late=(30, 40), warmup=1,
)  # fmt: skip


def test_variance_is_what_the_theory_says_where_it_must_be() -> None:
    torch.manual_seed(0)
    rows = []
    for rate in SMALL.rates:
        rows += v.summary(SMALL, rate, 4, list(v.follow(SMALL, rate, 4, 0)))
    late = {(r["lr"], r["mode"], r["gamma"]): r for r in rows if r["part"] == v.LATE}
    still = 1e-5  # hardly moves: noise alone
    for gamma in SMALL.gammas:
        approximate = late[still, v.APPROXIMATE, gamma]
        assert approximate["variance_ratio"] == pytest.approx(approximate["independent"], rel=0.2)
        assert late[still, v.EXACT, gamma]["variance_ratio"] == pytest.approx(1, rel=0.01)
        assert late[still, v.EXACT, gamma]["to_plain"] == pytest.approx(1, rel=0.05)
    # m = (1−γ)·EMA(g) + γ·g: at γ = 1 it is the last gradient, with all of its noise.
    alone = late[still, v.APPROXIMATE, 1.0]
    assert alone["error"] == pytest.approx(alone["noise"], rel=0.6)
    assert late[still, v.PLAIN, 0.0]["to_plain"] == 1.0
    assert len(rows) == 2 * 2 * (1 + 2 * 2)


def test_averages_are_those_of_the_library() -> None:
    """The shadow of approximate MARS is the first moment that mars.MARS itself keeps."""
    import mars

    e = v.Experiment(gammas=(0.1,), betas=(0.9,))
    averages = v._Averages(e, 6)
    x = torch.zeros(2, 3, requires_grad=True)
    optimizer = mars.MARS([x], lr=0.0, betas=(0.9, 0.99), gamma=0.1, clip=None)
    last = None
    for step in range(5):
        g = torch.randn(6, generator=torch.Generator().manual_seed(step))
        if step == 0:  # the library begins with h = 0: c = (1+κ)g
            averages.add(g, torch.zeros(6), torch.zeros(6))
        else:
            assert last is not None
            averages.add(g, last, g)
        x.grad = g.view(2, 3).clone()
        optimizer.step()
        last = g
    own = averages.m[averages.keys.index((v.APPROXIMATE, 0.1, 0.9))]
    assert torch.allclose(own.view(2, 3), optimizer.state[x]["exp_avg"], atol=1e-6)


def variance_here(monkeypatch: pytest.MonkeyPatch) -> v.Experiment:
    """`mars study variance` on a small experiment, one trajectory at a time."""
    e = replace(SMALL, seeds=2, betas=(0.95,), gammas=variance_command.GAMMAS, redraws=2)
    monkeypatch.setattr(variance_command, "Experiment", lambda seeds: replace(e, seeds=seeds))
    monkeypatch.setattr(variance_command, "cores", lambda: 1)
    return e


@pytest.mark.slow
def test_variance_goes_on_after_ctrl_c_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    e = variance_here(monkeypatch)
    words = ["study", "variance", "--seeds", "2", "--out"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*words, str(whole)]) == 0
    assert not (whole / NAME_OF_KEPT).exists()
    write = Kept.write

    def interrupted(kept: Kept, looks: dict[v.Which, list[v.Look]], seconds: float) -> None:
        monkeypatch.setattr(Kept, "write", write)
        kept.write(looks, 1000.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(Kept, "write", interrupted)
    assert main([*words, str(parts)]) == 130
    assert "the same command resumes from here" in capsys.readouterr().out
    assert not (parts / "results.json").exists()
    done = Kept(parts, e).read()
    assert done is not None
    assert 0 < len(done) < len(e.trajectories)
    followed: list[v.Which] = []
    submit = v.Crew.submit
    monkeypatch.setattr(v.Crew, "submit", lambda *a: (followed.append(a[3:]), submit(*a))[1])
    assert main([*words, str(parts)]) == 0
    assert f"resuming: {len(done)} trajectories are done" in capsys.readouterr().err
    assert sorted([*followed, *done]) == sorted(e.trajectories)  # none twice
    assert not (parts / NAME_OF_KEPT).exists()
    assert (parts / "variance.md").read_bytes() == (whole / "variance.md").read_bytes()
    rows = [json.loads((out / "results.json").read_text())["rows"] for out in (whole, parts)]
    assert rows[0] == rows[1]


def test_kept_trajectories_come_back_to_the_bit_and_only_where_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {(1e-2, 4, 0): list(v.follow(SMALL, 1e-2, 4, 0))}
    kept = Kept(tmp_path, SMALL)
    assert kept.read() == {}
    kept.write(looks, 2.0)
    again = Kept(tmp_path, replace(SMALL, seeds=5))  # more seeds change none of the others
    assert again.read() == looks
    assert again.seconds == 2.0
    assert Kept(tmp_path, replace(SMALL, steps=41)).read() is None
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert Kept(tmp_path, SMALL).read() is None
    monkeypatch.undo()
    kept.path.write_text(kept.path.read_text()[:-9])
    with pytest.raises(LabError, match="is damaged: remove it"):
        kept.read()


def test_the_variance_files(tmp_path: Path) -> None:
    rows = []
    for lr in (1e-3, 1e-2):
        for batch in (8, 64):
            for part in (v.EARLY, v.LATE):
                for mode in (v.PLAIN, v.APPROXIMATE, v.EXACT):
                    for gamma in (0.0,) if mode == v.PLAIN else (0.025, 0.1, 0.5, 1.0):
                        rows.append({
                            "part": part, "lr": lr, "batch": batch, "mode": mode, "gamma": gamma,
                            "beta1": 0.95, "error": 0.5, "to_plain": 1.0, "variance_ratio": 2.0,
                            "independent": noise_ratio(gamma, 0.95), "noise": 1.0, "turn": 0.5,
                        })  # fmt: skip
    write(v.Experiment(), rows, tmp_path, 1.0)
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["rows"]) == len(rows)
    assert found["about"]["experiment"]["gammas"][1] == 0.025
    assert (tmp_path / "variance.png").read_bytes()[:4] == b"\x89PNG"
    assert "| 8 | 0.001 | 2.00 (2.40) |" in text(rows)

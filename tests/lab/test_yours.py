"""Recipes of somebody's own, by the name of a function: trained, raced and searched as ours are."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from mars.lab import recipes
from mars.lab.cli import main
from mars.lab.config import to_json
from mars.lab.errors import LabError
from mars.lab.recipes import yours

Capture = pytest.CaptureFixture[str]
TEXT = """
import dataclasses
from mars.lab import recipes
from mars.lab.config import Data, Loop, Model, Optimizer, Run, Schedule

def rec():
    return Run(
        model=Model(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=256),
        data=Data(source="tinyshakespeare", tokenizer="bytes"),
        optimizer=Optimizer(name="adamw", lr=0.02, betas=(0.9, 0.9)),
        schedule=Schedule(warmup_steps=2),
        loop=Loop(steps=4, batch_size=4, eval_every=4, eval_sequences=4),
    )

def every(optimizer):
    run = recipes.make("gpt-tiny", optimizer)
    return run.replace(model={"n_embd": 32}, optimizer={"lr": 0.0625}, loop={"steps": 50})

def usual(optimizer="lion"): return every(optimizer)
def named(name): return dataclasses.replace(every(name), recipe="mine")
def nothing(): return None
def fails(): raise KeyError("x")
def wrong(): return rec().replace(model={"n_head": 3})
def steps(): return rec().replace(schedule={"warmup_steps": 3})
def two(steps, width): return rec()
def plain(): return Run(recipe="plain", schedule=Schedule(warmup_steps=2))
thing = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_recipes.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_recipes", raising=False)
    importlib.invalidate_caches()


def test_a_function_is_trained_as_a_recipe_is(capsys: Capture) -> None:
    """It was "unknown recipe 'mine:rec'", though a recipe is a function."""
    assert main(["train", "own_recipes:rec"]) == 0
    there = Path("runs/own_recipes.rec-adamw-s0")
    config = json.loads((there / "config.json").read_text())
    assert config == json.loads(json.dumps(to_json(recipes.make("own_recipes:rec"))))
    assert config["optimizer"]["betas"] == [0.9, 0.9]
    assert main(["train", "own_recipes:rec", "--loop.steps", "6"]) == 0
    assert "extended 4 to 6 steps" in capsys.readouterr().err
    assert main(["train", str(there), "--loop.steps", "8"]) == 0  # it needs the function no more
    out = ["--out", str(there)]
    assert main(["train", "own_recipes:steps", "--loop.steps", "9", *out]) == 1
    assert "holds a run with schedule.warmup_steps = 2, not 6" in capsys.readouterr().err
    assert main(["train", "own_recipes:rec", "--optimizer", "muon", "--dry-run"]) == 1
    assert "recipe 'own_recipes:rec': it is for adamw: for muon it" in capsys.readouterr().err
    words = ["--optimizer", "muon", "--loop.seed", "3", "--dry-run"]
    assert main(["train", "own_recipes:every", *words]) == 0
    said = capsys.readouterr().out
    assert "runs/own_recipes.every-muon-s3" in said
    assert "muon" in said


def test_a_function_may_take_the_optimizer() -> None:
    assert recipes.make("own_recipes:every").optimizer.name == yours.USUAL
    assert recipes.make("own_recipes:usual").optimizer.name == "lion"
    for name in ("every", "usual", "named"):
        made = recipes.make(f"own_recipes:{name}", "muon")
        assert made.optimizer.name == "muon"
        assert made.recipe == ("mine" if name == "named" else f"own_recipes.{name}")
        assert yours.is_for_all(f"own_recipes:{name}")
    assert not yours.is_for_all("own_recipes:rec")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rec", "the rates of muon, lion were not tuned for own_recipes.rec (adamw has the"),
        ("every", None),
    ],
)
def test_a_race_on_a_function(
    name: str, said: str | None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["race", f"own_recipes:{name}", "--seeds", "1", "--jobs", "1", "--loop.steps", "2"]
    assert main([*words, "--optimizers", "adamw", "muon", "lion"]) == 0
    told = capsys.readouterr().err
    assert said in told if said else "tuned" not in told
    runs = Path(f"runs/race-own_recipes.{name}").glob("*/config.json")
    own = {o["name"]: o for o in (json.loads(p.read_text())["optimizer"] for p in runs)}
    assert set(own) == {"adamw", "muon", "lion"}
    if name == "every":  # all as the function says
        assert {o["lr"] for o in own.values()} == {0.0625}
        assert own["lion"]["betas"] == [0.9, 0.99]
    else:
        assert (own["adamw"]["lr"], own["adamw"]["betas"]) == (0.02, [0.9, 0.9])
        assert own["muon"]["betas"] is None
        assert own["lion"]["betas"] == [0.9, 0.99]
    assert main(["race", f"runs/race-own_recipes.{name}"]) == 0  # goes on by its directory
    assert "done already" in capsys.readouterr().err


def test_a_search_on_a_function() -> None:
    words = ["own_recipes:rec", "--trials", "1", "--jobs", "1", "--search", "lr"]
    assert main(["tune", *words]) == 0
    best = Path("runs/tune-own_recipes.rec-adamw/best.json")
    assert json.loads(best.read_text())["recipe"] == "own_recipes.rec"
    assert main(["train", str(best), "--dry-run"]) == 0


def test_what_is_written_about_a_function_can_be_read() -> None:
    """The usual model was left out, so that the label was taken for the name of a recipe."""
    from mars.lab import arguments
    from mars.lab.findings import Findings

    found = Findings(Path("x"), recipes.make("own_recipes:plain"), {}, 1, "")
    assert arguments.overridden(found.settings({})).recipe == "plain"


def test_a_json_recipe_may_begin_with_a_function() -> None:
    from mars.lab import arguments

    made = arguments.overridden({"recipe": "own_recipes:rec", "loop": {"steps": 8}})
    assert made.directory == "runs/own_recipes.rec-adamw-s0"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.such:thing", "cannot be made: ModuleNotFoundError: No module named 'no'"),
        ("own_recipes:gone", "cannot be made: AttributeError: module 'own_recipes' has no attr"),
        ("own_recipes:thing", "cannot be made: TypeError: 3 is not a callable object"),
        ("own_recipes:fails", "cannot be made: KeyError: 'x' (own_recipes.py, line "),
        ("own_recipes:nothing", "it returned no mars.lab.config.Run"),
        (
            "own_recipes:two",
            "it needs steps, width: a recipe takes nothing but an optimizer's name",
        ),
        ("own_recipes:wrong", "model.n_embd (16) must be a multiple of model.n_head (3)"),
    ],
)
@pytest.mark.parametrize("command", ["train", "race", "tune"])
def test_what_is_wrong_with_a_function_is_told(
    command: str, name: str, said: str, capsys: Capture
) -> None:
    assert main([command, name]) == 1
    found = capsys.readouterr().err
    assert found.startswith(f"mars: error: recipe {name!r}")
    assert said in found
    assert found.count("\n") == 1
    assert not Path("runs").exists()


def test_the_help_and_the_error_say_that_there_are_such(capsys: Capture) -> None:
    for command in ("train", "tune"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "package.module:function" in capsys.readouterr().out
    with pytest.raises(
        LabError, match=r"unknown recipe 'zzz': known: .*; your own: package\.module"
    ):
        recipes.make("zzz")

"""Gradients that are not finite, or not there at all, in a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from miniature import run
from nursery import Nursery
from runs import assert_alike, config, given, leaves, newest, texts, written
from safetensors.torch import load_file

from mars.lab.errors import LabError
from mars.lab.log import read
from mars.lab.train import prepare

# Spoils one element of one gradient at some steps; the loss of these steps is an honest number.
SPOILED = """
from mars.lab.loop import Training
gradients = Training._gradients
def spoiled(self):
    loss = gradients(self)
    if self.step in {steps}:
        next(self.model.parameters()).grad.view(-1)[3] = float("{value}")
    return loss
Training._gradients = spoiled
"""


def finite(path: Path) -> bool:
    return all(t.isfinite().all() for t in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize(
    ("optimizer", "step"),
    # Step 5 (from 0) is saved at once. Lion goes on with finite weights, its momentum spoiled.
    [("mars-adamw", 5), ("mars-adamw", 7), ("exact", 5), ("lion", 5), ("lion", 7)],
)
def test_a_nan_gradient_stops_the_run_before_it_is_saved(
    mars: Nursery, tmp_path: Path, optimizer: str, step: int
) -> None:
    folder = tmp_path / "run"
    fault = SPOILED.format(steps={step}, value="nan")
    ended = mars.run("train", given(folder, optimizer, steps=24), fault=fault)
    assert ended.code == 1
    assert "not finite at step" in ended.err
    assert "checkpoints before it are kept" in ended.err
    end = read(folder)[-1]
    assert (end["kind"], end["status"]) == ("end", "diverged")
    last = 3 if step == 5 else 6
    assert newest(folder).name == f"step-{last:08d}"
    assert finite(newest(folder))
    # The fault was of the moment: the same command resumes, and nothing is lost.
    ended = mars.run("train", given(folder, optimizer, steps=24))
    assert ended.code == 0, ended.err
    assert mars.run("train", given(tmp_path / "whole", optimizer, steps=24)).code == 0
    assert_alike(folder, tmp_path / "whole")


def test_a_nan_gradient_is_skipped_if_one_asks_for_it(mars: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fault = SPOILED.format(steps={5, 6}, value="nan")
    path = given(folder, steps=12, skip_nan=True)
    ended = mars.run("train", path, fault=fault)
    assert ended.code == 0, ended.err
    told = [f"step {step} skipped: its gradient was not finite" for step in (6, 7)]
    assert texts(folder, "skipped") == told
    assert told[0] in ended.err
    assert finite(newest(folder))
    assert all(math.isfinite(r["loss"]) for r in read(folder) if r["kind"] in ("train", "valid"))


def test_nothing_but_nan_is_given_up(mars: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fault = SPOILED.format(steps=set(range(6, 100)), value="nan")
    ended = mars.run("train", given(folder, steps=100, skip_nan=True), fault=fault)
    assert ended.code == 1
    assert "25 gradients in a row were not finite at step 31" in ended.err
    assert finite(newest(folder))


@pytest.mark.parametrize("optimizer", ["mars-adamw", "mars-m", "mars-lion", "adamw"])
def test_a_skipped_step_leaves_all_state_alone(tmp_path: Path, optimizer: str) -> None:
    training = prepare(run(tmp_path / "run", optimizer, skip_nan=True))
    training.advance()
    training.advance()
    before = leaves([training.model.state_dict(), training.optimizer.state_dict()["state"]])
    if optimizer != "adamw":
        assert any("last_grad" in state for state in training.optimizer.state.values())
    honest = training.loss_of
    training.loss_of = lambda *pair: honest(*pair) * math.inf
    training.advance()
    assert leaves([training.model.state_dict(), training.optimizer.state_dict()["state"]]) == before


def test_exact_mode_cannot_skip(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"exact does not go with loop\.skip_nan"):
        prepare(run(tmp_path / "run", "exact", skip_nan=True))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("optimizer", ["mars-adamw", "adamw"])
def test_inf_with_a_grad_scaler_is_skipped_and_the_scale_halved(
    mars: Nursery, tmp_path: Path, optimizer: str, skip: bool
) -> None:
    folder = tmp_path / "run"
    fault = SPOILED.format(steps={4, 5}, value="inf")
    path = given(folder, optimizer, steps=6, precision="fp16", skip_nan=skip)
    ended = mars.run("train", path, fault=fault)
    assert ended.code == 0, ended.err
    assert "skipped: its gradient was not finite" in ended.err
    assert len(texts(folder, "skipped")) == 2
    scaler = torch.load(newest(folder) / "training.pt", weights_only=True)["scaler"]
    assert scaler["scale"] == 65536 / 4
    state = torch.load(newest(folder) / "optimizer.pt", weights_only=True)["state"]
    assert {float(own["step"]) for own in state.values()} == {4.0}
    # As after step 4: state and weights are those before the two.
    at_four = written(config(tmp_path / "four", optimizer, steps=4, precision="fp16"))
    assert mars.run("train", at_four).code == 0
    weights, expected = (
        load_file(newest(tmp_path / name) / "model.safetensors") for name in ("run", "four")
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert leaves(state) == leaves(
        torch.load(newest(tmp_path / "four") / "optimizer.pt", weights_only=True)["state"]
    )


NO_GRADIENTS = """
from mars.lab.loop import Training
gradients = Training._gradients
def none(self):
    loss = gradients(self)
    for p in self.model.parameters():
        if self.step == 4:
            p.grad = None
    return loss
Training._gradients = none
"""


@pytest.mark.parametrize("optimizer", ["mars-adamw", "mars-m", "adamw"])
def test_a_step_without_any_gradient(mars: Nursery, tmp_path: Path, optimizer: str) -> None:
    folder = tmp_path / "run"
    ended = mars.run("train", given(folder, optimizer, steps=6), fault=NO_GRADIENTS)
    assert ended.code == 0, ended.err
    state: dict[Any, Any] = torch.load(newest(folder) / "optimizer.pt", weights_only=True)["state"]
    counts = {float(own["step"]) for own in state.values() if "step" in own}
    assert counts == {5.0}
    assert finite(newest(folder))

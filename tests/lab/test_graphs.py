"""Steps replayed as CUDA graphs are the steps that are not, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from miniature import run

from gpu import needs_gpu
from mars.lab import hardware, loop, recipes
from mars.lab.config import Run
from mars.lab.errors import LabError
from mars.lab.train import prepare, train


def config(out: Path, optimizer: str, dropout: float = 0.0, **loop: Any) -> Run:
    """Large enough that what is compiled is more than a few numbers."""
    loop = {"device": "cuda", "steps": 9, "batch_size": 6, "graphs": True, **loop}
    made = run(out, optimizer, deterministic=True, **loop)
    return made.replace(model={"n_layer": 2, "n_embd": 64, "block_size": 32, "dropout": dropout})


def state(made: Run, steps: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Parameters and buffers after some steps."""
    with hardware.deterministic(True):
        training = prepare(made)
        for _ in range(steps):
            training.advance()
    return training.model.state_dict(), training


def same_with_and_without(made: Run, recorded: set[bool]) -> None:
    with_, training = state(made, 9)
    assert set(training.graphs.recorded) == recorded
    without, plain = state(made.replace(loop={"graphs": False}), 9)
    assert plain.graphs is None
    assert with_.keys() == without.keys()
    assert all(torch.equal(with_[name], without[name]) for name in with_)
    assert float(training.window) == float(plain.window)
    assert training.validate() == plain.validate()


@needs_gpu
@pytest.mark.parametrize("micro", [6, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "mars-adamw", "mars-m", "muon"])
def test_the_same_bits_with_and_without(tmp_path: Path, optimizer: str, micro: int) -> None:
    made = config(tmp_path, optimizer, micro_batch_size=micro)
    same_with_and_without(made, {True} if micro == 6 else {True, False})


@needs_gpu
def test_muon_replays_its_step_too_and_stays_torchs(tmp_path: Path) -> None:
    made = config(tmp_path, "muon")
    _, training = state(made, 9)
    muon = training.optimizer.optimizers[0]
    assert muon._replayed.recorded is not None
    _, plain = state(made.replace(loop={"graphs": False}), 9)
    assert plain.optimizer.optimizers[0]._replayed is None


@needs_gpu
def test_dropout_is_drawn_anew_in_every_replay(tmp_path: Path) -> None:
    same_with_and_without(config(tmp_path, "mars-adamw", dropout=0.1), {True})


@needs_gpu
@pytest.mark.parametrize("optimizer", ["adamw", "mars-adamw", "muon"])
def test_images_have_the_same_bits_too(tmp_path: Path, optimizer: str) -> None:
    made = recipes.make("digits-cnn", optimizer).replace(
        loop={"device": "cuda", "deterministic": True, "graphs": True}, keep={"out": str(tmp_path)}
    )
    same_with_and_without(made, {True})


@needs_gpu
def test_short_passes_are_recorded_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(tmp_path, "mars-adamw", graphs=None)
    assert prepare(made).graphs is not None
    assert prepare(made.replace(optimizer={"exact": True})).graphs is None
    monkeypatch.setattr(loop, "SHORT_PASS", 0)
    assert prepare(made).graphs is None
    assert prepare(made.replace(loop={"graphs": True})).graphs is not None


@needs_gpu
def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole = config(tmp_path / "whole", "mars-adamw", micro_batch_size=2)
    whole = whole.replace(schedule={"shape": "constant"})
    parts = whole.replace(keep={"out": str(tmp_path / "parts")})
    train(whole)
    train(parts.replace(loop={"steps": 5}))
    train(parts, extend=True)
    ends = []
    for made in (whole, parts):
        training = prepare(made)
        training.restore(Path(made.directory) / "checkpoints" / "step-00000009")
        ends.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
    assert torch.equal(*ends)


def test_without_a_gpu_they_are_refused(tmp_path: Path) -> None:
    assert prepare(run(tmp_path)).graphs is None
    with pytest.raises(LabError, match=r"loop\.graphs: CUDA graphs need a GPU"):
        prepare(run(tmp_path, graphs=True))


@needs_gpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"exact": True}}, "not in exact mode"),
        ({"loop": {"precision": "fp16"}}, "not in fp16"),
        ({"optimizer": {"options": {"consume_grads": "True"}}}, "not with consume_grads"),
    ],
)
def test_what_changes_from_step_to_step_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    made = config(tmp_path, "mars-adamw").replace(**changes)
    with pytest.raises(LabError, match=message):
        prepare(made)

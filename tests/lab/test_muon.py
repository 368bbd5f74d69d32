"""Muon on convolutions, and its step split in two, is torch's own to the bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from gpu import needs_gpu
from mars.lab import muon
from mars.lab.muon import Muon, replay_steps
from mars.lab.optimizers import Together

SHAPES = [(6, 4, 3, 3), (8, 5), (5, 40)]


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]


def follow(ours: Muon, given: list[nn.Parameter], steps: int, **options: Any) -> None:
    """Step it and torch's own with the same gradients and falling rates, and compare."""
    matrices = [nn.Parameter(p.detach().flatten(1).clone()) for p in given]
    theirs = torch.optim.Muon(matrices, **options)
    for p in given:
        p.grad = torch.empty_like(p)  # where it stays
    for step in range(steps):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for p, matrix in zip(given, matrices, strict=True):
            assert p.grad is not None
            p.grad.normal_()
            matrix.grad = p.grad.flatten(1).clone()
        before = [p.grad.clone() for p in given if p.grad is not None]
        ours.step()
        theirs.step()
        for p, matrix, g in zip(given, matrices, before, strict=True):
            assert torch.equal(p.flatten(1), matrix)
            momentum = theirs.state[matrix]["momentum_buffer"]
            assert torch.equal(ours.state[p]["momentum_buffer"].flatten(1), momentum)
            assert p.grad is not None
            assert torch.equal(p.grad, g)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_split_in_two_is_torchs(
    monkeypatch: pytest.MonkeyPatch, adjust: str, nesterov: bool
) -> None:
    monkeypatch.setattr(muon, "WARM", 99)  # a CPU records nothing
    given = parameters()
    options = {"adjust_lr_fn": adjust, "nesterov": nesterov, "weight_decay": 0.3}
    ours = Muon(given, **options)
    replay_steps(Together([ours]))
    assert ours._replayed is not None
    follow(ours, given, 4, **options)
    assert ours.param_groups[0]["lr"] == 0.1 / 4
    assert ours._replayed.passed == 3  # the first made momentum
    assert ours._replayed.recorded is None


def test_what_a_graph_would_have_fixed_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "WARM", 99)
    given = parameters()
    ours = Muon(given)
    replay_steps(ours)
    assert ours._replayed is not None
    for p in given:
        p.grad = torch.randn_like(p)

    def passed_after_two() -> int:
        assert ours._replayed is not None
        ours.step()
        ours.step()
        return ours._replayed.passed

    assert passed_after_two() == 1
    ours.param_groups[0].update(lr=0.5, weight_decay=0.0)  # these are not fixed
    assert passed_after_two() == 3
    ours.param_groups[0]["momentum"] = 0.5
    assert passed_after_two() == 2
    kept = given[0].grad  # its memory is not to be had by the next
    given[0].grad = torch.randn_like(given[0])
    assert passed_after_two() == 2
    del kept
    given[1].grad = None
    assert passed_after_two() == 2
    ours.load_state_dict(ours.state_dict())
    assert passed_after_two() == 4  # loading kept the tensors
    loss = ours.step(lambda: torch.tensor(3.0))
    assert float(loss) == 3.0


def test_a_copy_steps_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "WARM", 99)
    given = parameters()
    ours = Muon(given)
    replay_steps(ours)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        own = made.param_groups[0]["params"]
        follow(made, own, 2)


@needs_gpu
def test_replayed_steps_are_torchs() -> None:
    given = parameters("cuda")
    ours = Muon(given, weight_decay=0.3)
    replay_steps(ours)
    assert ours._replayed is not None
    follow(ours, given, 12, weight_decay=0.3)
    assert ours._replayed.recorded is not None
    given[0].grad = torch.randn_like(given[0])  # elsewhere: as it is, until that stays
    ours.step()
    assert ours._replayed.recorded is None

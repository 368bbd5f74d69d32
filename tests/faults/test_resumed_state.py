"""What may be done to an optimizer between two parts of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mars import MARS
from mars.lab import checkpoint
from mars.rule import KINDS


def gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_added_after_resume(tmp_path: Path, kind: str) -> None:
    """Resumed and then added to, or never stopped and added to: the same."""
    finals = []
    for stopped in (False, True):
        torch.manual_seed(0)
        model, new = nn.Linear(4, 3), nn.Parameter(torch.randn(5, 3))
        parameters = list(model.parameters())
        optimizer = MARS(parameters, lr=0.1, mars_type=kind)
        for step in range(3):
            gradients(parameters, step)
            optimizer.step()
        if stopped:
            path = checkpoint.save(tmp_path, 3, model, optimizer, {})
            torch.manual_seed(1)
            model = nn.Linear(4, 3)
            parameters = list(model.parameters())
            optimizer = MARS(parameters, lr=0.1, mars_type=kind)
            checkpoint.load(path, model, optimizer)
        optimizer.add_param_group({"params": [new], "lr": 0.5})
        for step in range(3, 6):
            gradients([*parameters, new], step)
            optimizer.step()
        assert float(optimizer.state[new]["step"]) == 3
        finals.append([p.detach().clone() for p in (*parameters, new)])
    for one, two in zip(*finals, strict=True):
        assert torch.equal(one, two)

"""Schedules against their formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mars.lab.config import Schedule
from mars.lab.errors import LabError
from mars.lab.schedule import factor, remember_peaks, set_rate


def test_warm_up_is_linear_and_its_first_step_moves() -> None:
    schedule = Schedule(warmup_steps=4)
    assert [factor(schedule, t, 100) for t in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine() -> None:
    schedule = Schedule(shape="cosine", warmup_steps=0, min_lr=0.1)
    assert factor(schedule, 0, 100) == 1.0
    assert factor(schedule, 50, 100) == pytest.approx(0.55)
    assert factor(schedule, 25, 100) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert factor(schedule, 100, 100) == pytest.approx(0.1)


def test_wsd_holds_and_then_falls_to_zero() -> None:
    schedule = Schedule(shape="wsd", warmup_steps=10, decay_share=0.2)
    assert [factor(schedule, t, 100) for t in (10, 79)] == [1.0, 1.0]
    assert factor(schedule, 90, 100) == pytest.approx(0.5)
    assert factor(schedule, 100, 100) == 0.0


def test_exp_is_the_authors() -> None:
    schedule = Schedule(shape="exp", warmup_steps=2000, min_lr=0.005)
    progress = (50_000 - 2000) / (100_000 - 2000)
    expected = 0.005 + 0.995 * 0.9 ** (100 * progress)
    assert factor(schedule, 50_000, 100_000) == pytest.approx(expected)


def test_linear_and_constant() -> None:
    assert factor(Schedule(shape="linear", warmup_steps=0, min_lr=0), 25, 100) == 0.75
    assert factor(Schedule(shape="constant", warmup_steps=0), 99, 100) == 1.0


def test_every_group_keeps_its_own_peak() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}])
    remember_peaks(optimizer)
    set_rate(optimizer, 0.1)
    set_rate(optimizer, 0.2)
    remember_peaks(optimizer)  # a second time changes nothing
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.1]
    assert [g["initial_lr"] for g in optimizer.param_groups] == [1.0, 0.5]


def test_multistep_falls_to_a_tenth_at_half_and_at_three_quarters() -> None:
    schedule = Schedule(shape="multistep", warmup_steps=0)
    shares = [factor(schedule, step, 200) for step in (0, 99, 100, 149, 150, 199)]
    assert shares == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert factor(Schedule(shape="multistep", warmup_steps=10), 4, 200) == 0.5


def test_onecycle_rises_and_falls_linearly_and_never_reaches_zero_before_the_end() -> None:
    schedule = Schedule(shape="onecycle", warmup_steps=2000, rise_share=0.25)  # warm-up: its own
    shares = [factor(schedule, step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(1 / 25)
    assert shares[24] == shares[25] == 1
    assert shares[99] == pytest.approx(1 / 75)
    assert factor(schedule, 100, 100) == 0
    falls = [a - b for a, b in itertools.pairwise(shares[25:])]
    assert falls == pytest.approx([1 / 75] * 74)
    assert factor(Schedule(shape="onecycle", rise_share=0.0), 0, 10) == 1


def test_an_optimizer_without_a_rate_cannot_be_scheduled() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(LabError, match="SGD has no lr in its groups"):
        remember_peaks(optimizer)

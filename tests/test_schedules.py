"""γ schedules."""

from __future__ import annotations

import pytest
import torch

from mars import MARS, GammaScheduler, schedules


def optimizer(**options) -> MARS:
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    return MARS([p], **options)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (schedules.constant(0.1), [0.1, 0.1, 0.1, 0.1, 0.1]),
        (schedules.linear(0.0, 0.2, steps=2), [0.0, 0.1, 0.2, 0.2, 0.2]),
        (schedules.cosine(0.2, 0.0, steps=4), [0.2, 0.1707106781, 0.1, 0.0292893219, 0.0]),
        (lambda step: 0.5 if step < 2 else 0.25, [0.5, 0.5, 0.25, 0.25, 0.25]),
    ],
    ids=["constant", "linear", "cosine", "own"],
)
def test_values(schedule, values) -> None:
    opt = optimizer()
    scheduler = GammaScheduler(opt, schedule)
    seen = []
    for _ in values:
        seen.append(opt.param_groups[0]["gamma"])
        opt.step()
        scheduler.step()
    assert seen == pytest.approx(values)


def test_gamma_is_read_at_each_step() -> None:
    """The same gradients under γ = 0 from step 2 on: c = g there."""
    opt = optimizer(gamma=0.9, clip="tensor")
    p = opt.param_groups[0]["params"][0]
    p.grad = torch.full((3, 3), 0.1)
    opt.step()
    opt.param_groups[0]["gamma"] = 0.0
    before = opt.state[p]["exp_avg"].clone()
    p.grad = torch.full((3, 3), 0.2)
    opt.step()
    torch.testing.assert_close(opt.state[p]["exp_avg"], 0.95 * before + 0.05 * 0.2)


def test_state_dict_resumes() -> None:
    first = GammaScheduler(optimizer(), schedules.linear(0.1, 0.0, steps=10))
    for _ in range(4):
        first.step()
    second = GammaScheduler(optimizer(), schedules.linear(0.1, 0.0, steps=10))
    second.load_state_dict(first.state_dict())
    assert second.get_last_gamma() == first.get_last_gamma() == [pytest.approx(0.06)]
    with pytest.raises(ValueError, match="not the state of a GammaScheduler"):
        second.load_state_dict({"last_epoch": 3})


def test_one_function_a_group_and_tensor_gamma() -> None:
    p, q = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    gamma = torch.tensor(0.3)
    opt = MARS([{"params": [p]}, {"params": [q], "gamma": gamma}])
    scheduler = GammaScheduler(opt, [schedules.constant(0.1), schedules.linear(0.2, 0.0, 2)])
    scheduler.step()
    assert opt.param_groups[0]["gamma"] == 0.1
    assert opt.param_groups[1]["gamma"] is gamma  # written in place: a compiled step sees it
    assert float(gamma) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="1 functions for 2 parameter groups"):
        GammaScheduler(opt, [schedules.constant(0.1)])


def test_a_schedule_that_returns_nonsense_is_refused() -> None:
    opt = optimizer()
    with pytest.raises(ValueError, match=r"Invalid gamma: -1\.0 at step 0"):
        GammaScheduler(opt, lambda step: -1.0)
    assert opt.param_groups[0]["gamma"] == 0.025
    scheduler = GammaScheduler(opt, lambda step: -1.0 if step else 0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="at step 1"):
            scheduler.step()
    with pytest.raises(ValueError, match="at step 7"):
        scheduler.load_state_dict({"last_step": 7})
    assert scheduler.state_dict() == {"last_step": 0}


def test_groups_that_share_a_default_tensor_are_told_apart() -> None:
    p, q = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    opt = MARS([{"params": [p]}, {"params": [q]}], gamma=torch.tensor(0.3))
    scheduler = GammaScheduler(opt, [schedules.constant(0.1), schedules.constant(0.2)])
    assert scheduler.get_last_gamma() == pytest.approx([0.1, 0.2])
    shared = MARS([{"params": [p]}, {"params": [q]}], gamma=torch.tensor(0.3)).state_dict()
    opt.load_state_dict(shared)  # which ties them together again
    scheduler.step()
    assert scheduler.get_last_gamma() == pytest.approx([0.1, 0.2])


def test_a_number_in_a_list_is_no_schedule() -> None:
    with pytest.raises(TypeError, match=r"a list of them, not \[0.1\].*schedules.constant"):
        GammaScheduler(optimizer(), [0.1])


def test_a_group_added_later_is_scheduled_too() -> None:
    opt = optimizer()
    scheduler = GammaScheduler(opt, schedules.linear(0.1, 0.0, steps=2))
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
    scheduler.step()
    assert scheduler.get_last_gamma() == pytest.approx([0.05, 0.05])

"""bfloat16 and float16 parameters: no update is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from choice import choose
from mars import MARS
from mars.engines import available
from mars.rule import KINDS
from mars.rule.halves import join
from mars.state import LOW_HALF

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("engine", available())
@pytest.mark.parametrize("dtype", HALF)
def test_updates_below_half_an_ulp_add_up(engine: str, dtype: torch.dtype) -> None:
    """400 steps of 1e-5 from 1: a bare bfloat16 or float16 weight would not move at all."""
    p = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    optimizer = MARS([p], lr=1e-5, mars_type="mars-lion", clip=None, **choose(engine))
    assert torch.equal(p - 1e-5, p)
    for _ in range(400):
        p.grad = torch.ones_like(p)
        optimizer.step()
    value = join(p.detach(), optimizer.state[p][LOW_HALF[p.dtype]])
    # A float32 weight rounds each 1e-5 to 168 units of 2^-24, where 167.8 were meant: 0.1 %.
    torch.testing.assert_close(value, torch.full((2, 2), 1 - 4e-3), rtol=0, atol=1e-5)
    torch.testing.assert_close(p.detach().float(), value.to(dtype).float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", available())
def test_the_pair_of_halves_is_the_float32_run_bit_for_bit(engine: str, kind: str) -> None:
    """Same (16-bit) gradients: the trajectory of a bfloat16 weight is that of a float32 one."""
    shapes = [(8, 6), (6, 8), (7,), (2, 3, 2, 2)]
    start = [torch.randn(s).bfloat16() for s in shapes]
    half = [nn.Parameter(x.clone()) for x in start]
    full = [nn.Parameter(x.float()) for x in start]
    options = {"lr": 1e-4, "mars_type": kind, **choose(engine), "weight_decay": 0.1}
    first, second = MARS(half, **options), MARS(full, **options)
    for _ in range(20):
        for p, q in zip(half, full, strict=True):
            p.grad = torch.randn(p.shape).bfloat16()
            q.grad = p.grad.float()
        first.step()
        second.step()
    for p, q in zip(half, full, strict=True):
        assert torch.equal(join(p.detach(), first.state[p][LOW_HALF[p.dtype]]), q.detach())


def train(dtype: torch.dtype, split: bool, steps: int = 600) -> float:
    """Fit a small teacher with parameters of a dtype; return the loss in float64 at the end."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    optimizer = MARS(student.parameters(), lr=3e-3, lr_1d=3e-3, weight_decay_1d=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x = torch.randn(64, 8, dtype=torch.float64)
        optimizer.zero_grad()
        (student(x.to(dtype)).double() - teacher(x)).square().mean().backward()
        optimizer.step()
        schedule.step()
        if not split:
            for p in student.parameters():
                optimizer.state[p][LOW_HALF[p.dtype]].zero_()
    wide = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    with torch.no_grad():
        for p, q in zip(wide.parameters(), student.parameters(), strict=True):
            low = optimizer.state[q].get(LOW_HALF.get(q.dtype))
            p.copy_(q if low is None else join(q, low))
    x = torch.randn(4096, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return float((wide(x) - teacher(x)).square().mean().detach())


def test_a_bfloat16_model_trains_like_a_float32_one() -> None:
    wide = train(torch.float32, split=True)
    narrow = train(torch.bfloat16, split=True)
    bare = train(torch.bfloat16, split=False)
    # Gradients are those of a rounded model, so the two runs differ a little; without the low
    # halves the loss stays higher.
    assert narrow < 1.5 * wide + 1e-4, (narrow, wide)
    assert bare > 1.5 * narrow, (bare, narrow)


def test_a_weight_changed_from_outside_stays_changed() -> None:
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MARS([p], lr=1e-4)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p.fill_(5.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.detach().float(), torch.full((2, 2), 5.0))


def test_memory_is_what_the_documentation_says() -> None:
    """docs/decisions.md: bytes of state a weight, step counter aside."""

    def bytes_of(dtype: torch.dtype, **options) -> int:
        p = nn.Parameter(torch.zeros(10, 10, dtype=dtype))
        optimizer = MARS([p], **options)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        state = {k: v for k, v in optimizer.state[p].items() if k != "step"}
        return sum(v.numel() * v.element_size() for v in state.values()) // p.numel()

    assert bytes_of(torch.float32) == 12
    assert bytes_of(torch.bfloat16) == 12
    assert bytes_of(torch.float32, mars_type="mars-lion") == 8
    assert bytes_of(torch.bfloat16, mars_type="mars-lion") == 8
    assert bytes_of(torch.float32, mars_type="mars-m", clip=None) == 4
    assert bytes_of(torch.bfloat16, mars_type="mars-m", clip=None) == 6
    assert bytes_of(torch.float32, mars_type="plain-adamw") == 8
    assert bytes_of(torch.bfloat16, mars_type="plain-adamw") == 10


@pytest.mark.parametrize("engine", available())
@pytest.mark.parametrize("dtype", HALF)
def test_a_weight_set_to_zero_from_outside_is_zero(engine: str, dtype: torch.dtype) -> None:
    """Pruning masks and clamps: a low half may not borrow from the bits of a zero."""
    p = nn.Parameter(torch.randn(64, 64).to(dtype))
    optimizer = MARS([p], lr=1e-3, **choose(engine))
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
    with torch.no_grad():
        p[::2] = 0.0
        p[1::4] = -0.0
        before = p.clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    torch.testing.assert_close(p.detach(), before, rtol=0, atol=1e-6)
    with torch.no_grad():
        p.clamp_(min=0)
    optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
        with torch.no_grad():
            p.clamp_(min=0)
    assert p.isfinite().all()


def test_low_halves_of_another_format_are_not_loaded() -> None:
    p = nn.Parameter(torch.randn(8, 8).bfloat16())
    q = nn.Parameter(p.detach().half())
    first, second = (MARS([x], mars_type="plain-adamw") for x in (p, q))
    for _ in range(3):
        p.grad = torch.randn_like(p)
        first.step()
    second.load_state_dict(first.state_dict())
    assert set(second.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
    before = q.detach().clone()
    second.param_groups[0]["lr"] = 0.0
    q.grad = torch.zeros_like(q)
    second.step()
    assert torch.equal(q, before)


def test_differentiable_needs_wide_parameters() -> None:
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MARS([p], differentiable=True)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="differentiable=True needs float32 or float64"):
        optimizer.step()
    assert not optimizer.state

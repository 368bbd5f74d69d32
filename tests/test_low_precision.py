"""bfloat16 and float16 parameters: no update is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mars import MARS
from mars.engines import ENGINES
from mars.rule import KINDS
from mars.rule.halves import join

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", HALF)
def test_updates_below_half_an_ulp_add_up(engine: str, dtype: torch.dtype) -> None:
    """4,000 steps of 1e-6 from 1: a bare bfloat16 or float16 weight would not move at all."""
    p = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    optimizer = MARS([p], lr=1e-6, mars_type="mars-lion", clip=None, foreach=engine == "foreach")
    assert torch.equal(p - 1e-6, p)
    for _ in range(4000):
        p.grad = torch.ones_like(p)
        optimizer.step()
    value = join(p.detach(), optimizer.state[p]["param_low"])
    # A float32 weight rounds each 1e-6 to 17 units of 2^-24: 1.4 % of the way.
    torch.testing.assert_close(value, torch.full((2, 2), 1 - 4e-3), rtol=0, atol=6e-5)
    torch.testing.assert_close(p.detach().float(), value.to(dtype).float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_pair_of_halves_is_the_float32_run_bit_for_bit(engine: str, kind: str) -> None:
    """Same (16-bit) gradients: the trajectory of a bfloat16 weight is that of a float32 one."""
    shapes = [(8, 6), (6, 8), (7,), (2, 3, 2, 2)]
    start = [torch.randn(s).bfloat16() for s in shapes]
    half = [nn.Parameter(x.clone()) for x in start]
    full = [nn.Parameter(x.float()) for x in start]
    options = {"lr": 1e-4, "mars_type": kind, "foreach": engine == "foreach", "weight_decay": 0.1}
    first, second = MARS(half, **options), MARS(full, **options)
    for _ in range(20):
        for p, q in zip(half, full, strict=True):
            p.grad = torch.randn(p.shape).bfloat16()
            q.grad = p.grad.float()
        first.step()
        second.step()
    for p, q in zip(half, full, strict=True):
        assert torch.equal(join(p.detach(), first.state[p]["param_low"]), q.detach())


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
                optimizer.state[p]["param_low"].zero_()
    wide = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    with torch.no_grad():
        for p, q in zip(wide.parameters(), student.parameters(), strict=True):
            low = optimizer.state[q].get("param_low")
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

"""Diagnostics: right numbers, and no effect on the training they observe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mars
from mars import MARS
from mars.diagnostics import Reading
from mars.engines import ENGINES


def noise_run(steps: int = 60, **options) -> Reading:
    """Pure noise around a constant gradient at a point that hardly moves."""
    p = nn.Parameter(torch.zeros(50, 40))
    optimizer = MARS([p], lr=1e-9, **options)
    with mars.diagnose(optimizer) as diagnosis:
        for _ in range(steps):
            p.grad = 1e-3 * (torch.randn(50, 40) + 0.5)
            optimizer.step()
    return diagnosis.readings[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gamma", [0.0, 0.025, 0.1])
def test_noise_that_approximate_mode_adds(engine: str, gamma: float) -> None:
    reading = noise_run(gamma=gamma, foreach=engine == "foreach")
    k = gamma * 0.95 / 0.05
    assert reading.independent == pytest.approx((1 + k) ** 2 + k**2)
    assert reading.variance_ratio == pytest.approx(reading.independent, rel=0.05)
    # Mean 0.5 and deviation 1: the cosine of two such vectors is 0.25/1.25.
    assert reading.cosine == pytest.approx(0.2, abs=0.03)
    assert reading.clipped == 0.0
    assert reading.steps == 60


@pytest.mark.parametrize("n", [2, 4, 10])
def test_few_steps_show_more_than_the_correction_adds(n: int) -> None:
    """Successive c share a gradient: over n steps independent noise reads 2κ(1+κ)/n more."""
    reading = noise_run(steps=n + 1, gamma=0.1)  # the first step has no last gradient
    assert reading.expected == pytest.approx(1 + 2 * 1.9 * 2.9 * (1 + 1 / n))
    assert reading.variance_ratio == pytest.approx(reading.expected, rel=0.08)


def test_noise_that_exact_mode_does_not_add() -> None:
    """Linear regression: g and h share the batch, so that the correction adds almost nothing."""
    torch.manual_seed(0)
    a, w = torch.randn(2048, 16), torch.randn(16, 1)
    y = a @ w + torch.randn(2048, 1)
    ratios = {}
    for approximate in (True, False):
        p = nn.Parameter(torch.zeros(16, 1))
        optimizer = MARS([p], lr=1e-4, gamma=0.1, is_approx=approximate)
        with mars.diagnose(optimizer) as diagnosis:
            for _ in range(60):
                rows = torch.randint(0, 2048, (32,))

                def closure(p=p, rows=rows):
                    p.grad = None
                    loss = (a[rows] @ p - y[rows]).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
        ratios[approximate] = diagnosis.readings[0].variance_ratio
    independent = diagnosis.readings[0].independent
    assert diagnosis.readings[0].expected == independent  # each c has two gradients of its own
    assert ratios[True] == pytest.approx(independent, rel=0.25)
    assert ratios[False] == pytest.approx(1.0, abs=0.02)


def test_norms_and_clip_by_hand() -> None:
    """Two tensors, γ = 0: ‖c‖ = ‖g‖ = 2 and 0.5, so half of them is clipped."""
    p, q = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizer = MARS([p, q], gamma=0.0)
    with mars.diagnose(optimizer) as diagnosis:
        for _ in range(2):
            p.grad, q.grad = torch.ones(2, 2), torch.full((2, 2), 0.25)
            optimizer.step()
    reading = diagnosis.readings[0]
    assert reading.clipped == 0.5
    assert reading.c_norm == pytest.approx(1.25)
    assert reading.cosine == pytest.approx(1.0)  # the first step has no last gradient
    assert reading.tensors == 2


def test_update_rms() -> None:
    """MARS-Lion moves every weight by lr."""
    p = nn.Parameter(torch.zeros(4, 4))
    optimizer = MARS([p], lr=0.01, mars_type="mars-lion")
    with mars.diagnose(optimizer) as diagnosis:
        for _ in range(3):
            p.grad = torch.randn(4, 4)
            optimizer.step()
    assert diagnosis.readings[0].update_rms == pytest.approx(0.01)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"clip": "global"}, {"mars_type": "mars-lion", "clip": None},
        {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}, {"state_dtype": {"exp_avg": "8bit"}},
    ],
)  # fmt: skip
def test_observed_training_is_the_same_training(options: dict) -> None:
    results = []
    for observed in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)).bfloat16()
        optimizer = MARS(model.parameters(), **options)
        diagnosis = mars.diagnose(optimizer)
        if observed:
            diagnosis.__enter__()
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        if observed:
            diagnosis.__exit__(None, None, None)
            assert "Var(c)/Var(g)" in str(diagnosis)
        results.append([p.detach().clone() for p in model.parameters()])
        assert optimizer._observer is None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_types_that_store_no_last_gradient_are_observed_too() -> None:
    reading = noise_run(mars_type="mars-lion", clip=None, gamma=0.05)
    assert reading.clipped is None
    assert reading.variance_ratio == pytest.approx(reading.independent, rel=0.05)


def test_groups_are_told_apart() -> None:
    p, q = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3))
    optimizer = MARS([{"params": [p], "name": "matrices"}, {"params": [q]}])
    with mars.diagnose(optimizer) as diagnosis:
        p.grad, q.grad = torch.ones(3, 3), torch.ones(3)
        optimizer.step()
    first, second = diagnosis.readings
    assert first.name == "matrices"
    assert second.name == "1"
    assert second.tensors == 0
    assert second.clipped is None
    assert second.update_rms > 0
    assert first.variance_ratio is None  # one step has no variance


def test_two_at_once_are_refused() -> None:
    optimizer = MARS([nn.Parameter(torch.zeros(2, 2))])
    with mars.diagnose(optimizer), pytest.raises(RuntimeError, match="diagnosed already"):
        mars.diagnose(optimizer).__enter__()


def test_small_noise_on_a_large_mean_is_seen() -> None:
    p = nn.Parameter(torch.zeros(50, 40))
    optimizer = MARS([p], lr=1e-9)
    with mars.diagnose(optimizer) as diagnosis:
        for _ in range(60):
            p.grad = 1e-3 + 1e-7 * torch.randn(50, 40)
            optimizer.step()
    reading = diagnosis.readings[0]
    assert reading.variance_ratio == pytest.approx(reading.independent, rel=0.05)


def test_the_optimizer_may_change_while_observed() -> None:
    p, q = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3, 3))
    optimizer = MARS([p])
    with mars.diagnose(optimizer) as diagnosis:
        for step in range(6):
            p.grad = torch.randn(3, 3)
            q.grad = torch.randn(3, 3)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 3:
                optimizer.add_param_group({"params": [q]})
    assert [r.tensors for r in diagnosis.readings] == [1, 1]
    assert diagnosis.readings[0].clipped is not None


def test_many_tensors_are_told_apart() -> None:
    params = [nn.Parameter(torch.zeros(2 + i % 5, 3)) for i in range(40)]
    params.append(nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    optimizer = MARS(params, gamma=0.0, clip=None, mars_type="mars-lion")
    with mars.diagnose(optimizer) as diagnosis:
        for _ in range(3):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, i + 1.0)
            optimizer.step()
    reading = diagnosis.readings[0]
    assert reading.tensors == 41
    lengths = [(i + 1) * p.numel() ** 0.5 for i, p in enumerate(params)]
    assert reading.c_norm == pytest.approx(sum(lengths) / 41)

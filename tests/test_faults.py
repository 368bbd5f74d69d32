"""Faults of public MARS implementations, one test each, named after the fault."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from choice import choose
from mars import MARS
from mars.engines import ENGINES
from mars.rule import KINDS

every_engine = pytest.mark.parametrize("engine", ENGINES)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def test_step_bs_raises_type_error() -> None:
    """The authors' README calls step(bs=…), which their class refuses."""
    p = parameter(3, 3)
    p.grad = torch.randn(3, 3)
    assert MARS([p]).step(bs=480 * 1024) is None


@every_engine
@pytest.mark.parametrize("consume", [False, True])
def test_last_grad_aliases_p_grad(engine: str, consume: bool) -> None:
    """h would be g whenever the buffer is reused, and MARS silently AdamW."""
    buffer = torch.zeros(3, 3)
    kept, reused = parameter(3, 3), None
    reused = nn.Parameter(kept.detach().clone())
    gradients = torch.randn(4, 3, 3)
    for p, reuse in ((kept, False), (reused, True)):
        optimizer = MARS([p], lr=0.1, gamma=0.9, **choose(engine), consume_grads=consume)
        for g in gradients:
            if reuse:
                buffer.copy_(g)
                p.grad = buffer.view(3, 3)  # a view, as DDP's gradient_as_bucket_view gives
            else:
                p.grad = g.clone()
            optimizer.step()
            if reuse:
                assert optimizer.state[p]["last_grad"].data_ptr() != buffer.data_ptr()
    assert torch.equal(kept, reused)


@every_engine
def test_zero_grad_in_place_turns_h_into_zero(engine: str) -> None:
    p, q = parameter(3, 3), None
    q = nn.Parameter(p.detach().clone())
    for x, to_none in ((p, True), (q, False)):
        optimizer = MARS([x], lr=0.1, gamma=0.9, **choose(engine))
        torch.manual_seed(1)
        for _ in range(3):
            (x * torch.randn(3, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert torch.equal(p, q)


def test_options_read_from_self_so_groups_and_checkpoints_are_ignored() -> None:
    p = parameter(3, 3)
    optimizer = MARS([{"params": [p], "gamma": 0.0}], gamma=0.9)
    optimizer.param_groups[0]["mars_type"] = "mars-lion"
    p.grad = torch.ones(3, 3)
    before = p.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - p.detach(), torch.full((3, 3), 3e-3))
    other = MARS([parameter(3, 3)])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["gamma"] == 0.0
    assert other.param_groups[0]["mars_type"] == "mars-lion"


@every_engine
@pytest.mark.parametrize("kind", KINDS)
def test_lr_zero_divides_by_zero(kind: str, engine: str) -> None:
    p, v = parameter(3, 3), parameter(3)
    before = p.detach().clone(), v.detach().clone()
    optimizer = MARS([p, v], lr=0.0, mars_type=kind, **choose(engine), weight_decay=0.1)
    p.grad, v.grad = torch.randn(3, 3), torch.randn(3)
    optimizer.step()
    assert torch.equal(p, before[0])
    assert torch.equal(v, before[1])
    optimizer.param_groups[0]["lr"] = 1e-2  # and it can be thawed
    optimizer.step()
    assert p.isfinite().all()
    assert not torch.equal(v, before[1])


@every_engine
def test_no_gradients_crash(engine: str) -> None:
    p = parameter(3, 3)
    before = p.detach().clone()
    optimizer = MARS([p], **choose(engine), clip="global")
    optimizer.step()
    assert torch.equal(p, before)
    assert not optimizer.state


def test_vectors_decay_in_a_no_decay_group() -> None:
    vector = nn.Parameter(torch.ones(3))
    groups = [{"params": [vector], "weight_decay": 0.0}]
    optimizer = MARS(groups, weight_decay=0.1, weight_decay_1d=0.1)
    vector.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(vector, torch.ones(3))
    chosen = MARS([{"params": [vector], "weight_decay": 0.0, "weight_decay_1d": 0.5}])
    chosen.step()
    assert torch.all(vector < 1)


def test_convolutions_are_never_trained_by_mars() -> None:
    conv = nn.Conv2d(3, 4, 3)
    for rule, kept in (("2d", False), ("flatten", True)):
        optimizer = MARS(conv.parameters(), matrix_rule=rule)
        conv(torch.randn(1, 3, 5, 5)).sum().backward()
        optimizer.step()
        assert ("last_grad" in optimizer.state[conv.weight]) == kept


@pytest.mark.parametrize("kind", ["mars-shampoo", "mars-m"])
def test_scale_of_4d_comes_from_the_wrong_shape(kind: str) -> None:
    """A convolution moves exactly like its matrix (out, in·h·w)."""
    conv, g = torch.randn(6, 2, 3, 3), torch.randn(6, 2, 3, 3)
    p, q = nn.Parameter(conv.clone()), nn.Parameter(conv.flatten(1).clone())
    for x, gradient in ((p, g), (q, g.flatten(1))):
        optimizer = MARS([x], mars_type=kind, matrix_rule="flatten")
        x.grad = gradient
        optimizer.step()
    assert torch.equal(p.detach().flatten(1), q.detach())


def test_unused_second_moments_are_allocated() -> None:
    for kind in ("mars-lion", "mars-shampoo", "mars-m"):
        p = parameter(3, 3)
        p.grad = torch.randn(3, 3)
        optimizer = MARS([p], mars_type=kind, amsgrad=True)
        optimizer.step()
        assert "exp_avg_sq" not in optimizer.state[p]
        assert "max_exp_avg_sq" not in optimizer.state[p]


def test_gamma_and_beta1_are_swapped() -> None:
    """c = g + γ·β₁/(1−β₁)·(g − h): 1.475·g at the defaults, not 1.024·g."""
    p = nn.Parameter(torch.zeros(1, 1))
    optimizer = MARS([p])
    p.grad = torch.full((1, 1), 0.1)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.05 * 1.475 * 0.1)


def test_decay_grows_weights() -> None:
    for kind in KINDS:
        p = nn.Parameter(torch.full((3, 3), 2.0))
        optimizer = MARS([p], lr=0.1, weight_decay=0.5, mars_type=kind)
        p.grad = torch.zeros(3, 3)
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full((3, 3), 2.0 * 0.95))


@every_engine
def test_step_is_counted_per_group_so_late_parameters_are_miscorrected(engine: str) -> None:
    """A parameter unfrozen at step 4 moves as if it were its first step."""
    early, late, alone = parameter(3, 3), parameter(3, 3), None
    alone = nn.Parameter(late.detach().clone())
    optimizer = MARS([early, late], **choose(engine))
    for step in range(4):
        early.grad = torch.randn(3, 3)
        late.grad = torch.full((3, 3), 0.1) if step == 3 else None
        optimizer.step()
    fresh = MARS([alone], **choose(engine))
    alone.grad = torch.full((3, 3), 0.1)
    fresh.step()
    assert torch.equal(late, alone)
    assert float(optimizer.state[late]["step"]) == 1


@every_engine
@pytest.mark.parametrize("kind", KINDS)
def test_maximize_flips_p_grad_in_place(kind: str, engine: str) -> None:
    p, g = parameter(3, 3), torch.randn(3, 3)
    optimizer = MARS([p], mars_type=kind, **choose(engine), maximize=True)
    p.grad = g.clone()
    optimizer.step()
    assert torch.equal(p.grad, g)


def test_the_clip_depends_on_accumulation() -> None:
    """Not ours to fix (the loss must be averaged), but ours to keep: c is clipped once a step."""
    whole, parts = parameter(3, 3), None
    parts = nn.Parameter(whole.detach().clone())
    x = torch.randn(8, 3)
    for p, n in ((whole, 1), (parts, 4)):
        optimizer = MARS([p], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for micro in x.chunk(n):
                (((micro @ p) ** 2).sum(1).mean() / n).backward()
            optimizer.step()
    torch.testing.assert_close(whole, parts)


@every_engine
def test_tail_elements_are_skipped(engine: str) -> None:
    """Sizes around powers of two: every element moves."""
    for n in (1, 7, 31, 33, 255, 257, 1025):
        p = nn.Parameter(torch.zeros(1, n))
        optimizer = MARS([p], mars_type="mars-lion", **choose(engine))
        p.grad = torch.ones(1, n)
        optimizer.step()
        assert (p != 0).all()


def test_nan_is_not_spread_to_other_tensors() -> None:
    """Without GradScaler a NaN poisons its own tensor, as in torch.optim, but no other."""
    p, q = parameter(3, 3), parameter(3, 3)
    optimizer = MARS([p, q])
    p.grad, q.grad = torch.full((3, 3), float("nan")), torch.randn(3, 3)
    optimizer.step()
    assert p.isnan().all()
    assert q.isfinite().all()

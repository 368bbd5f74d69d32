"""The CPU engine: when it is chosen, and that portions and layouts change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mars
from mars import MARS
from mars.engines import CELLS, Batch, cpu
from mars.rule import KINDS

SHAPES = [(3,), (40, 9), (7, 5), (), (64, 3), (0, 4), (11,), (2, 3, 4)]


def trained(options: dict, steps: int = 4, layout: bool = False) -> list[Tensor]:
    """Parameters and state after some steps; with ``layout`` gradients lie in another order."""
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]
    optimizer = MARS(params, **options)
    for _ in range(steps):
        for p in params:
            g = torch.randn(p.shape, generator=random)
            p.grad = g.t().contiguous().t() if layout and g.ndim == 2 else g
        optimizer.step()
    found = [p.detach() for p in params]
    for p in params:
        found += [value for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return found


def engines(optimizer: MARS) -> set[str]:
    return {line.split()[5] for line in mars.explain(optimizer).splitlines()[1:]}


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({}, "cpu"),
        ({"foreach": False}, "reference"),
        ({"foreach": True}, "foreach"),
        ({"fused": False}, "reference"),
        ({"differentiable": True}, "reference"),
    ],
)
def test_it_is_the_default_on_a_cpu(options: dict, engine: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = MARS(model.parameters(), **options)
    assert engines(optimizer) == {engine}


def test_a_tensor_of_a_class_of_its_own_is_left_to_the_reference() -> None:
    class Own(Tensor):
        pass

    p = nn.Parameter(torch.randn(3, 3).as_subclass(Own))
    assert engines(MARS([p])) == {"reference"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"clip": "global"}, {"weight_decay": 0.2, "amsgrad": True},
        {"clip": None, "second_moment": "raw", "weight_decay": 0.2},
    ],
)  # fmt: skip
def test_portions_change_no_bit(kind: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"mars_type": kind, "optimize_1d": True, **options}
    if KINDS[kind].matrix:
        options |= {"optimize_1d": False, "ns_dtype": "float32"}
    ends = []
    for portion in (1, 100, 1 << 30):
        monkeypatch.setattr(cpu, "PORTION", portion)
        monkeypatch.setattr(cpu, "MATRICES", portion)
        ends.append(trained(options))
    for other in ends[1:]:
        for a, b in zip(ends[0], other, strict=True):
            if KINDS[kind].matrix:  # stacks of other sizes are multiplied in another order
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {"mars_type": "mars-adamw"}, {"mars_type": "plain-adamw"},
        {"clip": None, "second_moment": "raw"},
    ],
)  # fmt: skip
def test_gradients_may_lie_in_another_order(options: dict) -> None:
    options = {**options, "weight_decay": 0.1}
    pairs = zip(trained(options), trained(options, layout=True), strict=True)
    for plain, turned in pairs:
        torch.testing.assert_close(plain, turned, rtol=1e-6, atol=1e-7)


def test_the_kernel_is_what_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of AdamW's tensors and of MARS-AdamW's, in few calls."""
    calls: list[int] = []
    kernel = torch._fused_adamw_

    def counted(x: list[Tensor], *others: object, **options: object) -> None:
        calls.append(len(x))
        kernel(x, *others, **options)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    trained({}, steps=1)
    assert calls == [4, 4]  # matrices, and all others
    calls.clear()
    trained({"second_moment": "raw"}, steps=1)
    assert calls == [4]  # of c̃ and g, which is no AdamW
    calls.clear()
    trained({"second_moment": "raw", "clip": None}, steps=1)
    assert calls == [4, 4]


@pytest.mark.parametrize("limit", [0.5, 1e3])
def test_gradients_are_copied_only_where_they_are_clipped(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as any other engine clips them."""
    given: list[Tensor] = []
    whole = cpu.step

    def seen(batch: Batch, length: Tensor | None) -> None:
        given.extend(batch.g)
        whole(batch, length)

    monkeypatch.setitem(CELLS, "cpu", seen)
    ends = []
    for engine in ({}, {"foreach": False}):
        p = nn.Parameter(torch.ones(4, 3))
        optimizer = MARS([p], max_grad_norm=limit, clip=None, **engine)
        for _ in range(3):
            p.grad = torch.full((4, 3), 1 / 12**0.5)  # of norm 1
            optimizer.step()
            assert engine or (given[-1] is p.grad) == (limit > 1)
        ends.append((p.detach(), optimizer.state[p]["exp_avg"]))
    assert len(given) == 3
    assert all(float(g.norm()) == pytest.approx(min(limit, 1.0)) for g in given)
    torch.testing.assert_close(*ends)


def test_a_gamma_that_moves_moves_as_in_the_reference() -> None:
    ends = []
    for engine in ({}, {"foreach": False}):
        p = nn.Parameter(torch.ones(4, 3))
        optimizer = MARS([p], clip=None, second_moment="raw", **engine)
        for step in range(6):
            optimizer.param_groups[0]["gamma"] = 0.3 * (step % 3)
            p.grad = torch.linspace(-1, 1, 12).view(4, 3) * (step + 1)
            optimizer.step()
        ends.append((p.detach(), optimizer.state[p]["exp_avg"]))
    torch.testing.assert_close(*ends)


def test_what_is_not_finite_shows() -> None:
    p = nn.Parameter(torch.ones(3, 3))
    p.grad = torch.full((3, 3), float("nan"))
    MARS([p]).step()
    assert p.isnan().all()


def test_matrices_are_done_in_portions_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[tuple[int, ...]]] = []
    whole = cpu.foreach.step

    def seen(batch: Batch, length: Tensor | None) -> None:
        stacks.append([tuple(x.shape) for x in batch.x])
        whole(batch, length)

    monkeypatch.setattr(cpu.foreach, "step", seen)
    monkeypatch.setattr(cpu, "MATRICES", 60)
    params = [nn.Parameter(torch.randn(4, 5 + i % 2)) for i in range(6)]
    for p in params:
        p.grad = torch.randn_like(p)
    MARS(params, mars_type="mars-m").step()
    assert stacks == [[(4, 5)] * 3, [(4, 6)] * 2, [(4, 6)]]


def test_a_group_that_is_not_differentiable_beside_a_step_that_is() -> None:
    for shape in ((3, 3), (600, 600)):
        x = torch.ones(shape, requires_grad=True)
        y = x.clone()
        y.grad = torch.zeros(shape)
        group = {"params": [y], "differentiable": False}
        MARS([group], differentiable=True, weight_decay=0.5, lr=0.1).step()
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.full(shape, 0.95))

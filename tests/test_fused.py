"""The fused engine beyond its cells: schedule, plan, formats, AMP, global norms.

Without a GPU the kernels run in Triton's interpreter; test_cuda.py has what needs the device.
"""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import mars
from mars import MARS
from mars.dispatch import why_not_fused
from mars.rule import formats
from mars.rule.estimator import kappa

pytest.importorskip("triton")
from mars.engines.fused import launch
from mars.engines.fused import layout as at

SHAPES = [(40, 50), (33,), (1,), (5, 5), (0,)]


def make(*shapes, dtype=torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes or SHAPES]


def give(xs, scale: float = 1.0) -> None:
    for x in xs:
        x.grad = (scale * torch.randn(x.shape)).to(x.dtype)


def pair(first: dict, second: dict, steps: int = 3, scale: float = 1.0, dtype=torch.float32):
    """Two optimizers on the same gradients; their parameters."""
    a = make(dtype=dtype)
    b = [nn.Parameter(x.detach().clone()) for x in a]
    one, two = MARS(a, **first), MARS(b, **second)
    for _ in range(steps):
        give(a, scale)
        step_alike(one, two, a, b)
    return one, two, a, b


def step_alike(one: MARS, two: MARS, a, b) -> None:
    """Step both, the second on the first one's gradients."""
    for x, y in zip(a, b, strict=True):
        y.grad = x.grad.clone()
    one.step()
    two.step()


def assert_alike(a, b, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


def test_a_captured_step_moves_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is in the plan, one is not contiguous: a graph captures both, by two engines."""

    def trained(engine: dict, captured: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        xs = [torch.randn(4, 4, generator=random), torch.randn(4, 4, generator=random).t()]
        gs = [torch.randn(4, 4, generator=random) for _ in xs]
        xs = [x.requires_grad_() for x in xs]
        optimizer = MARS(xs, lr=1e-2, capturable=True, **engine)
        monkeypatch.setattr(MARS, "_check_capture", lambda self: None)
        for step in range(3):
            for name in ("optimizer", "collect", "plan"):
                monkeypatch.setattr(f"mars.{name}.capturing", lambda step=step: step == captured)
            for x, g in zip(xs, gs, strict=True):
                x.grad = g.clone() if x.is_contiguous() else g.t()
            optimizer.step()
        assert [float(optimizer.state[x]["step"]) for x in xs] == [3, 3]
        return xs

    want = trained({"foreach": False}, 9)
    assert_alike(want, trained({"fused": True}, 9))
    assert_alike(want, trained({"fused": True}, 2))


@pytest.fixture
def small_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of a few blocks, so that small tensors have many."""
    monkeypatch.setattr(launch, "UPDATE_ITEM", 512)
    monkeypatch.setattr(launch, "NORM_ITEM", 512)
    monkeypatch.setattr(launch, "EXACT_ITEM", 1024)


@pytest.mark.parametrize("clip", ["tensor", "global", None])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["clipped", "unclipped"])
@pytest.mark.usefixtures("small_items")
def test_many_items_of_a_tensor_equal_the_loop(scale, max_grad_norm, clip) -> None:
    options = {"clip": clip, "max_grad_norm": max_grad_norm, "gamma": 0.2}
    one, two, a, b = pair({"fused": True, **options}, {"foreach": False, **options}, scale=scale)
    assert_alike(a, b)
    if max_grad_norm is not None:
        torch.testing.assert_close(one.grad_norm, two.grad_norm.float())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_an_item_waits_only_for_items_before_it(together, normed) -> None:
    sizes = [100_000, 10, 0, 300_000, 9000]
    flags = [at.CLIPPED.value, at.CLIPPED.value, at.CLIPPED.value, 0, at.CLIPPED.value]
    work = launch.schedule(sizes, flags, together, normed and together).tolist()
    seen: dict[tuple[int, int], int] = {}
    for position, (entry, _) in enumerate(work):
        seen[entry >> 28, entry & 0xFFFFFFF] = position  # the last of its kind and tensor
    first: dict[tuple[int, int], int] = {}
    for position, (entry, _) in reversed(list(enumerate(work))):
        first[entry >> 28, entry & 0xFFFFFFF] = position
    norm, exact, update, small = (op.value for op in (at.NORM, at.EXACT, at.UPDATE, at.SMALL))
    for i, n in enumerate(sizes):
        ops = {op for op, tensor in seen if tensor == i}
        assert ops & {update, small}, "every tensor is updated, an empty one too"
        if exact in ops:
            assert seen[norm, i] < first[exact, i]
            assert seen[exact, i] < first[update, i]
        covered = sorted(item for entry, item in work if entry == (update << 28) + i)
        assert covered in ([], list(range(max(1, -(-n // launch.UPDATE_ITEM)))))
    if together:
        last = max(p for (op, _), p in seen.items() if op in (norm, exact))
        assert all(p > last for (op, _), p in first.items() if op == update)


def test_a_plan_is_kept_and_dropped_when_anything_changes() -> None:
    xs = make()
    optimizer = MARS(xs, fused=True)

    def step():
        give(xs)
        optimizer.step()
        return optimizer._plan

    plan = step()
    assert plan.complete
    assert step() is plan
    optimizer.param_groups[0]["lr"] = 1e-5  # a number
    optimizer.param_groups[0]["gamma"] = 0.1
    assert step() is plan
    optimizer.param_groups[0]["clip"] = None
    changed = step()
    assert changed is not plan
    optimizer.state[xs[0]]["exp_avg"] = optimizer.state[xs[0]]["exp_avg"].clone()
    moved = step()
    assert moved is not changed
    with torch.no_grad():
        xs[1].data = xs[1].data.clone()
    again = step()
    assert again is not moved
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step() is not again
    give(xs)
    xs[2].grad = None
    optimizer.step()
    assert xs[2] in optimizer._plan.idle
    optimizer.add_param_group({"params": make((3, 3))})
    optimizer.param_groups[-1]["params"][0].grad = torch.ones(3, 3)
    step()
    assert optimizer.state[optimizer.param_groups[-1]["params"][0]]["step"] == 1


@pytest.mark.usefixtures("small_items")  # a tensor of one item takes its norm itself
def test_a_changed_last_gradient_is_noticed() -> None:
    """The bound of the clip takes ‖h‖ from the step before: not if somebody wrote h."""
    for change in (False, True):
        torch.manual_seed(1)
        one, two, a, b = pair({"fused": True}, {"foreach": False}, scale=1e-3)
        for optimizer, xs in ((one, a), (two, b)):
            if change:
                optimizer.state[xs[0]]["last_grad"].mul_(1e6)
        give(a, 1e-3)
        step_alike(one, two, a, b)
        assert_alike(a, b)


def test_a_gradient_that_is_not_dense_goes_to_another_engine_for_that_step() -> None:
    xs = make((6, 4), (7,))
    ys = [nn.Parameter(x.detach().clone()) for x in xs]
    one, two = MARS(xs, fused=True), MARS(ys, foreach=False)
    for i in range(4):
        give(xs)
        if i % 2:
            xs[0].grad = torch.randn(4, 6).t()
        step_alike(one, two, xs, ys)
    assert_alike(xs, ys)


def test_autograd_notices_that_a_parameter_was_stepped() -> None:
    x = nn.Parameter(torch.randn(4, 4))
    optimizer = MARS([x], fused=True)
    loss = (x * x).sum()
    x.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("consume", [False, True])
def test_a_grad_scaler_is_served_inside_the_step(consume: bool) -> None:
    torch.manual_seed(2)
    one, two, a, b = pair({"fused": True, "consume_grads": consume}, {"foreach": False}, steps=1)
    scale = torch.tensor(8.0)
    for i in range(4):
        give(a)
        for x, y in zip(a, b, strict=True):
            y.grad = x.grad.clone()
            x.grad = x.grad * scale
        one.grad_scale, one.found_inf = scale, torch.tensor(float(i == 1))
        kept = [t.clone() for x in a for t in (x.detach(), *one.state[x].values())]
        one.step()
        if i == 1:  # skipped: nothing at all has changed
            now = [t for x in a for t in (x.detach(), *one.state[x].values())]
            assert all(torch.equal(p, q) for p, q in zip(kept, now, strict=True))
        else:
            two.step()
    assert_alike(a, b)
    del one.grad_scale, one.found_inf


def test_a_real_grad_scaler_leaves_it_to_the_step() -> None:
    xs = make((6, 4), (7,))
    optimizer = MARS(xs, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    give(xs)
    assert optimizer._step_supports_amp_scaling
    loss = scaler.scale(sum((x * x).sum() for x in xs))
    for x in xs:
        x.grad = None
    loss.backward()
    before = [x.detach().clone() for x in xs]
    scaler.step(optimizer)
    scaler.update()
    for x, old in zip(xs, before, strict=True):
        torch.testing.assert_close(
            optimizer.state[x]["exp_avg_sq"].sqrt().argmax(), old.abs().argmax()
        )
    xs[0].grad.fill_(float("inf"))
    kept = [x.detach().clone() for x in xs]
    scaler.step(optimizer)
    assert all(torch.equal(x, k) for x, k in zip(xs, kept, strict=True))


def test_consumed_gradients_of_no_size_and_sparse_ones_beside_a_plan() -> None:
    xs = make((0, 4), (0, 4), (6, 4))
    optimizer = MARS(xs, fused=True, consume_grads=True)
    plans = set()
    for _ in range(3):
        give(xs)
        optimizer.step()
        plans.add(optimizer._plan)
    assert len(plans) == 1
    give(xs)
    xs[2].grad = None
    xs[2].grad = torch.eye(6, 4).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_the_advice_for_a_grad_scaler_helps() -> None:
    """What torch's scaler leaves behind when a step raises must not make the next one raise."""
    torch._dynamo.reset()
    (x,) = make((4, 4))
    optimizer = MARS([x], fused=True, lr=torch.tensor(1e-3))
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((x * x).sum()).backward()
    with pytest.raises(RuntimeError, match="use fused=False with it"):
        scaler.step(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.param_groups[0]["fused"] = False
    scaler.scale((x * x).sum()).backward()
    before = x.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(x, before)


def test_consumed_gradients_that_were_clipped_are_the_last_gradients() -> None:
    options = {"max_grad_norm": 0.1, "clip": "tensor"}
    one, two, a, b = pair(
        {"fused": True, "consume_grads": True, **options}, {"foreach": False, **options}
    )
    assert_alike(a, b)
    for x, y in zip(a, b, strict=True):
        assert x.grad is None
        if "last_grad" in two.state[y]:
            torch.testing.assert_close(one.state[x]["last_grad"], two.state[y]["last_grad"])


@pytest.mark.parametrize("form", ["bfloat16", "8bit", {"last_grad": "bfloat16"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion", "mars-m"])
def test_lean_state_is_the_same_on_every_engine(kind, dtype, form) -> None:
    options = {"mars_type": kind, "state_dtype": form, "ns_dtype": "float32", "lr": 1e-3}
    torch.manual_seed(3)
    a = make(dtype=dtype)
    one = MARS(a, fused=True, **options)
    others = []
    for foreach in (True, False):
        b = [nn.Parameter(x.detach().clone()) for x in a]
        others.append((MARS(b, foreach=foreach, **options), b))
    for _ in range(3):
        give(a)
        for two, b in others:
            for x, y in zip(a, b, strict=True):
                y.grad = x.grad.clone()
            two.step()
        one.step()
    for two, b in others:
        for x, y in zip(a, b, strict=True):
            mine, theirs = one.state[x], two.state[y]
            assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in theirs.items()}
            for name in mine:
                if mine[name].dtype in (torch.bfloat16, torch.uint8) and x.numel():
                    same = (mine[name] == theirs[name]).float().mean()
                    # A rounding of the arithmetic can cross a boundary of the format.
                    assert same > 0.97, (name, float(same))
                elif mine[name].dtype == torch.float32:
                    torch.testing.assert_close(mine[name], theirs[name], rtol=2e-2, atol=2e-3)
        assert_alike(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(("form", "error"), [("bfloat16", 0.02), ("8bit", 0.12)])
@pytest.mark.parametrize("kind", ["mars-m", "mars-shampoo"])
def test_matrices_move_as_their_stored_momentum_says(kind: str, form: str, error: float) -> None:
    """Fused orthogonalises what the state holds, other engines what it held before rounding."""
    options = {"mars_type": kind, "state_dtype": form, "ns_dtype": "float32", "lr": 1e-2}
    start = make((64, 96))
    moved = []
    for engine in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(1)
        (x,) = (nn.Parameter(p.detach().clone()) for p in start)
        optimizer = MARS([x], **options, **engine)
        for _ in range(3):
            give([x])
            optimizer.step()
        moved.append(x.detach() - start[0].detach())
    assert (moved[0] - moved[1]).norm() < error * moved[1].norm()


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(kind: str, dtype: torch.dtype) -> None:
    options = {"mars_type": kind, "max_grad_norm": 1.0, "ns_dtype": "float32"}
    start = torch.randn(8, 8)
    ends = []
    for default in (torch.float32, dtype):
        x = nn.Parameter(start.clone())
        torch.manual_seed(2)
        gradients = [torch.randn(8, 8) for _ in range(3)]
        torch.set_default_dtype(default)
        try:
            optimizer = MARS([x], fused=True, **options)
            for g in gradients:
                x.grad = g
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(x.detach())
    assert torch.equal(*ends)


def test_gradients_do_not_outlive_zero_grad() -> None:
    (x,) = make((8, 8))
    optimizer = MARS([x], fused=True)
    for _ in range(3):
        give([x])
        held = weakref.ref(x.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert held() is None


def test_explain_names_engine_and_reason() -> None:
    optimizer = MARS([
        {"params": make((3, 3)), "fused": True},
        {"params": make((4,), dtype=torch.float64)},
    ])  # fmt: skip
    table = mars.explain(optimizer)
    assert "fused" in table.splitlines()[1]
    assert "on cpu" in table.splitlines()[2]
    strided = nn.Parameter(torch.randn(4, 6).t())
    assert why_not_fused({**optimizer.param_groups[0]}, strided) == "not contiguous"


@pytest.mark.parametrize("clip", ["tensor", "global", None])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.usefixtures("small_items")
def test_norms_over_launches_and_engines(consume, max_grad_norm, clip) -> None:
    """Other engines, dtypes and formats have tensors in the same norm; matrices are among them."""
    options = {"clip": clip, "max_grad_norm": max_grad_norm, "consume_grads": consume}
    kinds = [
        {"mars_type": "mars-adamw"}, {"mars_type": "mars-adamw"}, {"mars_type": "mars-adamw"},
        {"mars_type": "mars-lion", "state_dtype": {"exp_avg": "bfloat16"}},
        {"mars_type": "mars-m", "ns_dtype": "float32"}, {"mars_type": "plain-adamw"},
    ]  # fmt: skip
    dtypes = [torch.float32, torch.bfloat16, *[torch.float32] * 4]
    first = [make((40, 50), (33,), dtype=dtype) for dtype in dtypes]
    second = [[nn.Parameter(x.detach().clone()) for x in own] for own in first]
    engines = [{"fused": True}, {"fused": True}, {"foreach": False}, *[{"fused": True}] * 3]
    optimizers = []
    for params, how in ((first, engines), (second, [{"foreach": False}] * 6)):
        columns = zip(params, kinds, how, strict=True)
        groups = [{"params": own, **kind, **engine} for own, kind, engine in columns]
        optimizers.append(MARS(groups, gamma=0.2, **options))
    one, two = optimizers
    a, b = [x for own in first for x in own], [x for own in second for x in own]
    for _ in range(3):
        give(a, 0.05)
        step_alike(one, two, a, b)
    assert bool(one._plan.outside) == (clip == "global" or max_grad_norm is not None)
    for own, expected in zip(first, second, strict=True):
        # The interpreter rounds to bfloat16 otherwise: a last bit of what is visible of them.
        half = own[0].dtype == torch.bfloat16
        assert_alike(own, expected, 2**-7 if half else 1e-5, 1e-4 if half else 1e-6)
    if max_grad_norm is not None:
        torch.testing.assert_close(one.grad_norm, two.grad_norm.float())


def test_a_diagnosed_step_is_one_step() -> None:
    """Fused, then watched (by foreach or the loop), then fused: the trajectory of the loop."""
    xs = make()
    ys = [nn.Parameter(x.detach().clone()) for x in xs]
    one, two = MARS(xs, fused=True), MARS(ys, foreach=False)

    def step() -> None:
        give(xs)
        step_alike(one, two, xs, ys)

    step()
    step()
    with mars.diagnose(one) as diagnosis:
        step()
        step()
    assert diagnosis.readings[0].steps == 2
    step()
    assert one._plan is not None
    assert_alike(xs, ys)
    assert float(one.state[xs[0]]["step"]) == 5


def test_a_compiled_step_between_fused_ones() -> None:
    xs = make((6, 4), (7,))
    ys = [nn.Parameter(x.detach().clone()) for x in xs]
    one, two = MARS(xs, fused=True), MARS(ys, foreach=False)
    compiled = torch.compile(one.step, backend="eager")
    for i in range(6):
        give(xs)
        for x, y in zip(xs, ys, strict=True):
            y.grad = x.grad.clone()
        compiled() if i in (2, 3) else one.step()
        two.step()
    assert_alike(xs, ys)


def test_state_of_another_layout_is_straightened() -> None:
    x = nn.Parameter(torch.randn(2, 3, 4, 5))
    y = nn.Parameter(x.detach().clone())
    one, two = (MARS([p], fused=f, foreach=None if f else False, matrix_rule="flatten")
                for p, f in ((x, True), (y, False)))  # fmt: skip
    for i in range(4):
        x.grad = torch.randn(2, 3, 4, 5)
        y.grad = x.grad.clone()
        if i == 2:
            for name in ("exp_avg", "exp_avg_sq", "last_grad"):
                own = one.state[x]
                own[name] = own[name].to(memory_format=torch.channels_last)
        one.step()
        two.step()
    assert_alike([x], [y])


def test_a_consumed_gradient_of_another_layout_is_copied() -> None:
    x = nn.Parameter(torch.randn(6, 4))
    y = nn.Parameter(x.detach().clone())
    one, two = MARS([x], fused=True, consume_grads=True), MARS([y], foreach=False)
    for i in range(4):
        g = torch.randn(6, 4)
        x.grad = torch.empty_strided((6, 4), (1, 6)).copy_(g) if i == 1 else g.clone()
        y.grad = g
        one.step()
        two.step()
    assert_alike([x], [y])
    assert one.state[x]["last_grad"].is_contiguous()


@pytest.mark.parametrize("betas", [(0.9, 0.0), (0.0, 0.9), (0.0, 0.0)])
@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion"])
def test_small_betas_after_a_spike(kind, betas) -> None:
    a = make((5, 7))
    b = [nn.Parameter(x.detach().clone()) for x in a]
    options = {"mars_type": kind, "betas": betas, "clip": None}
    one, two = MARS(a, fused=True, **options), MARS(b, foreach=False, **options)
    for scale in (100.0, 1.0, 1e-5, 1e-5):
        give(a, scale)
        b[0].grad = a[0].grad.clone()
        one.step()
        two.step()
    assert_alike(a, b, rtol=1e-4, atol=1e-5)


def test_a_parameter_moved_to_another_group_takes_its_options() -> None:
    xs = make((3, 3), (4, 4))
    optimizer = MARS([{"params": [xs[0]], "lr": 1.0}, {"params": [xs[1]], "lr": 0.0}], fused=True)
    give(xs)
    optimizer.step()
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    before = xs[0].detach().clone()
    optimizer.step()
    assert torch.equal(xs[0], before)


def test_an_offloaded_buffer_is_noticed() -> None:
    xs = make((3, 3))
    optimizer = MARS(xs, fused=True)
    give(xs)
    optimizer.step()
    v = optimizer.state[xs[0]]["exp_avg_sq"]
    v.data = v.data.clone()
    before = v.clone()
    optimizer.step()
    assert not torch.equal(v, before)


@pytest.mark.usefixtures("small_items")
def test_exact_mode_never_takes_the_gradient_for_the_last_one() -> None:
    xs = make((40, 50))
    ys = [nn.Parameter(x.detach().clone()) for x in xs]
    options = {"is_approx": False, "gamma": 0.5, "lr": 0.0}
    one, two = MARS(xs, fused=True, **options), MARS(ys, foreach=False, **options)
    h = 20 * torch.nn.functional.normalize(torch.randn(2000), dim=0).view(40, 50)
    for _ in range(3):
        for optimizer, p in ((one, xs[0]), (two, ys[0])):
            p.grad = h.clone()
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
            p.grad = 1e-3 * torch.ones(40, 50)
            optimizer.step()
    torch.testing.assert_close(one.state[xs[0]]["exp_avg"], two.state[ys[0]]["exp_avg"])


def test_the_norm_that_is_read_is_that_of_its_step() -> None:
    xs = make((3, 3))
    optimizer = MARS(xs, fused=True, max_grad_norm=1.0)
    norms = []
    for scale in (1.0, 2.0, 3.0):
        xs[0].grad = torch.full((3, 3), scale)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert [float(n) for n in norms] == pytest.approx([3.0, 6.0, 9.0])
    optimizer.param_groups[0]["max_grad_norm"] = None
    give(xs)
    optimizer.step()
    assert optimizer.grad_norm is None
    other = MARS(make((3, 3)), fused=True, clip="global")
    give(other.param_groups[0]["params"])
    other.step()
    assert other.grad_norm is None


def test_a_moving_max_grad_norm_keeps_the_plan() -> None:
    one, two, a, b = pair(
        {"fused": True, "max_grad_norm": 1.0}, {"foreach": False, "max_grad_norm": 1.0}
    )
    plan = one._plan
    for limit in (0.5, 0.1):
        one.param_groups[0]["max_grad_norm"] = two.param_groups[0]["max_grad_norm"] = limit
        give(a)
        step_alike(one, two, a, b)
    assert one._plan is plan
    assert_alike(a, b)


def test_counts_of_another_dtype_are_converted() -> None:
    xs = make((3, 3))
    optimizer = MARS(xs, fused=True)
    give(xs)
    optimizer.step()
    optimizer.state[xs[0]]["step"] = torch.tensor(1.0, dtype=torch.float64)
    give(xs)
    optimizer.step()
    assert float(optimizer.state[xs[0]]["step"]) == 2.0


def test_a_gradient_that_cannot_be_stepped_stops_what_is_fused_beside_it() -> None:
    p, q = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6).t())
    optimizer = MARS([p, q], fused=True)
    give([p, q])
    optimizer.step()
    assert optimizer._plan is not None
    before = p.detach().clone()
    give([p])
    q.grad = torch.ones(6, 4).to_sparse()
    with pytest.raises(RuntimeError, match="MARS does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(p, before)


def test_a_nan_in_a_gradient_of_lion_does_what_the_loop_does() -> None:
    a = make((8, 8))
    b = [nn.Parameter(x.detach().clone()) for x in a]
    lion = {"mars_type": "mars-lion"}
    one, two = MARS(a, fused=True, **lion), MARS(b, foreach=False, **lion)
    give(a)
    a[0].grad[0, 0] = float("nan")
    b[0].grad = a[0].grad.clone()
    one.step()
    two.step()
    torch.testing.assert_close(a[0], b[0], equal_nan=True)


def test_a_last_gradient_that_is_needed_again_starts_at_zero() -> None:
    for form in (None, "bfloat16", "8bit"):
        x = nn.Parameter(torch.randn(6, 4))
        optimizer = MARS([x], fused=True, mars_type="mars-lion", clip=None, state_dtype=form)
        x.grad = torch.randn(6, 4)
        optimizer.step()
        assert "last_grad" not in optimizer.state[x]
        optimizer.param_groups[0]["clip"] = "tensor"
        before = wide(optimizer.state[x])
        x.grad = 1e-2 * torch.randn(6, 4)
        optimizer.step()
        want = 0.95 * before + 0.05 * (1 + kappa(0.025, 0.95)) * x.grad
        error = {None: 1e-6, "bfloat16": 0.01, "8bit": 0.15}[form]
        assert (wide(optimizer.state[x]) - want).norm() <= error * want.norm()


def wide(state: dict) -> torch.Tensor:
    """exp_avg in float32."""
    if "exp_avg_exponent" in state:
        return formats.decode(state["exp_avg"], state["exp_avg_exponent"], signed=True)
    return state["exp_avg"].float().clone()


def test_float64_parameters_with_lean_state() -> None:
    x = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    optimizer = MARS([x], state_dtype="8bit")
    x.grad = torch.randn(6, 4, dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[x]["exp_avg"].dtype == torch.uint8
    assert x.isfinite().all()


def test_fused_is_insisted_on_but_for_the_layout() -> None:
    (strided,) = (nn.Parameter(torch.randn(4, 6).t()),)
    MARS([strided], fused=True)  # goes to foreach
    with pytest.raises(RuntimeError, match="float64: it takes float32"):
        MARS([nn.Parameter(strided.detach().double())], fused=True)


@pytest.mark.parametrize("clip", ["tensor", "global"])
def test_gradients_scaled_beyond_the_root_of_the_largest_float(clip: str) -> None:
    """As a GradScaler under bfloat16 comes to in time: their squares would be infinite."""
    ends, norms = [], []
    for options in ({"fused": True}, {"foreach": True}):
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**72)
        x = nn.Parameter(torch.randn(40, 50))
        optimizer = MARS([x], clip=clip, max_grad_norm=0.5, **options)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((1e-2 * x * torch.randn_like(x)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(x)
        norms.append(optimizer.grad_norm)
    assert_alike(*([x] for x in ends))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("clip", ["tensor", "global"])
def test_a_negative_gamma_is_clipped_too(clip: str) -> None:
    """None is accepted, but a group may be given one."""
    a = make((128, 128))
    b = [nn.Parameter(x.detach().clone()) for x in a]
    one, two = MARS(a, fused=True, clip=clip), MARS(b, foreach=False, clip=clip)
    for optimizer in (one, two):
        optimizer.param_groups[0]["gamma"] = -0.2  # κ = −3.8
    for _ in range(3):
        give(a, 0.9 / 128)
        step_alike(one, two, a, b)
        torch.testing.assert_close(
            one.state[a[0]]["exp_avg"], two.state[b[0]]["exp_avg"], rtol=1e-4, atol=1e-7
        )


def test_what_a_replayed_graph_has_written_is_not_taken_for_known() -> None:
    lengths = []
    for options in ({"fused": True, "capturable": True}, {"foreach": False}):
        torch.manual_seed(0)
        x = nn.Parameter(torch.randn(128, 128))
        optimizer = MARS([x], **options)
        for _ in range(2):
            give([x], 0.1 / 128)
            optimizer.step()
        optimizer.state[x]["last_grad"].numpy()[:] = 5 / 128  # no version is raised by it
        before = optimizer.state[x]["exp_avg"].clone()
        give([x], 0.3 / 128)
        optimizer.step()
        lengths.append((optimizer.state[x]["exp_avg"] - 0.95 * before).norm() / 0.05)
    torch.testing.assert_close(*lengths)


def test_a_grad_scaler_and_a_last_gradient_that_begins_late() -> None:
    x = nn.Parameter(torch.randn(6, 4))
    optimizer = MARS([x], fused=True, mars_type="mars-lion", clip=None, max_grad_norm=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step(scale: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale((scale * x * torch.ones(6, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    optimizer.param_groups[0]["clip"] = "tensor"
    step(float("inf"))  # skipped
    before = optimizer.state[x]["exp_avg"].clone()
    step()
    g = torch.full((6, 4), 0.1 / 24**0.5)  # clipped to 0.1
    c = (1 + kappa(0.025, 0.95)) * g
    torch.testing.assert_close(optimizer.state[x]["exp_avg"], 0.95 * before + 0.05 * c)
    step()
    assert optimizer._plan is not None
    assert optimizer.state[x]["last_grad"].isfinite().all()


def test_tables_are_made_on_the_host_whatever_the_default_device_is() -> None:
    xs = make((6, 4), (7,))
    optimizer = MARS(xs, fused=True, mars_type="mars-m")
    give(xs)
    with torch.device("meta"):
        optimizer.step()
    assert all(x.device.type == "cpu" for x in optimizer.state[xs[0]].values())


@pytest.mark.parametrize("kind", ["mars-m", "mars-shampoo"])
@pytest.mark.parametrize("shape", [(1, 4), (1, 64), (16, 16)])
def test_newton_schulz_of_rounded_momenta_stays_bounded(kind: str, shape) -> None:
    """Rounded to 8 bits a momentum may be an eighth longer, which Polar Express does not bear."""
    for seed in range(4):
        torch.manual_seed(seed)
        p = nn.Parameter(torch.zeros(shape))
        optimizer = MARS(
            [p], mars_type=kind, state_dtype="8bit", ns_coefficients="polar-express", fused=True
        )
        for _ in range(4):
            p.grad = torch.zeros(shape)
            p.grad[0] = torch.randn(shape[1])
            optimizer.step()
        assert p.isfinite().all()


@pytest.mark.parametrize("norm", [{"max_grad_norm": 100.0}, {"clip": "global"}], ids=str)
def test_a_last_gradient_that_begins_late_beside_others(norm: dict) -> None:
    """Of others with which it shares a norm, fused as they are."""
    ends = []
    for engine in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        p, v = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
        groups = [{"params": [p], "clip": None}, {"params": [v]}]
        optimizer = MARS(groups, mars_type="mars-lion", gamma=0.5, **norm, **engine)
        give([p, v])
        optimizer.step()
        optimizer.param_groups[0]["clip"] = "tensor"
        give([p, v], 0.01)
        optimizer.step()
        ends.append(optimizer.state[p]["exp_avg"])
    torch.testing.assert_close(*ends)


def test_notes_in_a_group_make_no_new_plan() -> None:
    """What a scheduler of somebody's keeps there changes at every step, and may be a tensor."""
    x = nn.Parameter(torch.randn(6, 5))
    optimizer = MARS([x], fused=True)
    plans = []
    for i in range(4):
        optimizer.param_groups[0]["lr_scale"] = 0.5**i
        optimizer.param_groups[0]["momentum"] = torch.ones(3) * i
        x.grad = torch.randn(6, 5)
        optimizer.step()
        plans.append(optimizer._plan)
    assert plans[0] is not None
    assert all(plan is plans[0] for plan in plans)


@pytest.mark.parametrize("fused", [True, False])
def test_two_parameters_with_one_gradient_that_is_consumed(fused: bool) -> None:
    torch.manual_seed(0)
    start = [torch.randn(4, 3) for _ in range(2)]
    ways = []
    for consume in (False, True):
        xs = [nn.Parameter(x.clone()) for x in start]
        options = {"fused": True} if fused else {"foreach": False}
        optimizer = MARS(xs, consume_grads=consume, max_grad_norm=0.1, **options)
        generator = torch.Generator().manual_seed(1)
        for i in range(4):
            xs[0].grad = xs[1].grad = torch.randn(4, 3, generator=generator)
            if i == 3:
                optimizer.param_groups[0]["consume_grads"] = False
            optimizer.step()
        ways.append((xs, [optimizer.state[x]["last_grad"] for x in xs]))
    for (xs, hs), (ys, ks) in [ways]:
        for a, b in zip([*xs, *hs], [*ys, *ks], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_consumed_here_and_not_there() -> None:
    """It is clipped once, for both."""
    ways = []
    for shared in (False, True):
        torch.manual_seed(0)
        p, q = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
        groups = [{"params": [p], "consume_grads": True}, {"params": [q]}]
        optimizer = MARS(groups, max_grad_norm=1.0, clip=None, foreach=False)
        for _ in range(3):
            p.grad = torch.randn(3, 2)
            q.grad = p.grad if shared else p.grad.clone()
            optimizer.step()
        ways.append((p.detach(), q.detach(), optimizer.state[p]["last_grad"]))
    for a, b in zip(*ways, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def _mixed(**options) -> tuple[MARS, nn.Parameter, nn.Parameter]:
    """One tensor that is fused, one that is not, in one norm."""
    a, b = make((3, 3), (4, 4))
    b.data = b.data.t()
    return MARS([a, b], fused=True, max_grad_norm=0.5, **options), a, b


def test_a_scaler_unscales_by_itself_beside_a_norm_from_outside() -> None:
    """Also in a step where all that has a gradient is fused: the plan of before is still used."""
    optimizer, a, b = _mixed()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for has_b in (True, False, True):
        optimizer.zero_grad()
        loss = a.square().sum() + (b.square().sum() if has_b else 0.0)
        scaler.scale(loss).backward()
        if has_b:
            b.grad = b.grad.t().contiguous().t()
        scaler.step(optimizer)
        scaler.update()
        want = torch.stack([x.grad.norm() for x in (a, b) if x.grad is not None]).norm()
        torch.testing.assert_close(optimizer.grad_norm, want)


def test_norms_of_a_step_that_failed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from mars import clipping

    optimizer, a, b = _mixed()

    def fail(*_) -> None:
        raise RuntimeError("timed out")

    for scale in (1.0, 100.0, 1.0):
        a.grad, b.grad = scale * torch.ones(3, 3), scale * torch.ones(4, 4).t()
        with monkeypatch.context() as patch:
            if scale == 100.0:
                patch.setattr(clipping, "_total", fail)
                with pytest.raises(RuntimeError, match="timed out"):
                    optimizer.step()
                continue
            optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(5.0)

"""What torch.optim promises: schedulers, hooks, copies, AMP, compile, capturable, differentiable.

The configurations are torch's own (`OptimizerInput`s of AdamW), for every type of ours.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.testing._internal.common_optimizers import optim_inputs_func_adamw

from choice import choose
from mars import MARS
from mars.rule import KINDS

INPUTS = {i.desc: i.kwargs for i in optim_inputs_func_adamw("cpu")}
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, gamma=0.9, step_size=3),
    "linear from zero": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, t / 5)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=40),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 2e-2, step_size_up=5),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 1e-3, 1.0, 5), lr_scheduler.ExponentialLR(o, 0.99)],
        milestones=[5],
    ),
}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_input = pytest.mark.parametrize("options", INPUTS.values(), ids=INPUTS)
every_engine = pytest.mark.parametrize("engine", ["reference", "foreach", "cpu"])
both_engines = pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "reference"])


def regression(contiguous: bool = True, dtype: torch.dtype = torch.float32):
    """torch's own little problem: weight.mv(input) + bias to zero."""
    if contiguous:
        weight, bias = torch.randn(10, 5, dtype=dtype), torch.randn(10, dtype=dtype)
    else:
        weight, bias = torch.randn(10, 10, dtype=dtype)[:, ::2], torch.randn(20, dtype=dtype)[::2]
    weight, bias = nn.Parameter(weight), nn.Parameter(bias)
    return weight, bias, torch.randn(5, dtype=dtype)


def closure_of(optimizer, weight, bias, x):
    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).pow(2).sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@every_engine
@every_input
@every_kind
def test_goes_the_right_way(kind, options, engine, contiguous) -> None:
    weight, bias, x = regression(contiguous)
    optimizer = MARS([weight, bias], mars_type=kind, **{**options, **choose(engine)})
    closure = closure_of(optimizer, weight, bias, x)
    first = closure().item()
    for _ in range(30):
        optimizer.step(closure)
    last = closure().item()
    assert last > first if options.get("maximize") else last < first


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@every_engine
@every_kind
def test_schedulers_move_it_as_the_reference_is_moved_by_hand(
    kind, engine, contiguous, scheduler
) -> None:
    weight, bias, x = regression(contiguous, torch.float64)
    alike = [nn.Parameter(p.detach().clone()) for p in (weight, bias)]
    options = {"mars_type": kind, "ns_dtype": "float64", "weight_decay": 0.1}
    optimizer = MARS([weight, bias], **choose(engine), **options)
    by_hand = MARS(alike, **choose("reference"), **options)
    closure, again = (
        closure_of(optimizer, weight, bias, x), closure_of(by_hand, *alike, x)
    )  # fmt: skip
    schedule = SCHEDULERS[scheduler](optimizer)
    rates = set()
    for _ in range(12):
        group = optimizer.param_groups[0]
        rates.add(group["lr"])
        by_hand.param_groups[0].update(lr=group["lr"], betas=group["betas"])
        loss = optimizer.step(closure).detach()
        by_hand.step(again)
        schedule.step(loss) if scheduler == "plateau" else schedule.step()
    assert len(rates) > 1 or scheduler == "plateau"
    for moved, want in zip((weight, bias), alike, strict=True):
        torch.testing.assert_close(moved, want, rtol=1e-9, atol=1e-12)


@both_engines
@every_input
@every_kind
def test_copies_continue_identically(kind, options, foreach) -> None:
    weight, bias, x = regression()
    optimizer = MARS([weight, bias], mars_type=kind, foreach=foreach, **options)
    closure = closure_of(optimizer, weight, bias, x)
    for _ in range(3):
        optimizer.step(closure)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for _ in range(3):
        optimizer.step(closure)
    for other in copies:
        w, b = other.param_groups[0]["params"]
        again = closure_of(other, w, b, x)
        for _ in range(3):
            other.step(again)
        assert torch.equal(w, weight)
        assert torch.equal(b, bias)
        assert repr(other) == repr(optimizer)


@every_kind
def test_groups_have_their_own_options(kind: str) -> None:
    """Two groups in one optimizer are two optimizers."""
    fast = {"lr": 1e-2, "weight_decay": 0.1, "gamma": 0.1, "clip": None, "betas": (0.8, 0.9)}
    slow = {"lr": 1e-3, "optimize_1d": True, "maximize": True, "eps": 1e-3}
    start = [torch.randn(5, 4), torch.randn(4)]
    together = [[nn.Parameter(x.clone()) for x in start] for _ in range(2)]
    apart = [[nn.Parameter(x.clone()) for x in start] for _ in range(2)]
    groups = [{"params": p, **o} for p, o in zip(together, (fast, slow), strict=True)]
    optimizers = [MARS(groups, mars_type=kind, lr_1d=1e-3)]
    # lr_1d is the rate of vectors at the constructor's lr; a group's own lr moves it along.
    for p, o in zip(apart, (fast, slow), strict=True):
        optimizers.append(MARS(p, mars_type=kind, **{**o, "lr_1d": o["lr"] / 3e-3 * 1e-3}))
    for _ in range(4):
        for pair in zip(together[0] + together[1], apart[0] + apart[1], strict=True):
            g = torch.randn(pair[0].shape)
            for p in pair:
                p.grad = g.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(together[0] + together[1], apart[0] + apart[1], strict=True):
        torch.testing.assert_close(p, q)


def test_a_tiny_rate_freezes_the_group_and_leaves_others_alone() -> None:
    """torch's test of per-group rates: lr=1e-28 outside, a real one inside a group."""
    weight, bias, x = regression()
    other = nn.Parameter(torch.randn(2))
    before = other.detach().clone()
    groups = [{"params": [weight, bias], "lr": 1e-3}, {"params": [other]}]
    optimizer = MARS(groups, lr=1e-28)
    closure = closure_of(optimizer, weight, bias, x)
    first = closure().item()
    for _ in range(20):
        closure()
        other.grad = torch.rand(2)
        optimizer.step()
    assert closure().item() < first
    torch.testing.assert_close(other.detach(), before)


def test_the_1d_rate_follows_lr() -> None:
    vector = nn.Parameter(torch.zeros(3))
    optimizer = MARS([vector], lr=0.01, lr_1d=0.002, weight_decay_1d=0.0)
    for lr, moved in ((0.01, 0.002), (0.005, 0.001), (0.0, 0.0)):
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = lr
        before = vector.detach().clone()
        vector.grad = torch.ones(3)
        optimizer.step()
        torch.testing.assert_close(before - vector.detach(), torch.full((3,), moved))
    optimizer.param_groups[0].update(lr=0.01, lr_1d=0.004)
    optimizer.state.clear()
    before = vector.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - vector.detach(), torch.full((3,), 0.004))


@every_kind
def test_complex_is_its_real_view(kind: str) -> None:
    for foreach in (True, False):
        shapes = [(10, 5), (10,)]
        z = [torch.randn(s, dtype=torch.complex64, requires_grad=True) for s in shapes]
        r = [torch.view_as_real(p.detach()).clone().requires_grad_() for p in z]
        first, second = (MARS(p, mars_type=kind, foreach=foreach) for p in (z, r))
        for _ in range(3):
            for p, q in zip(z, r, strict=True):
                p.grad = torch.randn_like(p)
                q.grad = torch.view_as_real(p.grad).clone()
            first.step()
            second.step()
        for p, q in zip(z, r, strict=True):
            assert torch.equal(torch.view_as_real(p), q)


@every_kind
def test_hooks_fire_in_order(kind: str) -> None:
    optimizer = MARS([nn.Parameter(torch.ones(2, 2))], mars_type=kind)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, s: {**s, "note": 1})
    optimizer.step()
    optimizer.step(bs=12)
    assert seen == ["before", "after"] * 2
    assert optimizer.state_dict()["note"] == 1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@every_kind
@both_engines
def test_tensor_lr_equals_float_lr(kind: str, foreach: bool, shape: tuple[int, ...]) -> None:
    xs = [torch.randn(4, 3), torch.randn(3)]
    runs = []
    for lr in (1e-2, torch.full(shape, 1e-2)):
        ps = [nn.Parameter(x.clone()) for x in xs]
        optimizer = MARS(ps, lr=lr, mars_type=kind, foreach=foreach, capturable=foreach)
        torch.manual_seed(1)
        for _ in range(5):
            for p in ps:
                p.grad = torch.randn_like(p)
            optimizer.step()
        runs.append(ps)
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("is_approx", [True, False])
def test_grad_scaler_skips_a_step_with_inf(is_approx: bool) -> None:
    model = nn.Linear(4, 3)
    optimizer = MARS(model.parameters(), is_approx=is_approx)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        if step == 2:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().sum()
        scaler.scale(loss).backward()
        if step == 2:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.update_last_grad()
    assert scaler.get_scale() == 4.0
    after = model.state_dict(), optimizer.state_dict()["state"]
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name])
    for index, state in before[1].items():
        for name, value in state.items():
            assert torch.equal(value, after[1][index][name]), name


def test_add_param_group_while_training() -> None:
    weight, bias, x = regression()
    optimizer = MARS([weight])
    closure = closure_of(optimizer, weight, bias, x)
    for _ in range(3):
        optimizer.step(closure)
    optimizer.add_param_group({"params": [bias], "mars_type": "plain-adamw", "lr": 0.1})
    for _ in range(2):
        optimizer.step(closure)
    assert float(optimizer.state[weight]["step"]) == 5
    assert float(optimizer.state[bias]["step"]) == 2


def test_named_parameters_are_kept() -> None:
    model = nn.Linear(3, 2)
    optimizer = MARS(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def differentiable_step(kind: str, p, g, state, options):
    p = p.clone()
    p.grad = g
    optimizer = MARS([p], lr=0.01, differentiable=True, mars_type=kind, **options)
    optimizer.state[p].update({k: v.clone() for k, v in state.items()})
    optimizer.step()
    return (p, *(v for v in optimizer.state[p].values() if v.requires_grad))


@pytest.mark.parametrize("shape", [(4, 3), (5,)])
@every_kind
def test_differentiable_passes_gradcheck(kind: str, shape: tuple[int, ...]) -> None:
    def leaf(low: float = 0.1) -> torch.Tensor:
        return (low + torch.rand(shape, dtype=torch.float64)).requires_grad_()

    state = {"step": torch.tensor(10.0, dtype=torch.float64), "exp_avg": leaf()}
    uses_v = kind in ("mars-adamw", "plain-adamw") or len(shape) == 1
    if uses_v:
        state |= {"exp_avg_sq": leaf(), "max_exp_avg_sq": leaf(2.0)}
    if kind != "plain-adamw" and len(shape) == 2:
        state["last_grad"] = leaf()
    options = {"amsgrad": uses_v, "weight_decay": 0.1, "ns_dtype": "float64", "ns_steps": 3}
    names = [name for name in state if name != "step"]

    def fn(p, g, *values):
        return differentiable_step(
            kind, p, g, {"step": state["step"], **dict(zip(names, values, strict=True))}, options
        )

    inputs = (leaf(), leaf(), *(state[name] for name in names))
    if kind == "mars-lion" and len(shape) == 2:
        p, *_ = fn(*inputs)  # sign has gradient 0 almost everywhere; x itself passes through
        (grad,) = torch.autograd.grad(p.sum(), inputs[0])
        torch.testing.assert_close(grad, torch.full_like(grad, 1 - 0.01 * 0.1))
    else:
        assert torch.autograd.gradcheck(fn, inputs)


@pytest.mark.parametrize("shape", [(4, 3), (5,)])
@every_kind
def test_gradients_reach_the_hyper_parameters(kind: str, shape: tuple[int, ...]) -> None:
    """lr, betas, weight decay and gamma of a differentiable step, by gradcheck."""
    x, g0, g1 = (0.1 + torch.rand(3, *shape, dtype=torch.float64)).unbind()

    def fn(lr, beta1, beta2, decay, gamma):
        p = x.clone()
        optimizer = MARS(
            [p], lr=lr, betas=(beta1, beta2), weight_decay=decay, gamma=gamma, mars_type=kind,
            optimize_1d=True, differentiable=True, ns_dtype="float64", ns_steps=2, eps=1e-3,
        )  # fmt: skip
        for g in (g0, g1):
            p.grad = g.clone()
            optimizer.step()
        return p

    values = (0.05, 0.9, 0.95, 0.1, 0.2)
    inputs = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
    assert torch.autograd.gradcheck(fn, inputs)
    (grad,) = torch.autograd.grad(fn(*inputs).sum(), inputs[0])
    assert grad != 0


def compiled(kind: str, backend, dtype=torch.float32, **options):
    """Ten scheduled steps, compiled and eager side by side; returns the largest difference."""

    def make():
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)]
        return nn.Sequential(*layers).to(dtype)

    models, optimizers, schedules = [], [], []
    for _ in range(2):
        models.append(make())
        optimizers.append(
            MARS(models[-1].parameters(), lr=torch.tensor(1e-2), mars_type=kind, **options)
        )
        schedules.append(lr_scheduler.LambdaLR(optimizers[-1], lambda t: min(1.0, t / 5)))
    steps = [torch.compile(optimizers[0].step, backend=backend), optimizers[1].step]
    for _ in range(10):
        x = torch.randn(6, 8, dtype=dtype)
        for model, optimizer, step, schedule in zip(
            models, optimizers, steps, schedules, strict=True
        ):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
            schedule.step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((p - q).abs().max().detach()) for p, q in pairs)


@pytest.mark.filterwarnings("ignore")  # dynamo's own notices
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": "global"}, {"amsgrad": True}, {"clip": None}, {"dtype": torch.bfloat16},
     {"foreach": True, "capturable": True}, {"consume_grads": True}],
    ids=str,
)  # fmt: skip
@every_kind
def test_compiled_step_with_tensor_lr_is_one_graph(kind: str, options: dict) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    difference = compiled(kind, count, **options)
    assert len(graphs) == 1
    # The same operations; only β**t is float32 in the graph and float64 outside it.
    assert difference <= (1e-2 if "dtype" in options else 2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion"])
def test_compiled_by_inductor(kind: str) -> None:
    torch._dynamo.reset()
    assert compiled(kind, "inductor") <= 2e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_exact_mode_compiled_by_inductor() -> None:
    """The closure is evaluated at the parameters before the step, not after it."""
    torch._dynamo.reset()
    targets = torch.randn(6, 4, 4)
    ends = []
    for compiling in (True, False):
        p = torch.ones(4, 4, requires_grad=True)
        optimizer = MARS([p], lr=0.1, is_approx=False, gamma=0.2)
        number = torch.zeros((), dtype=torch.long)

        def closure(p=p, number=number, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (p - targets[number]).square().sum()
            loss.backward()
            return loss

        step = torch.compile(optimizer.step) if compiling else optimizer.step
        for i in range(6):
            number.fill_(i)
            step(closure)
        ends += [p.detach(), optimizer.state[p]["last_param"]]
    torch.testing.assert_close(ends[:2], ends[2:])
    assert not torch.equal(ends[0], ends[1])


@pytest.mark.filterwarnings("ignore")
def test_misuse_of_exact_mode_is_refused_in_a_compiled_step_too() -> None:
    torch._dynamo.reset()
    p = torch.ones(4, 4, requires_grad=True)
    optimizer = MARS([p], is_approx=False)
    step = torch.compile(optimizer.step, backend="aot_eager")

    def steps() -> None:
        for _ in range(3):
            p.grad = torch.randn(4, 4)
            step()

    with pytest.raises(RuntimeError, match="is_approx=False needs the gradients"):
        steps()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["reference", "foreach", "cpu"])
def test_a_compiled_step_counts_in_float64(engine: str) -> None:
    """As torch.set_default_dtype has it: `t += 1` was lost there, and 0/0 was NaN."""
    torch._dynamo.reset()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        x, y = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
        one, other = (MARS([p], lr=1e-2, **choose(engine)) for p in (x, y))
        step = torch.compile(one.step, backend="aot_eager")
        for _ in range(2):
            x.grad = torch.randn(4, 4)
            y.grad = x.grad.clone()
            step()
            other.step()
    finally:
        torch.set_default_dtype(default)
    assert float(one.state[x]["step"]) == 2
    torch.testing.assert_close(x, y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mars-adamw", "plain-adamw"])
def test_a_count_on_the_device_corrects_as_one_on_the_host(kind: str) -> None:
    """In float32 1 − βᵗ cancels: the first step was 8e-5 off with β₂ = 0.9999."""
    torch._dynamo.reset()
    moved = []
    for compiled, options in ((False, {}), (False, {"capturable": True}), (True, {})):
        x = nn.Parameter(torch.zeros(4, 4))
        x.grad = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
        betas = {"betas": (0.9, 0.9999), "betas_1d": (0.9, 0.9999)}
        optimizer = MARS([x], mars_type=kind, fused=False, foreach=False, **betas, **options)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        step()
        moved.append(x.detach().clone())
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=5e-7, atol=0)


class OnGpu(nn.Parameter):
    """dynamo marks groups of unstepped parameters on a GPU as capturable, for good."""

    is_cuda = True


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_consumed_where_dynamo_has_set_capturable() -> None:
    """Its checkpoint could not be loaded, and the next step by hand was refused."""
    torch._dynamo.reset()
    x, y = OnGpu(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    own = MARS([x], lr=torch.tensor(0.01), consume_grads=True)
    usual = MARS([y], lr=torch.tensor(0.01))
    step = torch.compile(own.step, backend="eager")
    for by in (step, step, own.step):
        x.grad = torch.randn(4, 4)
        y.grad = x.grad.clone()
        by()
        usual.step()
        assert x.grad is None
    assert own.param_groups[0]["capturable"]
    torch.testing.assert_close(x.data, y.data, rtol=1e-6, atol=1e-7)
    fresh = MARS([nn.Parameter(torch.ones(4, 4))], lr=torch.tensor(0.01), consume_grads=True)
    fresh.load_state_dict(own.state_dict())
    assert fresh.param_groups[0]["consume_grads"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_data(kind: str) -> None:
    """On the meta device, to count memory before there is any."""
    layer = nn.Linear(4, 3, device="meta")
    optimizer = MARS(layer.parameters(), mars_type=kind)
    for p in layer.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert optimizer.state[layer.weight]["exp_avg"].is_meta


@pytest.mark.filterwarnings("ignore")
def test_grad_norm_is_that_of_the_last_step_compiled_or_not() -> None:
    torch._dynamo.reset()
    p = torch.zeros(4, 4, requires_grad=True)
    optimizer = MARS([p], lr=torch.tensor(1e-2), max_grad_norm=0.5)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for size, take in ((1.0, step), (100.0, optimizer.step), (2.0, step)):
        p.grad = torch.full((4, 4), size)
        take()
        assert float(optimizer.grad_norm) == pytest.approx(4 * size)


def test_state_dict_is_safe_to_load(tmp_path) -> None:
    weight, bias, x = regression()
    for options in ({}, {"is_approx": False}, {"lr": torch.tensor(1e-2)}):
        optimizer = MARS([weight, bias], **options)
        optimizer.step(closure_of(optimizer, weight, bias, x))
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        optimizer.load_state_dict(loaded)
        assert float(optimizer.state[weight]["step"]) == 1


def test_no_public_attribute_changes_behaviour() -> None:
    """Everything that matters is in param_groups and state, so it travels in state_dict."""
    public = {k for k in vars(MARS([nn.Parameter(torch.ones(2))])) if not k.startswith("_")}
    assert public == {"defaults", "state", "param_groups"}


def test_numbers_of_numpy_and_rates_with_a_gradient(tmp_path) -> None:
    import numpy as np

    p = nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([p], lr=np.float32(0.01), ns_steps=np.int64(4), betas=np.array([0.9, 0.95]))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert type(optimizer.param_groups[0]["lr"]) is float
    torch.save(optimizer.state_dict(), tmp_path / "s.pt")
    torch.load(tmp_path / "s.pt", weights_only=True)
    MARS([p], lr=torch.tensor(0.01, requires_grad=True))  # warnings are errors here


@pytest.fixture
def one_rank_mesh(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch.distributed's own notices
@both_engines
@every_kind
def test_dtensor_steps_like_its_tensor(kind: str, foreach: bool, one_rank_mesh) -> None:
    """One rank; there is no multi-tensor copy for DTensor, so the last gradient needs care."""
    from torch.distributed.tensor import Shard, distribute_tensor

    plain = nn.Parameter(torch.randn(6, 4))
    sharded = nn.Parameter(distribute_tensor(plain.detach().clone(), one_rank_mesh, [Shard(0)]))
    first, second = (MARS([p], mars_type=kind, foreach=foreach) for p in (plain, sharded))
    for _ in range(3):
        plain.grad = torch.randn(6, 4)
        sharded.grad = distribute_tensor(plain.grad.clone(), one_rank_mesh, [Shard(0)])
        first.step()
        second.step()
    torch.testing.assert_close(sharded.full_tensor(), plain.data, rtol=1e-5, atol=1e-6)


def test_imported_under_another_default_device() -> None:
    """What the library makes at import belongs to the CPU, whatever the default device is then."""
    code = (
        "import torch; torch.set_default_device('meta'); from mars import MARS; "
        "p = torch.nn.Parameter(torch.ones(2, 2, device='cpu')); "
        "p.grad = torch.ones(2, 2, device='cpu'); "
        "o = MARS([p], foreach=True); o.step(); print(float(o.state[p]['step']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1.0", done.stderr


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_training_step_around_the_optimizer() -> None:
    """Not the step alone: forward, backward and step in one compiled function."""
    model = torch.nn.Linear(8, 8)
    optimizer = MARS(model.parameters(), lr=1e-2, max_grad_norm=1.0)

    @torch.compile(backend="aot_eager")
    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [float(train(torch.ones(4, 8)).detach()) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert float(optimizer.state[model.weight]["step"]) == 8

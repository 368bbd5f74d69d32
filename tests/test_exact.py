"""Exact mode: closure and protocol, randomness, frozen parameters, accumulation."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from choice import choose
from mars import MARS, exact
from mars.engines import available
from mars.rule import KINDS


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def make_batches(n: int) -> list[torch.Tensor]:
    torch.manual_seed(6)
    return list(torch.randn(n, 10, 6, dtype=torch.float64))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() + model(batch).mean()


def train_by_closure(model, batches, **options):
    optimizer = MARS(model.parameters(), is_approx=False, **options)
    losses = []
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return optimizer, losses


def train_by_protocol(model, batches, **options):
    """The authors' way: the next batch is evaluated before the step."""
    optimizer = MARS(model.parameters(), is_approx=False, **options)
    return optimizer, follow_protocol(optimizer, model, batches, range(len(batches)))


def follow_protocol(optimizer, model, batches, steps) -> list[float]:
    losses = []
    for i in steps:
        if i + 1 < len(batches):
            optimizer.zero_grad()
            loss_of(model, batches[i + 1]).backward()
            optimizer.update_previous_grad()
        optimizer.zero_grad()
        loss = loss_of(model, batches[i])
        loss.backward()
        optimizer.step()
        if i + 1 < len(batches):
            optimizer.update_last_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("clip", ["tensor", "global", None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", available())
def test_closure_and_protocol_walk_the_same_way(engine: str, kind: str, clip: str | None) -> None:
    options = {"mars_type": kind, **choose(engine), "clip": clip, "gamma": 0.5}
    options |= {"lr": 0.05, "ns_dtype": "float64"}
    first, second = make_model(), make_model()
    tolerance = 1e-12
    if engine == "fused":  # float32 and less; a rounding may differ where the closure copies
        first, second, tolerance = first.float(), second.float(), 1e-5
    batches = [b.to(next(first.parameters()).dtype) for b in make_batches(8)]
    _, losses = train_by_closure(first, batches, **options)
    _, same = train_by_protocol(second, batches, **options)
    assert losses == pytest.approx(same, rel=tolerance)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_exact_gradient_is_that_of_this_batch_at_the_previous_parameters() -> None:
    model, batches = make_model(), make_batches(3)
    optimizer, _ = train_by_closure(model, batches[:2], lr=0.05)
    before = [p.detach().clone() for p in model.parameters()]
    previous = [optimizer.state[p]["last_param"].clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batches[2])
        loss.backward()
        return loss

    optimizer.step(closure)
    there = make_model()
    with torch.no_grad():
        for p, value in zip(there.parameters(), previous, strict=True):
            p.copy_(value)
    loss_of(there, batches[2]).backward()
    for p, q, x in zip(model.parameters(), there.parameters(), before, strict=True):
        if p.ndim == 2:
            torch.testing.assert_close(optimizer.state[p]["last_grad"], q.grad)
        assert torch.equal(optimizer.state[p]["last_param"], x)


@pytest.mark.parametrize("outer", [None, True, False])
def test_an_autocast_around_the_step_keeps_no_weights_of_before(outer: bool | None) -> None:
    """Autocast keeps what it has cast until the outermost one ends: both points would be one."""
    model, batch = nn.Linear(6, 6), torch.randn(12, 6)
    optimizer = MARS(model.parameters(), lr=0.05, is_approx=False)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(batch) - batch).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        around = nullcontext() if outer is None else torch.autocast("cpu", enabled=outer)
        with around:
            optimizer.step(closure)
    assert losses[1] == losses[0], "the second step begins where the first one did"
    assert losses[2] != losses[1]
    assert not torch.equal(model.weight.grad, optimizer.state[model.weight]["last_grad"])


def test_dropout_sees_the_same_numbers_in_both_evaluations() -> None:
    model, masks = make_model(dropout=0.5), []
    model[2].register_forward_hook(lambda _m, _i, out: masks.append(out.detach() == 0))
    optimizer = MARS(model.parameters(), is_approx=False)
    batch = make_batches(1)[0]
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        masks.clear()
        optimizer.step(closure)
    assert len(masks) == 2
    # Zeroed by dropout in both or in neither; activations are never 0 of themselves here.
    assert torch.equal(masks[0], masks[1])
    assert masks[0].any()


def test_randomness_goes_on_as_if_there_were_one_evaluation() -> None:
    states = []
    for approximate in (True, False):
        model = make_model(dropout=0.5)
        optimizer = MARS(model.parameters(), is_approx=approximate, lr=0.0)
        torch.manual_seed(9)
        for batch in make_batches(3):

            def closure(optimizer=optimizer, model=model, batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_randomness_of_other_accelerators_goes_on_too(kind: str, monkeypatch) -> None:
    """Their generators stand in as one number each: there is no such device in the tests."""
    numbers = {0: 10, 1: 20}
    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "get_rng_state", lambda device: numbers[device])
    monkeypatch.setattr(module, "set_rng_state", lambda n, device: numbers.update({device: n}))
    there = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", f"{kind}:0")]
    with exact._forked(there):
        numbers.update({0: 11, 1: 21})
    assert numbers == {0: 10, 1: 21}


def test_frozen_and_gradientless_parameters() -> None:
    """Fault in the authors' code: frozen parameters crash exact mode."""
    for train in (train_by_closure, train_by_protocol):
        model = make_model()
        model[0].weight.requires_grad_(False)
        model.register_parameter("unused", nn.Parameter(torch.ones(3, 3, dtype=torch.float64)))
        frozen = model[0].weight.detach().clone()
        optimizer, losses = train(model, make_batches(20), lr=0.01)
        assert torch.equal(model[0].weight, frozen)
        assert torch.equal(model.unused, torch.ones(3, 3, dtype=torch.float64))
        assert model[0].weight not in optimizer.state
        assert losses[-1] < losses[0]


def test_a_parameter_unfrozen_late_starts_on_its_own() -> None:
    model, batches = make_model(), make_batches(6)
    model[0].weight.requires_grad_(False)
    optimizer = MARS(model.parameters(), is_approx=False)
    for i, batch in enumerate(batches):
        model[0].weight.requires_grad_(i >= 3)

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step(closure)
    assert float(optimizer.state[model[0].weight]["step"]) == 3
    assert float(optimizer.state[model[3].weight]["step"]) == 6


def test_accumulation_inside_the_closure() -> None:
    """Micro-batches that average to a batch give the batch's trajectory."""
    batches = make_batches(5)
    whole, parts = make_model(), make_model()
    train_by_closure(whole, batches, lr=0.05, gamma=0.5)
    optimizer = MARS(parts.parameters(), is_approx=False, lr=0.05, gamma=0.5)
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            total = 0.0
            for micro in batch.chunk(2):
                loss = loss_of(parts, micro) / 2
                loss.backward()
                total += float(loss.detach())
            return total

        optimizer.step(closure)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_failing_closure_leaves_the_parameters_where_they_are() -> None:
    model, batches = make_model(), make_batches(2)
    optimizer, _ = train_by_closure(model, batches)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    for p, x in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, x)


def test_exact_mode_without_closure_or_protocol_is_refused() -> None:
    model = make_model()
    optimizer = MARS(model.parameters(), is_approx=False)
    loss_of(model, make_batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"step\(closure\)"):
        optimizer.step()


def test_who_follows_the_protocol_after_a_refusal_begins_it() -> None:
    model, batches = make_model(), make_batches(4)
    optimizer = MARS(model.parameters(), is_approx=False)
    for refused in (False, True):
        optimizer.zero_grad()
        loss_of(model, batches[0]).backward()
        with pytest.raises(RuntimeError, match="previous param") if refused else nullcontext():
            optimizer.step()
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which wraps step
    with pytest.warns(UserWarning, match="this one step is taken without correction") as told:
        follow_protocol(optimizer, model, batches, [1])
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow_protocol(optimizer, model, batches, [2])
    assert optimizer.state[model[0].weight]["step"] == 3


def test_gradients_that_a_grad_scaler_leaves_scaled_are_warned_about() -> None:
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = MARS([p], is_approx=False)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(p.square().sum()).backward()
    optimizer.update_previous_grad()
    with pytest.warns(UserWarning, match="not the gradients that update_previous_grad") as said:
        scaler.step(optimizer)
    assert said[0].filename == __file__


def test_a_step_without_gradients_after_closures_is_no_misuse() -> None:
    model, batches = make_model(), make_batches(3)
    optimizer, _ = train_by_closure(model, batches)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 3


def test_the_protocol_may_begin_with_a_parameter_that_is_new() -> None:
    p, late = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = MARS([p, late], is_approx=False)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    p.grad, late.grad = torch.full((3, 3), 0.1), torch.full((3, 3), 0.2)
    optimizer.update_previous_grad()
    with pytest.warns(UserWarning, match="without correction"):
        optimizer.step()
    optimizer.update_last_grad()
    assert [int(optimizer.state[q]["step"]) for q in (p, late)] == [3, 1]


def test_a_group_that_comes_back_is_not_evaluated_where_it_was() -> None:
    """Its parameters went on without this optimizer, or stayed: they are not those of before."""
    p, q = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = MARS([{"params": [p]}, {"params": [q]}], is_approx=False)

    def closure():
        optimizer.zero_grad()
        loss = (p * q).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    group = optimizer.param_groups.pop(1)
    for _ in range(3):
        optimizer.step(closure)
    optimizer.add_param_group(group)
    with pytest.warns(UserWarning, match="for 1 tensors"):
        optimizer.step(closure)


def test_a_group_that_comes_back_has_no_gradient_of_where_it_was_by_the_protocol_either() -> None:
    p, q = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = MARS([{"params": [p]}, {"params": [q]}], is_approx=False)

    def step() -> None:
        for keep in (optimizer.update_previous_grad, optimizer.step):
            p.grad = q.grad = None
            (p * q).square().sum().backward()
            keep()

    for _ in range(2):
        step()
        optimizer.update_last_grad()
    group = optimizer.param_groups.pop(1)
    for _ in range(3):
        step()
        optimizer.update_last_grad()
    optimizer.add_param_group(group)
    with pytest.warns(UserWarning, match="for 1 tensors"):
        step()
    assert torch.equal(optimizer.state[q]["last_grad"], q.grad)  # no correction
    assert not torch.equal(optimizer.state[p]["last_grad"], p.grad)
    optimizer.update_last_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert not torch.equal(optimizer.state[q]["last_grad"], q.grad)


def test_who_forgot_update_last_grad_and_calls_it_then_goes_on_with_the_correction() -> None:
    model, batches = make_model(), make_batches(6)
    optimizer = MARS(model.parameters(), is_approx=False)
    follow_protocol(optimizer, model, batches, [0])
    optimizer.zero_grad()
    loss_of(model, batches[2]).backward()
    optimizer.update_previous_grad()
    for forgotten in (True, False):
        optimizer.zero_grad()
        loss_of(model, batches[1 if forgotten else 2]).backward()
        with nullcontext() if forgotten else pytest.raises(RuntimeError, match="previous param"):
            optimizer.step()
    optimizer.update_last_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow_protocol(optimizer, model, batches, [2, 3])
    assert optimizer.state[model[0].weight]["step"] == 4


def test_a_gradient_that_becomes_sparse_is_named() -> None:
    table = nn.Embedding(4, 3)
    optimizer = MARS(table.parameters(), is_approx=False)

    def closure():
        optimizer.zero_grad()
        loss = table(torch.tensor([1, 2])).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = table.weight.detach().clone()
    table.sparse = True
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step(closure)
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["float", "tensor"])
def test_dcp_init_step_does_not_count_as_a_step_of_the_protocol(lr: float | torch.Tensor) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = make_model()
    optimizer = MARS(model.parameters(), is_approx=False, lr=lr)
    get_optimizer_state_dict(model, optimizer)  # makes the state by a step at lr = 0
    loss_of(model, make_batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="previous parameters"):
        optimizer.step()


def test_old_gradients_are_not_taken_for_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = make_model(), make_batches(3)
    optimizer, _ = train_by_protocol(model, batches)
    assert not caplog.records
    optimizer.update_last_grad()
    optimizer.step()
    assert "without a new update_previous_grad" in caplog.text


def test_protocol_methods_are_harmless_in_approximate_mode() -> None:
    model = make_model()
    optimizer = MARS(model.parameters())
    optimizer.update_last_grad()
    optimizer.update_previous_grad()
    loss_of(model, make_batches(1)[0]).backward()
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[model[0].weight].items()}
    optimizer.update_previous_grad()
    optimizer.update_last_grad()
    after = optimizer.state[model[0].weight]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("train", [train_by_closure, train_by_protocol])
def test_resume_is_bitwise(train) -> None:
    batches = make_batches(8)
    whole = make_model()
    train(whole, batches, lr=0.05)
    model = make_model()
    if train is train_by_closure:
        optimizer, _ = train(model, batches[:4], lr=0.05)
    else:  # whose fourth step has looked at the fifth batch
        optimizer = MARS(model.parameters(), is_approx=False, lr=0.05)
        follow_protocol(optimizer, model, batches, range(4))
    resumed = make_model()
    resumed.load_state_dict(model.state_dict())
    again = MARS(resumed.parameters(), is_approx=False, lr=0.05)
    again.load_state_dict(optimizer.state_dict())
    if train is train_by_protocol:
        follow_protocol(again, resumed, batches, range(4, 8))
    for batch in batches[4:] if train is train_by_closure else []:

        def closure(batch=batch):
            again.zero_grad()
            loss = loss_of(resumed, batch)
            loss.backward()
            return loss

        again.step(closure)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_switching_to_the_protocol_mid_way_takes_one_uncorrected_step() -> None:
    """Gradients of approximate steps are those of other batches: not corrected by, and said."""
    p = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    optimizer = MARS([p], gamma=0.5, clip=None)
    for _ in range(2):
        p.grad = torch.randn_like(p)
        optimizer.step()
    for _ in range(2):  # and again after approximate steps in between
        optimizer.param_groups[0]["is_approx"] = False
        before = optimizer.state[p]["exp_avg"].clone()
        p.grad = torch.randn_like(p)
        with pytest.warns(UserWarning, match="this one step is taken without correction"):
            optimizer.step()
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.95 * before + 0.05 * p.grad)
        with pytest.raises(RuntimeError, match="needs the gradients of this batch"):
            optimizer.step()
        optimizer.update_previous_grad()
        optimizer.update_last_grad()
        optimizer.param_groups[0]["is_approx"] = True
        p.grad = torch.randn_like(p)
        optimizer.step()
        assert "previous_grad" not in optimizer.state[p]


@pytest.mark.parametrize("approximate", [0, 2])
@pytest.mark.parametrize("closures", [0, 2])
def test_the_protocol_may_begin_after_any_steps(closures: int, approximate: int) -> None:
    """In its own order, with update_previous_grad first: one step without correction, then on."""
    model, batches = make_model(), make_batches(6)
    optimizer, _ = train_by_closure(model, batches[:closures], gamma=0.5, clip=None)
    optimizer.param_groups[0]["is_approx"] = True
    for batch in batches[:approximate]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.param_groups[0]["is_approx"] = False
    weight = model[0].weight
    before = optimizer.state[weight]["exp_avg"].clone() if optimizer.state else None
    if before is None:
        follow_protocol(optimizer, model, batches, range(1))
        return  # nothing went before: h is 0
    with pytest.warns(UserWarning, match="this one step is taken without correction"):
        follow_protocol(optimizer, model, batches, range(1))
    expected = 0.95 * before + 0.05 * weight.grad
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow_protocol(optimizer, model, batches, range(1, 4))


@pytest.mark.parametrize("resumed", [False, True])
def test_the_protocol_may_be_left_for_closures_and_begin_again(resumed: bool) -> None:
    """Closures keep nothing of it: neither a buffer in checkpoints, nor one taken for a new one."""
    model, batches = make_model(), make_batches(8)
    optimizer = MARS(model.parameters(), is_approx=False)
    follow_protocol(optimizer, model, batches, range(2))
    if resumed:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def closure() -> None:
        optimizer.zero_grad()
        loss_of(model, batches[2]).backward()

    with pytest.warns(UserWarning, match="this one step is taken without correction"):
        optimizer.step(closure)
    optimizer.step(closure)
    assert not any("previous_grad" in own for own in optimizer.state.values())
    with pytest.warns(UserWarning, match="this one step is taken without correction"):
        follow_protocol(optimizer, model, batches, range(4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow_protocol(optimizer, model, batches, range(5, 7))
    assert not any("last_param" in own for own in optimizer.state.values())


def test_a_wrong_option_is_found_before_the_closure_runs() -> None:
    p = nn.Parameter(torch.randn(4, 3))
    optimizer = MARS([p], is_approx=False)
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="max_grad_norm needs is_approx=True"):
        optimizer.step(lambda: pytest.fail("evaluated"))


def test_switching_to_exact_mid_way_takes_one_uncorrected_step() -> None:
    model, batches = make_model(), make_batches(3)
    optimizer = MARS(model.parameters())
    loss_of(model, batches[0]).backward()
    optimizer.step()
    optimizer.param_groups[0]["is_approx"] = False

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batches[1])
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="without correction"):
        optimizer.step(closure)
    weight = model[0].weight
    torch.testing.assert_close(optimizer.state[weight]["last_grad"], weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("gamma", "approximate", "exact"),
    [(0.025, (0.90, 1.0), (0.90, 1.0)), (0.1, (0.8, 1.0), (0.75, 0.9)), (0.5, (1.1, 9), (0, 0.5))],
)
def test_error_of_the_estimate(gamma: float, approximate: tuple, exact: tuple) -> None:
    """E‖m − ∇F(x)‖² relative to plain averaging: the table of docs/math.md, fact 2.

    Noisy linear regression small enough to have ∇F; the parameters drift, so that plain
    averaging lags behind. All three at the same points x_t, with the same batches.
    """
    torch.manual_seed(0)
    a = torch.randn(512, 8, dtype=torch.float64)
    y = a @ torch.randn(8, 1, dtype=torch.float64) + torch.randn(512, 1, dtype=torch.float64)

    def gradient(x, rows):
        return a[rows].T @ (a[rows] @ x - y[rows]) / len(rows)

    beta, every = 0.95, torch.arange(512)
    x = torch.zeros(8, 1, dtype=torch.float64)
    m = dict.fromkeys(("plain", "approximate", "exact"), torch.zeros_like(x))
    error = dict.fromkeys(m, 0.0)
    last_x, last_g = x, torch.zeros_like(x)
    for t in range(400):
        rows = torch.randint(0, 512, (32,))
        g, there, full = gradient(x, rows), gradient(last_x, rows), gradient(x, every)
        k = gamma * beta / (1 - beta)
        c = {"plain": g, "approximate": g + k * (g - last_g), "exact": g + k * (g - there)}
        for name in m:
            m[name] = beta * m[name] + (1 - beta) * c[name]
            if t >= 50:
                error[name] += float((m[name] - full).square().sum())
        last_x, last_g = x, g
        angle = torch.tensor(0.05 * t)
        x = x + 0.05 * torch.cos(angle + torch.arange(8, dtype=torch.float64)).unsqueeze(1)
    for name, (low, high) in (("approximate", approximate), ("exact", exact)):
        assert low < error[name] / error["plain"] < high, (name, error[name] / error["plain"])
    assert error["exact"] < error["approximate"]


def step_with(optimizer, model, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure)


def test_previous_parameters_are_never_old_ones() -> None:
    """Approximate steps in between: what was kept is dropped, not used many steps later."""
    model, batches = make_model(), make_batches(6)
    optimizer, _ = train_by_closure(model, batches[:2])
    optimizer.param_groups[0]["is_approx"] = True
    for batch in batches[2:4]:
        step_with(optimizer, model, batch)
    assert "last_param" not in optimizer.state[model[0].weight]
    optimizer.param_groups[0]["is_approx"] = False
    with pytest.warns(UserWarning, match="without correction"):
        step_with(optimizer, model, batches[4])


def test_a_step_without_closure_after_one_with_it_is_refused() -> None:
    model, batches = make_model(), make_batches(3)
    optimizer, _ = train_by_closure(model, batches[:2])
    loss_of(model, batches[2]).backward()
    with pytest.raises(RuntimeError, match=r"step\(closure\)"):
        optimizer.step()


def test_a_parameter_first_used_by_the_next_batch() -> None:
    """Its first step has h = 0 by either way, and the state in between can be loaded."""
    results = []
    for protocol in (False, True):
        p = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        late = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        optimizer = MARS([p, late], is_approx=False, gamma=0.5)

        def loss(t, p=p, late=late):
            return (p**2).sum() + ((late * (t + 1)) ** 2).sum() * (t > 0)

        for t in range(3):

            def closure(at=t, optimizer=optimizer, late=late, loss=loss):
                optimizer.zero_grad()
                value = loss(at)
                value.backward()
                if at == 0:
                    late.grad = None
                return value

            if protocol:
                closure(t + 1)
                optimizer.update_previous_grad()
                closure()
                optimizer.step()
                optimizer.update_last_grad()
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                optimizer.step(closure)
        results.append((p.detach(), late.detach()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_nothing_to_correct_is_evaluated_once() -> None:
    model, calls = make_model(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    optimizer = MARS(model.parameters(), is_approx=False, mars_type="plain-adamw")
    for batch in make_batches(2):
        calls.clear()
        step_with(optimizer, model, batch)
        assert len(calls) == 2  # loss_of evaluates the model twice
    assert "last_param" not in optimizer.state[model[0].weight]


def test_notes_of_others_in_the_state_are_left_alone() -> None:
    model, batches = make_model(), make_batches(3)
    optimizer = MARS(model.parameters(), is_approx=False)
    optimizer.state["note"] = True
    for batch in batches:
        step_with(optimizer, model, batch)
    assert optimizer.state["note"] is True


def test_a_resume_between_the_protocols_calls_is_no_misuse(caplog) -> None:
    targets = torch.randn(6, 4, 4)

    def gradient(p, i: int) -> torch.Tensor:
        return p.detach() - targets[i]

    p = torch.zeros(4, 4, requires_grad=True)
    optimizer = MARS([p], is_approx=False)
    for i in range(3):
        g = gradient(p, i)
        p.grad = gradient(p, i + 1)
        optimizer.update_previous_grad()
        if i == 2:
            q = p.detach().clone().requires_grad_()
            resumed = MARS([q], is_approx=False)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            p, optimizer = q, resumed
        p.grad = g
        optimizer.step()
        optimizer.update_last_grad()
    p.grad = gradient(p, 3)
    optimizer.step()
    assert not caplog.text


def test_what_is_corrected_from_now_on_is_evaluated_there_too() -> None:
    model, batches = make_model(), make_batches(3)
    optimizer = MARS(model.parameters(), is_approx=False)

    def step(batch: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    step(batches[0])
    optimizer.param_groups[0]["optimize_1d"] = True
    step(batches[1])
    bias = model[0].bias
    assert "last_grad" in optimizer.state[bias]
    step(batches[2])
    assert bias.isfinite().all()


def test_a_step_without_gradients_is_none_of_the_protocol() -> None:
    model, batches = make_model(), make_batches(2)
    optimizer = MARS(model.parameters(), is_approx=False)
    optimizer.step()
    loss_of(model, batches[0]).backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1


def test_a_gradient_that_the_next_batch_does_not_have_is_no_old_one() -> None:
    """An expert that no token of a batch is sent to: h is 0 there, by the protocol as by the
    closure.
    """
    used = [True, True, True, False, True, True]
    inputs = make_batches(len(used))
    finals = []
    for by_protocol in (False, True):
        model = make_model()
        optimizer = MARS(model.parameters(), is_approx=False, gamma=0.4, lr=1e-2)

        def evaluate(i: int, model=model, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            hidden = model[1](model[0](inputs[i]))
            loss = (model[3](hidden) if used[i] else hidden).square().mean()
            loss.backward()
            return loss

        for i in range(len(used)):
            if not by_protocol:
                optimizer.step(lambda i=i: evaluate(i))
                continue
            if i + 1 < len(used):
                evaluate(i + 1)
                optimizer.update_previous_grad()
            evaluate(i)
            optimizer.step()
            optimizer.update_last_grad()
        finals.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*finals, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_graph_through_an_exact_step_is_refused() -> None:
    """It would be without the gradients at the previous parameters, and wrong."""
    with pytest.raises(ValueError, match="differentiable=True needs is_approx=True"):
        MARS([nn.Parameter(torch.ones(2, 2))], differentiable=True, is_approx=False)

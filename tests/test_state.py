"""Which buffers there are, when they appear, and what load_state_dict takes and refuses."""

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from choice import choose
from mars import MARS
from mars.rule import KINDS
from mars.rule.estimator import kappa
from mars.state import LOW_HALF

FULL = {"step", "exp_avg", "exp_avg_sq", "last_grad"}


def stepped(shape=(4, 3), dtype=torch.float32, steps=1, **options) -> tuple[MARS, nn.Parameter]:
    p = nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = MARS([p], **options)
    for _ in range(steps):
        p.grad = torch.randn(shape).to(dtype)
        optimizer.step()
    return optimizer, p


@pytest.mark.parametrize(
    ("options", "buffers"),
    [
        ({}, FULL),
        ({"amsgrad": True}, FULL | {"max_exp_avg_sq"}),
        ({"clip": None}, FULL),
        ({"second_moment": "raw"}, FULL),
        ({"second_moment": "raw", "clip": None}, FULL - {"last_grad"}),
        ({"mars_type": "mars-lion"}, {"step", "exp_avg", "last_grad"}),
        ({"mars_type": "mars-lion", "clip": None}, {"step", "exp_avg"}),
        ({"mars_type": "mars-lion", "clip": "global"}, {"step", "exp_avg", "last_grad"}),
        ({"mars_type": "mars-shampoo"}, {"step", "exp_avg", "last_grad"}),
        ({"mars_type": "mars-shampoo", "clip": None}, {"step", "exp_avg"}),
        ({"mars_type": "mars-m"}, {"step", "exp_avg", "last_grad"}),
        ({"mars_type": "mars-m", "clip": None, "amsgrad": True}, {"step", "exp_avg"}),
        ({"mars_type": "plain-adamw"}, {"step", "exp_avg", "exp_avg_sq"}),
        ({"is_approx": False}, FULL | {"previous_grad"}),
        ({"dtype": torch.bfloat16}, FULL | {"param_low_bf16"}),
        ({"shape": (5,)}, {"step", "exp_avg", "exp_avg_sq"}),
        ({"shape": (2, 2, 2), "matrix_rule": "flatten"}, FULL),
        ({"shape": (5,), "optimize_1d": True}, FULL),
        ({"shape": (5,), "optimize_1d": True, "mars_type": "mars-m"}, FULL),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_buffers_are_those_needed_and_exist_after_the_first_step(options, buffers) -> None:
    torch.manual_seed(0)
    optimizer, p = stepped(**options)
    assert set(optimizer.state[p]) == buffers
    assert all(isinstance(value, torch.Tensor) for value in optimizer.state[p].values())


def test_exact_mode_by_closure_has_its_buffers_after_the_first_step() -> None:
    p, v = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
    optimizer = MARS([p, v], is_approx=False)

    def closure():
        p.grad, v.grad = torch.randn(3, 3), torch.randn(3)
        return 0.0

    optimizer.step(closure)
    assert set(optimizer.state[p]) == FULL | {"last_param"}
    assert set(optimizer.state[v]) == {"step", "exp_avg", "exp_avg_sq", "last_param"}
    optimizer.step(closure)
    assert set(optimizer.state[p]) == FULL | {"last_param"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_resume_is_bitwise(kind: str, dtype: torch.dtype) -> None:
    def gradients(p, seed):
        return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)

    def train(optimizer, params, seeds):
        for seed in seeds:
            for p in params:
                p.grad = gradients(p, seed)
            optimizer.step()

    start = [torch.randn(6, 4).to(dtype), torch.randn(4).to(dtype)]
    whole = [nn.Parameter(x.clone()) for x in start]
    train(MARS(whole, mars_type=kind), whole, range(6))

    half = [nn.Parameter(x.clone()) for x in start]
    optimizer = MARS(half, mars_type=kind)
    train(optimizer, half, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": half}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = saved["model"]
    again = MARS(resumed, lr=123.0, mars_type="mars-lion")  # everything comes from the checkpoint
    again.load_state_dict(saved["optimizer"])
    train(again, resumed, range(3, 6))
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_state_dtype_survives_loading(dtype: torch.dtype) -> None:
    """torch.optim casts float32 state to the parameter's bfloat16."""
    optimizer, p = stepped(dtype=dtype, amsgrad=True)
    kept = {name: value.dtype for name, value in optimizer.state[p].items()}
    if dtype in (torch.bfloat16, torch.float16):
        assert kept["exp_avg"] == torch.float32
        assert kept["last_grad"] == dtype
        assert kept[LOW_HALF[p.dtype]] == torch.int16
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert {name: value.dtype for name, value in optimizer.state[p].items()} == kept
    for name, value in saved["state"][0].items():
        assert torch.equal(optimizer.state[p][name], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_halves_load_in_either_width(dtype: torch.dtype) -> None:
    """A process alone saves them in int16; a process group, which cannot send that, in int32."""
    optimizer, p = stepped(dtype=dtype)
    low = optimizer.state[p][LOW_HALF[dtype]].clone()
    assert low.any()
    for width in (torch.int16, torch.int32):
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["state"][0][LOW_HALF[dtype]].dtype == torch.int16
        saved["state"][0][LOW_HALF[dtype]] = low.to(width)
        optimizer.load_state_dict(saved)
        held = optimizer.state[p][LOW_HALF[dtype]]
        assert held.dtype == torch.int16
        assert torch.equal(held, low)


def test_a_float32_checkpoint_loads_into_a_bfloat16_model_and_back() -> None:
    wide, _ = stepped()
    narrow, q = stepped(dtype=torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.state[q]["exp_avg"].dtype == torch.float32
    assert narrow.state[q]["last_grad"].dtype == torch.bfloat16
    q.grad = torch.randn(4, 3).bfloat16()
    narrow.step()
    wide, p = stepped()
    wide.load_state_dict(narrow.state_dict())
    assert "param_low_bf16" not in wide.state[p]
    p.grad = torch.randn(4, 3)
    wide.step()


def snapshot(optimizer: MARS) -> dict:
    return copy.deepcopy(optimizer.state_dict())


def assert_same(a: dict, b: dict) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key in a["state"]:
        assert a["state"][key].keys() == b["state"][key].keys()
        for name in a["state"][key]:
            assert torch.equal(a["state"][key][name], b["state"][key][name])


def _drop(name):
    return lambda s: s["state"][0].pop(name)


def _reshape(s):
    s["state"][0]["exp_avg"] = torch.zeros(3, 4)


def _bad_option(s):
    s["param_groups"][0]["mars_type"] = "mars-bar"


def _bad_lr(s):
    s["param_groups"][0]["lr"] = -1.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop("exp_avg"), r"lacks \['exp_avg'\].*truncated"),
        (_drop("last_grad"), r"lacks \['last_grad'\]"),
        (_drop("exp_avg_sq"), r"lacks \['exp_avg_sq'\]"),
        (_drop("step"), r"lacks \['step'\]"),
        (_reshape, r"exp_avg has shape \(3, 4\), the parameter \(4, 3\)"),
        (_bad_option, "Invalid mars_type: 'mars-bar'"),
        (_bad_lr, "Invalid learning rate: -1.0"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "different number of parameter"),
        (lambda s: s["param_groups"][0]["params"].append(1), "doesn't match the size of"),
        (lambda s: s.pop("state"), "without 'state'"),
        (lambda s: s.pop("param_groups"), "without 'param_groups'"),
    ],
    ids=[
        "no m",
        "no h",
        "no v",
        "no step",
        "shape",
        "type",
        "lr",
        "groups",
        "size",
        "state",
        "options",
    ],
)
def test_a_wrong_state_dict_is_refused_and_changes_nothing(spoil, message) -> None:
    optimizer, _ = stepped(steps=3)
    before = snapshot(optimizer)
    wrong = snapshot(optimizer)
    spoil(wrong)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(wrong)
    assert_same(optimizer.state_dict(), before)


def test_the_error_names_the_parameter() -> None:
    model = nn.Linear(3, 2)
    optimizer = MARS(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    wrong = snapshot(optimizer)
    del wrong["state"][1]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"parameter 1 \(bias\)"):
        optimizer.load_state_dict(wrong)


def test_a_state_dict_of_another_optimizer_is_refused() -> None:
    p = nn.Parameter(torch.randn(4, 3))
    other = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.randn(4, 3)
    other.step()
    with pytest.raises(ValueError, match="saved by another optimizer"):
        MARS([p]).load_state_dict(other.state_dict())


def test_an_older_state_dict_gets_defaults() -> None:
    optimizer, p = stepped(gamma=0.1)
    old = snapshot(optimizer)
    for name in ("clip", "maximize", "ns_dtype", "capturable", "base_lr", "second_moment"):
        del old["param_groups"][0][name]
    old["state"][0]["step"] = 1.0  # a number, as old torch versions kept it
    optimizer.load_state_dict(old)
    group = optimizer.param_groups[0]
    assert group["clip"] == "tensor"
    assert group["gamma"] == 0.1
    assert isinstance(optimizer.state[p]["step"], torch.Tensor)
    p.grad = torch.randn(4, 3)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2


def test_user_hooks_see_what_they_expect() -> None:
    optimizer, p = stepped(dtype=torch.bfloat16)
    seen = []

    def before(_, state_dict):
        state_dict["param_groups"][0]["gamma"] = 0.5

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append((o.param_groups[0]["gamma"], o.state[p]["exp_avg"].dtype))
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [(0.5, torch.float32)]


def test_dcp_makes_the_state_by_a_step_that_moves_nothing() -> None:
    """torch.distributed.checkpoint: zero gradients, lr = 0 in each group, then load."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    for kind in KINDS:
        options = {"mars_type": kind, "lr": 0.01, "lr_1d": 0.02}
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        optimizer = MARS(model.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()  # else DCP takes the optimizer for an initialised one
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        fresh = copy.deepcopy(model)
        before = [p.detach().clone() for p in fresh.parameters()]
        again = MARS(fresh.parameters(), **options)
        set_optimizer_state_dict(fresh, again, saved)
        for p, x in zip(fresh.parameters(), before, strict=True):
            assert torch.equal(p, x)
        for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
            assert optimizer.state[p].keys() == again.state[q].keys()
            for name, value in optimizer.state[p].items():
                assert torch.equal(value, again.state[q][name]), name


def test_a_last_gradient_is_never_an_old_one() -> None:
    """Options that change while training: what nobody updates is dropped, what is new is 0.

    exp_avg has been n = m − γ·h meanwhile, and β₁·n + (1−β₁)·(1+κ)·g is the m of this step.
    """
    optimizer, p = stepped(steps=3, mars_type="mars-lion", gamma=0.5)
    group = optimizer.param_groups[0]
    group["clip"] = None
    p.grad = torch.randn(4, 3)
    optimizer.step()
    assert "last_grad" not in optimizer.state[p]
    group["clip"] = "tensor"
    before = optimizer.state[p]["exp_avg"].clone()
    p.grad = 0.01 * torch.randn(4, 3)
    optimizer.step()
    c = (1 + kappa(0.5, 0.95)) * p.grad
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.95 * before + 0.05 * c)
    assert torch.equal(optimizer.state[p]["last_grad"], p.grad)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("kind", ["mars-lion", "mars-m", "mars-adamw"])
def test_a_clip_that_does_nothing_may_go_and_come(kind: str, maximize: bool) -> None:
    """Without it the state means something else, and the trajectory stays what it was."""
    ends = []
    for clips in (["tensor"] * 9, ["tensor"] * 3 + [None] * 3 + ["tensor"] * 3):
        torch.manual_seed(0)
        p = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        options = {"ns_dtype": "float64", "lr": 0.1, "maximize": maximize, "second_moment": "raw"}
        gamma = torch.tensor([0.3], dtype=torch.float64) if maximize else 0.3
        optimizer = MARS([p], mars_type=kind, gamma=gamma, **options)
        for clip in clips:
            optimizer.param_groups[0]["clip"] = clip
            p.grad = 0.01 * torch.randn(4, 3, dtype=torch.float64)
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends)


def test_a_refused_step_leaves_no_state() -> None:
    p = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    optimizer = MARS([p], state_dtype="bfloat16")
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="cannot be kept in fewer bits"):
        optimizer.step()
    assert not optimizer.state.get(p)
    MARS([p], state_dtype="bfloat16").load_state_dict(optimizer.state_dict())


def test_gradients_of_another_dtype_are_consumed_by_copy() -> None:
    p = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True)
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    p.grad_dtype = torch.float32
    optimizer = MARS([p], consume_grads=True)
    for _ in range(3):
        p.grad = torch.ones(4, 4)
        optimizer.step()
    assert optimizer.state[p]["last_grad"].dtype == torch.bfloat16


def test_a_previous_gradient_of_another_shape_is_refused() -> None:
    p, q = (torch.zeros(*shape, requires_grad=True) for shape in ((4, 4), (5, 3)))
    optimizer = MARS([p], is_approx=False)
    p.grad = torch.ones(4, 4)
    optimizer.update_previous_grad()
    with pytest.raises(ValueError, match="previous_grad"):
        MARS([q], is_approx=False).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.update(exp_avg=None), "exp_avg is None, not a tensor"),
        (lambda s: s.update(step=torch.ones(3, 3)), "step has 9 elements"),
        (lambda s: s.update(step=torch.tensor(math.nan)), "step is tensor.nan., not a count"),
        (lambda s: s.update(step=-1), "step is -1, not a count"),
    ],
)
def test_state_of_the_wrong_kind_is_refused(spoil, message) -> None:
    optimizer, _ = stepped()
    wrong = snapshot(optimizer)
    spoil(wrong["state"][0])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(wrong)


def test_consumed_gradients_are_ours_alone() -> None:
    """Slices of a flat buffer and gradients with a graph are copied or detached."""
    flat = torch.randn(24)
    p, q = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3))
    optimizer = MARS([p, q], consume_grads=True)
    p.grad = flat[:12].view(4, 3).data
    q.grad = torch.autograd.grad((q**3).sum(), q, create_graph=True)[0]
    kept = p.grad.clone()
    optimizer.step()
    flat.fill_(7.0)
    assert torch.equal(optimizer.state[p]["last_grad"], kept)
    assert not optimizer.state[q]["last_grad"].requires_grad
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("how", ["negated", "conjugated", "expanded", "shared"])
def test_consumed_gradients_are_clipped_once_whatever_they_are(how: str) -> None:
    numbers = torch.randn(12, dtype=torch.complex64 if how == "conjugated" else torch.float32)
    g = numbers if how == "conjugated" else numbers.view(4, 3)  # complex vectors are matrices
    a, b = nn.Parameter(torch.zeros_like(g)), nn.Parameter(torch.zeros_like(g))
    optimizer = MARS([{"params": [a]}, {"params": [b]}], consume_grads=True, max_grad_norm=0.1)
    if how == "negated":
        a.grad = torch._neg_view(g)
    elif how == "conjugated":
        a.grad = g.conj()
    elif how == "expanded":
        a.grad = g[:1].expand(4, 3)
    else:
        a.grad = b.grad = g.clone()
    want = a.grad.clone().resolve_conj().resolve_neg()
    want *= 0.1 / (want.norm() * (2**0.5 if how == "shared" else 1))
    optimizer.step()
    torch.testing.assert_close(optimizer.state[a]["last_grad"], want, rtol=1e-4, atol=1e-7)
    assert a.grad is None


@pytest.mark.parametrize("engine", ["reference", "foreach", "cpu", "fused"])
def test_gradients_that_lie_in_one_place_are_consumed_once_each(engine: str) -> None:
    """Autograd hands one tensor to both sides of a sum; each side then has a view of its own."""
    ends = []
    for consume in (False, True):
        torch.manual_seed(0)
        a, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2, 8))
        options = {"consume_grads": consume, "max_grad_norm": 0.1, **choose(engine)}
        optimizer = MARS([a, b], lr=1e-2, **options)
        for scale in (10.0, 1.0, 10.0):
            ((a.view(16) + b.view(16)) * torch.randn(16) * scale).sum().backward()
            assert a.grad.data_ptr() == b.grad.data_ptr()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((a, b))
    torch.testing.assert_close(*ends)


def test_a_maximum_that_nobody_kept_up_begins_anew() -> None:
    optimizer, p = stepped(steps=2, amsgrad=True)
    optimizer.param_groups[0]["amsgrad"] = False
    p.grad = torch.randn(4, 3)
    optimizer.step()
    assert "max_exp_avg_sq" not in optimizer.state[p]


@pytest.mark.parametrize("engine", [{"foreach": False}, {"foreach": True}, {}])
def test_a_last_gradient_that_begins_late_is_the_clipped_one(engine: dict) -> None:
    optimizer, p = stepped(mars_type="mars-lion", clip=None, max_grad_norm=1e-3, **engine)
    optimizer.param_groups[0]["clip"] = "tensor"
    before = optimizer.state[p]["exp_avg"].clone()
    p.grad = torch.ones(4, 3)
    optimizer.step()
    g = p.grad * 1e-3 / 12**0.5
    c = (1 + kappa(0.025, 0.95)) * g
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.95 * before + 0.05 * c)
    torch.testing.assert_close(optimizer.state[p]["last_grad"], g, rtol=1e-4, atol=1e-8)


def test_numpys_numbers_of_a_schedule_by_hand_are_saved_as_pythons() -> None:
    optimizer, _ = stepped()
    group = optimizer.param_groups[0]
    group["lr"] = np.float64(1e-3)
    group["betas"] = (np.float32(0.5), 0.75)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["param_groups"][0]
    assert (saved["lr"], saved["betas"]) == (1e-3, (0.5, 0.75))
    assert type(group["lr"]) is np.float64, "what is saved is a copy"


@pytest.mark.parametrize(
    ("options", "change"),
    [({}, {"amsgrad": True}), ({"clip": None, "second_moment": "raw"}, {"clip": "tensor"})],
)
def test_own_state_loads_whatever_was_switched_on_before_it_was_saved(
    options: dict, change: dict
) -> None:
    optimizer, p = stepped(**options)
    optimizer.param_groups[0].update(change)
    other, q = stepped(**options)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state[q].keys() == optimizer.state_dict()["state"][0].keys()
    for one, x in ((optimizer, p), (other, q)):
        torch.manual_seed(0)
        x.grad = torch.randn(4, 3)
        one.step()
    assert_same(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("engine", ["reference", "foreach", "cpu", "fused"])
def test_notes_in_the_state_of_a_parameter_are_kept_and_change_nothing(engine: str) -> None:
    notes = {"text": "mine", "count": 3, "names": ("a", "b"), "mask": torch.ones(2)}
    ends = []
    for own in ({}, notes):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = MARS(model.parameters(), **choose(engine))
        for step in range(4):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimizer.step()
            optimizer.state[model.weight].update(own)
        loaded = MARS(model.parameters(), **choose(engine))
        loaded.load_state_dict(optimizer.state_dict())
        assert {name: loaded.state[model.weight][name] for name in own} == own
        loaded.step()
        ends.append(model.weight.detach())
    assert torch.equal(*ends)


def test_notes_stay_what_they_are_beside_a_plan() -> None:
    p = nn.Parameter(torch.randn(4, 3))
    optimizer = MARS([p], fused=True)
    turned, sparse = torch.randn(3, 2).t(), torch.eye(3).to_sparse()
    plans = set()
    for count in range(5):
        p.grad = torch.randn(4, 3)
        optimizer.step()
        optimizer.state[p] |= {"turned": turned, "sparse": sparse, "count": count}
        if count > 1:  # the first has seen no note
            plans.add(optimizer._plan)
    assert optimizer.state[p]["turned"] is turned
    assert len(plans) == 1


def test_counts_on_the_device_are_loaded_there() -> None:
    p = nn.Parameter(torch.zeros(4, 3, device="meta"))
    saved, _ = stepped(capturable=True)
    optimizer = MARS([p], capturable=True)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.state[p]["step"].device.type == "meta"


def test_parameters_in_another_order_are_refused_if_their_names_are_known() -> None:
    def made(*names: str) -> MARS:
        optimizer = MARS([(name, nn.Parameter(torch.zeros(3, 3))) for name in names])
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones(3, 3)
        optimizer.step()
        return optimizer

    saved = made("a", "b").state_dict()
    with pytest.raises(ValueError, match="number 0 is 'b', and in the state dict 'a'"):
        made("b", "a").load_state_dict(saved)
    made("a", "b").load_state_dict(saved)
    made("module.a", "module.b").load_state_dict(saved)


@pytest.mark.parametrize(
    "option",
    [
        {"clip": "x"}, {"second_moment": "foo"}, {"matrix_rule": "3d"}, {"ns_dtype": "int"},
        {"state_dtype": torch.int32}, {"max_grad_norm": 0.0},
    ],
)  # fmt: skip
def test_a_word_that_a_group_is_given_later_is_checked(option: dict) -> None:
    optimizer, p = stepped()
    optimizer.param_groups[0].update(option)
    before = p.detach().clone()
    (name,) = option
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        optimizer.step()
    assert torch.equal(p, before)


def test_a_dtype_of_torch_may_be_written_into_a_group() -> None:
    """As the constructor takes it."""
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = MARS([p], mars_type="mars-m")
    group = optimizer.param_groups[0]
    group.update({"ns_dtype": torch.float32, "state_dtype": {"exp_avg": torch.bfloat16}})
    p.grad = torch.ones(3, 3)
    optimizer.step()
    assert (group["ns_dtype"], group["state_dtype"]) == ("float32", {"exp_avg": "bfloat16"})
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


def test_dtypes_by_name_or_as_torch_has_them() -> None:
    p = nn.Parameter(torch.zeros(3, 3))
    by_type = MARS([p], state_dtype=torch.bfloat16, ns_dtype=torch.float32, max_grad_norm=math.inf)
    group = by_type.param_groups[0]
    assert (group["state_dtype"], group["ns_dtype"]) == ("bfloat16", "float32")
    p.grad = torch.ones(3, 3)
    by_type.step()
    assert by_type.grad_norm == 3.0
    own = MARS([{"params": [p], "state_dtype": {"exp_avg": torch.bfloat16}}])
    assert own.param_groups[0]["state_dtype"] == {"exp_avg": "bfloat16"}
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        MARS([p], state_dtype=torch.int8)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"mars_type": "mars-m"}, {"mars_type": "mars-adamw"}),
        ({"mars_type": "mars-lion"}, {"mars_type": "mars-adamw"}),
        ({"mars_type": "mars-m", "matrix_rule": "flatten"}, {"matrix_rule": "2d"}),
        ({"mars_type": "mars-lion", "optimize_1d": True}, {"optimize_1d": False}),
    ],
)
def test_a_rule_that_needs_another_moment_cannot_begin_in_mid_run(
    before: dict, after: dict
) -> None:
    """It would begin at zero beside a count that is far: a step of hundreds of times lr."""
    shape = (4, 3) if "mars_type" in after else (4, 3, 2, 2)
    optimizer, p = stepped(shape, steps=3, **before)
    kept = copy.deepcopy(optimizer.state[p])
    optimizer.param_groups[0].update(after)
    with pytest.raises(RuntimeError, match="exp_avg_sq cannot begin in mid-run: mars_type,"):
        optimizer.step()
    assert kept.keys() == optimizer.state[p].keys()
    assert all(torch.equal(kept[name], value) for name, value in optimizer.state[p].items())


@pytest.mark.parametrize("form", [None, "8bit"])
def test_a_second_moment_is_never_an_old_one(form: str | None) -> None:
    """Of a time when gradients were small: a step of many times lr."""
    optimizer, p = stepped(steps=3, state_dtype=form, amsgrad=True)
    optimizer.param_groups[0]["mars_type"] = "mars-lion"
    optimizer.step()
    assert not any("exp_avg_sq" in name for name in optimizer.state[p])
    optimizer.param_groups[0]["mars_type"] = "mars-adamw"
    with pytest.raises(RuntimeError, match="exp_avg_sq cannot begin in mid-run"):
        optimizer.step()


@pytest.mark.parametrize("others", [{"state_dtype": None}, {"state_dtype": "bfloat16"}])
def test_codes_of_8_bits_are_not_taken_for_numbers(others: dict) -> None:
    saved = stepped(steps=2, state_dtype="8bit")[0].state_dict()
    saved["param_groups"][0].update(others)
    with pytest.raises(ValueError, match=r"exp_avg is saved in torch\.uint8"):
        MARS([nn.Parameter(torch.zeros(4, 3))]).load_state_dict(saved)
    exact = stepped(steps=2, state_dtype={"last_grad": "8bit"})[0].state_dict()
    exact["param_groups"][0] |= {"is_approx": False, "state_dtype": None}
    with pytest.raises(ValueError, match=r"last_grad is saved in torch\.uint8"):
        MARS([nn.Parameter(torch.zeros(4, 3))]).load_state_dict(exact)


@pytest.mark.parametrize("first", [{"clip": "tensor"}, {"clip": None}], ids=str)
def test_a_step_that_one_group_refuses_changes_no_other(first: dict) -> None:
    begun = {"clip": None if first["clip"] else "tensor"}
    a, b = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = MARS([{"params": [a], **begun}, {"params": [b]}], mars_type="mars-lion")
    a.grad, b.grad = torch.ones(4, 4), torch.ones(4, 4)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state[a])
    optimizer.param_groups[0].update(first)
    optimizer.param_groups[1]["state_dtype"] = "bfloat16"
    with pytest.raises(RuntimeError, match=r"exp_avg is kept in torch\.float32"):
        optimizer.step()
    assert kept.keys() == optimizer.state[a].keys()
    assert all(torch.equal(kept[name], value) for name, value in optimizer.state[a].items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"amsgrad": True}),
        ({"mars_type": "mars-lion", "clip": None, "state_dtype": "8bit"}, {"clip": "tensor"}),
    ],
)
def test_an_empty_parameter_is_saved_after_an_option_was_switched_on(
    before: dict, after: dict
) -> None:
    optimizer, p = stepped((3, 0), **before)
    optimizer.param_groups[0].update(after)
    again = MARS([p])
    again.load_state_dict(optimizer.state_dict())
    again.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_after_an_option_was_switched_on(tmp_path: Path) -> None:
    """Its reader compares shapes: an empty tensor in place of the buffer was refused."""
    ends = []
    model = nn.Linear(3, 4, bias=False)
    for options in ({}, {"amsgrad": True}):
        again = copy.deepcopy(model)
        optimizer = MARS(again.parameters(), **options)
        if not options:
            again(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["amsgrad"] = True
            saved = {"optimizer": get_optimizer_state_dict(again, optimizer)}
            dcp.save(saved, checkpoint_id=tmp_path)
        else:
            saved = {"optimizer": get_optimizer_state_dict(again, optimizer)}
            dcp.load(saved, checkpoint_id=tmp_path)
            set_optimizer_state_dict(again, optimizer, saved["optimizer"])
        ends.append(optimizer.state[again.weight])
    assert not ends[1].pop("max_exp_avg_sq").any()
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", ["lr", "lr_1d", "weight_decay", "gamma"])
def test_what_a_schedule_has_rounded_below_zero_loads(name: str, tensor: bool) -> None:
    """As it steps: torch's LinearLR to 0 ends at −1.4e-19."""
    if tensor and name not in ("lr", "gamma"):
        pytest.skip("it is no tensor")
    optimizer, p = stepped()
    optimizer.param_groups[0][name] = torch.tensor(-1.4e-19) if tensor else -1.4e-19
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    for wrong in (-1e-3, float("nan")):
        if name != "gamma" or wrong != wrong:
            saved = optimizer.state_dict()
            saved["param_groups"][0][name] = wrong
            with pytest.raises(ValueError, match=name):
                MARS([p]).load_state_dict(saved)


def test_a_state_dict_of_thousands_of_names_is_refused_in_a_line() -> None:
    names = {f"layers.{i}.weight": torch.zeros(1) for i in range(1000)}
    with pytest.raises(ValueError, match="and 992 more") as refused:
        MARS([nn.Parameter(torch.zeros(2))]).load_state_dict(names)
    assert len(str(refused.value)) < 400


def test_a_low_half_that_is_no_tensor_is_named() -> None:
    optimizer, p = stepped(dtype=torch.bfloat16)
    saved = optimizer.state_dict()
    saved["state"][0][LOW_HALF[torch.bfloat16]] = 3
    with pytest.raises(ValueError, match="param_low_bf16 is 3, not a tensor"):
        MARS([p]).load_state_dict(saved)


@pytest.mark.parametrize("options", [{"lr": 1e-2}, {"gamma": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_dimensions_and_an_option_that_is_a_tensor(
    options: dict, dtype: torch.dtype
) -> None:
    """0-d times 0-d takes the wider dtype, which no other shape would."""
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in options.items()}
    ends = []
    for given in (options, tensors):
        p = nn.Parameter(torch.tensor(1.0, dtype=dtype))
        optimizer = MARS([p], optimize_1d=True, foreach=False, **given)
        for g in (0.5, -0.25):
            p.grad = torch.tensor(g, dtype=dtype)
            optimizer.step()
        assert p.dtype == dtype
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        ends.append(p.detach())
    torch.testing.assert_close(*ends)


# What was loaded, or made by somebody, and does not fit.


@pytest.mark.parametrize("engine", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("size", [2, 4000])
def test_a_parameter_of_another_shape_is_refused(engine: dict, size: int) -> None:
    p, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(2, 2))
    optimizer = MARS([other, p], **engine)
    for each in (p, other):
        each.grad = torch.ones_like(each)
    optimizer.step()
    before, moment = other.detach().clone(), optimizer.state[p]["exp_avg"].clone()
    p.data = torch.zeros(size)
    with pytest.raises(RuntimeError, match=rf"gradient has shape \(4,\), its parameter \({size},"):
        optimizer.step()
    p.grad = torch.ones(size)
    with pytest.raises(RuntimeError, match=r"exp_avg has shape \(4,\).*make a new optimizer"):
        optimizer.step()
    assert torch.equal(other, before)
    assert torch.equal(optimizer.state[p]["exp_avg"], moment)


def test_state_on_another_device_is_refused() -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    optimizer = MARS([p])
    p.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(4, 4, device="meta")
    with pytest.raises(RuntimeError, match="exp_avg is on meta, its parameter on cpu"):
        optimizer.step()


def test_a_parameter_transposed_in_place_is_noticed() -> None:
    """The same address and shape, other elements."""
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 4), torch.randn(3, 4, 4)
    found = []
    for fused in (True, False):
        p = nn.Parameter(start.clone())
        optimizer = MARS([p], lr=0.1, fused=fused)
        for i, g in enumerate(gradients):
            if i == 1:
                p.data = p.data.t()
            p.grad = g.clone()
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1,)])
@pytest.mark.parametrize("engine", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_gradients_that_torch_negates_later(engine: dict, shape: tuple[int, ...]) -> None:
    """Autograd leaves the sign of the gradient of a conjugate to whoever reads it."""
    w = nn.Parameter(torch.ones(shape))
    optimizer = MARS([w], lr=0.1, lr_1d=0.1, weight_decay=0.0, weight_decay_1d=0.0, **engine)
    for _ in range(2):
        w.grad = None
        torch.complex(torch.ones(shape), w).conj().abs().sum().backward()
        assert w.grad.is_neg()
        optimizer.step()
    assert float(w.detach()) == pytest.approx(0.8, abs=0.02)


def test_conjugated_gradients_are_taken() -> None:
    found = []
    for conjugate in (True, False):
        p = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
        g = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        p.grad = g.conj() if conjugate else g.conj().resolve_conj()
        optimizer = MARS([p])
        optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("routed", [False, True])
def test_the_state_of_torchs_adamw_goes_on(routed: bool) -> None:
    """Options that the saved group does not know stay ours; its rate is everybody's."""

    def gradients(model: nn.Module) -> None:
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * (i + 1))

    ours, theirs = (nn.Linear(3, 3) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, **options)
    gradients(theirs)
    adamw.step()
    ours.load_state_dict(theirs.state_dict())
    adamw.param_groups[0]["lr"] = 5e-3  # by a schedule
    own = {"mars_type": "plain-adamw"}
    groups = [{"params": list(ours.parameters()), **own, **({"lr_1d": 1e-3} if routed else {})}]
    optimizer = MARS(groups, lr=1e-2, **options)
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.param_groups[0]["mars_type"] == "plain-adamw"
    for _ in range(3):
        for model in (ours, theirs):
            gradients(model)
        adamw.step()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_hook_may_wrap_the_state_dict() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    optimizer = MARS([p])
    p.grad = torch.ones(2, 2)
    optimizer.step()
    handle = optimizer.register_state_dict_post_hook(lambda _, saved: {"optimizer": saved})
    assert set(optimizer.state_dict()) == {"optimizer"}
    handle.remove()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_a_resumed_exact_run_needs_its_closure() -> None:
    def closure() -> torch.Tensor:
        p.grad = 2 * p.detach()
        return p.detach().sum()

    p = nn.Parameter(torch.ones(3, 3))
    optimizer = MARS([p], is_approx=False)
    for _ in range(2):
        optimizer.step(closure)
    resumed = MARS([p], is_approx=False)
    resumed.load_state_dict(optimizer.state_dict())
    p.grad = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="needs the gradients of this batch at the previous"):
        resumed.step()
    resumed.step(closure)


def test_exact_mode_begins_with_gradients_of_another_dtype() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch has no grad_dtype")

    def closure() -> float:
        p.grad = torch.ones(4, 4)
        return 0.0

    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    optimizer = MARS([p])
    p.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.param_groups[0]["is_approx"] = False
    with pytest.warns(UserWarning, match="nothing of the previous parameters"):
        optimizer.step(closure)
    assert optimizer.state[p]["last_grad"].dtype == torch.bfloat16
    optimizer.step(closure)


def test_the_norm_of_no_gradients_is_zero() -> None:
    p, other = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    groups = [{"params": [p], "max_grad_norm": 1.0}, {"params": [other]}]
    optimizer = MARS(groups)
    p.grad = torch.ones(3, 3)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(3.0)
    p.grad, other.grad = None, torch.ones(3, 3)
    optimizer.step()
    assert float(optimizer.grad_norm) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": []}, "'state' must be a dict of dicts"),
        ({"state": {0: 5}}, "'state' must be a dict of dicts"),
        ({"param_groups": [{}]}, "must be a list of dicts"),
        ({"param_groups": [3]}, "must be a list of dicts"),
        ({"param_groups": 5}, "must be a list of dicts"),
        ({"param_groups": [{"params": 5}]}, "must be a list of dicts"),
        ({"state": {0: {"step": None}}}, "lacks"),
    ],
    ids=str,
)
def test_what_is_no_state_dict_is_refused_by_a_sentence(change: dict, message: str) -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    optimizer = MARS([p])
    p.grad = torch.ones(2, 2)
    optimizer.step()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({**optimizer.state_dict(), **change})
    for step in (None, "x"):
        saved = optimizer.state_dict()
        saved["state"][0] = {**saved["state"][0], "step": step}
        with pytest.raises(ValueError, match=f"step is {step!r}, not a count"):
            optimizer.load_state_dict(saved)
    optimizer.step()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": "x", "lr_1d": 0.1}, "Invalid learning rate: 'x'"),
        ({"lr": "x", "mars_type": "plain-adamw"}, "Invalid learning rate: 'x'"),
        ({"weight_decay": torch.zeros(2)}, "weight_decay"),
        ({5: 1}, "unknown option 5"),
    ],
    ids=str,
)
def test_a_wrong_group_is_refused_by_a_sentence(group: dict, message: str) -> None:
    optimizer = MARS([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **group})
    assert len(optimizer.param_groups) == 1


def test_options_that_a_state_dict_brings_are_told(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, _ = stepped()
    other = MARS([nn.Parameter(torch.randn(4, 3))], mars_type="mars-m", max_grad_norm=1.0)
    other.load_state_dict(optimizer.state_dict())
    (told,) = caplog.messages
    assert "mars_type='mars-adamw' (it was 'mars-m')" in told
    assert "max_grad_norm=None (it was 1.0)" in told
    caplog.clear()
    other.load_state_dict(optimizer.state_dict())
    assert not caplog.messages


def test_every_option_that_loading_changes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Who resumes with other options would believe to have them."""
    x = torch.nn.Parameter(torch.ones(3, 2))
    saved = MARS([x], lr=1e-3, lr_1d=1e-3).state_dict()
    other = {"clip": None, "second_moment": "raw", "matrix_rule": "flatten", "optimize_1d": True}
    MARS([x], lr=2e-3, betas=(0.9, 0.95), gamma=0.1, **other).load_state_dict(saved)
    (told,) = caplog.messages
    for name, value in other.items():
        assert f"(it was {value!r})" in told, name
    assert "lr=" not in told  # what schedulers move comes with the run
    assert "gamma" not in told


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": None, "second_moment": "raw"}, {"mars_type": "mars-lion", "clip": None}],
)
def test_the_state_of_torch_s_adamw_is_refused_by_types_that_cannot_go_on_with_it(
    options: dict, trained: bool
) -> None:
    layer = torch.nn.Linear(3, 2)
    adamw = torch.optim.AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0)
    optimizer = MARS(layer.parameters(), lr=2e-3, lr_1d=2e-3, weight_decay=0.1, **options)
    layer(torch.ones(4, 3)).sum().backward()
    if trained:
        adamw.step()
    before = optimizer.state_dict()["param_groups"]
    with pytest.raises(
        ValueError, match=r"no options of MARS: it was saved by another .*from_adamw"
    ):
        optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.state_dict()["param_groups"] == before


def test_a_state_dict_with_the_options_of_the_authors_code_goes_on() -> None:
    """Which keeps neither lr_1d nor base_lr in its groups."""
    optimizer, p = stepped()
    saved = snapshot(optimizer)
    theirs = ("params", "lr", "betas", "eps", "weight_decay", "amsgrad", "mars_type", "gamma")
    saved["param_groups"] = [{k: g[k] for k in theirs} for g in saved["param_groups"]]
    other = MARS([p])
    other.load_state_dict(saved)
    assert torch.equal(other.state[p]["last_grad"], optimizer.state[p]["last_grad"])


def test_a_group_that_was_taken_out_is_let_go() -> None:
    optimizer = MARS([nn.Parameter(torch.ones(2, 2))])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2, 2)
    optimizer.step()
    taken = optimizer.param_groups.pop()["params"][0]
    gone = weakref.ref(taken)
    del optimizer.state[taken], taken, group
    optimizer.step()
    gc.collect()
    assert gone() is None


def test_a_named_group_that_was_changed_by_hand_can_be_saved_and_loaded() -> None:
    """As torch.optim.AdamW can: what is unfrozen is often added so."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = MARS(list(model.named_parameters())[:3], lr=0.01)
    optimizer.param_groups[0]["params"] += list(model.parameters())[3:]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert len(optimizer.state) == 6
    saved["state"][5]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match="state of parameter 5: exp_avg has shape"):
        optimizer.load_state_dict(saved)


def test_after_a_parameter_was_taken_out_errors_name_no_other() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 3)})
    groups = [{"params": list(layer.named_parameters())} for layer in model.values()]
    optimizer = MARS(groups, lr=0.01)
    del optimizer.param_groups[0]["params"][0]
    model["b"](model["a"](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"state of parameter 2 \(bias\): exp_avg has shape"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("other", ["NAdam", "Adam"])
def test_plain_adamw_goes_on_with_the_state_of_adamw_alone(other: str) -> None:
    """Of an Adam without decay too, which steps as AdamW does."""
    p = nn.Parameter(torch.ones(3, 3))

    def saved(decay: float) -> dict:
        p.grad = torch.ones(3, 3)
        of = getattr(torch.optim, other)([p], lr=0.01, weight_decay=decay)
        of.step()
        return of.state_dict()

    optimizer = MARS([p], mars_type="plain-adamw")
    with pytest.raises(ValueError, match="goes on with the state of an AdamW alone"):
        optimizer.load_state_dict(saved(1.0))
    assert not optimizer.state
    if other == "Adam":
        optimizer.load_state_dict(saved(0.0))
        assert optimizer.param_groups[0]["lr"] == 0.01

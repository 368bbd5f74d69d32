"""Wrong input: an error that names it, the value and what is allowed; and nothing changed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import mars
from mars import MARS


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": float("inf")}, "Invalid learning rate: inf"),
        ({"lr": "0.1"}, "Invalid learning rate: '0.1'"),
        ({"lr": torch.tensor([0.1, 0.1])}, "Tensor lr must be 1-element"),
        ({"lr": torch.tensor(1j)}, "Invalid learning rate: tensor"),
        (
            {"betas": (1.0, 0.9)},
            r"index 0: 1.0 \(betas=\(1.0, 0.9\): both must be numbers in \[0, 1\)\)",
        ),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"betas": 0.9}, "Invalid betas: 0.9"),
        ({"betas": np.array(0.9)}, r"Invalid betas: array\(0.9\) .*must be a pair"),
        ({"betas": {0.9, 0.95}}, "Invalid betas: {0.9.*must be a pair"),  # of no order
        ({"betas": b"ab"}, "Invalid betas: b'ab'.*must be a pair"),
        ({"betas": (0.9, 0.9, 0.9)}, "must be a pair"),
        ({"betas": (0.9, torch.tensor(0.9))}, "betas must be either both floats or both Tensors"),
        ({"betas_1d": (0.9, 2.0)}, r"Invalid beta parameter at index 1: 2.0 \(betas_1d="),
        ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
        ({"weight_decay": -1}, "Invalid weight_decay value: -1"),
        ({"weight_decay_1d": -1}, "Invalid weight_decay_1d: -1"),
        ({"lr_1d": -1}, "Invalid lr_1d: -1"),
        ({"gamma": -0.1}, "Invalid gamma: -0.1"),
        ({"gamma": None}, "Invalid gamma: None"),
        ({"gamma": torch.ones(2)}, "Invalid gamma: .*must be one finite number"),
        ({"mars_type": "adam"}, "Invalid mars_type: 'adam'.*'mars-adamw', 'mars-lion'"),
        ({"clip": 1.0}, r"Invalid clip \(the norm is always 1\): 1.0.*'tensor', 'global', None"),
        ({"second_moment": "c"}, "Invalid second_moment: 'c'.*'corrected', 'raw'"),
        ({"matrix_rule": "4d"}, "Invalid matrix_rule: '4d'.*'2d', 'flatten', 'stack'"),
        ({"ns_steps": 0}, "Invalid ns_steps: 0.*at least 1"),
        ({"ns_steps": 2.5}, "Invalid ns_steps: 2.5"),
        ({"ns_coefficients": "cubic"}, "Invalid ns_coefficients: 'cubic'.*'polar-express'"),
        ({"ns_dtype": "int8"}, "Invalid ns_dtype: 'int8'"),
        ({"amsgrad": 1}, "Invalid amsgrad: 1"),
        ({"is_approx": None}, "Invalid is_approx: None"),
        ({"foreach": "yes"}, "Invalid foreach: 'yes'"),
        (
            {"lr": torch.tensor(0.1), "foreach": True},
            "lr as a Tensor is not supported for capturable=False and foreach=True",
        ),
        ({"consume_grads": True, "is_approx": False}, "consume_grads=True needs is_approx=True"),
        ({"consume_grads": True, "capturable": True}, "consume_grads=True needs capturable=False"),
        ({"eps": torch.tensor(1e-8)}, "eps: must be a number, not a tensor"),
        ({"weight_decay": torch.tensor(0.1)}, "weight_decay as a Tensor needs differentiable"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_value(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MARS([weight()], **options)
    with pytest.raises(ValueError, match=message):
        MARS([{"params": [weight()], **options}])
    optimizer = MARS([weight()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight()], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foreach": True, "fused": True}, "`fused` and `foreach` cannot be `True` together"),
        ({"fused": True, "differentiable": True}, "`fused` does not support `differentiable`"),
        ({"foreach": True, "differentiable": True}, "`foreach` does not support `differentiable`"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other(options: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        MARS([weight()], **options)


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="weight_decy"):
        MARS([weight()], weight_decy=0.1)
    with pytest.raises(TypeError, match=r"unknown option 'gama'\. Did you mean 'gamma'"):
        MARS([{"params": [weight()], "gama": 0.1}])
    with pytest.raises(
        TypeError, match=r"group 0 is one of torch.optim's Adam or AdamW: MARS\.from_adamw"
    ):
        MARS(torch.optim.AdamW([weight()]).param_groups)
    with pytest.raises(TypeError, match="unknown option 'momentum'"):
        mars.param_groups(nn.Linear(2, 2), momentum=0.9)


def test_a_group_may_carry_notes_of_schedulers_and_people() -> None:
    optimizer = MARS([{"params": [weight()], "name": "head", "initial_lr": 0.1, "lr_scale": 2.0}])
    assert optimizer.param_groups[0]["name"] == "head"


@pytest.mark.parametrize("foreach", [True, False])
def test_sparse_gradient(foreach: bool) -> None:
    dense, table = weight(), nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    dense.grad = torch.ones(3, 2)
    optimizer = MARS([{"params": [dense]}, {"params": table.parameters()}], foreach=foreach)
    with pytest.raises(RuntimeError, match=r"sparse gradients.*sparse=False"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3, 2))
    assert not optimizer.state


def test_nothing_to_optimize() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        MARS([])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        MARS(weight())


def test_a_small_lr_beside_the_default_lr_1d_is_pointed_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    MARS([weight()], lr=1e-5)
    MARS([weight(), nn.Parameter(torch.ones(3))], lr=1e-5, lr_1d=1e-5)
    MARS([nn.Parameter(torch.ones(3))], lr=1e-5, optimize_1d=True)
    MARS([weight(), nn.Parameter(torch.ones(3))], lr=2e-3)
    assert not caplog.records
    MARS([weight(), nn.Parameter(torch.ones(3))], lr=1e-5)
    assert "lr=1e-05 is for what MARS trains. The rate of what AdamW trains (1 t" in caplog.text
    assert "lr_1d=0.003, 300 times more" in caplog.text


def test_a_weight_decay_that_no_group_has_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """Hugging Face's Trainer sets weight_decay in both of its groups, 0 by default."""
    MARS([{"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}], weight_decay=0.1)
    MARS([{"params": [weight()], "weight_decay": 0.1}])
    assert not caplog.records
    MARS([{"params": [weight()], "weight_decay": 0.0} for _ in range(2)], weight_decay=0.1)
    assert "weight_decay=0.1 is used nowhere: every group sets its own (0, 0)" in caplog.text


def test_decays_that_are_tensors_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    group = {"params": [weight()], "weight_decay": torch.tensor([0.1])}
    MARS([group], weight_decay=0.2, differentiable=True)
    assert "weight_decay=0.2 is used nowhere: every group sets its own (0.1)" in caplog.text


def test_a_group_cannot_be_differentiable_alone() -> None:
    optimizer = MARS([weight()])
    with pytest.raises(ValueError, match="only if the whole optimizer is"):
        optimizer.add_param_group({"params": [weight()], "differentiable": True})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_of_integers_is_refused() -> None:
    p = torch.zeros(2, 2, dtype=torch.long)
    optimizer = MARS([p])
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"a parameter of torch.int64 cannot be trained"):
        optimizer.step()
    assert not optimizer.state[p]


def test_a_process_group_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup, not int"):
        MARS([weight()], ranks="replicate", process_group=3)


def test_embeddings_known_by_name_are_not_orthogonalised_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "up": nn.Linear(4, 4, bias=False)})
    MARS(model.named_parameters())
    MARS(mars.param_groups(model, mars_type="mars-m", embeddings="mars"))
    MARS(mars.param_groups(model, mars_type="mars-m"), lr_1d=1e-3)
    assert not caplog.records
    MARS.from_adamw(torch.optim.AdamW(model.named_parameters()), mars_type="mars-m")
    assert "wte.weight: by name or shape an embedding" in caplog.text


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("mars_type", "muon", "Invalid mars_type: 'muon'"),
        ("mars_type", "plain-adamw", "mars_type cannot become 'plain-adamw' in mid-run"),
        ("betas", (1.0, 0.9), "Invalid beta parameter at index 0: 1.0"),
        ("betas_1d", 0.9, "Invalid betas_1d: 0.9"),
        ("eps", None, "Invalid epsilon value: None"),
        ("ns_steps", 0, "Invalid ns_steps: 0"),
        ("fused", "x", "Invalid fused: 'x'"),
        ("state_dtype", {"exp_avg": "9bit"}, "Invalid state_dtype: {'exp_avg': '9bit'}"),
    ],
)
def test_an_option_changed_to_nonsense_later_is_named(
    option: str, value: object, message: str
) -> None:
    p = weight()
    optimizer = MARS([p])
    p.grad = torch.ones(3, 2)
    optimizer.step()
    before, optimizer.param_groups[0][option] = optimizer.param_groups[0][option], value
    for _ in range(2):  # it is not taken for right the second time
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer.step()
    optimizer.param_groups[0][option] = before
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 2


def test_a_type_that_is_still_the_same_is_no_change() -> None:
    p, q = weight(), weight()
    optimizer = MARS([{"params": [p]}, {"params": [q], "mars_type": "plain-adamw"}])
    p.grad, q.grad = torch.ones(3, 2), torch.ones(3, 2)
    optimizer.step()
    optimizer.param_groups[1]["mars_type"] = "-".join(["plain", "adamw"])  # as JSON gives it
    optimizer.step()
    del optimizer.param_groups[0]
    optimizer.step()
    assert int(optimizer.state[q]["step"]) == 3


def test_a_dict_changed_in_its_place_is_looked_at_again() -> None:
    p = weight()
    optimizer = MARS([p], state_dtype={"exp_avg": "bfloat16"})
    p.grad = torch.ones(3, 2)
    optimizer.step()
    optimizer.param_groups[0]["state_dtype"]["exp_avg_sq"] = "9bit"
    with pytest.raises(ValueError, match="Invalid state_dtype"):
        optimizer.step()


def test_a_rate_that_a_scheduler_rounds_below_zero_ends_no_training() -> None:
    p = weight()
    optimizer = MARS([p])
    optimizer.param_groups[0]["lr"] = -1e-19
    p.grad = torch.ones(3, 2)
    optimizer.step()


@pytest.mark.parametrize("name", ["lr", "lr_1d", "gamma", "weight_decay"])
@pytest.mark.parametrize(
    "value", [float("nan"), np.float32("inf"), np.float64("nan"), "1e-3", True]
)
def test_but_one_that_is_no_rate_is_named_at_the_next_step(name: str, value: float) -> None:
    p = weight()
    optimizer = MARS([p])
    p.grad = torch.ones(3, 2)
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"Invalid .*{name}"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("value", [-1e-3, -1, np.float32(-1)])
def test_nor_is_one_below_zero(value: object) -> None:
    p = weight()
    optimizer = MARS([p])
    p.grad = torch.ones(3, 2)
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optimizer.step()
    optimizer.param_groups[0] |= {"lr": np.float64(1e-3), "gamma": -0.1, "weight_decay": 0}
    optimizer.step()


def test_a_loaded_group_is_differentiable_only_if_the_optimizer_is() -> None:
    saved = MARS([weight()], differentiable=True).state_dict()
    with pytest.raises(ValueError, match="only if the whole optimizer is"):
        MARS([weight()]).load_state_dict(saved)


def test_tools_for_mars_refuse_other_optimizers() -> None:
    other = torch.optim.AdamW([weight()])
    with pytest.raises(TypeError, match="AdamW has no gamma"):
        mars.GammaScheduler(other, mars.schedules.constant(0.1))
    with pytest.raises(TypeError, match="diagnose takes a MARS optimizer, not AdamW"):
        mars.diagnose(other)
    with pytest.raises(TypeError, match=r"use mars\.schedules\.constant"):
        mars.GammaScheduler(MARS([weight()]), 0.1)


def test_fused_says_why_it_is_not_possible_and_adds_nothing() -> None:
    wide = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"`fused=True` is not possible.*float64"):
        MARS([wide], fused=True)
    optimizer = MARS([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(RuntimeError, match="float64"):
        optimizer.add_param_group({"params": [wide], "fused": True})
    assert len(optimizer.param_groups) == 1


def test_fused_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="on cpu: it needs a CUDA device"):
        MARS([torch.nn.Parameter(torch.ones(2))], fused=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 0}, "max_grad_norm: must be None or a positive number"),
        ({"max_grad_norm": "1"}, "Invalid max_grad_norm"),
        ({"state_dtype": "int4"}, "state_dtype: must be None, one of 'float32', 'bfloat16'"),
        ({"state_dtype": {"exp": "8bit"}}, "Invalid state_dtype"),
        ({"max_grad_norm": 1.0, "is_approx": False}, "max_grad_norm needs is_approx=True"),
    ],
    ids=str,
)
def test_new_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MARS([torch.nn.Parameter(torch.ones(2))], **options)


def test_what_is_no_mars_and_no_state_dict() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(TypeError, match="explain takes a MARS, not AdamW"):
        mars.explain(torch.optim.AdamW([p]))
    with pytest.raises(TypeError, match="takes a state dict, not NoneType"):
        MARS([p]).load_state_dict(None)


@pytest.mark.parametrize("name", ["lr", "gamma", "weight_decay", "lr_1d"])
def test_a_number_that_becomes_none_is_named_before_anything_moves(name: str) -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = MARS([{"params": [p]} for p in params])
    for p in params:
        p.grad = torch.ones(2, 2)
    optimizer.param_groups[1][name] = None
    with pytest.raises(ValueError, match=f"Invalid .*: None \\({name}"):
        optimizer.step()
    assert all(torch.equal(p, torch.ones(2, 2)) for p in params)


def test_groups_taken_out_and_added_are_not_mistaken_for_each_other() -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    kinds = ["mars-adamw", "plain-adamw", "mars-lion"]
    groups = [{"params": [p], "mars_type": k} for p, k in zip(params, kinds, strict=True)]
    optimizer = MARS(groups[:2])
    for p in params:
        p.grad = torch.ones(2, 2)
    optimizer.step()
    del optimizer.param_groups[0]
    optimizer.add_param_group(groups[2])
    optimizer.step()
    assert not torch.equal(params[2], torch.ones(2, 2))

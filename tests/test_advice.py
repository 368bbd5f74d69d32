"""What is allowed and hardly meant is told, once; what is meant is not."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import mars
from mars import MARS
from mars.advice import DEFAULT_LR_1D

CONV = nn.Conv2d(4, 8, 3)
Log = pytest.LogCaptureFixture


@pytest.mark.parametrize(
    ("own", "given", "told"),
    [
        ({"weight_decay": 0.01}, {}, True),
        ({}, {"weight_decay": 0.01}, True),
        ({"weight_decay": 0.0}, {}, False),  # decays nothing
        ({"weight_decay": 0.1}, {}, False),  # as they do anyway
        ({}, {}, False),
        ({"weight_decay": 0.01, "weight_decay_1d": 0.1}, {}, False),
        ({"weight_decay": 0.01}, {"weight_decay_1d": 0.1}, False),
        ({}, {"weight_decay": 0.01, "weight_decay_1d": 0.1}, False),
        ({"weight_decay": 0.01, "weight_decay_1d": 0.0}, {}, False),
        ({"weight_decay": 0.01, "optimize_1d": True}, {}, False),
    ],
)
def test_a_decay_that_is_for_matrices_alone(
    own: dict, given: dict, told: bool, caplog: Log
) -> None:
    layer = nn.Linear(4, 8)
    groups = [{"params": [p], **own} for p in layer.parameters()]
    optimizer = MARS(
        [*groups, {"params": [nn.Parameter(torch.ones(3))], **own}], lr_1d=1e-2, **given
    )
    expected = "weight_decay=0.01 is for what MARS trains; what AdamW trains (1 tensor: "
    assert [text[: len(expected)] for text in caplog.messages] == [expected] * told
    assert optimizer.defaults["weight_decay_1d"] == 0.1


ROUTED = nn.ModuleDict({"wte": nn.Embedding(5, 4), "up": nn.Linear(4, 4)})


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-shampoo"])
@pytest.mark.parametrize(
    ("routing", "given", "told"),
    [
        ({}, {"weight_decay": 0.01}, True),
        ({"weight_decay": 0.01}, {}, True),
        ({}, {"weight_decay": 0.1}, False),
        ({}, {"weight_decay": 0.01, "weight_decay_1d": 0.01}, False),
        ({"weight_decay_1d": 0.01}, {"weight_decay": 0.01}, False),
        ({"embeddings": "no-decay", "vectors": "no-decay"}, {"weight_decay": 0.01}, False),
        ({"vectors": {"weight_decay": 0.01}, "embeddings": "mars"}, {"weight_decay": 0.01}, False),
    ],
)
def test_a_decay_that_is_not_that_of_what_is_routed_to_adamw(
    kind: str, routing: dict, given: dict, told: bool, caplog: Log
) -> None:
    """The way of the README was the only one without a word."""
    MARS(mars.param_groups(ROUTED, mars_type=kind, **routing), **given)
    found = [text for text in caplog.messages if "decays by weight_decay_1d, 0.1 by" in text]
    assert len(found) == told


def test_a_rate_that_is_not_that_of_what_is_routed_to_adamw(caplog: Log) -> None:
    groups = mars.param_groups(ROUTED, mars_type="mars-m")
    MARS(groups, lr=8e-3)
    MARS(groups, lr=1e-4, lr_1d=1e-4)
    MARS([{"params": [nn.Parameter(torch.ones(2))], "mars_type": "plain-adamw"}], lr=1e-4)
    assert caplog.messages == []
    MARS(groups, lr=1e-4)
    assert "The rate of what AdamW trains (2 tensors" in caplog.text
    assert "lr_1d=0.003, 30 times more" in caplog.text


def test_a_rate_of_a_group_that_has_no_matrix(caplog: Log) -> None:
    """Written for AdamW, where it would be the rate of its tensors."""
    weight, bias = nn.Linear(4, 4).parameters()
    for lr_1d, own in ((1e-2, {}), (3e-3, {"lr_1d": 2e-3}), (3e-3, {"optimize_1d": True})):
        MARS([{"params": [weight]}, {"params": [bias], "lr": 2e-3, **own}], lr=1e-2, lr_1d=lr_1d)
    MARS([{"params": [weight, bias], "lr": 2e-3}], lr=5e-3)
    assert caplog.messages == []
    own = {"params": [nn.Parameter(torch.ones(2))], "lr": 4e-3, "lr_1d": 4e-3}  # is right
    MARS([own, {"params": [weight], "lr": 1e-3}, {"params": [bias], "lr": 2e-3}], lr=5e-3)
    (text,) = caplog.messages
    assert text.startswith("lr=0.002 of group 2, which has no matrix, is not the rate")
    assert text.endswith("in proportion, 0.0012. Set lr_1d in the group")
    caplog.clear()
    layers = [(nn.Linear(4, 4), 1e-3 * 0.9**i) for i in range(12)]  # a rate a layer: meant
    MARS([{"params": [p], "lr": lr} for layer, lr in layers for p in layer.parameters()], lr=5e-3)
    assert caplog.messages == []
    biases = [{"params": [layer.bias], "lr": lr} for layer, lr in layers]
    MARS([{"params": [weight]}, *biases], lr=5e-3)
    assert len(caplog.messages) == 1
    assert "and of 11 more groups" in caplog.text


def test_tables_whose_names_say_nothing(caplog: Log) -> None:
    tall, hidden, low = (nn.Parameter(torch.zeros(s)) for s in ((2000, 64), (64, 64), (2000, 8)))
    MARS([hidden, low], mars_type="mars-m")
    MARS([tall])
    layers = [("up", hidden), ("layers.0.up", tall)]  # one of many is no head
    MARS(mars.param_groups(layers, mars_type="mars-m"))
    MARS(
        mars.param_groups([("up", hidden), ("b", tall)], mars_type="mars-m", routes=[("b", "mars")])
    )
    assert caplog.messages == []
    MARS([hidden, tall], mars_type="mars-shampoo", lr=0.032, lr_1d=0.016)
    assert "a tensor of shape (2000, 64): by name or shape an embedding or a head" in caplog.text
    assert "mars.param_groups(model, mars_type='mars-shampoo')" in caplog.text


def test_output_layers_that_names_do_not_tell_are_told_by_their_shape(caplog: Log) -> None:
    """Megatron pads the table, so that it has not the shape of the head; to know names was to be
    told less.
    """
    head, hidden = (nn.Parameter(torch.zeros(s)) for s in ((1000, 64), (64, 64)))
    named = [("l.weight", hidden), ("towards_tokens.weight", head)]
    for given in (named, mars.param_groups(named, mars_type="mars-m")):
        caplog.clear()
        MARS(given, mars_type="mars-m")
        assert "towards_tokens.weight: by name or shape an embedding or a head" in caplog.text
    assert "routes=[('^towards_tokens[.]weight$', 'adamw'), …]" in caplog.text
    caplog.clear()
    routes = [("towards_tokens", "adamw")]
    MARS(mars.param_groups(named, mars_type="mars-m", routes=routes), lr=3e-3)
    assert caplog.messages == []


def test_a_rate_of_adamws_for_mars_shampoo(caplog: Log) -> None:
    """The commonest mistake, and it was silent: AdamW's rate, or the default."""
    layer = nn.Linear(4, 4)
    for given in ({"lr": 1e-3, "lr_1d": 1e-3}, {"lr": 1e-3}, {}):
        caplog.clear()
        MARS(mars.param_groups(layer, mars_type="mars-shampoo"), **given)
        (text,) = caplog.messages
        assert text.endswith("whatever AdamW's rate is: begin with lr=0.032, lr_1d=0.016")
    caplog.clear()
    MARS(mars.param_groups(layer, mars_type="mars-shampoo"), lr=0.008, lr_1d=0.004)
    MARS(mars.param_groups(layer, mars_type="mars-shampoo"), lr=0.0)  # frozen
    MARS(mars.param_groups(layer, mars_type="mars-m"), lr=3e-3)
    assert not [text for text in caplog.messages if "far below" in text]


def test_frozen_parameters_are_no_reason_for_advice(caplog: Log) -> None:
    """Beside adapters nearly all are, and are trained by nobody."""
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(2000, 64), "l": nn.Linear(64, 64)})
    model.requires_grad_(False)
    model["lora_A"] = nn.Linear(64, 8, bias=False)
    MARS(model.named_parameters(), mars_type="mars-m", lr=1e-3, weight_decay=0.01)
    assert caplog.messages == []


@pytest.mark.parametrize("matrix", [False, True])
def test_flat_tensors_of_a_wrapper(matrix: bool, caplog: Log) -> None:
    """FSDP1 and DeepSpeed flatten what they wrap."""
    flat = [nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(0))]
    MARS([*flat, *([nn.Parameter(torch.ones(3, 4))] if matrix else [])], mars_type="mars-m")
    assert ("MARS needs FSDP2" in caplog.text) is not matrix
    caplog.clear()
    MARS(flat, mars_type="mars-m", optimize_1d=True)
    MARS(flat, mars_type="plain-adamw")
    MARS(flat[:1], mars_type="mars-m")  # a bias, whose step is taken in backward
    assert caplog.messages == []


def test_the_default_that_is_warned_about_is_that_of_the_optimizer() -> None:
    assert inspect.signature(MARS).parameters["lr_1d"].default == DEFAULT_LR_1D


def test_what_from_adamw_derives_is_meant(caplog: Log) -> None:
    adamw = torch.optim.AdamW(nn.Linear(4, 2).parameters(), lr=1e-3, weight_decay=0.1)
    group = MARS.from_adamw(adamw, verbose=False).param_groups[0]
    assert group["weight_decay"] < group["weight_decay_1d"] == 0.1
    assert caplog.messages == []


def test_a_network_that_mars_would_hardly_train(caplog: Log) -> None:
    resnet = nn.Sequential(CONV, nn.Flatten(), nn.Linear(8, 4))
    for params in (resnet.parameters(), mars.param_groups(resnet, vectors="no-decay")):
        caplog.clear()
        MARS(params)
        assert "87 % of all numbers are in tensors of more than two dimensions" in caplog.text
        assert "'flatten' for convolutions, or 'stack' for experts" in caplog.text
    caplog.clear()
    for options in ({"matrix_rule": "flatten"}, {"matrix_rule": "stack"}, {"optimize_1d": True}):
        MARS(resnet.parameters(), **options)
        MARS(mars.param_groups(resnet, **options))
    MARS(nn.Sequential(nn.Conv2d(1, 1, 2), nn.Linear(8, 4)).parameters())
    assert caplog.messages == []


def test_a_rate_of_vectors_that_is_moved_twice(caplog: Log) -> None:
    """A schedule by hand that sets lr and lr_1d alike."""
    layer = nn.Linear(4, 2)
    optimizer = MARS(layer.parameters(), lr=1e-3, lr_1d=1e-3)
    group = optimizer.param_groups[0]

    def step() -> None:
        layer(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    step()
    for rate in (1e-4, 1e-5):
        group["lr"] = group["lr_1d"] = rate
        step()
    assert len(caplog.messages) == 1
    assert "lr_1d became 0.0001 beside lr=0.0001" in caplog.text
    assert "so that it now is 1e-05" in caplog.text
    caplog.clear()
    other = MARS(layer.parameters(), lr=2e-3, lr_1d=2e-3)
    step()
    other.step()
    other.load_state_dict(optimizer.state_dict())  # rates come with it
    other.step()
    group["lr"] = group["lr_1d"] = group["base_lr"] = 1e-4
    step()
    assert caplog.messages == []


def test_what_was_observed_of_nothing() -> None:
    optimizer = MARS(nn.Linear(4, 2).parameters())
    assert str(mars.diagnose(optimizer)).startswith("no step was observed: take some within `with")


def test_what_is_frozen_or_has_no_shape_yet_is_not_counted(caplog: Log) -> None:
    backbone = nn.Conv2d(4, 8, 3).requires_grad_(False)
    MARS([*backbone.parameters(), *nn.Linear(8, 4).parameters()])
    MARS(nn.LazyLinear(3).parameters())
    assert caplog.messages == []


def test_a_rate_of_vectors_where_there_are_none(caplog: Log) -> None:
    x = nn.Parameter(torch.ones(3, 2))
    optimizer = MARS([x], lr=1e-3, lr_1d=1e-3)
    for rate in (1e-3, 1e-4):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr_1d"] = rate
        x.grad = torch.ones(3, 2)
        optimizer.step()
    assert caplog.messages == []

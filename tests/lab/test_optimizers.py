"""The table of optimizers: who trains what, with which numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from miniature import OPTIMIZERS, run

import mars
from mars.lab.config import Optimizer
from mars.lab.describe import routing
from mars.lab.errors import LabError
from mars.lab.models import GPT
from mars.lab.optimizers import REGISTRY, Together, build, label


def model() -> GPT:
    return GPT(run(Path("unused")).model)


def members(optimizer: torch.optim.Optimizer, gpt: GPT) -> list[set[str]]:
    names = {p: name for name, p in gpt.named_parameters()}
    return [{names[p] for p in group["params"]} for group in optimizer.param_groups]


class PassesOn(torch.optim.AdamW):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class OneRate(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)


class Mine(torch.optim.SGD):
    """An optimizer of a user's."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0, momentum=0.0) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_parameter_is_trained_once_and_norms_never_decay(name: str) -> None:
    gpt = model()
    optimizer = build(gpt, Optimizer(name=name, lr=1e-3, weight_decay=0.1))
    trained = [n for group in members(optimizer, gpt) for n in group]
    assert sorted(trained) == sorted(n for n, _ in gpt.named_parameters())
    for group, names in zip(optimizer.param_groups, members(optimizer, gpt), strict=True):
        norms = any(".ln_" in n for n in names)
        assert not (norms and any("attn" in n for n in names))
        decay = group.get("weight_decay_1d") if norms and "mars_type" in group else None
        assert (group["weight_decay"] if decay is None else decay) == (0.0 if norms else 0.1), names


@pytest.mark.parametrize("name", REGISTRY)
def test_decay_is_decoupled(name: str) -> None:
    """Where the gradient is zero, a step shrinks a matrix by rate times decay and does no more."""
    gpt = model()
    optimizer = build(gpt, Optimizer(name=name, lr=0.01, weight_decay=0.5))
    before = [p.detach().clone() for p in gpt.parameters()]
    for _ in range(2):  # some do nothing in their first step but look at the gradient
        for p in gpt.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    steps = 1 if name == "soap" else 2  # whose first step is only to look
    for old, new in zip(before, gpt.parameters(), strict=True):
        kept = (1 - 0.01 * 0.5) ** steps if new.ndim > 1 else 1.0
        torch.testing.assert_close(new.detach(), kept * old)


def test_adopt_is_coupled_where_somebody_asks_for_it() -> None:
    asked = Optimizer(name="adopt", lr=0.01, options={"weight_decouple": "False"})
    assert not build(model(), asked).param_groups[0]["weight_decouple"]


@pytest.mark.parametrize("name", ["muon", "mars-m", "mars-shampoo"])
def test_matrix_rules_train_hidden_matrices_alone(name: str) -> None:
    """Not embeddings, not the head: the fault of the published Muon baseline."""
    gpt = model()
    first, *rest = members(build(gpt, Optimizer(name=name, lr=1e-3)), gpt)
    hidden = {n for n, p in gpt.named_parameters() if ".h." in n and p.ndim == 2}
    assert first == hidden
    assert "transformer.wte.weight" in set.union(*rest)


def test_tables_can_be_trained_by_another_type() -> None:
    """The routing of `mars.param_groups` is a configuration's too."""
    gpt = model()
    own = "{'mars_type': 'mars-adamw', 'betas': (0.9, 0.95)}"
    optimizer = build(gpt, Optimizer(name="mars-m", lr=1e-3, options={"embeddings": own}))
    kinds = {group["name"]: group["mars_type"] for group in optimizer.param_groups}
    assert kinds["matrices"] == "mars-m"
    assert kinds["embeddings"] == "mars-adamw"
    tables = next(g for g in optimizer.param_groups if g["name"] == "embeddings")
    assert {p.shape for p in tables["params"]} == {
        gpt.transformer.wte.weight.shape, gpt.transformer.wpe.weight.shape
    }  # fmt: skip
    assert (tables["lr"], tables["betas"]) == (1e-3, (0.9, 0.95))
    with pytest.raises(LabError, match="embeddings"):
        build(gpt, Optimizer(name="mars-m", lr=1e-3, options={"embeddings": "sideways"}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"embeddings": "{'weight_decay': 0.3}"},
         {"mars-m lr 0.02 decay 0.1", "plain-adamw lr 0.005 decay 0.3",
          "plain-adamw lr 0.005 decay 0"}),
        ({"embeddings": "mars", "vectors": "mars"},  # AdamW beside the type of the group
         {"mars-m lr 0.02 decay 0.1", "plain-adamw lr 0.005 decay 0.05"}),
    ],
)  # fmt: skip
def test_a_dry_run_tells_the_rates_and_decays_of_the_step(
    options: dict[str, str], expected: set[str]
) -> None:
    gpt = model()
    own = Optimizer(
        name="mars-m", lr=0.02, lr_1d=0.005, weight_decay=0.1, weight_decay_1d=0.05, options=options
    )
    optimizer = build(gpt, own)
    told = {" ".join(line.split()[:5]) for line in routing(gpt, optimizer).splitlines()}
    assert told == expected
    rows = [line.split() for line in mars.explain(optimizer).splitlines()[1:]]
    assert {f"{kind} lr {lr} decay {decay}" for _, kind, _, lr, decay, *_ in rows} == told


def test_muon_is_torchs_and_its_state_returns(tmp_path: Path) -> None:
    gpt = model()
    optimizer = build(gpt, Optimizer(name="muon", lr=2e-2, lr_1d=1e-3, betas=(0.9, 0.0)))
    assert isinstance(optimizer, Together)
    muon, adamw = optimizer.optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert muon.param_groups[0]["momentum"] == 0.9
    assert [g["lr"] for g in optimizer.param_groups] == [2e-2, 1e-3, 1e-3]
    for p in gpt.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    other_model = model()
    other = build(other_model, Optimizer(name="muon", lr=5.0))
    other.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in other.param_groups] == [2e-2, 1e-3, 1e-3]
    other.param_groups[0]["lr"] = 7.0  # the groups are those that step
    assert other.optimizers[0].param_groups[0]["lr"] == 7.0  # type: ignore[attr-defined]


def test_mars_gets_its_numbers() -> None:
    config = Optimizer(
        name="mars-m", lr=1e-2, lr_1d=2e-3, betas=(0.9, 0.98), gamma=0.05, weight_decay=0.1,
        weight_decay_1d=0.2, max_grad_norm=2.0, options={"clip": "None", "ns_steps": "6"},
    )  # fmt: skip
    optimizer = build(model(), config)
    assert isinstance(optimizer, mars.MARS)
    group = optimizer.param_groups[0]
    assert (group["mars_type"], group["betas"], group["gamma"]) == ("mars-m", (0.9, 0.98), 0.05)
    assert (group["clip"], group["ns_steps"], group["max_grad_norm"]) == (None, 6, 2.0)
    embeddings = optimizer.param_groups[1]
    assert embeddings["mars_type"] == "plain-adamw"
    assert (embeddings["lr_1d"], embeddings["weight_decay_1d"]) == (2e-3, 0.2)


def test_your_own() -> None:
    config = Optimizer(name="test_optimizers:Mine", lr=0.5, options={"momentum": "0.9"})
    optimizer = build(model(), config)
    assert isinstance(optimizer, Mine)
    assert [g["momentum"] for g in optimizer.param_groups] == [0.9, 0.9]
    assert label("test_optimizers:Mine") == "Mine"


def test_your_own_that_passes_its_options_on() -> None:
    config = Optimizer(name="test_optimizers:PassesOn", lr=0.5, weight_decay=0.3, betas=(0.8, 0.9))
    optimizer = build(model(), config)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "test_optimizers:OneRate"}, "takes no lr: all rates would be the same one"),
        ({"name": "adamw@0.1"}, "NAME@RATE is for a race; here it is NAME, and --optimizer.lr"),
        ({"name": "adamm"}, "unknown optimizer 'adamm'; did you mean adamw? known: adamw"),
        ({"name": "no.such.module:X"}, "cannot be imported: No module named 'no'"),
        ({"name": "math:sqrt"}, "'math:sqrt' is no torch.optim.Optimizer"),
        ({"name": "adamw", "gamma": 0.1}, "optimizer.gamma is no option of adamw"),
        ({"name": "lion", "lr_1d": 0.1}, "optimizer.lr_1d is no option of lion"),
        ({"name": "adamw", "exact": True}, "optimizer.exact is no option of adamw"),
        ({"name": "mars-m", "options": {"ns_step": "3"}}, "ns_step"),
        ({"name": "adamw", "betas": (0.9, 2.0)}, "Invalid beta parameter"),
        ({"name": "test_optimizers:Mine", "betas": (0.9, 0.9)}, "betas is no option of test_opt"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, object], words: str) -> None:
    with pytest.raises(LabError) as error:
        build(model(), Optimizer(**config))  # type: ignore[arg-type]
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_miniature_covers_the_registry() -> None:
    covered = {settings["name"] for settings in OPTIMIZERS.values()}
    assert covered == set(REGISTRY)

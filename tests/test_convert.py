"""From AdamW to MARS."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mars import MARS
from mars.convert import noise_factor


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def adamw(m: nn.Module) -> torch.optim.AdamW:
    decay = [p for p in m.parameters() if p.ndim == 2]
    rest = [p for p in m.parameters() if p.ndim != 2]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)


def assert_vectors_agree(first, old, second, new, steps: int) -> None:
    """Two models under the same gradients: what is not a matrix moves alike."""
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    for _ in range(steps):
        for p, q in pairs:
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        old.step()
        new.step()
    for p, q in pairs:
        if p.ndim == 1:
            torch.testing.assert_close(p, q)


def test_step_size_rule_keeps_lr_times_decay() -> None:
    m = model()
    old = adamw(m)
    new = MARS.from_adamw(old, verbose=False)
    assert noise_factor(0.025, 0.95) == pytest.approx(1.55, abs=2e-3)
    factor = noise_factor(0.025, 0.9)
    assert factor == pytest.approx(1.245, abs=2e-3)
    assert len(new.param_groups) == 2
    for a, b in zip(old.param_groups, new.param_groups, strict=True):
        assert a["params"] == b["params"]
        assert b["lr"] == pytest.approx(a["lr"] * factor)
        assert b["lr"] * b["weight_decay"] == pytest.approx(a["lr"] * a["weight_decay"])
        assert b["lr_1d"] == a["lr"]
        assert b["betas_1d"] == a["betas"]
        assert b["weight_decay_1d"] == a["weight_decay"]
        assert b["eps"] == 1e-7
        assert b["betas"] == a["betas"]


@pytest.mark.parametrize("options", [{"second_moment": "raw"}, {"mars_type": "mars-m"}])
def test_a_second_moment_without_the_corrections_noise_keeps_the_rate(options: dict) -> None:
    old = adamw(model())
    new = MARS.from_adamw(old, verbose=False, clip=None, **options)
    assert [g["lr"] for g in new.param_groups] == [g["lr"] for g in old.param_groups]


def test_exact_mode_takes_the_rate_of_approximate_mode() -> None:
    both = [MARS.from_adamw(adamw(model()), verbose=False, is_approx=a) for a in (True, False)]
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in both]
    assert rates[0] == rates[1]


def test_vectors_go_on_exactly_as_adamw_trained_them() -> None:
    first, second = model(), model()
    second.load_state_dict(first.state_dict())
    old, new = adamw(first), MARS.from_adamw(adamw(second), verbose=False)
    assert_vectors_agree(first, old, second, new, steps=5)


def test_published_rule() -> None:
    new = MARS.from_adamw(adamw(model()), rule="published", verbose=False)
    assert new.param_groups[0]["lr"] == pytest.approx(6e-3)
    assert new.param_groups[0]["weight_decay"] == pytest.approx(1e-2)
    assert new.param_groups[0]["lr_1d"] == pytest.approx(3e-3)
    assert new.param_groups[0]["betas"] == (0.95, 0.99)
    with pytest.raises(ValueError, match="published' is for 'mars-adamw'"):
        MARS.from_adamw(adamw(model()), rule="published", mars_type="mars-m")


def test_the_step_keeps_its_size() -> None:
    """Gradients that are noise: MARS at the converted rate moves as far as AdamW."""
    sizes = {}
    for name in ("adamw", "mars", "same rate"):
        torch.manual_seed(0)
        p = nn.Parameter(torch.zeros(64, 64))
        old = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        optimizer = old
        if name == "mars":
            optimizer = MARS.from_adamw(old, gamma=0.05, verbose=False)
        elif name == "same rate":
            optimizer = MARS([p], lr=1e-3, betas=(0.9, 0.95), gamma=0.05)
        moved = []
        for _ in range(100):
            before = p.detach().clone()
            p.grad = 1e-3 * torch.randn(64, 64)
            optimizer.step()
            moved.append((p.detach() - before).square().mean().item())
        sizes[name] = math.sqrt(sum(moved[50:]) / 50)
    # m is no longer than AdamW's (only v is), so the converted step is that of AdamW up to the
    # weight that the correction moves to the current gradient.
    assert sizes["mars"] == pytest.approx(sizes["adamw"], rel=0.15)
    assert sizes["same rate"] < 0.85 * sizes["adamw"]


def test_it_says_what_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    MARS.from_adamw(adamw(model()))
    said = capsys.readouterr().out
    assert "mars-adamw in place of AdamW" in said
    assert "0.0006 -> 0.000747" in said
    assert "0.1 -> 0.0803" in said


def test_it_says_the_rate_that_vectors_have(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = MARS.from_adamw(adamw(model()), optimize_1d=True)
    rows = capsys.readouterr().out.splitlines()[2:]
    for row, group, lr in zip(rows, optimizer.param_groups, ("0.000747", "0.00125"), strict=True):
        assert row.split().count(lr) == 2  # of matrices, of vectors
        assert f"{group['lr']:.3g}" == lr


def test_a_model_without_shapes_and_an_engine_that_was_chosen() -> None:
    lazy = torch.optim.AdamW(nn.LazyLinear(3).parameters(), foreach=False, lr=torch.tensor(1e-3))
    made = MARS.from_adamw(lazy)
    assert made.param_groups[0]["foreach"] is False


def test_names_schedulers_and_other_types() -> None:
    m = model()
    old = torch.optim.AdamW(m.named_parameters(), lr=torch.tensor(1e-3), weight_decay=0.1)
    torch.optim.lr_scheduler.LambdaLR(old, lambda t: 1.0)
    new = MARS.from_adamw(old, mars_type="mars-m", verbose=False)
    group = new.param_groups[0]
    assert group["param_names"] == [name for name, _ in m.named_parameters()]
    assert float(group["lr"]) == pytest.approx(1e-3)
    assert float(group["initial_lr"]) == pytest.approx(1e-3)
    assert group["mars_type"] == "mars-m"
    for p in m.parameters():
        p.grad = torch.randn_like(p)
    new.step()


def test_a_group_that_is_added_later_is_converted_as_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when layers are unfrozen: it had the rate of MARS, 240 times as high."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    own = {"lr": 1e-5, "betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-6}
    adamw = torch.optim.AdamW(first.parameters(), **own)
    optimizer = MARS.from_adamw(adamw, verbose=False)
    optimizer.add_param_group({"params": list(second.parameters())})
    was, added = optimizer.param_groups
    assert {**added, "params": was["params"]} == was
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1e-6})
    adamw.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1e-6})
    theirs = MARS.from_adamw(adamw, verbose=False).param_groups[1]
    added = optimizer.param_groups[2]
    assert added["lr_1d"] * added["lr"] / added["base_lr"] == pytest.approx(
        theirs["lr_1d"] / noise_factor(0.025, 0.9)
    )
    assert caplog.messages == []


def test_notes_of_the_users_stay_in_their_groups() -> None:
    m = model()
    matrices = [p for p in m.parameters() if p.ndim == 2]
    rest = [p for p in m.parameters() if p.ndim != 2]
    old = torch.optim.AdamW(
        [{"params": matrices, "lr_mult": 2.0}, {"params": rest, "name": "rest"}]
    )
    new = MARS.from_adamw(old, verbose=False)
    assert [group.get("lr_mult") for group in new.param_groups] == [2.0, None]
    assert "decoupled_weight_decay" not in new.param_groups[0]
    again = MARS.from_adamw(old, verbose=False)
    again.load_state_dict(new.state_dict())
    assert again.param_groups[0]["lr_mult"] == 2.0


def test_wrong_arguments() -> None:
    m = model()
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.AdamW, not SGD"):
        MARS.from_adamw(torch.optim.SGD(m.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Invalid rule: 'guess'"):
        MARS.from_adamw(adamw(m), rule="guess")
    with pytest.raises(ValueError, match=r"no rule keeps the size .* 'mars-lion'"):
        MARS.from_adamw(adamw(m), mars_type="mars-lion")
    with pytest.raises(TypeError, match="chooses 'lr'"):
        MARS.from_adamw(adamw(m), lr=0.1)


def test_a_scheduler_that_warms_up_is_already_attached() -> None:
    """lr is 0 at that moment; vectors still follow AdamW's rate."""
    first, second = model(), model()
    second.load_state_dict(first.state_dict())
    old, other = adamw(first), adamw(second)
    for optimizer in (old, other):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 5))
    new = MARS.from_adamw(other, verbose=False)
    for optimizer, factor in ((old, 1.0), (new, noise_factor(0.025, 0.9))):
        for group in optimizer.param_groups:
            assert group["lr"] == 0.0
            group["lr"] = 1e-3 * factor
    assert new.param_groups[0]["initial_lr"] == pytest.approx(6e-4 * noise_factor(0.025, 0.9))
    assert_vectors_agree(first, old, second, new, steps=1)


def test_to_plain_adamw_and_to_a_subclass() -> None:
    class Mine(MARS):
        """Somebody's own."""

    old = adamw(model())
    new = Mine.from_adamw(old, mars_type="plain-adamw", verbose=False)
    assert type(new) is Mine
    for a, b in zip(old.param_groups, new.param_groups, strict=True):
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert a[name] == b[name]


def test_moments_that_are_lost_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    old = adamw(model())
    for group in old.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    old.step()
    new = MARS.from_adamw(old, verbose=False)
    assert "moments of AdamW are not carried over" in caplog.text
    assert not new.state


def test_a_scheduler_that_stays_behind_is_said(caplog) -> None:
    p = torch.nn.Parameter(torch.zeros(3, 3))
    adamw = torch.optim.AdamW([p], lr=1e-2)
    MARS.from_adamw(adamw, verbose=False)
    assert not caplog.text
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: min(1.0, step / 10))
    MARS.from_adamw(adamw, verbose=False)
    assert "a scheduler moves the rates of this AdamW" in caplog.text


def test_a_rate_of_zero_is_shown_as_it_is(capsys) -> None:
    MARS.from_adamw(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, 3))], lr=0.0))
    assert "0 -> 0" in capsys.readouterr().out


def test_a_differentiable_adamw_is_taken_over() -> None:
    p = torch.nn.Parameter(torch.ones(2, 2))
    adamw = torch.optim.AdamW([p], differentiable=True)
    optimizer = MARS.from_adamw(adamw, verbose=False)
    assert optimizer.defaults["differentiable"]
    assert optimizer.param_groups[0]["differentiable"]

"""Lean formats: unbiased, bounded, saved as they are; training with them."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from choice import choose
from mars import MARS
from mars.engines import Batch, batch
from mars.rule import formats


def mean_of(rounded, repeats: int = 4000) -> torch.Tensor:
    return sum(rounded(float(t)).double() for t in range(repeats)) / repeats


def test_bfloat16_is_right_on_average() -> None:
    x = torch.randn(300) * torch.logspace(-8, 3, 300)
    got = mean_of(lambda t: formats.to_bfloat16(x, formats.random_bits(x, t, 1)))
    # A unit in the last place is 2⁻⁸ of x; its mean over 4000 rounds is sharper by √4000.
    assert ((got - x) / x).abs().max() < 4 * 2**-8 / 4000**0.5


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_are_right_on_average_and_never_far(signed: bool) -> None:
    x = torch.randn(500) * torch.logspace(-4, 2, 500)
    x = x if signed else x.square()

    def rounded(t: float) -> torch.Tensor:
        code, exponent = formats.encode(x, formats.random_bits(x, t, 1), signed)
        assert code.dtype == exponent.dtype == torch.uint8
        return formats.decode(code, exponent, signed)

    error = (rounded(1.0) - x).abs()
    top = x.abs().view(-1, 100).amax()
    assert (error <= x.abs() / 8 + top * 2.0 ** (-16 if signed else -31)).all()
    biased = (mean_of(rounded) - x).abs() / x.abs().clamp(min=1e-9)
    assert biased.median() < 4 / 8 / 4000**0.5


def test_a_second_moment_above_zero_stays_above_zero() -> None:
    v = torch.full((128,), 1e-30)
    v[0] = 1.0
    code, exponent = formats.encode(v, torch.zeros(128, dtype=torch.int64), signed=False)
    assert (formats.decode(code, exponent, signed=False) > 0).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, -1.0, 3e38])
def test_edges(value: float) -> None:
    x = torch.full((130,), value)
    bits = formats.random_bits(x, 1.0, 1)
    code, exponent = formats.encode(x, bits, signed=True)
    decoded = formats.decode(code, exponent, signed=True)
    assert torch.allclose(decoded, x, rtol=1 / 8, atol=1e-33)
    assert torch.allclose(formats.to_bfloat16(x, bits).float(), x, rtol=1 / 128, atol=1e-40)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = torch.ones(256)
    x[3] = bad
    bits = formats.random_bits(x, 1.0, 1)
    decoded = formats.decode(*formats.encode(x, bits, signed=True), signed=True)
    assert decoded[:128].isnan().all()
    assert decoded[128:].isfinite().all()
    assert not formats.to_bfloat16(x, bits)[3].isfinite()


def run(seed: int, **options) -> tuple[float, MARS]:
    """Regression with a two-layer net on fixed data; the last loss."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 16, generator=random)
    targets = torch.tanh(inputs @ torch.randn(16, 16, generator=random)).sum(1, keepdim=True)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = MARS(model.parameters(), lr=5e-3, optimize_1d=True, **options)
    for _ in range(150):
        batch = torch.randint(0, 256, (64,), generator=random)
        optimizer.zero_grad()
        loss = (model(inputs[batch]) - targets[batch]).square().mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(inputs) - targets).square().mean()), optimizer


@pytest.mark.parametrize(("form", "bytes_"), [("bfloat16", 6.0), ("8bit", 3.05)])
def test_training_with_lean_state_ends_where_float32_does(form: str, bytes_: float) -> None:
    full = [run(seed)[0] for seed in range(3)]
    lean, optimizer = zip(*(run(seed, state_dtype=form) for seed in range(3)), strict=True)
    spread = max(full) - min(full)
    mean = sum(full) / 3
    assert abs(sum(lean) / 3 - mean) < 2 * spread + 0.1 * mean
    p = optimizer[0].param_groups[0]["params"][0]
    state = optimizer[0].state[p]
    held = sum(v.numel() * v.element_size() for v in state.values() if v.ndim)
    assert held / p.numel() <= bytes_


@pytest.mark.parametrize("form", ["bfloat16", "8bit"])
def test_a_checkpoint_keeps_the_format_and_continues_bit_for_bit(form: str) -> None:
    def make():
        torch.manual_seed(0)
        x = nn.Parameter(torch.randn(20, 30))
        return x, MARS([x], state_dtype=form)

    (x, first), (y, second) = make(), make()
    gradients = [torch.randn(20, 30) for _ in range(6)]
    for g in gradients[:3]:
        x.grad = g
        first.step()
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    with torch.no_grad():
        y.copy_(x)
    for g in gradients[3:]:
        x.grad, y.grad = g, g.clone()
        first.step()
        second.step()
    assert torch.equal(x, y)
    for name, value in first.state[x].items():
        assert value.dtype == second.state[y][name].dtype
        assert torch.equal(value, second.state[y][name])


@pytest.mark.parametrize("engine", ["reference", "foreach", "cpu"])
@pytest.mark.parametrize("clip", ["tensor", "global", None])
@pytest.mark.parametrize(("kind", "form"), [("mars-adamw", "bfloat16"), ("mars-lion", "8bit")])
def test_some_tensors_are_decoded_at_a_time(
    kind: str, form: str, clip: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once took more memory than the fewer bits save."""
    sizes: list[int] = []
    decode = Batch.widened

    def seen(own: Batch) -> Batch:
        sizes.append(sum(x.numel() for x in own.x))
        return decode(own)

    monkeypatch.setattr(Batch, "widened", seen)
    ends = []
    for room in (1 << 22, 100):
        monkeypatch.setattr(batch, "DECODED", room)
        sizes.clear()
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, 8)) for n in (3, 5, 40, 2, 7, 1)]
        optimizer = MARS(
            params, mars_type=kind, clip=clip, state_dtype=form, max_grad_norm=1.0, **choose(engine)
        )
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        ends.append([x for p in params for x in (p, *optimizer.state[p].values())])
        whole = sum(p.numel() for p in params)
        assert max(sizes) == (whole if room > whole else 320)  # the largest tensor alone
    assert all(map(torch.equal, *ends))


def test_a_wrong_state_of_8_bits_is_refused() -> None:
    x = nn.Parameter(torch.randn(20, 30))
    optimizer = MARS([x], state_dtype="8bit")
    x.grad = torch.ones(20, 30)
    optimizer.step()
    spoilt = optimizer.state_dict()
    spoilt["state"][0]["exp_avg_exponent"] = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="exp_avg_exponent has 1 elements for 600 codes"):
        MARS([x], state_dtype="8bit").load_state_dict(spoilt)


def test_the_format_is_chosen_before_the_first_step() -> None:
    x = nn.Parameter(torch.randn(4, 4))
    optimizer = MARS([x])
    x.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.param_groups[0]["state_dtype"] = "bfloat16"
    with pytest.raises(RuntimeError, match="set state_dtype and is_approx before the first"):
        optimizer.step()


def test_exact_mode_keeps_last_gradients_wide() -> None:
    x = nn.Parameter(torch.randn(4, 4))
    optimizer = MARS([x], is_approx=False, state_dtype="8bit")

    def closure():
        optimizer.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert optimizer.state[x]["last_grad"].dtype == torch.float32
    assert optimizer.state[x]["exp_avg"].dtype == torch.uint8

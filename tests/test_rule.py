"""The mathematics: a step by hand, identities, and limits that are known optimizers."""

from __future__ import annotations

import math

import pytest
import torch

from choice import choose
from mars import MARS
from mars.engines import ENGINES
from mars.rule import KINDS, MATRIX, Hyper, update
from mars.rule.estimator import average, average_without_h, clip, correct, kappa, norm
from mars.rule.halves import join, split
from mars.rule.newton_schulz import COEFFICIENTS, NewtonSchulz
from mars.rule.update import Moments


def run(make, xs: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Step an optimizer made by ``make`` over the gradients; return the parameters."""
    xs = [torch.nn.Parameter(x.clone()) for x in xs]
    optimizer = make(xs)
    for gs in gradients:
        for x, g in zip(xs, gs, strict=True):
            x.grad = g.clone()
        optimizer.step()
    return [x.detach() for x in xs]


def problem(dtype: torch.dtype = torch.float32, steps: int = 50, shapes=((6, 4), (4, 9), (5,))):
    xs = [torch.randn(s, dtype=dtype) for s in shapes]
    return xs, [[torch.randn(s, dtype=dtype) for s in shapes] for _ in range(steps)]


def test_two_steps_by_hand() -> None:
    """One weight, two steps of MARS-AdamW: every number computed on paper.

    x=1, lr=0.1, β=(0.5, 0.75), γ=0.5, λ=0.1, ε=0, so κ = 0.5·0.5/0.5 = 0.5.
    Step 1: g=0.2, h=0: c=0.3 (no clip), m=0.15, v=0.0225; m̂=0.3, v̂=0.09: u=1;
            x = 1 − 0.1·(1 + 0.1) = 0.89.
    Step 2: g=1.2, h=0.2: c=1.7, clipped to 1; m=0.575, v=0.266875; m̂=0.575/0.75,
            v̂=0.266875/0.4375; x = 0.89 − 0.1·(m̂/√v̂ + 0.089).
    """
    x = torch.nn.Parameter(torch.tensor([[1.0]], dtype=torch.float64))
    optimizer = MARS([x], lr=0.1, betas=(0.5, 0.75), gamma=0.5, weight_decay=0.1, eps=0.0)
    x.grad = torch.tensor([[0.2]], dtype=torch.float64)
    optimizer.step()
    assert x.item() == pytest.approx(0.89, abs=1e-14)
    x.grad = torch.tensor([[1.2]], dtype=torch.float64)
    optimizer.step()
    u = (0.575 / 0.75) / math.sqrt(0.266875 / 0.4375)
    assert x.item() == pytest.approx(0.89 - 0.1 * (u + 0.089), abs=1e-14)


@pytest.mark.parametrize("clip", ["tensor", None])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_lion_that_met_a_nan_shows_it(engine: str, clip: str | None) -> None:
    """The sign of a NaN is 0: parameters would stand still for ever, and look sound."""
    xs = [torch.ones(3, 3)]
    gradients = [[torch.ones(3, 3)] for _ in range(4)]
    gradients[1][0][0, 0] = math.nan
    options = {"mars_type": "mars-lion", "clip": clip, **choose(engine)}
    (x,) = run(lambda params: MARS(params, **options), xs, gradients)
    assert x[0, 0].isnan()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e-3, 1e-1, 1e6])
@pytest.mark.parametrize("kind", ["mars-m", "mars-shampoo"])
def test_newton_schulz_in_float16_does_not_care_for_the_size(
    kind: str, size: float, engine: str
) -> None:
    g = torch.randn(256, 256)
    gradients = [[g * size / g.norm()]]
    options = {"mars_type": kind, "lr": 1.0, "weight_decay": 0.0, "clip": None, **choose(engine)}
    ends = [
        run(
            lambda params, d=d: MARS(params, ns_dtype=d, **options),
            [torch.zeros(256, 256)],
            gradients,
        )
        for d in ("float16", "float32")
    ]
    (half,), (single,) = ends
    assert (half - single).norm() < 0.02 * single.norm()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gamma_zero_without_clip_is_torch_adamw(engine: str, amsgrad: bool, decay: float) -> None:
    xs, gradients = problem(torch.float64)
    ours = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": decay, "amsgrad": amsgrad}
    got = run(
        lambda p: MARS(
            p, gamma=0.0, clip=None, optimize_1d=True, foreach=engine == "foreach", **ours
        ),
        xs,
        gradients,
    )
    want = run(lambda p: torch.optim.AdamW(p, **ours), xs, gradients)
    for a, b in zip(got, want, strict=True):
        # The same arithmetic in another order: a few units in the last place after 50 steps.
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_adamw_is_torch_adamw(engine: str) -> None:
    xs, gradients = problem(torch.float64)
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": True}
    got = run(
        lambda p: MARS(p, mars_type="plain-adamw", foreach=engine == "foreach", **options),
        xs,
        gradients,
    )
    want = run(lambda p: torch.optim.AdamW(p, **options), xs, gradients)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("gamma", [0.0, 0.025, 0.3])
def test_unclipped_lion_is_lion(gamma: float) -> None:
    """sign((1−γ)EMA(g) + γg) is Lion with β₁' = (1−γ)β₁ and β₂' = β₁."""
    beta = 0.9

    class Lion:
        def __init__(self, params: list[torch.nn.Parameter]) -> None:
            self.params = params
            self.m = [torch.zeros_like(p) for p in params]

        @torch.no_grad()
        def step(self) -> None:
            for p, m in zip(self.params, self.m, strict=True):
                u = ((1 - gamma) * beta * m + (1 - (1 - gamma) * beta) * p.grad).sign()
                m.mul_(beta).add_(p.grad, alpha=1 - beta)
                p.sub_(1e-3 * (u + 0.1 * p))

    xs, gradients = problem(torch.float64)
    got = run(
        lambda p: MARS(
            p,
            lr=1e-3,
            betas=(beta, 0.99),
            gamma=gamma,
            weight_decay=0.1,
            clip=None,
            mars_type="mars-lion",
            optimize_1d=True,
        ),
        xs,
        gradients,
    )
    for a, b in zip(got, run(Lion, xs, gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gamma", "nesterov"), [(0.0, False), (0.05, True)])
@pytest.mark.parametrize(
    ("mars_type", "scale"), [("mars-m", "match_rms_adamw"), ("mars-shampoo", "original")]
)
def test_unclipped_matrix_types_are_muon(
    mars_type: str, scale: str, gamma: float, nesterov: bool
) -> None:
    """γ = 0 is Muon without Nesterov; γ = 1 − β₁ is Muon with it, at either scale."""
    xs, gradients = problem(torch.float32, steps=8, shapes=((16, 8), (8, 24)))
    got = run(
        lambda p: MARS(
            p,
            lr=0.02,
            betas=(0.95, 0.99),
            gamma=gamma,
            weight_decay=0.1,
            clip=None,
            mars_type=mars_type,
        ),
        xs,
        gradients,
    )
    want = run(
        lambda p: torch.optim.Muon(
            p,
            lr=0.02,
            momentum=0.95,
            nesterov=nesterov,
            weight_decay=0.1,
            adjust_lr_fn=scale,
        ),
        xs,
        gradients,
    )
    for a, b, x in zip(got, want, xs, strict=True):
        # Both iterate in bfloat16, each rounding in its own places.
        assert (a - b).norm() <= 0.08 * (b - x).norm()


def test_form_without_h_equals_the_recursion() -> None:
    """n = β₁n + (1−β₁)(1−γ)g, m = n + γg, while γ is constant, whatever β₁ does."""
    gamma = 0.3
    n = m = h = torch.zeros(5, dtype=torch.float64)
    for step in range(30):
        beta = 0.8 + 0.15 * (step % 2)
        g = torch.randn(5, dtype=torch.float64)
        m = average(m, correct(g, h, gamma, beta), beta)
        n, free = average_without_h(n, g, gamma, beta)
        torch.testing.assert_close(free, m, rtol=1e-12, atol=1e-12)
        h = g


def test_unclipped_approximate_momentum_is_quasi_hyperbolic() -> None:
    """m = (1−γ)·EMA(g) + γ·g."""
    gamma, beta = 0.025, 0.95
    m = h = ema = torch.zeros(5, dtype=torch.float64)
    for _ in range(30):
        g = torch.randn(5, dtype=torch.float64)
        m = average(m, correct(g, h, gamma, beta), beta)
        ema = average(ema, g, beta)
        torch.testing.assert_close(m, (1 - gamma) * ema + gamma * g, rtol=1e-12, atol=1e-12)
        h = g


def test_noise_of_the_correction() -> None:
    """Var(c) = ((1+κ)² + κ²)σ² for independent noise; σ² where h shares it."""
    k = float(kappa(0.025, 0.95))
    g, h = torch.randn(2, 400_000, dtype=torch.float64)
    assert correct(g, h, 0.025, 0.95).var() == pytest.approx((1 + k) ** 2 + k**2, rel=0.02)
    drift = 0.3
    assert correct(g, g - drift, 0.025, 0.95).var() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("gamma", [0.025, 0.1])
def test_noise_of_the_average_of_corrected_gradients(gamma: float) -> None:
    """docs/math.md, fact 3: its variance to that of a plain average, independent gradients."""
    beta1, size = 0.95, 20_000
    m = plain = h = torch.zeros(size, dtype=torch.float64)
    for _ in range(200):
        g = torch.randn(size, dtype=torch.float64)
        m, plain, h = average(m, correct(g, h, gamma, beta1), beta1), average(plain, g, beta1), g
    weight = gamma**2 + 2 * gamma * (1 - gamma) * (1 - beta1)
    ratio = (1 - gamma) ** 2 + weight * (1 + beta1) / (1 - beta1)
    assert float(m.var() / plain.var()) == pytest.approx(ratio, rel=0.02)


def test_clip_shortens_only_what_is_longer_than_one() -> None:
    for length in (0.0, 0.5, 1.0, 7.0):
        c = torch.nn.functional.normalize(torch.randn(9, dtype=torch.float64), dim=0) * length
        assert norm(clip(c, norm(c))).item() == pytest.approx(min(1.0, length), abs=1e-12)


BANDS = {  # (coefficients, steps): singular values of the result, from σ/‖M‖_F in [1e-2, 1]
    ("muon", 5): (0.65, 1.25),
    ("polar-express", 5): (0.85, 1.13),
    ("polar-express", 8): (0.98, 1.01),
}


@pytest.mark.parametrize("form", ["muon", "shampoo"])
@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16), (3, 16, 24)])
@pytest.mark.parametrize(("coefficients", "steps"), BANDS)
def test_newton_schulz_orthogonalises(coefficients, steps, shape, form) -> None:
    rank = min(shape[-2:])
    u = torch.linalg.qr(torch.randn(*shape[:-2], shape[-2], rank, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(*shape[:-2], shape[-1], rank, dtype=torch.float64))[0]
    s = torch.logspace(-1.5, 0, rank, dtype=torch.float64)
    M = (u * s) @ v.mT
    ns = NewtonSchulz(steps, coefficients, "float64")
    out = ns.muon(M) if form == "muon" else ns.shampoo(M, 1e-8)
    low, high = BANDS[coefficients, steps]
    sigma = torch.linalg.svdvals(out)
    assert low <= sigma.min() and sigma.max() <= high  # noqa: PT018
    # The singular vectors stay: uᵀ·out·v is diagonal.
    inner = u.mT @ out @ v
    off = inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-9


def test_newton_schulz_of_zero_is_zero() -> None:
    for coefficients in COEFFICIENTS:
        ns = NewtonSchulz(5, coefficients)
        assert ns.muon(torch.zeros(4, 3)).count_nonzero() == 0
        assert ns.shampoo(torch.zeros(4, 3), 1e-8).count_nonzero() == 0


def test_a_stack_gives_the_bits_of_its_members() -> None:
    M = torch.randn(5, 24, 40)
    ns = NewtonSchulz()
    for i, out in enumerate(ns.muon(M)):
        assert torch.equal(out, ns.muon(M[i]))
    for i, out in enumerate(ns.shampoo(M, 1e-8)):
        assert torch.equal(out, ns.shampoo(M[i], 1e-8))


def test_the_file_of_a_matrix_type_has_its_parts_and_their_product() -> None:
    assert MATRIX.keys() == {kind for kind in KINDS if KINDS[kind].matrix}
    m = torch.randn(7, 4)
    for kind, own in MATRIX.items():
        given = (m, 0.9, 1e-8, NewtonSchulz())
        assert torch.equal(own.direction(*given), own.scale(7, 4) * own.orthogonal(*given)), kind


@pytest.mark.parametrize(("kind", "rounds"), [("mars-shampoo", False), ("mars-m", True)])
def test_an_order_that_rounds_first_sees_no_more_than_16_bits(kind: str, rounds: bool) -> None:
    """By which ranks send each other half as much."""
    m = torch.randn(7, 4)
    orthogonal = [MATRIX[kind].orthogonal(x, 0.9, 0.0, NewtonSchulz()) for x in (m, m.bfloat16())]
    assert MATRIX[kind].ROUNDS_FIRST is rounds
    assert torch.equal(orthogonal[0].float(), orthogonal[1].float()) is rounds


def test_update_is_pure() -> None:
    """The rule writes to nothing it is given."""
    for kind, needs in KINDS.items():
        x, g, h = torch.randn(3, 4, 4, dtype=torch.float64)
        v = torch.rand(4, 4, dtype=torch.float64) if needs.second_moment else None
        s = Moments(torch.randn(4, 4, dtype=torch.float64), v, v)
        given = [x, g, h, *(t for t in s if t is not None)]
        copies = [t.clone() for t in given]
        k = Hyper(0.1, 0.9, 0.99, 1e-8, 0.1, gamma=0.1, clip="tensor", maximize=True)
        update(kind, x, g, h, s, 3, k)
        assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_lossless(dtype: torch.dtype) -> None:
    x = torch.randn(100_000) * torch.logspace(-3, 3, 100_000)
    high, low = split(x, dtype)
    assert high.dtype == dtype
    assert low.dtype == torch.int16
    back = join(high, low)
    # Below 2^-14 float16 has no exponents left; the pair is then a multiple of 2^-39.
    exact = torch.ones_like(x).bool() if dtype == torch.bfloat16 else x.abs() >= 2**-14
    assert torch.equal(back[exact], x[exact])
    assert (back - x).abs().max() <= 2**-40
    # The high half is what the model sees: the nearest 16-bit number.
    assert (high.float() - x).abs().le((x.to(dtype).float() - x).abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_keep_what_is_not_a_number(dtype: torch.dtype) -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001], dtype=torch.int32)
    nan = bits.view(torch.float32)
    assert join(*split(nan, dtype)).isnan().all()
    infinite = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e-9])
    back = join(*split(infinite, dtype))
    torch.testing.assert_close(back, infinite, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["mars-shampoo", "mars-m"])
def test_autocast_does_not_change_the_dtype_of_the_iteration(kind: str) -> None:
    def stepped(on: bool) -> torch.Tensor:
        p = torch.nn.Parameter(torch.zeros(16, 16))
        p.grad = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            MARS([p], lr=1.0, mars_type=kind, ns_dtype="float32").step()
        return p.detach()

    assert torch.equal(stepped(True), stepped(False))

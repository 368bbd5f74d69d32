"""Newton–Schulz by the Gram matrix: as close to the float64 iteration as step by step.

On a GPU at the sizes of real models, where the kernel for symmetric products runs; on a CPU small.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from mars.engines.fused.matrices import MOST, RESTART, Stack, by_gram, by_steps
from mars.rule.newton_schulz import COEFFICIENTS, NewtonSchulz

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SIZES = [(1600, 6400), (768, 2304), (520, 1040)] if ON_GPU else [(96, 200), (128, 512)]


def spectrum(n: int, m: int, values: Tensor) -> Tensor:
    """A matrix with these singular values."""
    U = torch.linalg.qr(torch.randn(n, n, device=DEVICE))[0]
    V = torch.linalg.qr(torch.randn(m, n, device=DEVICE))[0]
    return (U * values.to(DEVICE)) @ V.mT


HARD = {
    "random": torch.randn,
    "condition 1e2": lambda n, m: spectrum(n, m, torch.logspace(0, -2, n)),
    "condition 1e8": lambda n, m: spectrum(n, m, torch.logspace(0, -8, n)),
    "power law": lambda n, m: spectrum(n, m, 1 / torch.arange(1, n + 1)),
    "all equal": lambda n, m: spectrum(n, m, torch.ones(n)),
    "a tenth of the rank": lambda n, m: torch.randn(n, n // 10) @ torch.randn(n // 10, m),
    "rank 1": lambda n, m: torch.randn(n, 1) @ torch.randn(1, m),
    "rank 1 and noise": lambda n, m: torch.randn(n, 1) * torch.randn(m) + 1e-2 * torch.randn(n, m),
    "a mean": lambda n, m: 1 + 0.3 * torch.randn(n, m),
    "constant": torch.ones,
    "repeated rows": lambda n, m: torch.randn(n // 8, m).repeat(8, 1),
    "empty rows": lambda n, m: torch.randn(n, m) * (torch.rand(n, 1) < 0.1),
    "rows of all sizes": lambda n, m: torch.randn(n, m) * torch.logspace(0, -5, n)[:, None],
    "one element": lambda n, m: torch.nn.functional.pad(torch.ones(1, 1), (5, m - 6, 3, n - 4)),
}  # fmt: skip


def table(name: str, steps: int) -> list[tuple[float, float, float]]:
    return NewtonSchulz(steps, name).polynomials()


def iterate(how, M: Tensor, dtype: torch.dtype, name: str, steps: int) -> Tensor:
    """On a stack of three; what is not written yet is NaN."""
    n, m = M.shape
    X = (M.to(DEVICE, torch.float64) / M.double().norm()).to(dtype).repeat(3, 1, 1)
    Y, *AB = (
        torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
        for shape in ((3, n, m), *[(3 if how is by_steps else 6, n, n)] * 2)
    )
    out = how(X, Y, *AB, table(name, steps))
    assert torch.equal(out[0], out[2])
    return out[0].double()


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("hard", HARD)
def test_as_good_as_step_by_step(hard, size, name) -> None:
    torch.manual_seed(0)
    M = HARD[hard](*size)
    want = iterate(by_steps, M, torch.float64, name, 5)
    steps, gram = (
        float((iterate(how, M, dtype, name, 5) - want).norm() / want.norm())
        for how, dtype in ((by_steps, torch.bfloat16), (by_gram, torch.float16))
    )
    # A constant matrix has one singular value, and rounding all its elements alike moves that.
    assert gram <= max(0.15 if hard == "constant" else 0.03, steps), (gram, steps)


@pytest.mark.parametrize("steps", range(1, MOST + 1))
def test_any_number_of_steps(steps) -> None:
    torch.manual_seed(1)
    M = torch.randn(*SIZES[-1])
    for name in COEFFICIENTS:
        want = iterate(by_steps, M, torch.float64, name, steps)
        assert (iterate(by_gram, M, torch.float16, name, steps) - want).norm() <= 0.01 * want.norm()


def test_zero_stays_zero() -> None:
    n, m = SIZES[-1]
    X, Y = (torch.zeros(1, n, m, dtype=torch.float16, device=DEVICE) for _ in range(2))
    A, B = (torch.zeros(2, n, n, dtype=torch.float16, device=DEVICE) for _ in range(2))
    assert by_gram(X, Y, A, B, table("muon", 5)).count_nonzero() == 0


def test_where_it_is_chosen() -> None:
    def chosen(short: int, long: int, **ns) -> bool:
        return Stack("mars-m", short, long, NewtonSchulz(**ns), *torch.empty(2, 1), True).gram

    assert chosen(100, 200)
    assert not chosen(100, 199), "too square: it costs more"
    assert not chosen(100, 400, steps=MOST + 1)
    assert not chosen(100, 400, dtype="float32")


def test_all_numbers_are_far_from_the_largest_of_float16() -> None:
    """Of X, A, B and of P, the product of B since the last restart, at any singular value."""
    for name in COEFFICIENTS:
        s, P = torch.linspace(0, 1, 1000), torch.ones(1000)
        for i, (a, b, c) in enumerate(table(name, 5)):
            A = s.square()
            B = a + b * A + c * A * A
            s, P = s * B, B if i == RESTART else P * B
            assert max(float(z.abs().max()) for z in (s, A, B, P)) < 100

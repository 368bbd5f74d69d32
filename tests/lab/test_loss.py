"""The chunked loss against torch's own on all logits, in float64 where that is the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpu import needs_gpu
from mars.lab.models import linear_cross_entropy
from mars.lab.models import loss as loss_module

N, V, D = 300, 77, 16
SMALL = 128 * V  # one byte an element: chunks of 128 rows at most, whatever the dtype


@pytest.fixture(params=["chunks", "whole"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "chunks":
        monkeypatch.setattr(loss_module, "_budget", lambda device: SMALL)
    return request.param


def data(dtype=torch.float64, ignored: bool = True, device: str = "cpu") -> tuple[Tensor, ...]:
    hidden = torch.randn(N, D, device=device).to(dtype).requires_grad_()
    weight = torch.randn(V, D, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), device=device)
    if ignored:
        targets[::7] = -100
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def gradients(function, hidden, weight, targets, upstream=1.0) -> tuple[Tensor, ...]:
    loss = function(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss * upstream, (hidden, weight))


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("upstream", [1.0, 3.7])
def test_equals_torch(chunks: str, ignored: bool, upstream: float) -> None:
    given = data(ignored=ignored)
    for got, want in zip(
        gradients(linear_cross_entropy, *given, upstream),
        gradients(plain, *given, upstream),
        strict=True,
    ):
        assert error(got, want) < 1e-14  # float64, other orders of summation


def test_gradients_by_differences(chunks: str) -> None:
    hidden, weight, targets = data()
    few = hidden.detach()[:20].requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets[:20]),
                                    (few, weight))  # fmt: skip


def test_chunks_are_even_and_fit() -> None:
    for rows in (1, 127, 128, 129, 5000, 32768):
        for row_bytes in (77, 100608):
            size = loss_module.chunk_rows(rows, row_bytes, 1 << 28)
            count = -(-rows // size)
            assert count == 1 or size % 128 == 0
            assert size * row_bytes <= (1 << 28) + 128 * row_bytes
            assert count * size - rows < 128 * count, "the last chunk is not much smaller"
    assert loss_module.chunk_rows(0, 77, 1 << 20) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_as_exact_as_torch_under_autocast(chunks: str, dtype: torch.dtype) -> None:
    hidden, weight, targets = data(torch.float32)
    exact = gradients(plain, hidden.double(), weight.double(), targets)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        ours = gradients(linear_cross_entropy, hidden, weight, targets)
        theirs = gradients(plain, hidden, weight, targets)
    assert [t.dtype for t in ours] == [torch.float32] * 3
    assert abs(ours[0] - exact[0]) < 2 * torch.finfo(dtype).eps * exact[0]
    for got, other, want in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        # Rounding of the operands and of the logits' gradient is common to both; twice is room for
        # one more rounding, of a dtype's eps.
        assert error(got, want) < 2 * error(other, want) + torch.finfo(dtype).eps


def test_float16_keeps_the_gradient_of_many_rows() -> None:
    """1/N on a softmax of small probabilities is below float16's range; it is applied later."""
    rows, vocabulary = 4096, 1000
    hidden = (0.01 * torch.randn(rows, D)).requires_grad_()
    weight = torch.randn(vocabulary, D).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,))
    exact = gradients(plain, hidden.double(), weight.double(), targets)
    with torch.autocast("cpu", torch.float16):
        got = gradients(linear_cross_entropy, hidden, weight, targets, upstream=2.0**14)
    assert error(got[1] / 2**14, exact[1]) < 2e-3
    assert error(got[2] / 2**14, exact[2]) < 2e-3


def test_grad_scaler_with_an_infinite_loss_skips_the_step() -> None:
    hidden, weight, targets = data(torch.float32)
    parameter = torch.nn.Parameter(weight.detach().clone())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = parameter.detach().clone()
    scaler.scale(linear_cross_entropy(hidden.detach() * math.inf, parameter, targets)).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, before)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(linear_cross_entropy(hidden.detach(), parameter, targets)).backward()
    scaler.step(optimizer)
    want = before - torch.autograd.grad(plain(hidden, weight, targets), weight)[0]
    torch.testing.assert_close(parameter.detach(), want, rtol=1e-5, atol=1e-6)  # float32


def test_accumulation_adds_up() -> None:
    hidden, weight, targets = data(ignored=False)
    for part in (slice(0, N // 2), slice(N // 2, N)):
        (linear_cross_entropy(hidden[part], weight, targets[part]) / 2).backward()
    want = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    assert error(hidden.grad, want[0]) < 1e-14
    assert error(weight.grad, want[1]) < 1e-14


def test_one_frozen_side() -> None:
    hidden, weight, targets = data()
    want = gradients(plain, hidden, weight, targets)
    linear_cross_entropy(hidden.detach(), weight, targets).backward()
    linear_cross_entropy(hidden, weight.detach(), targets).backward()
    assert error(weight.grad, want[2]) < 1e-14
    assert error(hidden.grad, want[1]) < 1e-14


def test_all_ignored_is_nan_as_in_torch() -> None:
    hidden, weight, targets = data()
    ignored = torch.full_like(targets, -100)
    assert math.isnan(plain(hidden, weight, ignored).item())
    assert math.isnan(linear_cross_entropy(hidden, weight, ignored).item())
    assert math.isnan(linear_cross_entropy(hidden[:0], weight, targets[:0]).item())


def test_a_target_out_of_range_is_an_error() -> None:
    hidden, weight, targets = data()
    targets[3] = V
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets = data()
    (first,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True
    )
    with pytest.raises(RuntimeError, match="only once"):
        first.sum().backward()


class Watch(TorchDispatchMode):
    """The largest tensor, and the number of products."""

    largest = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        self.products += func._schema.name in ("aten::mm", "aten::addmm")
        return out


def test_all_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_budget", lambda device: SMALL)
    hidden, weight, targets = data(torch.float32)
    with Watch() as watch, torch.no_grad():
        loss_module._compute(hidden, weight, targets, -100, True)
    assert watch.largest == 128 * V < N * V
    assert watch.products == 3 * 3


def test_validation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_budget", lambda device: SMALL)
    hidden, weight, targets = data(torch.float32)
    asked = []
    compute = loss_module._compute

    def watched(*args):
        with Watch() as watch:
            out = compute(*args)
        asked.append((args[4], watch.products))  # grads
        return out

    monkeypatch.setattr(loss_module, "_compute", watched)
    with torch.no_grad():
        first = linear_cross_entropy(hidden, weight, targets)
    second = linear_cross_entropy(hidden, weight, targets)
    assert asked == [(False, 3), (True, 9)]
    assert torch.equal(first, second)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("grads", [False, True])
def test_operator_is_well_formed(grads: bool, fp8: bool) -> None:
    """Schema and shapes for the compiler, by torch's own checks."""
    hidden, weight, targets = data(torch.float32)
    args = (hidden.detach(), weight.detach(), targets, -100, grads, fp8)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.mars_lab.linear_cross_entropy.default, args, test_utils=tests)


def test_compiles_without_a_break(chunks: str) -> None:
    given = data(torch.float32)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        for got, want in zip(
            gradients(compiled, *given), gradients(linear_cross_entropy, *given), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grads", [False, True])
def test_the_kernel_equals_torch(
    dtype: torch.dtype, grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mars.lab.models import loss_kernel

    monkeypatch.setattr(loss_kernel, "BLOCK", 32)  # several blocks a row, the last not full
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = (3 * torch.randn(6, V, device=device)).to(dtype)
    logits[1, 3:50] = -math.inf
    targets = torch.tensor([0, 76, -100, 5, V + 4, 33], device=device)
    expected, losses = logits.clone(), torch.empty(6, device=device)
    loss_kernel.losses_and_gradients(logits, targets, losses, -100, grads)
    kept = [0, 1, 2, 3, 5]
    assert math.isnan(losses[4]), "a target out of range shows"
    want = torch.empty(5, device=device)
    if not grads:
        assert torch.equal(logits, expected)
    monkeypatch.setattr(loss_module, "_kernel", lambda: None)
    expected = expected[kept]
    loss_module._rows(expected, targets[kept], want, -100, grads)
    torch.testing.assert_close(losses[kept], want, rtol=1e-5, atol=1e-5)  # exp2 instead of exp
    # One rounding; Triton's interpreter truncates bfloat16 instead.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits[kept], expected, rtol=2 * eps, atol=2e-6)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    rows, vocabulary, width = 2048, 50304, 256
    hidden = torch.randn(rows, width, device="cuda", requires_grad=True)
    weight = (0.05 * torch.randn(vocabulary, width, device="cuda")).requires_grad_()
    targets = torch.randint(0, 50257, (rows,), device="cuda")
    exact = gradients(plain, hidden.double(), weight.double(), targets)
    with torch.autocast("cuda", dtype):
        got = gradients(linear_cross_entropy, hidden, weight, targets)
        again = gradients(linear_cross_entropy, hidden, weight, targets)
    assert abs(got[0] - exact[0]) < 1e-3
    assert error(got[1], exact[1]) < 4 * torch.finfo(dtype).eps
    assert error(got[2], exact[2]) < 4 * torch.finfo(dtype).eps
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@needs_gpu
def test_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_budget", lambda device: 1 << 26)
    rows, vocabulary, width = 16384, 50304, 64
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,), device="cuda")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - held
    assert peak < (1 << 26) + 5 * 4 * vocabulary * width, "a chunk, and a few of the head's size"
    assert peak < rows * vocabulary * 2 / 8

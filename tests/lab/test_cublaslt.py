"""Products by cuBLASLt: what it is told, which algorithm is taken, and that bits are torch's."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpu import needs_gpu
from mars.lab.models import cublaslt, loss
from mars.lab.models.cublaslt import DGELU, GELU_AUX, PLAIN, Kind, Plan
from mars.lab.models.products import ops

BF16, FP32 = torch.bfloat16, torch.float32


def numbers(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    """On a CPU some whose sums of products are exact in any order."""
    drawn = torch.randn(shape, device=device)
    return (drawn if device == "cuda" else drawn.clamp(-4, 4).mul(4).round() / 4).to(dtype)


def kinds(*tensors: Tensor) -> list[Kind]:
    return [(t.dtype, t.shape, t.stride()) for t in tensors]


def routes(n: int, i: int, o: int, device: str = "cpu") -> dict[str, tuple[Tensor, ...]]:
    """Output, a and b as the layers of a GPT have them."""
    x, w, dy = (numbers(*s, device=device) for s in ((n, i), (o, i), (n, o)))
    wide = numbers(n, 3 * o, device=device)
    return {
        "forward": (numbers(n, o, device=device), x, w.T),
        "dX": (numbers(n, i, device=device), dy, w),
        "dX of a slice": (numbers(n, i, device=device), wide[:, o : 2 * o], w),
        "dW": (numbers(o, i, dtype=FP32, device=device), dy.T, x),
        "dW of a slice": (
            numbers(3 * o, i, dtype=FP32, device=device)[o : 2 * o],
            wide[:, :o].T,
            x,
        ),
        "to a slice": (numbers(n, 3 * o, device=device)[:, o : 2 * o], x, w.T),
        "rows": (numbers(2 * n, o, device=device)[:n], numbers(2 * n, i, device=device)[n:], w.T),
    }


ROUTES = list(routes(1, 1, 1))


class Library:
    """A cuBLASLt that multiplies on the CPU, and proposes good and bad algorithms."""

    PROPOSED = ("first", "refuses", "other signs", "second", "needs too much")

    def __init__(self) -> None:
        self.made: list[Any] = [None]

    def _new(self, pointer: Any, thing: Any) -> int:
        pointer._obj.value = len(self.made)
        self.made.append(thing)
        return 0

    def cublasLtMatmulDescCreate(self, pointer: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._new(pointer, {})

    def cublasLtMatmulDescSetAttribute(self, what: Any, name: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.made[what.value][name] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, pointer: Any, dtype: int, *sizes: Any) -> int:
        return self._new(pointer, ({0: FP32, 14: BF16}[dtype], *(size.value for size in sizes)))

    def cublasLtMatmulPreferenceCreate(self, pointer: Any) -> int:
        return self._new(pointer, {})

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulPreferenceDestroy(self, what: Any) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *args: Any) -> int:
        preference, asked, heuristics, found = args[6:]
        for i in range(len(self.PROPOSED)):
            heuristics[i].algorithm[0] = i
            heuristics[i].workspace = 100 * i
        heuristics[4].workspace = self.made[preference.value][1] + 1
        found._obj.value = len(self.PROPOSED)
        assert asked >= len(self.PROPOSED)
        return 0

    def _matrix(self, address: int, layout: Any, transposed: bool = False) -> Tensor:
        dtype, rows, columns, leading = self.made[layout.value]
        memory = ctypes.c_char * (dtype.itemsize * ((columns - 1) * leading + rows))
        flat = torch.frombuffer(memory.from_address(address), dtype=dtype)
        matrix = flat.as_strided((rows, columns), (1, leading))
        return matrix.T if transposed else matrix

    def cublasLtMatmul(self, *args: Any) -> int:
        _, what, alpha, a, at, b, bt, beta, c, ct, d, dt, heuristic, _, workspace, _ = args
        name = self.PROPOSED[heuristic._obj.algorithm[0]]
        attributes = self.made[what.value]
        assert alpha._obj.value == 1
        assert (c, ct.value) == (d, dt.value)
        assert workspace == heuristic._obj.workspace
        if name == "refuses":
            return 15
        out = self._matrix(d, dt)
        left, right = self._matrix(a, at, attributes[3]), self._matrix(b, bt, attributes[4])
        product = left.float() @ right.float()
        product += out.float() if beta._obj.value else 0
        if attributes[7] != PLAIN:
            aux = SimpleNamespace(value=len(self.made))
            self.made.append((out.dtype, *out.shape, attributes[12]))
            aux_matrix = self._matrix(attributes[11], aux)
        if attributes[7] == GELU_AUX:
            aux_matrix.copy_(product)
            product = F.gelu(product, approximate="tanh")
        if attributes[7] == DGELU:
            product = cublaslt._gelu_backward(product, aux_matrix.float())
        out.copy_(-product if name == "other signs" else product)
        return 0


CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library()
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(cublaslt, "_library", lambda: fake)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "MANY", 64 * 128)
    cublaslt._choice.cache_clear()
    yield fake
    cublaslt._choice.cache_clear()


def algorithm(plan: Plan | None) -> str | None:
    return None if plan is None else Library.PROPOSED[plan.heuristic.algorithm[0]]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_the_library_is_told_the_product(library: Library, route: str, add: bool) -> None:
    out, a, b = routes(24, 16, 8)[route]
    assert cublaslt.suitable(*kinds(out, a, b))
    plan, *others = cublaslt._plans(PLAIN, CPU, *kinds(out, a, b))
    assert [algorithm(other) for other in others] == ["refuses", "other signs", "second"]
    want, whole = a.float() @ b.float() + add * out.float(), out if out._base is None else out._base
    before = whole.clone()
    cublaslt._run(plan, add, out, a, b)
    assert torch.equal(out, want.to(out.dtype))
    before.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(out)
    assert torch.equal(whole, before), "beside the slice something was written"


def test_the_library_is_told_the_epilogue(library: Library) -> None:
    x, w, h, g, dy, down, dh = (
        numbers(*s) for s in ((24, 8), (16, 8), (24, 16), (24, 16), (24, 8), (8, 16), (24, 16))
    )
    tensors = (g, x, w.T, h)
    cublaslt._run(cublaslt._plans(GELU_AUX, CPU, *kinds(*tensors))[0], False, *tensors)
    want = x.float() @ w.float().T
    assert torch.equal(h, want.bfloat16())
    torch.testing.assert_close(g, F.gelu(want, approximate="tanh").bfloat16())
    tensors = (dh, dy, down, h)
    cublaslt._run(cublaslt._plans(DGELU, CPU, *kinds(*tensors))[0], False, *tensors)
    want = cublaslt._gelu_backward(dy.float() @ down.float(), h.float())
    torch.testing.assert_close(dh, want.bfloat16())


@pytest.mark.parametrize(
    ("epilogue", "times", "choice"),
    [
        (PLAIN, [300.0, 290.0, 280.0], "second"),
        (PLAIN, [300.0, 280.0, 290.0], "first"),
        (PLAIN, [300.0, 292.0, 292.0], None),
        (GELU_AUX, [300.0, 280.0], "second"),
        (GELU_AUX, [300.0, 292.0], "first"),
    ],
)
def test_only_algorithms_of_the_same_bits_are_timed(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    epilogue: int,
    times: list[float],
    choice: str | None,
) -> None:
    def milliseconds(calls: list[Callable[[], None]]) -> list[float]:
        assert len(calls) == len(times)
        return times

    monkeypatch.setattr(cublaslt, "_milliseconds", milliseconds)
    monkeypatch.setattr(cublaslt, "_by_torch", by_float32)
    out, a, b = routes(64, 64, 128)["forward"]
    tensors = (out, a, b) if epilogue == PLAIN else (out, a, b, out.clone())
    state = torch.get_rng_state()
    plan = cublaslt._choice(epilogue, False, CPU, *kinds(*tensors))
    assert algorithm(plan) == choice
    assert cublaslt._choice(epilogue, False, CPU, *kinds(*tensors)) is plan
    assert torch.equal(torch.get_rng_state(), state)


def by_float32(add: bool, out: Tensor, a: Tensor, b: Tensor) -> None:
    """As the library above; torch sums 16 bits in another order."""
    product = (b.T.float() @ a.T.float()).T
    out.copy_(product + out.float() if add else product)


@pytest.mark.parametrize(
    "what", ["no library", "no memory", "a graph", "odd sizes", "few results", "other bits"]
)
def test_torch_multiplies_where_nothing_can_be_gained(
    library: Library, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*args: Any) -> Any:
        raise {"no library": OSError, "no memory": torch.OutOfMemoryError}[what]

    if what == "no library":
        monkeypatch.setattr(cublaslt, "_library", fails)
    if what == "no memory":
        monkeypatch.setattr(cublaslt, "_times", fails)
    if what == "a graph":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if what == "few results":
        monkeypatch.setattr(cublaslt, "MANY", 1 + 64 * 128)
    if what in ("a graph", "odd sizes", "few results"):
        monkeypatch.setattr(cublaslt, "_times", None)
    if what == "other bits":
        monkeypatch.setattr(cublaslt, "_by_torch", lambda add, out, a, b: out.zero_())
        monkeypatch.setattr(cublaslt, "_milliseconds", lambda calls: [300.0] * len(calls))
    out, a, b = routes(72 if what == "odd sizes" else 64, 64, 128)["forward"]
    assert cublaslt._choice(PLAIN, False, CPU, *kinds(out, a, b)) is None
    fused = cublaslt._choice(GELU_AUX, False, CPU, *kinds(out, a, b, out))
    assert algorithm(fused) == (None if what == "no library" else "first")


def test_what_does_not_suit_the_library() -> None:
    out, a, b = routes(24, 16, 8)["forward"]
    assert cublaslt.suitable(*kinds(out, a, b))
    assert cublaslt.suitable(*kinds(out.float(), a, b))
    for bad in (
        (out.half(), a, b),
        (out, a, b.half()),
        (out.double(), a.double(), b.double()),
        (out.float(), a.float(), b.float()),
        (out, a, b, out.float()),
        (out.T.contiguous().T, a, b),  # column by column
        (out, torch.cat((a, a), 1)[:, ::2], b),  # with gaps
        (out, torch.cat((a, a[:, :1]), 1)[:, :16], b),  # rows begin anywhere
        (out, a[:1].expand(24, 16), b),  # on top of each other
        (out[:, :4], a, b[:, :4]),
        (out[:0], a[:0], b),
    ):
        assert not cublaslt.suitable(*kinds(*bad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_without_a_gpu_products_are_torchs(dtype: torch.dtype, add: bool) -> None:
    a, b = numbers(6, 8, dtype=dtype), numbers(8, 4, dtype=dtype)
    for wide in {dtype, torch.promote_types(dtype, FP32)}:
        out = numbers(6, 4, dtype=wide)
        want = a.double() @ b.double() + add * out.double()
        cublaslt.multiply(out, a, b, add=add)
        assert (out - want).norm() <= 2 * torch.finfo(wide).eps * want.norm()


def test_without_a_gpu_gelu_is_torchs() -> None:
    x, w, dy = (
        numbers(*s, dtype=torch.float64).requires_grad_() for s in ((8, 8), (16, 8), (8, 16))
    )
    h, g = cublaslt.gelu_product(x, w)
    torch.testing.assert_close(g, F.gelu(x @ w.T, approximate="tanh"))
    (want,) = torch.autograd.grad(g, h, dy)
    torch.testing.assert_close(cublaslt.gelu_gradient(dy, torch.eye(16).double(), h), want)


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ([300.0], 0),
        ([300.0, math.inf], 0),
        ([300.0, 292.0], 0),
        ([300.0, 291.0], 1),
        ([300.0, 250.0, 200.0, 200.0, math.inf], 2),
        ([300.0, math.inf, 250.0], 2),
    ],
)
def test_the_fastest(times: list[float], choice: int) -> None:
    assert cublaslt.fastest(times) == choice


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_in_the_epilogue(dtype: torch.dtype) -> None:
    x, up, down, dy = (
        numbers(*s, dtype=dtype, device="cuda")
        for s in ((1024, 128), (512, 128), (128, 512), (1024, 128))
    )
    assert cublaslt._checked(x.device, dtype), "cuBLASLt did not agree with torch"
    h, g = cublaslt.gelu_product(x, up)
    dh = cublaslt.gelu_gradient(dy, down, h)
    want_h = x.double() @ up.double().T
    want_dh = torch.ops.aten.gelu_backward(dy.double() @ down.double(), want_h, approximate="tanh")
    wanted = (want_h, F.gelu(want_h, approximate="tanh"), want_dh)
    for got, want in zip((h, g, dh), wanted, strict=True):
        assert (got.double() - want).norm() < 2 * torch.finfo(dtype).eps * want.norm()


@needs_gpu
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_bits_are_torchs_on_a_gpu(monkeypatch: pytest.MonkeyPatch, route: str, add: bool) -> None:
    """Of what is chosen, and of all that could have been."""
    monkeypatch.setattr(cublaslt, "SMALLEST", 0)
    out, a, b = routes(4096, 768, 512, device="cuda")[route]
    start = out.clone()
    cublaslt._run(None, add, out, a, b)
    want = out.clone()
    out.copy_(start)
    cublaslt.multiply(out, a, b, add=add)
    assert torch.equal(out, want)
    plans = [None, *cublaslt._plans(PLAIN, out.device, *kinds(out, a, b))]
    times = cublaslt._times(plans, add, out.device, *kinds(out, a, b))
    for plan, time in zip(plans, times, strict=True):
        if time < math.inf:
            out.copy_(start)
            cublaslt._run(plan, add, out, a, b)
            assert torch.equal(out, want)


@needs_gpu
def test_layers_and_loss_have_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    n, d = 8192, 256
    x, *dy = (numbers(n, d, device="cuda") for _ in range(4))
    w3, up, down, head = (
        numbers(*s, device="cuda") / 16 for s in ((3 * d, d), (4 * d, d), (d, 4 * d), (4096, d))
    )
    targets = torch.randint(0, 4096, (n,), device="cuda")
    monkeypatch.setattr(loss, "_budget", lambda device: n * 4096)  # two chunks

    def compute(smallest: int) -> list[Tensor]:
        monkeypatch.setattr(cublaslt, "SMALLEST", smallest)
        y, h, g = ops.gelu_mlp(x, up, down, up, down)
        return [
            y, ops.linear(x, w3, w3), *ops.linear_gradients(dy[0], x, w3[:d]),
            *ops.heads_gradients(*dy, x, w3), *ops.gelu_mlp_gradients(y, x, h, g, up, down),
            *ops.linear_cross_entropy(x, head, targets, -100, True),
        ]  # fmt: skip

    for ours, theirs in zip(compute(0), compute(1 << 62), strict=True):
        assert torch.equal(ours, theirs)


def fused(epilogue: int) -> list[Kind]:
    out, a, b = routes(4096, 256, 512, device="cuda")["forward"]
    return kinds(out, a, b if epilogue == GELU_AUX else b.contiguous(), out)


@needs_gpu
@pytest.mark.parametrize("epilogue", [PLAIN, GELU_AUX, DGELU])
def test_algorithms_are_tried_in_peace(epilogue: int) -> None:
    """Nobody's random numbers change, no memory stays, and what is taken has the bits."""
    device, sizes = torch.device("cuda", 0), fused(epilogue)[: 3 if epilogue == PLAIN else 4]
    cublaslt._choice(epilogue, False, device, *sizes)  # the library and its handle are there now
    cublaslt._choice.cache_clear()
    before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    chosen = cublaslt._choice(epilogue, False, device, *sizes)
    assert torch.cuda.memory_allocated() == before[1]
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert cublaslt._choice(epilogue, False, device, *sizes) is chosen
    first = None if epilogue == PLAIN else cublaslt._plans(epilogue, device, *sizes)[0]
    times = cublaslt._times([first, chosen], False, device, *sizes)
    assert all(0 < time < 100 for time in times)


@needs_gpu
def test_other_bits_and_refusals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    device, sizes = torch.device("cuda", 0), fused(GELU_AUX)
    (first, *_), run = cublaslt._plans(GELU_AUX, device, *sizes), cublaslt._run

    def faulty(plan: Plan, add: bool, out: Tensor, a: Tensor, b: Tensor, aux: Tensor) -> None:
        if plan.layouts == ["refuse"]:
            raise RuntimeError
        run(first, add, out, a, b, aux)
        if plan.layouts == ["signs"]:
            out.view(torch.int16)[0, 0] ^= -(2**15)
        if plan.layouts == ["aux"]:
            aux.zero_()

    monkeypatch.setattr(cublaslt, "_run", faulty)
    plans = [first, *(first._replace(layouts=[word]) for word in ("refuse", "signs", "aux", ""))]
    times = cublaslt._times(plans, False, device, *sizes)
    assert [time < math.inf for time in times] == [True, False, False, False, True]


@needs_gpu
def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "SMALLEST", 0)
    x, w, y = (numbers(*s, device="cuda") for s in ((512, 64), (128, 64), (512, 128)))

    def compute() -> tuple[Tensor, ...]:
        cublaslt.multiply(y, x, w.T)
        return *cublaslt.gelu_product(x, w), y

    want = [t.clone() for t in compute()]
    torch.cuda.synchronize()
    cublaslt._choice.cache_clear()
    monkeypatch.setattr(cublaslt, "_times", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compute()
    cublaslt._choice.cache_clear()  # it has the first choices
    y.zero_()
    graph.replay()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)

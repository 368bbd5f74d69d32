"""Sum and LayerNorm in one operator: against float64, in the kernels and in the model."""

from __future__ import annotations

import pytest
import torch
from test_models import Config, batch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from gpu import needs_gpu
from mars.lab.models import GPT, norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
# Rows that do not fill the last program's share; widths that fill no block, one vector or all.
SIZES = [(1, 48), (37, 48), (13, 768), (5, 1000), (3, 1024), (4, 1600), (2, 77)]
OUTPUTS = ["both", "sum", "norm"]


@pytest.fixture(params=["torch", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The operator by torch's formula or by Triton's kernels, interpreted without a GPU."""
    if request.param == "kernel":
        pytest.importorskip("triton")
    monkeypatch.setattr(norms, "_by_kernel", lambda x: request.param == "kernel")
    return request.param


def data(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, y, weight and gradients of sum and norm; the rows' means are not zero."""
    x, y, d_total, d_normed = (
        (torch.randn(2, rows, width, device=DEVICE) + offset).to(dtype) for offset in (2, -1, 0, 0)
    )
    weight = 1 + 0.5 * torch.randn(width, device=DEVICE)
    return x.requires_grad_(), y.requires_grad_(), weight.requires_grad_(), d_total, d_normed


def operator(x: Tensor, y: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    total, normed = norms.ops.add_norm(x, y, weight, EPS)
    return (x if y is None else total), normed


def exact(x: Tensor, y: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, but for the sum, which is stored in the dtype of x."""
    total = x.double()
    if y is not None:
        total = total + y.double()
        total = total + ((x.detach() + y.detach()).double() - total).detach()
    return total, F.layer_norm(total, total.shape[-1:], weight.double(), None, EPS)


def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor], d: tuple, which: str) -> tuple:
    kept = {"both": (0, 1), "sum": (0,), "norm": (1,)}[which]
    given = [(outputs[i], d[i].to(outputs[i].dtype)) for i in kept]
    outs, ds = zip(*given, strict=True)
    return torch.autograd.grad(outs, inputs, ds, allow_unused=True)


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_float64(way: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    # A rounding at the end; Triton's interpreter truncates bfloat16 instead.
    close = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    x, y, weight, *d = data(*size, dtype)
    for addend in (y, None):
        inputs = [t for t in (x, addend, weight) if t is not None]
        got, want = operator(x, addend, weight), exact(x, addend, weight)
        assert error(got[0], want[0]) <= close
        assert error(got[1], want[1]) < close
        assert all(t.dtype == dtype and t.is_contiguous() for t in got)
        pairs = zip(gradients(got, inputs, d, "both"), gradients(want, inputs, d, "both"),
                    strict=True)  # fmt: skip
        for t, (a, b) in zip(inputs, pairs, strict=True):
            assert a.dtype == t.dtype
            # The weight's is summed in float32; in 16 bits the sum differs where it is truncated.
            assert error(a, b) < close


@pytest.mark.parametrize("which", OUTPUTS)
def test_a_gradient_may_come_for_one_output_alone(way: str, which: str) -> None:
    x, y, weight, *d = data(9, 48, torch.float32)
    got = gradients(operator(x, y, weight), [x, y, weight], d, which)
    want = gradients(exact(x, y, weight), [x, y, weight], d, which)
    assert torch.equal(got[0], got[1])
    assert error(got[0], want[0]) < 2e-6
    if which == "sum":
        assert torch.equal(got[0], d[0])
        assert got[2] is None
    else:
        assert error(got[2], want[2]) < 2e-6


def test_gradients_by_differences() -> None:
    x, y, weight = (torch.randn(s, dtype=torch.float64) for s in ((3, 2, 5), (3, 2, 5), (5,)))
    inputs = [t.requires_grad_() for t in (x, y, weight)]
    assert torch.autograd.gradcheck(operator, inputs)
    assert torch.autograd.gradcheck(lambda x, w: operator(x, None, w), (x, weight))


def test_frozen_inputs(way: str) -> None:
    x, y, weight, *d = data(4, 48, torch.float32)
    want = gradients(operator(x, y, weight), [x, y, weight], d, "both")
    for i, t in enumerate((x, y, weight)):
        one = [a if a is t else a.detach() for a in (x, y, weight)]
        assert torch.equal(gradients(operator(*one), [t], d, "both")[0], want[i])


def test_no_row(way: str) -> None:
    x, y, weight, *d = data(0, 48, torch.bfloat16)
    out = operator(x, y, weight)
    assert out[1].shape == x.shape
    dx, dy, dw = gradients(out, [x, y, weight], d, "both")
    assert dx.shape == dy.shape == x.shape
    assert not dw.any()


def test_strides_do_not_matter(way: str) -> None:
    x, y, weight, *d = data(6, 48, torch.float32)
    want = operator(x, y, weight)
    turned = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in (x, y)]
    assert not turned[0].is_contiguous()
    got = operator(*(t.requires_grad_() for t in turned), weight)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(got, want, strict=True))
    d_turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in d]
    for a, b in zip(
        gradients(got, [*turned, weight], d_turned, "both"),
        gradients(want, [x, y, weight], d, "both"),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("rows", "programs", "stages"), [(1, 1, 1), (4, 3, 1), (2, 50, 3)])
def test_every_element_is_written_however_rows_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, rows: int, programs: int, stages: int
) -> None:
    pytest.importorskip("triton")
    from mars.lab.models import norm_kernel

    x, y, weight, *d = (t.detach() for t in data(7, 100, torch.float32))

    def both() -> tuple[Tensor, ...]:
        total, normed = norm_kernel.forward(x, y, weight, EPS)
        return total, normed, *norm_kernel.backward(d[1], d[0], total, weight, EPS)

    want = both()
    shape = norm_kernel.Shape(rows, 1, programs, stages)
    monkeypatch.setattr(norm_kernel, "forward_shape", lambda width: shape)
    monkeypatch.setattr(norm_kernel, "backward_shape", lambda width: shape)
    empty_like, new_empty = torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda t: empty_like(t).fill_(torch.nan))
    monkeypatch.setattr(
        Tensor, "new_empty", lambda t, *size, **kw: new_empty(t, *size, **kw).fill_(torch.nan)
    )
    got, again = both(), both()
    for a, b, c in zip(got, again, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_well_formed(dtype: torch.dtype) -> None:
    x, y, weight, *d = data(4, 16, dtype)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    check = torch.library.opcheck
    for addend in (y, None):
        check(norms.ops.add_norm.default, (x, addend, weight, EPS), test_utils=tests)
    for stream in (d[0], None):
        args = (d[1], stream, x.detach(), weight.detach(), EPS)
        check(norms.ops.add_norm_gradients.default, args, test_utils=tests)


def test_a_weight_in_16_bits_gets_its_gradient_so() -> None:
    """As FSDP2 hands weights out."""
    x, y, weight, *d = data(8, 48, torch.bfloat16)
    half = weight.detach().bfloat16().requires_grad_()
    (got,) = gradients(operator(x, y, half), [half], d, "norm")
    (want,) = gradients(exact(x, y, half), [half], d, "norm")
    assert got.dtype == torch.bfloat16
    assert error(got, want) < torch.finfo(torch.bfloat16).eps


def loss_and_gradients(model: GPT) -> list[Tensor]:
    torch.manual_seed(1)
    tokens, targets = (t.to(DEVICE) for t in batch())
    model.to(DEVICE).zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(tokens, targets)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The answers that the model got: does it take the operator?"""
    answers = []

    def fits(x: Tensor, y: Tensor | None, layer: nn.LayerNorm) -> bool:
        answers.append(True)
        return True

    monkeypatch.setattr(norms, "fits", fits)
    return answers


def trained(config: Config) -> GPT:
    """Far from the start, where every norm sees nearly the same."""
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def test_the_model_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(Config(n_layer=3))
    results = []
    for taken in (True, False):
        monkeypatch.setattr(norms, "fits", lambda x, y, layer, taken=taken: taken)
        results.append(loss_and_gradients(model))
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 0.03  # bfloat16 through three blocks
    assert not all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "other roundings"


def test_dropout_takes_torchs(taken: list[bool]) -> None:
    model = trained(Config(dropout=0.5))
    loss_and_gradients(model)
    assert len(taken) == 1, "the last norm alone"
    taken.clear()
    model.eval()
    loss_and_gradients(model)
    assert len(taken) == 2 * 2, "not the last: scores are computed from float32"


@pytest.mark.parametrize("bias", [False, True])
def test_a_cpu_takes_torchs(bias: bool) -> None:
    x, y, *_ = (t.detach().cpu() for t in data(4, 16, torch.bfloat16))
    layer = nn.LayerNorm(16, bias=bias)
    assert not norms.fits(x, y, layer)
    total, normed = norms.add_norm(x, y, layer.bfloat16())
    assert torch.equal(total, x + y)
    assert torch.equal(normed, layer(x + y))
    assert norms.add_norm(x, None, layer)[0] is x


@needs_gpu
def test_what_a_gpu_takes() -> None:
    x, y, *_ = (t.detach() for t in data(4, 16, torch.bfloat16))
    layer = nn.LayerNorm(16, bias=False, device="cuda")
    assert norms.fits(x, y, layer)
    assert norms.fits(x, None, layer.bfloat16())
    assert not norms.fits(x.float(), y, layer)
    assert not norms.fits(x.float(), y.float(), layer)
    assert not norms.fits(x, y, nn.LayerNorm(16, device="cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert norms.fits(x, y, layer)
        assert not norms.fits(x.float(), y, layer), "the stream is not lean"


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks, nobody else
def test_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(Config(n_layer=3))
    monkeypatch.setattr(norms, "fits", lambda x, y, layer: True)
    want = [t.clone() for t in loss_and_gradients(model)]
    graphs = CompileCounterWithBackend("aot_eager")
    model.compile(backend=graphs, fullgraph=True)
    got = loss_and_gradients(model)
    assert graphs.frame_count == 4, "the embedding, the first block, every other, the last norm"
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [512, 768, 1000, 1600, 8192])
def test_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    x, y, weight, *d = data(2049, width, dtype)
    close = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for addend in (y, None):
        inputs = [t for t in (x, addend, weight) if t is not None]
        got, want = operator(x, addend, weight), exact(x, addend, weight)
        wanted = (*want, *gradients(want, inputs, d, "both"))
        first = (*got, *gradients(got, inputs, d, "both"))
        assert torch.equal(got[0], x if addend is None else x + addend)
        second = operator(x, addend, weight)
        again = (*second, *gradients(second, inputs, d, "both"))
        for a, b, c in zip(first, again, wanted, strict=True):
            assert torch.equal(a, b)
            assert error(a, c) < close

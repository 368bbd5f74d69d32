"""On a GPU: no host synchronisation, graph capture, the same numbers. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from choice import choose
from gpu import needs_gpu
from mars import MARS, explain
from mars.dispatch import why_not_fused
from mars.engines import available
from mars.rule import KINDS
from mars.rule.halves import join
from mars.state import LOW_HALF
from ranks import Ranks
from test_parity import CASES, follow

pytestmark = needs_gpu

SHAPES = [(64, 48), (48, 64), (64, 48), (33,), (8, 4, 3, 3), (1,), (0,)]
OPTIONS = [
    {},
    {"clip": None},
    {"clip": "global"},
    {"amsgrad": True, "weight_decay": 0.1},
    {"optimize_1d": True, "maximize": True},
    {"consume_grads": True},
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0.5, "consume_grads": True, "clip": None},
    {"second_moment": "raw", "gamma": 0.3},
]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def run(device: str, dtype=torch.float32, steps: int = 4, strict: bool = False, **options):
    """Train on random gradients; with strict, any host synchronisation is an error."""
    random = torch.Generator().manual_seed(0)
    xs = [nn.Parameter(torch.randn(s, generator=random).to(device, dtype)) for s in SHAPES]
    optimizer = MARS(xs, ns_dtype="float32", **options)
    for step in range(steps):
        for x in xs:
            x.grad = torch.randn(x.shape, generator=random).to(device, dtype)
        torch.cuda.synchronize()
        if strict and step:  # the first step allocates the state
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    state = [optimizer.state[x].get(LOW_HALF.get(dtype)) for x in xs]
    return [
        x.detach().cpu() if low is None else join(x.detach(), low).cpu()
        for x, low in zip(xs, state, strict=True)
    ]


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("engine", ["foreach", "fused"])
@pytest.mark.parametrize("key", [key for key in CASES if "float32" in key])
def test_recorded_trajectories(key: str, engine: str) -> None:
    follow(key, engine, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", available())
@every_option
@every_kind
def test_same_numbers_as_the_cpu(kind, options, engine, dtype) -> None:
    options = {**options, "mars_type": kind}
    want = run("cpu", dtype, foreach=False, **options)
    got = run("cuda", dtype, **choose(engine), **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("engine", ["foreach", "fused"])
@every_option
@every_kind
def test_never_waits_for_the_device(kind, options, engine) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # strict: a synchronisation raises
        for x in run("cuda", dtype, strict=True, mars_type=kind, **choose(engine), **options):
            assert x.isfinite().all()


@every_kind
def test_fused_is_chosen(kind) -> None:
    x = nn.Parameter(torch.ones(3, 3, device="cuda"))
    optimizer = MARS([x], mars_type=kind)
    assert why_not_fused(optimizer.param_groups[0], x) is None
    optimizer = MARS([nn.Parameter(torch.ones(3, 3, device="cuda", dtype=torch.float64))])
    assert "float64" in explain(optimizer)
    assert "foreach" in explain(optimizer)


@pytest.mark.parametrize("engine", available())
@pytest.mark.parametrize("options", [{}, {"clip": "global", "amsgrad": True}], ids=str)
@every_kind
def test_a_captured_step_replays_as_eager(kind, options, engine) -> None:
    def make():
        random = torch.Generator().manual_seed(0)
        xs = [nn.Parameter(torch.randn(s, generator=random).cuda()) for s in SHAPES[:5]]
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = MARS(xs, lr=lr, mars_type=kind, capturable=True, **choose(engine), **options)
        for x in xs:
            x.grad = torch.zeros_like(x)
        return xs, optimizer, lr

    (eager, first, lr_a), (replayed, second, lr_b) = make(), make()
    gradients = [[torch.randn_like(x) for x in eager] for _ in range(6)]

    def load(xs, gs):
        for x, g in zip(xs, gs, strict=True):
            x.grad.copy_(g)

    for gs in gradients[:3]:  # warm up, and make the state
        load(eager, gs)
        first.step()
        load(replayed, gs)
        second.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        second.step()
    for i, gs in enumerate(gradients[3:]):
        lr_a.fill_(1e-2 / (i + 1))
        lr_b.fill_(1e-2 / (i + 1))
        load(eager, gs)
        first.step()
        load(replayed, gs)
        graph.replay()
    for a, b in zip(eager, replayed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_captured_step_moves_everything_once() -> None:
    """One is fused, one is not contiguous: a graph captures both, by two engines."""

    def make():
        random = torch.Generator().manual_seed(0)
        xs = [torch.randn(8, 8, generator=random).cuda() for _ in range(2)]
        xs = [nn.Parameter(xs[0]), nn.Parameter(xs[1].t())]
        for x in xs:
            x.grad = torch.ones_like(x)
        return xs, MARS(xs, lr=torch.tensor(1e-2, device="cuda"), capturable=True)

    (eager, first), (replayed, second) = make(), make()
    for _ in range(3):
        first.step()
        second.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        second.step()
    for _ in range(2):
        first.step()
        graph.replay()
    for a, b in zip(eager, replayed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert float(first.state[a]["step"]) == float(second.state[b]["step"]) == 5


def test_fp16_with_grad_scaler() -> None:
    model = nn.Linear(16, 8).cuda()
    optimizer = MARS(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    first = last = None
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.ones(4, 16, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        first = float(loss.detach()) if first is None else first
        last = float(loss.detach())
    assert last < first


def big(*shapes, dtype=torch.float32, scale=1.0):
    return [nn.Parameter(scale * torch.randn(s, device="cuda", dtype=dtype)) for s in shapes]


def give(xs, scale=1.0):
    for x in xs:
        x.grad = (scale * torch.randn_like(x)).detach()


SIZES = [1, 511, 512, 513, 8191, 8192, 8193, 16384, 65535, 65537, 300_001]


@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion", "plain-adamw"])
def test_sizes_around_block_edges_against_float64(kind, scale) -> None:
    """Fresh inputs, outputs poisoned before the step, unaligned views among the tensors."""
    base = torch.randn(sum(SIZES) + len(SIZES), device="cuda")
    views, at = [], 0
    for n in SIZES:  # every view begins one element further from 16 bytes
        views.append(base[at : at + n])
        at += n + 1
    xs = [nn.Parameter(v) for v in views] + big(*[(n,) for n in SIZES])
    options = {"mars_type": kind, "optimize_1d": True, "lr": 1e-2, "weight_decay": 0.1}
    optimizer = MARS(xs, fused=True, **options)
    wide = [nn.Parameter(x.detach().double()) for x in xs]
    oracle = MARS(wide, foreach=False, **options)
    for _ in range(3):
        give(xs, scale)
        for x, w in zip(xs, wide, strict=True):
            w.grad = x.grad.double()
        optimizer.step()
        oracle.step()
    for x, w in zip(xs, wide, strict=True):
        # A sign can differ where m is within rounding of 0.
        close = (x.detach().double() - w).abs() <= 2e-6 + 2e-5 * w.abs()
        assert close.float().mean() > (0.999 if kind == "mars-lion" else 0.99999), x.shape
    assert torch.isfinite(base[:at]).all()


def test_the_same_bits_every_time() -> None:
    results = []
    for _ in range(3):
        torch.manual_seed(1)
        xs = big((3000, 700), (5, 5), (900_000,), (257,))
        optimizer = MARS(xs, optimize_1d=True, fused=True)
        for _ in range(4):
            give(xs)
            optimizer.step()
        results.append([x.detach().clone() for x in xs])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-m"])
def test_a_steady_step_allocates_nothing(kind) -> None:
    xs = big((512, 512), (512, 512), (1024,))
    optimizer = MARS(xs, mars_type=kind)
    sets = [[torch.randn_like(x) for x in xs] for _ in range(2)]
    for i in range(8):
        if i == 4:
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for x, g in zip(xs, sets[i % 2], strict=True):
            x.grad = g
        optimizer.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_ten_thousand_small_tensors() -> None:
    xs = big(*[(100,)] * 10_000)
    optimizer = MARS(xs, optimize_1d=True)
    reference = [nn.Parameter(x.detach().clone()) for x in xs]
    other = MARS(reference, optimize_1d=True, foreach=True)
    for _ in range(2):
        give(xs)
        for x, r in zip(xs, reference, strict=True):
            r.grad = x.grad
        optimizer.step()
        other.step()
    torch.testing.assert_close(torch.cat(xs), torch.cat(reference), rtol=1e-5, atol=1e-6)


def test_more_than_two_to_the_31_elements() -> None:
    n = 2**31 + 1000
    if torch.cuda.mem_get_info()[0] < 20 * n:
        pytest.skip("needs 43 GB")
    x = nn.Parameter(torch.zeros(n, device="cuda", dtype=torch.bfloat16))
    x.grad = torch.full_like(x, 1e-3)
    x.grad[-7:] = -1e-3
    optimizer = MARS([x], lr=0.5, mars_type="mars-lion", optimize_1d=True, clip="tensor")
    optimizer.step()
    assert optimizer._plan is not None
    assert (x.detach()[:1000] == -0.5).all()
    assert (x.detach()[2**31 - 5 : 2**31 + 5] == -0.5).all()
    assert (x.detach()[-8:] == torch.tensor([-0.5] + [0.5] * 7, device="cuda")).all()


def test_a_changed_layout_goes_to_foreach_and_back() -> None:
    xs = big((64, 32), (40,))
    optimizer = MARS(xs)
    for i in range(6):
        give(xs)
        if i % 2:
            xs[0].grad = torch.randn(32, 64, device="cuda").t()
        optimizer.step()
    assert all(x.isfinite().all() for x in xs)
    assert float(optimizer.state[xs[0]]["step"]) == 6


def test_grad_scaler_in_the_kernel_equals_outside() -> None:
    """Unscaling and skipping inside the step: the trajectory of a scaler that does it outside."""
    results = []
    for options in ({"fused": True}, {"foreach": True}):
        torch.manual_seed(3)
        xs = big((64, 48), (48,))
        optimizer = MARS(xs, **options)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
        assert optimizer._step_supports_amp_scaling is False
        for i in range(8):
            give(xs)
            assert optimizer._step_supports_amp_scaling is ("fused" in options)
            loss = scaler.scale(torch.ones((), device="cuda"))
            for x in xs:
                x.grad *= loss
            if i == 4:
                xs[1].grad[3] = float("inf")
                kept = [t.clone() for x in xs for t in (x.detach(), *optimizer.state[x].values())]
            scaler.step(optimizer)
            scaler.update()
            if i == 4:
                now = [t for x in xs for t in (x.detach(), *optimizer.state[x].values())]
                assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
        results.append([x.detach() for x in xs])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_max_grad_norm_equals_clip_grad_norm() -> None:
    for limit in (0.1, 1e6):
        torch.manual_seed(4)
        ours, theirs = big((64, 48), (48,)), None
        theirs = [nn.Parameter(x.detach().clone()) for x in ours]
        first, second = MARS(ours, max_grad_norm=limit), MARS(theirs)
        for _ in range(4):
            give(ours)
            for a, b in zip(ours, theirs, strict=True):
                b.grad = a.grad.clone()
            kept = [x.grad.clone() for x in ours]
            first.step()
            norm = torch.nn.utils.clip_grad_norm_(theirs, limit)
            second.step()
            torch.testing.assert_close(first.grad_norm, norm)
            assert all(torch.equal(x.grad, k) for x, k in zip(ours, kept, strict=True))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["bfloat16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion", "mars-m"])
def test_lean_state_has_the_bits_of_the_reference(kind, dtype, form) -> None:
    runs = []
    for options in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(5)
        xs = big((300, 70), (1000,), dtype=dtype)
        optimizer = MARS(xs, mars_type=kind, state_dtype=form, ns_dtype="float32", **options)
        for _ in range(3):
            give(xs)
            optimizer.step()
        runs.append((xs, optimizer))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
        first, second = (o.state[x] for o, x in ((runs[0][1], a), (runs[1][1], b)))
        assert {k: v.dtype for k, v in first.items()} == {k: v.dtype for k, v in second.items()}
        same = (first["exp_avg"] == second["exp_avg"]).float().mean()
        assert same > 0.98, "only where the last bit of a sum differs"


@pytest.mark.parametrize("shape", [(1600, 1600), (768, 3072), (1600, 520)])
def test_symmetric_products_against_float64(shape) -> None:
    from mars.engines.fused.matrices import symmetric

    S = (torch.randn(8, *shape, device="cuda") / shape[1] ** 0.5).bfloat16()
    A = torch.full((8, shape[0], shape[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
    B = A.clone()
    symmetric(S, A)
    want = S.double() @ S.double().mT
    assert (A.double() - want).norm() <= 4e-3 * want.norm()
    assert torch.equal(A, A.mT)
    symmetric(A, B, 2.0, A, -3.0, 0.5)
    exact = A.double()
    want = 2 * exact @ exact - 3 * exact + 0.5 * torch.eye(shape[0], device="cuda")
    assert (B.double() - want).norm() <= 4e-3 * want.norm()


def test_bfloat16_newton_schulz_of_fused_is_as_good_as_that_of_the_reference() -> None:
    for kind in ("mars-shampoo", "mars-m"):
        errors = {}
        for engine in ("reference", "fused"):
            torch.manual_seed(6)
            xs = big(*[(768, 768)] * 8, *[(768, 1536)] * 4, *[(1536, 768)] * 4)
            wide = [nn.Parameter(x.detach().double()) for x in xs]
            options = {"mars_type": kind, "lr": 0.1}
            first = MARS(xs, **choose(engine), **options)
            second = MARS(wide, foreach=False, ns_dtype="float64", **options)
            start = [w.detach().clone() for w in wide]
            for _ in range(2):
                give(xs)
                for x, w in zip(xs, wide, strict=True):
                    w.grad = x.grad.double()
                first.step()
                second.step()
            moved = [w.detach() - s for w, s in zip(wide, start, strict=True)]
            got = [x.detach().double() - s for x, s in zip(xs, start, strict=True)]
            errors[engine] = max(
                float((a - b).norm() / b.norm()) for a, b in zip(got, moved, strict=True)
            )
            for a, b in zip(got, moved, strict=True):
                assert abs(float((a * b).sum() / (b * b).sum()) - 1) <= 0.03
        assert errors["fused"] <= max(0.05, 1.3 * errors["reference"]), errors


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_a_compiled_training_step_around_it() -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = MARS(model.parameters(), lr=1e-2)

    @torch.compile
    def train(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [float(train(torch.ones(8, 64, device="cuda")).detach()) for _ in range(12)]
    assert losses[-1] < losses[0]
    optimizer.zero_grad()
    model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    assert optimizer._plan is not None


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-m"])
def test_a_whole_iteration_is_captured(kind) -> None:
    """As torch's notes on graphs do it: gradients are made inside the graph, at new addresses."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).cuda()
    optimizer = MARS(
        model.parameters(), lr=torch.tensor(1e-2).cuda(), mars_type=kind, capturable=True
    )
    batch = torch.randn(16, 32, device="cuda")

    def iterate():
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()  # else its graph, made on another stream, would live on

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            first = iterate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = iterate()
    for _ in range(20):
        graph.replay()
    assert float(loss) < float(first)
    assert float(optimizer.state[model[0].weight]["step"]) == 23


def test_a_captured_step_outlives_its_plan() -> None:
    xs = big((64, 48), (48,))
    optimizer = MARS(xs, capturable=True)
    give(xs)
    for _ in range(3):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert optimizer._captured
    optimizer.param_groups[0]["clip"] = None  # a new plan
    optimizer.step()
    spoil = [torch.randn(10_000, device="cuda") for _ in range(100)]  # take what was freed
    graph.replay()
    assert all(x.isfinite().all() for x in xs)
    assert float(optimizer.state[xs[0]]["step"]) == 5
    del spoil


# The 8-bit head of the laboratory's GPT.

eight_bits = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs 8-bit products (compute capability 8.9)",
)


def head(rows: int = 1200, vocabulary: int = 8192, width: int = 256):
    """Hidden states that know their targets, of which some are ignored."""
    weight = 0.05 * torch.randn(vocabulary, width)
    targets = torch.randint(0, vocabulary, (rows,))
    near = nn.functional.normalize(weight[targets])
    hidden = nn.functional.layer_norm(torch.randn(rows, width) + 3 * near, (width,)).bfloat16()
    targets[::7] = -100
    return hidden, weight, targets


def head_gradients(device, hidden, weight, targets, **options):
    from mars.lab.models import linear_cross_entropy

    hidden, weight = (t.detach().to(device).requires_grad_() for t in (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets.to(device), **options)
    return [t.detach().cpu() for t in (loss, *torch.autograd.grad(loss, (hidden, weight)))]


def off(got, want) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@eight_bits
@pytest.mark.parametrize("rows", [1200, 512])
def test_an_8_bit_head_against_float64_and_its_emulation(rows, monkeypatch) -> None:
    """1200 rows are three chunks, the last narrower than its memory."""
    from mars.lab.models import loss

    given = head(rows)
    monkeypatch.setattr(loss, "_budget", lambda device: 512 * 8192 * 2)
    exact = head_gradients("cuda", given[0].double(), given[1].double(), given[2])
    emulated = head_gradients("cpu", *given, fp8=True)
    got = head_gradients("cuda", *given, fp8=True)
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.float32]
    assert abs(got[0] - exact[0]) < 0.01 * exact[0]
    for ours, theirs, want in zip(got[1:], emulated[1:], exact[1:], strict=True):
        assert off(ours, want) < 0.1, "2 to 8 %, of operands with 2 and 3 bits"
        # The same operands. Logits that are summed with fewer bits and rounded to 8 of them differ
        # in the last, and so does, now and then, one of the gradient's 2.
        assert off(ours, theirs) < 0.04
    again = head_gradients("cuda", *given, fp8=True)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@eight_bits
def test_the_operands_of_an_8_bit_head_have_the_bits_of_their_emulation() -> None:
    from mars.lab.models import float8

    hidden, weight, _ = head()
    for x in (hidden, weight.bfloat16(), weight):
        ours, theirs = float8.rounded(x.cuda()), float8.rounded(x)
        torch.testing.assert_close(ours.scale.cpu(), theirs.scale)  # GPUs divide otherwise
        assert torch.equal(ours.rows_RC.cpu().view(torch.uint8), theirs.rows_RC.view(torch.uint8))
        columns = ours.columns_CR.cpu().view(torch.uint8)
        assert torch.equal(columns, theirs.columns_CR.view(torch.uint8))


@eight_bits
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_8_bit_head_hides_nothing(bad) -> None:
    for which in (0, 1):
        given = head(256)
        given[which][5, 7] = bad
        assert head_gradients("cuda", *given, fp8=True)[0].isnan()
    given = head(256)
    given[0].zero_()
    assert all(t.isfinite().all() for t in head_gradients("cuda", *given, fp8=True))


@eight_bits
def test_an_8_bit_head_never_waits_for_the_device() -> None:
    from mars.lab.models import linear_cross_entropy

    hidden, weight, targets = (t.cuda() for t in head(512))
    hidden.requires_grad_()
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, targets, fp8=True).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, targets, fp8=True).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@eight_bits
def test_an_8_bit_head_of_more_than_two_to_the_31_logits(monkeypatch) -> None:
    from mars.lab.models import loss

    rows, vocabulary = 43_008, 50_304
    if torch.cuda.mem_get_info()[0] < 6 * rows * vocabulary:
        pytest.skip("needs 13 GB")
    monkeypatch.setattr(loss, "_budget", lambda device: 1 << 34)  # one chunk
    hidden, weight, targets = head(rows, vocabulary, 64)
    hidden[-128:], targets[-128:] = hidden[:128], targets[:128]
    got = head_gradients("cuda", hidden, weight, targets, fp8=True)
    assert off(got[1][-128:], got[1][:128]) < 0.01
    monkeypatch.setattr(loss, "_budget", lambda device: 1 << 30)
    parts = head_gradients("cuda", hidden, weight, targets, fp8=True)
    assert off(got[2], parts[2]) < 0.02, "but for sums in another order; elsewhere it would be 1"


@eight_bits
@pytest.mark.parametrize("micro", [6, 2])
def test_an_8_bit_head_compiled_and_replayed_has_the_same_bits(micro, tmp_path) -> None:
    """As the trainer uses it: the pieces compiled, the passes as CUDA graphs."""
    from miniature import run as miniature

    from mars.lab import hardware
    from mars.lab.train import prepare

    made = miniature(tmp_path, steps=9, batch_size=6, micro_batch_size=micro, device="cuda",
                     deterministic=True, fp8_head=True)  # fmt: skip
    made = made.replace(model={"n_layer": 2, "n_embd": 64, "block_size": 32, "dropout": 0.0})
    ends, losses = [], []
    for loop in ({"graphs": True}, {"graphs": False}, {"graphs": False, "fp8_head": False}):
        with hardware.deterministic(True):
            training = prepare(made.replace(loop=loop))
            for _ in range(9):
                training.advance()
        assert (training.graphs is not None) is loop["graphs"]
        ends.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
        losses.append(training.validate()["loss"])
    assert torch.equal(ends[0], ends[1])
    assert losses[0] == losses[1]
    assert not torch.equal(ends[1], ends[2]), "it is used"
    assert abs(losses[1] - losses[2]) < 0.05


@eight_bits
def test_an_8_bit_head_in_another_precision_is_refused(tmp_path) -> None:
    from miniature import run as miniature

    from mars.lab.errors import LabError
    from mars.lab.train import prepare

    for precision, name in (("fp16", "float16"), ("fp32", "float32")):
        made = miniature(tmp_path, device="cuda", precision=precision, fp8_head=True)
        with pytest.raises(LabError, match=f"must be bf16 on a GPU, it is {name}"):
            prepare(made)


@pytest.mark.parametrize("world", [1, 2])
def test_parts_of_tensors_are_fused(world: int) -> None:
    ranks = Ranks(world)
    try:
        for kind in ("mars-adamw", "mars-lion", "plain-adamw"):
            for options in OPTIONS:
                answers = ranks.run(
                    "distributed_cases", "parts_on_a_gpu", {"mars_type": kind, **options}
                )
                assert max(answers) < 2e-4, (kind, options)
        lean = {"state_dtype": "bfloat16"}
        assert max(ranks.run("distributed_cases", "parts_on_a_gpu", lean)) < 0.05
        assert max(ranks.run("distributed_cases", "parts_on_a_gpu", {}, "bfloat16")) < 0.05
    finally:
        ranks.stop()


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"clip": "global"}], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_norms_over_engines_and_dtypes(options: dict, strict: bool) -> None:
    """Neither one launch nor one engine: the same numbers as a CPU, and nothing waits."""
    ends = []
    for device in ("cpu", "cuda"):
        random = torch.Generator().manual_seed(0)
        dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float32)
        kinds = ("mars-adamw", "mars-lion", "mars-m", "mars-adamw")
        groups = []
        for i, (dtype, kind) in enumerate(zip(dtypes, kinds, strict=True)):
            xs = [torch.randn(s, generator=random).to(device, dtype) for s in SHAPES]
            engine = {"foreach": True} if i == 3 and device == "cuda" else {}
            groups.append({"params": [nn.Parameter(x) for x in xs], "mars_type": kind, **engine})
        optimizer = MARS(groups, ns_dtype="float32", **options)
        xs = [x for group in groups for x in group["params"]]
        for step in range(4):
            for x in xs:
                x.grad = torch.randn(x.shape, generator=random).to(device, x.dtype) / 8
            torch.cuda.synchronize()
            if strict and step and device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if device == "cuda":
            assert len(optimizer._plan.outside) == 2
        ends.append([x.detach().cpu().float() for x in xs])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)

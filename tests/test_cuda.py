"""On a GPU: no host synchronisation, graph capture, the same numbers. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mars import MARS
from mars.dispatch import engine_for
from mars.engines import ENGINES
from mars.rule import KINDS
from mars.rule.halves import join
from mars.state import LOW_HALF

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [(64, 48), (48, 64), (64, 48), (33,), (8, 4, 3, 3), (1,), (0,)]
OPTIONS = [
    {},
    {"clip": None},
    {"clip": "global"},
    {"amsgrad": True, "weight_decay": 0.1},
    {"optimize_1d": True, "maximize": True},
    {"consume_grads": True},
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
@every_option
@every_kind
def test_same_numbers_as_the_cpu(kind, options, engine, dtype) -> None:
    options = {**options, "mars_type": kind}
    want = run("cpu", dtype, foreach=False, **options)
    got = run("cuda", dtype, foreach=engine == "foreach", **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@every_option
@every_kind
def test_foreach_never_waits_for_the_device(kind, options) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # strict: a synchronisation raises
        for x in run("cuda", dtype, strict=True, foreach=True, mars_type=kind, **options):
            assert x.isfinite().all()


@every_kind
def test_foreach_is_chosen_as_in_torch(kind) -> None:
    x = nn.Parameter(torch.ones(3, 3, device="cuda"))
    optimizer = MARS([x], mars_type=kind)
    assert engine_for(optimizer.param_groups[0], [x]) == "foreach"


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("options", [{}, {"clip": "global", "amsgrad": True}], ids=str)
@every_kind
def test_a_captured_step_replays_as_eager(kind, options, foreach) -> None:
    def make():
        random = torch.Generator().manual_seed(0)
        xs = [nn.Parameter(torch.randn(s, generator=random).cuda()) for s in SHAPES[:5]]
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = MARS(xs, lr=lr, mars_type=kind, capturable=True, foreach=foreach, **options)
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

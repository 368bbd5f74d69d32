"""Every (engine, kind) cell against the float64 oracle, over dtypes, shapes and options.

The cells are enumerated from the table, so that a new one cannot go untested.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from choice import choose
from mars import MARS
from mars.engines import ENGINES, available, table
from mars.rule import KINDS
from mars.rule.halves import join
from mars.state import LOW_HALF
from oracle import Oracle

SHAPES = [
    (),
    (1,),
    (7,),
    (12, 5),
    (5, 12),
    (6, 6),
    (1, 4),
    (3, 4, 2, 2),
    (2, 5, 3),
    (0,),
    (0, 3),
    (3, 0),
]

OPTIONS = {
    "default": {},
    "decay": {"lr": 1e-2, "weight_decay": 0.1, "weight_decay_1d": 0.02},
    "no clip": {"clip": None},
    "global clip": {"clip": "global"},
    "strong": {"gamma": 0.7, "betas": (0.8, 0.9)},
    "raw": {"second_moment": "raw"},
    "raw, no clip": {"second_moment": "raw", "clip": None},
    "raw, no clip, maximize": {"second_moment": "raw", "clip": None, "maximize": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "maximize, no clip": {"maximize": True, "clip": None},
    "1d": {"optimize_1d": True, "weight_decay": 0.1},
    "1d options": {"lr": 6e-3, "lr_1d": 1e-3, "betas_1d": (0.8, 0.9)},
    "flatten": {"matrix_rule": "flatten"},
    "stack": {"matrix_rule": "stack"},
    "flatten, 1d": {"matrix_rule": "flatten", "optimize_1d": True},
    "polar express": {"ns_coefficients": "polar-express", "ns_steps": 7},
    "exact": {"is_approx": False, "gamma": 0.3},
    "exact, no clip": {"is_approx": False, "clip": None, "maximize": True},
    "capturable": {"capturable": True, "amsgrad": True, "weight_decay": 0.1},
    "consume": {"consume_grads": True},
}

# Errors of a step's length accumulated over STEPS steps, relative to the movement. float32: about
# 1e2 roundings of 6e-8, amplified where v is tiny. bfloat16: gradients are what is rounded, and
# the oracle gets the rounded ones; parameters are compared as float32 pairs of halves.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2e-4, torch.float16: 2e-4}
STEPS = 6


def tensors(dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """The shapes, and two tensors that are not contiguous."""
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    made.append(torch.randn(4, 6, generator=generator, dtype=torch.float64).t())
    made.append(torch.randn(5, 3, 2, generator=generator, dtype=torch.float64)[..., 0])
    return [t.to(dtype) for t in made]


def array(t: torch.Tensor) -> np.ndarray:
    return t.detach().double().numpy().copy()


def value(optimizer: MARS, x: torch.Tensor) -> torch.Tensor:
    """The parameter at full precision."""
    state = optimizer.state[x]
    low = state.get(LOW_HALF.get(x.dtype))
    return x.detach() if low is None else join(x.detach(), low)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("engine", "kind"), table())
def test_cell_matches_oracle(engine: str, kind: str, options: dict, dtype: torch.dtype) -> None:
    if engine == "fused" and dtype == torch.float64:
        pytest.skip("fused takes float32 and less")
    random = torch.Generator().manual_seed(1)
    xs = [torch.nn.Parameter(x) for x in tensors(dtype, random)]
    ns_dtype = "float64" if dtype == torch.float64 else "float32"
    optimizer = MARS(xs, mars_type=kind, **choose(engine), ns_dtype=ns_dtype, **options)
    oracle = Oracle([array(x) for x in xs], mars_type=kind, **options)
    x0 = [x.copy() for x in oracle.x]
    # On the device steps are float32, and so are the powers of beta.
    tolerance = max(TOLERANCE[dtype], 1e-5) if options.get("capturable") else TOLERANCE[dtype]
    exact = not options.get("is_approx", True)
    for step in range(STEPS if engine != "fused" else 4):  # the interpreter is slow
        # Norms on both sides of 1, so that clip acts on some tensors and steps only.
        scale = 10.0 ** (step % 3 - 1)
        gs = [(scale * g).to(dtype) for g in tensors(dtype, random)]
        hs = None
        if exact:
            hs = [(scale * h).to(dtype) for h in tensors(dtype, random)] if step else None
            if step:
                give(xs, hs)
                optimizer.update_previous_grad()
                optimizer.update_last_grad()
        before = [g.clone() for g in gs]
        give(xs, gs)
        optimizer.step()
        zeros = [np.zeros(x.shape) for x in oracle.x]
        given = [array(h) for h in hs] if hs else zeros
        oracle.step([array(g) for g in gs], given if exact else None)
        if exact:
            optimizer.update_last_grad()
        for i, x in enumerate(xs):
            assert torch.equal(gs[i], before[i]), "p.grad was written to"
            if options.get("consume_grads"):
                assert x.grad is None
            else:
                assert x.grad is gs[i]
            got, want = array(value(optimizer, x)), oracle.x[i]
            length = np.linalg.norm(want - x0[i])
            error = np.linalg.norm(got - want)
            rounding = 1e-16 if dtype == torch.float64 else 6e-8
            allowed = tolerance * length + rounding * STEPS * np.linalg.norm(want)
            assert error <= allowed, (step, i, x.shape, error, length)
            check_state(optimizer, x, oracle, i, gs[i], dtype, exact)


def give(xs: list[torch.Tensor], gs: list[torch.Tensor]) -> None:
    for x, g in zip(xs, gs, strict=True):
        x.grad = g


def check_state(optimizer, x, oracle, i, g, dtype, exact) -> None:
    state = optimizer.state[x]
    assert float(state["step"]) == oracle.t
    atol = 10 * TOLERANCE[dtype]
    if "exp_avg_sq" in state:
        np.testing.assert_allclose(array(state["exp_avg_sq"]), oracle.v[i], rtol=atol, atol=atol)
    if "max_exp_avg_sq" in state:
        np.testing.assert_allclose(
            array(state["max_exp_avg_sq"]), oracle.v_max[i], rtol=atol, atol=atol
        )
    if "last_grad" in state:
        m = array(state["exp_avg"])
        np.testing.assert_allclose(m, oracle.m[i], rtol=atol, atol=atol)
        if not exact:
            assert torch.equal(state["last_grad"], g)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree_on_mixed_groups(kind: str) -> None:
    """Groups of different types, dtypes and options in one optimizer, all engines alike."""
    results = []
    for engine in available():
        random = torch.Generator().manual_seed(2)
        groups = []
        for dtype, extra in [
            (torch.float32, {}),
            (torch.float64, {"mars_type": "plain-adamw", "lr": 1e-3, "fused": False}),
            (torch.bfloat16, {"clip": "global", "gamma": 0.1}),
            (torch.float32, {"clip": "global", "optimize_1d": True}),
        ]:
            xs = [torch.nn.Parameter(x) for x in tensors(dtype, random)]
            groups.append({"params": xs, **extra})
        optimizer = MARS(groups, mars_type=kind, **choose(engine), ns_dtype="float64")
        for _ in range(4):
            for group in optimizer.param_groups:
                for x in group["params"]:
                    x.grad = torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.dtype)
            optimizer.step()
        results.append([value(optimizer, x) for g in optimizer.param_groups for x in g["params"]])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_every_engine_has_every_kind() -> None:
    assert set(table()) == {(engine, kind) for engine in available() for kind in KINDS}
    assert available() == list(ENGINES), "Triton is missing"


@pytest.mark.parametrize("engine", available())
def test_bfloat16_newton_schulz_is_within_its_tolerance(engine: str) -> None:
    """The default dtype of the iteration, on shapes that stack: direction and length."""
    random = torch.Generator().manual_seed(3)
    for kind in ("mars-shampoo", "mars-m"):
        shapes = [(64, 64)] * 3 + [(32, 96)] * 2 + [(96, 32)]
        xs = [torch.nn.Parameter(torch.randn(s, generator=random)) for s in shapes]
        x0 = [array(x) for x in xs]
        optimizer = MARS(xs, lr=0.1, mars_type=kind, **choose(engine))
        oracle = Oracle(x0, lr=0.1, mars_type=kind)
        for _ in range(3):
            give(xs, [torch.randn(s, generator=random) for s in shapes])
            oracle.step([array(x.grad) for x in xs])
            optimizer.step()
        for x, start, want in zip(xs, x0, oracle.x, strict=True):
            moved, wanted = array(x) - start, want - start
            # 8 bits of mantissa through five quintics: 2 to 8 % seen; length within 3 %.
            assert np.linalg.norm(moved - wanted) <= 0.15 * np.linalg.norm(wanted)
            assert abs(np.sum(moved * wanted) / np.sum(wanted**2) - 1) <= 0.03


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("engine", available())
def test_a_graph_that_saved_a_parameter_notices(engine: str, decay: float) -> None:
    """Backward through a weight that a step has changed would be silently wrong."""
    for kind in KINDS:
        layer = torch.nn.Linear(4, 3, bias=False)
        optimizer = MARS(layer.parameters(), mars_type=kind, weight_decay=decay, **choose(engine))
        x = torch.randn(2, 4, requires_grad=True)
        loss = layer(x).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("engine", available())
def test_a_step_count_of_integers_is_taken(engine: str) -> None:
    for kind in KINDS:
        p = torch.nn.Parameter(torch.randn(4, 3))
        optimizer = MARS([p], mars_type=kind, **choose(engine))
        p.grad = torch.randn(4, 3)
        optimizer.step()
        saved = optimizer.state_dict()
        saved["state"][0]["step"] = torch.tensor(1)
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert float(optimizer.state[p]["step"]) == 2


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_memory(kind: str, foreach: bool) -> None:
    """Memory is estimated by steps of fake tensors, which mix with no tensor of before."""
    with FakeTensorMode():
        layer = torch.nn.Linear(4, 3)
        optimizer = MARS(layer.parameters(), mars_type=kind, foreach=foreach)
        for _ in range(2):
            layer(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()

"""The recorded trajectories of the authors' own code, reproduced by every engine."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from choice import choose
from mars import MARS
from mars.engines import available

FOLDER = Path(__file__).parent / "parity"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
CASES = {case["key"]: case for case in MANIFEST["cases"]}


@lru_cache(maxsize=1)
def arrays() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "trajectories.npz") as file:
        return {key: file[key] for key in file.files}


def tolerance(case: dict) -> float:
    """‖x − x_ref‖ / ‖x_ref − x₀‖. Rounding alone, except where Newton–Schulz runs in bfloat16."""
    if case["optimizer"] == "MARS_M" or "shampoo" in case["name"]:
        return 0.15
    return 1e-10 if case["dtype"] == "float64" else 1e-4  # 2.8e-13 and 1.9e-5 (by fused) seen


def options(case: dict) -> dict:
    o = dict(case["options"])
    if case["optimizer"] == "MARS_M":  # the authors' second class: other names, same rule
        decay, beta1 = o.pop("wd"), o.pop("momentum", 0.95)
        o |= {"mars_type": "mars-m", "betas": (beta1, 0.99), "weight_decay": decay}
        o |= {"lr_1d": o["lr"], "weight_decay_1d": decay}
    return o


def follow(key: str, engine: str, device: str = "cpu") -> None:
    """Take the recorded steps with the recorded gradients."""
    case, data = CASES[key], arrays()

    def recorded(name: str, i: int) -> torch.Tensor:
        return torch.from_numpy(data[f"{key}/{name}/{i}"]).to(device)

    x0 = [recorded("x0", i) for i in range(len(MANIFEST["shapes"]))]
    xs = [torch.nn.Parameter(x.clone()) for x in x0]
    optimizer = MARS(xs, **choose(engine), **options(case))
    group = optimizer.param_groups[0]
    lr = group["lr"]
    for step, factor in enumerate(case["lr_at"]):
        group["lr"] = lr * factor
        if f"{key}/prev_grad/{step}/0" in data:
            for i, x in enumerate(xs):
                x.grad = recorded(f"prev_grad/{step}", i)
            optimizer.update_previous_grad()
        for i, x in enumerate(xs):
            x.grad = recorded(f"grad/{step}", i)
        optimizer.step(bs=480 * 1024)
        optimizer.update_last_grad()
        for i, x in enumerate(xs):
            moved = (x.detach() - x0[i]).flatten()
            wanted = (recorded(f"x/{step}", i) - x0[i]).flatten()
            error = (moved - wanted).norm()
            assert error <= tolerance(case) * wanted.norm(), (step, i, float(error))
            # An error of scale must fail even where bfloat16 makes the tolerance wide.
            along, square = moved @ wanted, wanted @ wanted
            assert abs(along - square) <= 0.03 * square, (step, i, float(along / square))


@pytest.mark.parametrize("engine", available())
@pytest.mark.parametrize("key", CASES)
def test_trajectory(key: str, engine: str) -> None:
    if engine == "fused" and "float64" in key:
        pytest.skip("fused takes float32 and less")
    follow(key, engine)


def test_all_cases_are_there() -> None:
    assert len(CASES) == 62

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
    return 1e-10 if case["dtype"] == "float64" else 1e-4  # 2.8e-13 and 6e-6 seen


def options(case: dict) -> dict:
    o = dict(case["options"])
    if case["optimizer"] == "MARS_M":  # the authors' second class: other names, same rule
        decay, beta1 = o.pop("wd"), o.pop("momentum", 0.95)
        o |= {"mars_type": "mars-m", "betas": (beta1, 0.99), "weight_decay": decay}
        o |= {"lr_1d": o["lr"], "weight_decay_1d": decay}
    return o


@pytest.mark.parametrize("engine", available())
@pytest.mark.parametrize("key", CASES)
def test_trajectory(key: str, engine: str) -> None:
    if engine == "fused" and "float64" in key:
        pytest.skip("fused takes float32 and less")
    case, data = CASES[key], arrays()
    count = len(MANIFEST["shapes"])
    x0 = [torch.from_numpy(data[f"{key}/x0/{i}"]) for i in range(count)]
    xs = [torch.nn.Parameter(x.clone()) for x in x0]
    optimizer = MARS(xs, **choose(engine), **options(case))
    group = optimizer.param_groups[0]
    lr = group["lr"]
    for step, factor in enumerate(case["lr_at"]):
        group["lr"] = lr * factor
        if f"{key}/prev_grad/{step}/0" in data:
            for i, x in enumerate(xs):
                x.grad = torch.from_numpy(data[f"{key}/prev_grad/{step}/{i}"])
            optimizer.update_previous_grad()
        for i, x in enumerate(xs):
            x.grad = torch.from_numpy(data[f"{key}/grad/{step}/{i}"])
        optimizer.step(bs=480 * 1024)
        optimizer.update_last_grad()
        for i, x in enumerate(xs):
            reference = torch.from_numpy(data[f"{key}/x/{step}/{i}"])
            moved, wanted = (x.detach() - x0[i]).flatten(), (reference - x0[i]).flatten()
            error = (moved - wanted).norm()
            assert error <= tolerance(case) * wanted.norm(), (step, i, float(error))
            # An error of scale must fail even where bfloat16 makes the tolerance wide.
            along, square = moved @ wanted, wanted @ wanted
            assert abs(along - square) <= 0.03 * square, (step, i, float(along / square))


def test_all_cases_are_there() -> None:
    assert len(CASES) == 62

"""A step on shards: the part of a model that one of many ranks holds, by every engine.

    python bench/shards.py [--model gpt2-xl] [--ranks 8] [--rounds 10] [--out FILE.json]

Parameters, gradients and state are DTensors, as under FSDP2, on a process group that is torch's
fake one: this process is one of its ranks, and collectives return at once. So what is timed is what
a GPU and its host do, and what travels is left out (a vector of one number a tensor, summed over
ranks once, or twice with max_grad_norm). Optimizers take turns; times are medians, as ratios to
torch's fused AdamW on the same shards.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import mars
from mars.bench.shapes import PARAMETER_SETS
from mars.sharding import block

WAYS: dict[str, dict[str, Any]] = {
    "torch AdamW, fused": {},
    "MARS-AdamW, foreach": {"fused": False},
    "MARS-AdamW": {},
    "MARS-AdamW, max_grad_norm": {"max_grad_norm": 1.0},
    "MARS-AdamW, no clip, raw": {"clip": None, "second_moment": "raw"},
    "MARS-AdamW, bfloat16 state": {"state_dtype": "bfloat16"},
    "MARS-Lion": {"mars_type": "mars-lion"},
    "MARS-Lion, foreach": {"mars_type": "mars-lion", "fused": False},
}


def make(shapes: list[tuple[int, ...]], ranks: int, device: str) -> list[nn.Parameter]:
    """What rank 0 has of tensors that are cut by rows, with gradients of norm 1/ranks."""
    over = init_device_mesh(device, (ranks,))
    params = []
    for shape in shapes:
        local = (block(shape[0], ranks, 0), *shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        value, grad = (
            DTensor.from_local(
                scale * torch.randn(local, device=device), over, [Shard(0)], run_check=False,
                shape=torch.Size(shape), stride=stride,
            )
            for scale in (0.02, torch.Size(local).numel() ** -0.5 / ranks)
        )  # fmt: skip
        params.append(nn.Parameter(value))
        params[-1].grad = grad
    return params


def optimizer_of(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name.startswith("torch"):
        fused = params[0].is_cuda
        return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=fused)
    return mars.MARS(params, lr=1e-4, weight_decay=0.1, **WAYS[name])


def timed(optimizer: torch.optim.Optimizer, steps: int, device: str) -> float:
    """Seconds of a step, from one wait for the device to the next."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    wait()
    return (time.perf_counter() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-xl", choices=sorted(PARAMETER_SETS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    torch.manual_seed(0)
    params = make([shape.size for shape in PARAMETER_SETS[options.model]()], options.ranks, device)
    optimizers = {name: optimizer_of(name, params) for name in WAYS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for optimizer in optimizers.values():
        timed(optimizer, 3, device)  # state is made, kernels are compiled
    gc.collect()
    for _ in range(options.rounds):
        for name, optimizer in optimizers.items():
            seconds[name].append(timed(optimizer, options.steps, device))
    here = sum(p.to_local().numel() for p in params)
    base = statistics.median(seconds["torch AdamW, fused"])
    report = {
        "model": options.model, "ranks": options.ranks, "tensors": len(params), "elements": here,
        "ms": {name: 1e3 * statistics.median(own) for name, own in seconds.items()},
        "rounds": options.rounds, "steps": options.steps, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }  # fmt: skip
    print(f"{options.model}, one of {options.ranks} shards: {here / 1e6:.1f}M elements")
    for name, own in seconds.items():
        ms = 1e3 * statistics.median(own)
        print(f"{name:28} {ms:8.3f} ms  {ms / 1e3 / base:5.2f}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

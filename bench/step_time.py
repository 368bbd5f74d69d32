"""What a step costs, beside torch's own optimizers, in one run.

    python bench/step_time.py                  # GPT-2 small on a GPU, a small GPT on a CPU

Two sets of gradients alternate, so that no cache helps; medians of 20 steps; ratios to the fused
AdamW of torch (on a CPU: to its loop, which is what torch chooses there).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from mars import MARS
from mars.rule import KINDS

MODELS = {"gpt2-small": (12, 768, 50304, 1024), "gpt-tiny": (4, 128, 4096, 256)}


def shapes(model: str) -> list[tuple[int, ...]]:
    """Parameters of a GPT-2 without biases: (depth, width, vocabulary, context)."""
    depth, width, vocabulary, context = MODELS[model]
    block = [(width,), (3 * width, width), (width, width), (width,)]
    block += [(4 * width, width), (width, 4 * width)]
    return [(vocabulary, width), (context, width), *(block * depth), (width,)]


def candidates(on_gpu: bool) -> dict:
    adamw = {"lr": 1e-3, "weight_decay": 0.1}
    made = {"torch AdamW": lambda p: torch.optim.AdamW(p, fused=on_gpu, foreach=False, **adamw)}
    made["torch AdamW foreach"] = lambda p: torch.optim.AdamW(p, foreach=True, **adamw)
    for kind in KINDS:
        for engine in ("foreach", "reference"):
            for clip in ("tensor", None):
                if clip is None and kind in ("mars-adamw", "plain-adamw"):
                    continue
                name = f"{kind}, {engine}" + (", no clip" if clip is None else "")
                options = {**adamw, "mars_type": kind, "foreach": engine == "foreach", "clip": clip}
                made[name] = lambda p, options=options: MARS(p, **options)
    return made


def measure(make, sizes, device: str, repeat: int = 20) -> tuple[float, float]:
    """Median milliseconds of a step, and bytes of state a parameter."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device) * 0.02) for s in sizes]
    gradients = [[torch.randn_like(p) * 1e-3 for p in params] for _ in range(2)]
    optimizer = make(params)
    times = []
    for i in range(repeat + 5):
        for p, g in zip(params, gradients[i % 2], strict=True):
            p.grad = g
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    state = sum(
        v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if v.ndim
    )
    return statistics.median(times[5:]), state / sum(p.numel() for p in params)


def main() -> None:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, help="default: by device")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    model = args.model or ("gpt2-small" if on_gpu else "gpt-tiny")
    sizes, base, rows = shapes(model), None, []
    print(f"{model}, {args.device}, torch {torch.__version__}")
    print(f"{'':36s} ms/step   ratio   state bytes/parameter")
    for name, make in candidates(on_gpu).items():
        took, state = measure(make, sizes, args.device)
        base = base or took
        rows.append({"name": name, "ms": took, "ratio": took / base, "state": state})
        print(f"{name:36s} {took:7.2f} {took / base:7.2f} {state:7.1f}", flush=True)
    if args.out:
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        info = {"model": model, "device": device, "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(info, indent=1))


if __name__ == "__main__":
    main()

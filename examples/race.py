"""A short race on your CPU: AdamW, MARS-AdamW, Muon and MARS-M on characters of Shakespeare.

    make race            (or: python examples/race.py --steps 600)

The same model, initial weights and batches for all; two seeds. Each at its best rate of the grid in
docs/results/convert_rates_cpu.json (for MARS-AdamW that is the rate `MARS.from_adamw` chooses).
Takes two to three minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch
from gpt import GPT, batch, shakespeare, validate

import mars
from mars import MARS

CONTEXT, WIDTH, DEPTH, HEADS, BATCH = 64, 96, 3, 4, 16
LR, LR_MUON = 1e-2, 1.6e-2
MARKS = {"AdamW": "o", "MARS-AdamW": "x", "Muon": "#", "MARS-M": "+"}


def make(name: str, model: GPT) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    if name == "AdamW":
        return adamw
    if name == "MARS-AdamW":
        return MARS.from_adamw(adamw, verbose=False)
    # Muon with Nesterov is MARS-M at gamma = 1 - beta_1 without clip (tests/test_rule.py).
    options = {"gamma": 0.05, "clip": None} if name == "Muon" else {}
    return MARS(mars.param_groups(model, mars_type="mars-m", vectors="no-decay", **options),
                lr=LR_MUON, lr_1d=LR_MUON / 2, weight_decay=0.05)  # fmt: skip


def train(name: str, seed: int, steps: int, every: int, data) -> list[float]:
    """Validation losses along the way."""
    train_data, valid_data, vocab = data
    model = GPT(vocab, CONTEXT, WIDTH, DEPTH, HEADS)
    model.reset(seed)
    optimizer = make(name, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min(1.0, (t + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * t / steps))),
    )
    losses, started = [validate(model, valid_data, CONTEXT)], time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        model(*batch(train_data, step, BATCH, CONTEXT, seed)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0:
            losses.append(validate(model, valid_data, CONTEXT))
            if not sys.stderr.isatty() and step + 1 < steps:
                continue  # in a log file only the last line is of use
            left = (time.perf_counter() - started) / (step + 1) * (steps - step - 1)
            sys.stderr.write(f"\r{name:12s} seed {seed}  step {step + 1:4d}/{steps}  "
                             f"loss {losses[-1]:.3f}  {left:3.0f} s left ")  # fmt: skip
    sys.stderr.write("\n")
    return losses


def draw(curves: dict[str, list[float]], every: int, height: int = 16) -> str:
    """Loss over steps in characters; where curves meet, the last one drawn shows."""
    skip = 1  # the loss before training would squeeze everything else
    low = min(min(c[skip:]) for c in curves.values())
    high = max(max(c[skip:]) for c in curves.values())
    columns = max(len(c) for c in curves.values()) - skip
    rows = [[" "] * (columns * 3) for _ in range(height)]
    for name, curve in curves.items():
        for i, loss in enumerate(curve[skip:]):
            y = round((high - loss) / (high - low) * (height - 1))
            rows[y][3 * i + 1] = MARKS[name]
    lines = []
    for y, row in enumerate(rows):
        value = high - (high - low) * y / (height - 1)
        lines.append(f"{value:6.3f} |" + "".join(row).rstrip())
    lines.append("       +" + "-" * (columns * 3))
    lines.append(f"        step {every} to {every * columns}    "
                 + "   ".join(f"{mark} {name}" for name, mark in MARKS.items()))  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--steps", type=int, default=400, help="steps of 1,024 characters")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each optimizer")
    args = parser.parse_args()
    if args.steps < 40 or args.seeds < 1:
        parser.error("--steps must be at least 40 and --seeds at least 1")
    data, every = shakespeare(), args.steps // 20
    curves, spread = {}, {}
    for name in MARKS:
        runs = [train(name, seed, args.steps, every, data) for seed in range(args.seeds)]
        curves[name] = [sum(column) / len(column) for column in zip(*runs, strict=True)]
        final = [run[-1] for run in runs]
        spread[name] = (max(final) - min(final)) / 2
    print(f"\nValidation loss, mean of {args.seeds} seeds\n")
    print(draw(curves, every))
    target = curves["AdamW"][-1]
    print("\nWhere marks meet, the last one shows; Muon and MARS-M lie on each other.")
    print(f"\n{'':12s}  final loss, half range  steps to AdamW's final loss")
    for name, curve in curves.items():
        reached = next((i * every for i, loss in enumerate(curve) if loss <= target), None)
        print(f"{name:12s}  {curve[-1]:.4f} +- {spread[name]:.4f}        "
              f"{'not reached' if reached is None else reached}")  # fmt: skip


if __name__ == "__main__":
    main()

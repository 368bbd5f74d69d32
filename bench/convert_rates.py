"""Which rate should MARS have, given a tuned AdamW? Trains a small GPT over a grid and draws it.

    python bench/convert_rates.py                         # characters of Shakespeare, CPU, ~10 min
    python bench/convert_rates.py --train T.bin --valid V.bin --device cuda --size gpu

AdamW is tuned first; then MARS-AdamW and MARS-M run at multiples of AdamW's best rate, with
lr x weight_decay unchanged and vectors trained as AdamW trained them, which is what
`MARS.from_adamw` does; last, what its two rules choose by themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, batch, shakespeare, validate

import mars
from mars import MARS

SIZES = {
    # context, width, depth, heads, batch, steps
    "cpu": (64, 96, 3, 4, 16, 400),
    "gpu": (256, 384, 6, 6, 128, 600),
}
ADAMW_RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
MULTIPLES = {
    "mars-adamw": [0.5, 1.0, 1.55, 2.2, 3.0, 5.0, 10.0],
    "mars-m": [1.0, 2.0, 4.0, 8.0, 16.0],
}
DECAY = 0.1


def adamw(model: GPT, lr: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=DECAY, fused=fused)


def at_multiple(model: GPT, lr: float, kind: str, multiple: float) -> torch.optim.Optimizer:
    """MARS at a multiple of AdamW's rate; embeddings by AdamW for MARS-M, as is usual."""
    if kind == "mars-m":
        groups = mars.param_groups(model, mars_type=kind, lr=lr * multiple, lr_1d=lr,
                                   weight_decay=DECAY / multiple, weight_decay_1d=DECAY,
                                   vectors="no-decay")  # fmt: skip
        return MARS(groups)
    optimizer = MARS.from_adamw(adamw(model, lr), verbose=False)
    for group in optimizer.param_groups:
        # lr_1d is measured against base_lr, so that vectors keep AdamW's rate.
        group.update(lr=lr * multiple, base_lr=lr * multiple,
                     weight_decay=group["weight_decay_1d"] / multiple)  # fmt: skip
    return optimizer


class Lab:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device = args.device
        self.context, width, depth, heads, self.batch, self.steps = SIZES[args.size]
        if args.train:
            self.train, self.valid = (
                torch.from_file(path, dtype=torch.uint16, size=Path(path).stat().st_size // 2)
                .int().to(args.device) for path in (args.train, args.valid)
            )  # fmt: skip
            vocab, self.corpus = 50304, Path(args.train).name
        else:
            train, valid, vocab = shakespeare()
            self.train, self.valid = train.to(args.device), valid.to(args.device)
            self.corpus = "tiny Shakespeare, characters"
        self.model = GPT(vocab, self.context, width, depth, heads).to(args.device)
        self.forward = self.model
        if args.device == "cuda":
            torch.set_float32_matmul_precision("high")
            self.forward = torch.compile(self.model)
        self.args = args

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def run(self, make, seed: int) -> float:
        """Train from the seed's weights on the seed's batches; return the validation loss."""
        self.model.reset(seed)
        optimizer = make(self.model)
        rates = [group["lr"] for group in optimizer.param_groups]
        for step in range(self.steps):
            warm, left = min(1.0, (step + 1) / (0.05 * self.steps)), step / self.steps
            factor = warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * left)))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
            with self.autocast():
                loss = self.forward(*batch(self.train, step, self.batch, self.context, seed))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
        with self.autocast():
            loss = validate(self.forward, self.valid, self.context)
        return loss if math.isfinite(loss) else float("inf")

    def point(self, name: str, x: float, make) -> dict:
        started = time.perf_counter()
        losses = [self.run(make, seed) for seed in range(self.args.seeds)]
        mean, took = sum(losses) / len(losses), time.perf_counter() - started
        each = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:24s} {x:8.5g}  {mean:.4f}  ({each})  {took:.0f} s", flush=True)
        return {"name": name, "x": x, "mean": mean, "losses": losses}


def main() -> None:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--train", help="uint16 tokens (default: the characters of Shakespeare)")
    parser.add_argument("--valid", help="uint16 tokens to validate on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/convert_rates.json"))
    args = parser.parse_args()
    lab = Lab(args)
    print("optimizer                     rate or multiple, mean loss, losses of the seeds")
    points = {"adamw": [lab.point("adamw", lr, lambda m, lr=lr: adamw(m, lr))
                        for lr in ADAMW_RATES]}  # fmt: skip
    best = min(points["adamw"], key=lambda p: p["mean"])["x"]
    for kind, multiples in MULTIPLES.items():
        points[kind] = [
            lab.point(kind, x, lambda m, x=x, kind=kind: at_multiple(m, best, kind, x))
            for x in multiples
        ]
    for rule, x in (("step-size", 1.55), ("published", 10.0)):

        def chosen(model: GPT, rule: str = rule) -> MARS:
            return MARS.from_adamw(adamw(model, best), rule=rule, verbose=False)

        points[rule] = [lab.point(f"from_adamw, {rule}", x, chosen)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    args.out.write_text(json.dumps({
        "command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "device": device,
        "corpus": lab.corpus, "size": SIZES[args.size], "seeds": args.seeds, "decay": DECAY,
        "parameters": sum(p.numel() for p in lab.model.parameters()),
        "tokens": lab.batch * lab.context * lab.steps, "best_adamw": best, "points": points,
    }, indent=1))  # fmt: skip
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

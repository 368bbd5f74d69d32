"""Which rate should MARS have, given a tuned AdamW? Trains a small GPT over a grid and draws it.

    python bench/convert_rates.py            # characters of Shakespeare, two CPU cores, 20 minutes
    python bench/convert_rates.py --train T.bin --valid V.bin --device cuda --size gpu

The .bin files are uint16 GPT-2 tokens, as nanoGPT's data scripts write them.

AdamW is tuned first; then MARS-AdamW and MARS-M run at multiples of AdamW's best rate, with
lr x weight_decay unchanged and vectors trained as AdamW trained them, which is what
`MARS.from_adamw` does; last, what its two rules choose by themselves. Results go to a JSON file
and, if matplotlib is there, to a picture beside it; `--draw` only draws an existing file again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from gpt import GPT, batch, shakespeare, validate

import mars
from mars import MARS

SIZES = {
    # context, width, depth, heads, batch, steps
    "cpu": (64, 96, 3, 4, 16, 400),
    "gpu": (256, 384, 6, 6, 128, 600),
}
ADAMW_RATES = {
    "cpu": [2e-3, 4e-3, 6e-3, 8e-3, 1e-2, 1.2e-2, 1.6e-2, 3.2e-2],
    "gpu": [5e-4, 7e-4, 1e-3, 1.25e-3, 1.5e-3, 2e-3, 4e-3, 8e-3],
}
MULTIPLES = {
    "adamw, betas of MARS": [1.0, 1.5, 2.0, 3.0],
    "mars-adamw": [0.5, 1.0, 1.55, 2.2, 3.0, 5.0, 10.0],
    "mars-adamw, AdamW's betas": [1.0, 1.25, 1.55, 2.2, 3.0],
    "mars-m": [1.0, 2.0, 4.0, 8.0, 16.0],
    "muon": [1.0, 2.0, 4.0, 8.0, 16.0],
}
DECAY = 0.1


def adamw(
    model: GPT, lr: float, betas: tuple[float, float] = (0.9, 0.95), decay: float = DECAY
) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=decay, fused=fused)


def at_multiple(model: GPT, lr: float, kind: str, multiple: float) -> torch.optim.Optimizer:
    """An optimizer at a multiple of AdamW's rate, lr x weight_decay unchanged."""
    if kind in ("mars-m", "muon"):
        # Embeddings by AdamW, as is usual. Muon with Nesterov is MARS-M at gamma = 1 - beta_1
        # without clip (tests/test_rule.py).
        options = {"gamma": 0.05, "clip": None} if kind == "muon" else {}
        groups = mars.param_groups(
            model, mars_type="mars-m", vectors="no-decay", lr=lr * multiple, lr_1d=lr,
            weight_decay=DECAY / multiple, weight_decay_1d=DECAY, **options,
        )  # fmt: skip
        return MARS(groups)
    if kind == "adamw, betas of MARS":
        return adamw(model, lr * multiple, betas=(0.95, 0.99), decay=DECAY / multiple)
    betas = (0.9, 0.95) if "betas" in kind else (0.95, 0.99)
    optimizer = MARS.from_adamw(adamw(model, lr), betas=betas, verbose=False)
    for group in optimizer.param_groups:
        # lr_1d is measured against base_lr, so that vectors keep AdamW's rate.
        group["lr"] = group["base_lr"] = lr * multiple
        group["weight_decay"] = group["weight_decay_1d"] / multiple
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
            vocab, self.corpus = 50304, args.corpus or Path(args.train).name
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


def draw(path: Path) -> None:
    """The losses over the multiple of AdamW's best rate, as a picture beside the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    result = json.loads(path.read_text())
    base, points = result["base_rate"], result["points"]
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for name, label, color in (
        ("adamw", "AdamW (.9, .95)", "#555555"),
        ("adamw, betas of MARS", "AdamW (.95, .99)", "#aaaaaa"),
        ("mars-adamw", "MARS-AdamW (.95, .99), published", "#c8442e"),
        ("mars-adamw, AdamW's betas", "MARS-AdamW (.9, .95)", "#e0962f"),
        ("muon", "Muon: MARS-M, γ = 1−β₁, no clip", "#7a8fa6"),
        ("mars-m", "MARS-M", "#2f6db3"),
    ):
        xs = [p["x"] / base if name == "adamw" else p["x"] for p in points[name]]
        axes.plot(xs, [p["mean"] for p in points[name]], "o-", color=color, label=label, ms=4)
        for x, p in zip(xs, points[name], strict=True):
            axes.plot([x] * len(p["losses"]), p["losses"], "_", color=color, alpha=0.6)
    low, high = axes.get_ylim()
    for x, label, color in ((1.245, "from_adamw", "#e0962f"), (10.0, "published", "#c8442e")):
        axes.axvline(x, color=color, lw=0.8, ls=":")
        axes.text(x * 1.03, low + 0.02 * (high - low), label, color=color, fontsize=9)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.minorticks_off()
    axes.set_xlabel(f"learning rate, in multiples of {base:g}, logarithmic")
    axes.set_ylabel("validation loss")
    millions = result["parameters"] / 1e6
    title = f"GPT of {millions:.2g}M parameters, {result['tokens'] / 1e6:.2g}M tokens"
    axes.set_title(f"{title}, {result['seeds']} seeds", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    print(f"drew {path.with_suffix('.png')}")


def arguments(description: str, seeds: int, out: str) -> argparse.ArgumentParser:
    """The command line of what trains in a Lab."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=text)
    parser.add_argument("--train", help="uint16 tokens (default: the characters of Shakespeare)")
    parser.add_argument("--valid", help="uint16 tokens to validate on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--corpus", help="what the tokens are, for the record")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def main() -> None:
    parser = arguments(__doc__, 2, "runs/convert_rates.json")
    parser.add_argument("--more", action="store_true", help="keep the points of --out, add missing")
    parser.add_argument("--draw", type=Path, help="only draw this JSON file again")
    args = parser.parse_args()
    if args.draw:
        return draw(args.draw)
    lab = Lab(args)
    print("optimizer                     rate or multiple, mean loss, losses of the seeds")
    points: dict[str, list[dict]] = {"adamw": []}
    base = None
    if args.out.exists() and args.more:
        before = json.loads(args.out.read_text())
        points, base = before["points"], before["base_rate"]
    done = {point["x"] for point in points["adamw"]}
    for x in ADAMW_RATES[args.size]:
        if x not in done:
            points["adamw"].append(lab.point("adamw", x, lambda m, x=x: adamw(m, x)))
    points["adamw"].sort(key=lambda point: point["x"])
    base = base or min(points["adamw"], key=lambda p: p["mean"])["x"]
    for kind, multiples in MULTIPLES.items():
        if kind not in points:
            points[kind] = [
                lab.point(kind, x, lambda m, x=x, kind=kind: at_multiple(m, base, kind, x))
                for x in multiples
            ]
    for rule, x in (("step-size", 1.245), ("published", 10.0)):
        if rule in points:
            continue

        def chosen(model: GPT, rule: str = rule) -> MARS:
            return MARS.from_adamw(adamw(model, base), rule=rule, verbose=False)

        points[rule] = [lab.point(f"from_adamw, {rule}", x, chosen)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    device = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores"
    )
    args.out.write_text(json.dumps({
        "command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "device": device,
        "corpus": lab.corpus, "size": SIZES[args.size], "seeds": args.seeds, "decay": DECAY,
        "parameters": sum(p.numel() for p in lab.model.parameters()),
        "tokens": lab.batch * lab.context * lab.steps, "base_rate": base, "points": points,
    }, indent=1))  # fmt: skip
    print(f"wrote {args.out}")
    try:
        draw(args.out)
    except ImportError:
        print("no picture: install matplotlib and use --draw")


if __name__ == "__main__":
    main()

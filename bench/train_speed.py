"""Tokens a second: mars.lab's GPT against a plain one, and MARS against AdamW, side by side.

    python bench/train_speed.py --model gpt2-small --batch 32 64 --out runs/speed.json
    python bench/train_speed.py --graphs --fp8-head
    python bench/train_speed.py --model tiny --device cpu

The plain one is written as nanoGPT is: torch's layers under autocast, torch.compile, all logits at
once in F.cross_entropy, gradients clipped by clip_grad_norm_, torch's fused AdamW. Everything runs
in one process, in rounds that take turns, so that the device is as warm for all.
Tokens are random: arithmetic does not care. MFU is of the 16-bit peak, with an 8-bit head too.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mars
from mars.lab.clock import Clock
from mars.lab.graphs import WARM, Graphs
from mars.lab.models import GPT, flops_per_token, peak_flops
from mars.lab.optimizers import state_bytes


@dataclass(frozen=True)
class Shape:
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 1024
    vocab_size: int = 50304
    dropout: float = 0.0
    bias: bool = False


SHAPES = {
    "tiny": Shape(2, 2, 32, 32, 256),
    "gpt2-small": Shape(12, 12, 768),
    "gpt2-medium": Shape(24, 16, 1024),
}


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.n_embd
        self.n_head = shape.n_head
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        heads = (h.view(b, t, self.n_head, -1) for h in self.qkv(self.norm_1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads), is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Plain(nn.Module):
    """The baseline."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.wpe = nn.Embedding(shape.block_size, shape.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.n_embd, bias=False)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def by_mars(kind: str, clip: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = mars.param_groups(model, mars_type=kind)
        options = {"lr": 1e-4, "lr_1d": 1e-4, "weight_decay": 0.1}
        return mars.MARS(groups, **options, max_grad_norm=clip or None)

    return make


Passes = Callable[[tuple[Tensor, Tensor]], Tensor]


def passes_of(forward: Callable[..., Tensor], autocast: bool) -> Passes:
    """Forward and backward."""

    def passes(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16, autocast):
            loss = forward(*batch)
        loss.backward()
        return loss.detach()

    return passes


class Candidate:
    """A model with an optimizer, ready to step; MARS clips inside its step."""

    def __init__(
        self, name: str, model: nn.Module, passes: Passes, optimizer: torch.optim.Optimizer,
        clip: float,
    ) -> None:  # fmt: skip
        self.name, self.model, self.passes, self.optimizer = name, model, passes, optimizer
        self.clips = 0.0 if isinstance(optimizer, mars.MARS) else clip
        self.clock = Clock(next(model.parameters()).device)
        self.rates: list[float] = []  # tokens a second, by round
        self.optimizer_seconds: list[float] = []  # of a step, the clip included, by round
        self.memory: int | None = None

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.passes(batch)
        self.clock.optimizer_begins()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clips)
        self.optimizer.step()
        self.clock.optimizer_ends()

    def warm(self, batch: tuple[Tensor, Tensor]) -> None:
        """Some steps, the last for the memory."""
        for _ in range(WARM + 1):
            self.step(batch)
        self.optimizer.zero_grad()
        if batch[0].is_cuda:
            held = torch.cuda.memory_allocated() - self.own()  # by the others
            torch.cuda.reset_peak_memory_stats()
            self.step(batch)
            self.memory = torch.cuda.max_memory_allocated() - held
            self.optimizer.zero_grad()

    def own(self) -> int:
        """Bytes of parameters and optimizer state."""
        parameters = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return parameters + state_bytes(self.optimizer)

    def measure(self, batch: tuple[Tensor, Tensor], steps: int) -> None:
        """Tokens a second and the optimizer's part, over some steps after one that does not count.

        Gradients are given back afterwards: the next one takes their place.
        """
        self.step(batch)
        self.clock = Clock(batch[0].device)
        self.clock.start()
        for _ in range(steps):
            self.step(batch)
        self.clock.lap_steps = steps
        seconds, optimizer = self.clock.lap()
        self.rates.append(batch[0].numel() / seconds)
        self.optimizer_seconds.append(optimizer)
        self.optimizer.zero_grad()


def candidates(shape: Shape, args: argparse.Namespace) -> list[Candidate]:
    def ready(model: nn.Module) -> tuple[nn.Module, Passes]:
        model = model.to(args.device)
        forward: Callable[..., Tensor] = model
        if args.compile and isinstance(model, GPT):
            model.compile(dynamic=False)
        elif args.compile:
            forward = torch.compile(model)

        passes = passes_of(forward, args.autocast)
        if isinstance(model, GPT) and args.graphs and args.autocast:
            graphs = Graphs(lambda *batch: passes(batch), model.parameters())
            return model, lambda batch: graphs(batch, True)
        return model, passes

    lean = not args.wide_residual
    plain, ours = ready(Plain(shape)), ready(GPT(shape, lean_residual=lean))
    every = [
        ("plain, AdamW", plain, adamw),
        ("ours, AdamW", ours, adamw),
        ("ours, MARS-AdamW", ours, by_mars("mars-adamw", args.clip)),
        ("ours, MARS-M", ours, by_mars("mars-m", args.clip)),
    ]
    if args.fp8_head:
        eight = ready(GPT(shape, lean_residual=lean, fp8_head=True))
        every += [
            ("ours, AdamW, fp8 head", eight, adamw),
            ("ours, MARS-AdamW, fp8 head", eight, by_mars("mars-adamw", args.clip)),
        ]
    chosen = [row for row in every if not args.only or any(word in row[0] for word in args.only)]
    return [Candidate(name, *made, make(made[0]), args.clip) for name, made, make in chosen]


def compare(shape: Shape, batch_size: int, args: argparse.Namespace) -> list[dict]:
    """Rows of the table for one batch size."""
    size = (batch_size, shape.block_size)
    batch = tuple(torch.randint(0, shape.vocab_size, size, device=args.device) for _ in range(2))
    everyone = candidates(shape, args)
    for one in everyone:
        one.warm(batch)
    gc.collect()
    gc.freeze()  # no collection of what the compiler left behind falls into a round
    for _ in range(args.rounds):
        for one in everyone:
            one.measure(batch, args.steps)
    rows = [row(one, shape, batch_size, args) for one in everyone]
    for found in rows:
        found["ratio"] = found["tokens_per_second"] / rows[0]["tokens_per_second"]
        show(found)
    return rows


def row(one: Candidate, shape: Shape, batch_size: int, args: argparse.Namespace) -> dict:
    speed = statistics.median(one.rates)
    peak = peak_flops(args.device)
    return {
        "name": one.name,
        "batch": batch_size,
        "tokens_per_second": speed,
        "rounds": one.rates,
        "milliseconds": 1e3 * batch_size * shape.block_size / speed,
        "mfu": speed * flops_per_token(shape) / peak if peak else None,
        "peak_memory": None if args.graphs else one.memory,  # theirs is not seen by replaying them
        "graphs": args.graphs and args.autocast and one.name.startswith("ours"),
    }


def show(row: dict) -> None:
    mfu = "" if row["mfu"] is None else f"{row['mfu']:6.1%}"
    memory = "" if row["peak_memory"] is None else f"{row['peak_memory'] / 1e9:6.1f} GB"
    spread = f"{min(row['rounds']) / 1e3:.1f}–{max(row['rounds']) / 1e3:.1f}"
    print(
        f"{row['name']:30s} {row['batch']:4d} x  {row['tokens_per_second'] / 1e3:8.1f} k tokens/s "
        f"({spread})  {row['milliseconds']:7.2f} ms  {mfu}  {row['ratio']:.3f}  {memory}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="gpt2-small" if cuda else "tiny")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--clip", type=float, default=1.0, help="of the gradient's norm; 0: none")
    parser.add_argument("--only", nargs="*", help="candidates whose name has one of these words")
    parser.add_argument("--wide-residual", action="store_true", help="float32 residual in ours")
    parser.add_argument(
        "--fp8-head", action="store_true", help="ours with an 8-bit head too (--loop.fp8-head)"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="ours as with --loop.graphs True, which short passes have by default",
    )
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    args.autocast = args.device.startswith("cuda")
    return args


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    if args.autocast:  # on a CPU it would be another arithmetic, and only on some
        torch.set_float32_matmul_precision("high")
    shape = SHAPES[args.model]
    name = torch.cuda.get_device_name() if args.autocast else platform.processor() or "CPU"
    print(f"{args.model} on {name}, torch {torch.__version__}")
    rows = []
    for batch_size in args.batch:
        rows += compare(shape, batch_size, args)
        torch.compiler.reset()
        gc.unfreeze()
        gc.collect()
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            settings = {k: v for k, v in vars(args).items() if k != "out"}
            result = {"device": name, "torch": torch.__version__, "model": asdict(shape),
                      "settings": settings, "rows": rows}  # fmt: skip
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

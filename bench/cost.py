"""What AdamW, Muon and every MARS cost in training, by model size: time, memory, tokens a second.

    python bench/cost.py --seconds 500 --out runs/cost.json    # the same command resumes
    python bench/cost.py --sizes tiny --out runs/cost.json     # any machine

A cell is a size and an optimizer: a real training step of mars.lab's GPT on random tokens, beside
AdamW's, in turns where both states fit the memory and one after the other where they do not. State
and weights are kept in the first format that fits (cost_plan.py), and the row says which. What does
not fit is a result; it says what the planner thinks it needs. In the table the planner's prediction
stands beside every figure, and alone where a model is too large to measure. After every cell the
file is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cost_plan import (
    DOUBT,
    ENTRANTS,
    FREE_SHARE,
    ORDER,
    PREDICTED,
    SIZES,
    Kept,
    Place,
    fitting,
    forms,
    here,
    job_of,
    micro_batch,
    model_of,
    needs,
)  # fmt: skip
from cost_table import terminal
from torch import Tensor
from train_speed import Candidate, passes_of

from mars.bench.measure import quick_release, release
from mars.lab import hardware
from mars.lab.config import Optimizer
from mars.lab.errors import LabError
from mars.lab.graphs import WARM, Graphs
from mars.lab.loop import SHORT_PASS
from mars.lab.models import GPT
from mars.lab.optimizers import build, state_bytes
from mars.lab.planner import predict, words
from mars.lab.planner.steps import OPTIMIZERS
from mars.lab.planner.validate import of_cost
from mars.lab.rundir import write_json

FORMAT = 2
CLIP = 1.0


class Site:
    """One size: its model, made once for all optimizers that keep its weights alike."""

    def __init__(self, size: str, place: Place, args: argparse.Namespace) -> None:
        self.size, self.place, self.args = size, place, args
        self.plan = model_of(size)
        self.micro = micro_batch(self.plan, place, args.batch)
        self.made: GPT | None = None
        self.replayed: Graphs | None = None
        shape = (self.micro, self.plan.run.gpt.block_size)
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.plan.run.gpt.vocab_size, (2, *shape), generator=random)
        inputs, targets = tokens.to(place.device)
        self.batch: tuple[Tensor, Tensor] = (inputs, targets)

    @property
    def graphs(self) -> bool:
        """Are forward and backward replayed? As in training: where the host would be too slow."""
        flops = self.plan.flops_per_token * self.batch[0].numel()
        return self.place.device.type == "cuda" and flops <= SHORT_PASS

    def model(self, params: str) -> GPT:
        """The GPT with weights of a dtype, drawn where they are: on a CPU that takes minutes."""
        dtype = getattr(torch, params)
        if self.made is None or next(self.made.parameters()).dtype != dtype:
            self.close()
            with self.place.device:
                made = GPT(self.plan.run.gpt, seed=None)
            for p in made.to(dtype).parameters():
                torch.nn.init.normal_(p, 0.0, 0.02) if p.ndim > 1 else torch.nn.init.ones_(p)
            if self.args.compile:
                made.compile()
            self.made = made
        return self.made

    def close(self) -> None:
        """Give back everything but the tokens."""
        self.made = self.replayed = None
        torch.compiler.reset()
        release(self.place.device)

    def race(self, entrants: Sequence[tuple[str, Kept]]) -> dict[str, dict[str, Any]]:
        """Measure optimizers in turns, all on the same weights."""
        everyone = []
        for name, kept in entrants:
            model = self.model(kept.params)
            options = {} if OPTIMIZERS[name].torch else {"state_dtype": kept.state}
            config = Optimizer(name=name, lr=1e-4, max_grad_norm=CLIP, options=options)
            passes = passes_of(model, self.place.autocast)
            one = Candidate(name, model, passes, build(model, config), CLIP)
            one.warm(self.batch)
            everyone.append(one)
        release(self.place.device)
        if self.graphs:  # only now: what is replayed allocates nothing that could be measured
            self._replay(everyone)
        with quick_release():
            for _ in range(self.args.rounds):
                for one in everyone:
                    one.measure(self.batch, self.args.steps)
        return {
            one.name: self._row(one, kept)
            for one, (_, kept) in zip(everyone, entrants, strict=True)
        }

    def _replay(self, everyone: Sequence[Candidate]) -> None:
        """Record the passes, which are the same for all that train these weights."""
        passes = everyone[0].passes
        if self.replayed is None:
            parameters = everyone[0].model.parameters()
            self.replayed = Graphs(lambda *batch: passes(batch), parameters)
            for _ in range(WARM + 1):
                everyone[0].optimizer.zero_grad()
                self.replayed(self.batch, True)
        replayed = self.replayed
        for one in everyone:
            one.passes = lambda batch: replayed(batch, True)

    def _row(self, one: Candidate, kept: Kept) -> dict[str, Any]:
        speed = statistics.median(one.rates)
        peak = self.place.gpu.peak_flops_per_second if self.place.known else None
        return {
            **kept._asdict(),
            "tokens_per_second": speed,
            "rounds": one.rates,
            "step_ms": 1e3 * self.batch[0].numel() / speed,
            "optimizer_ms": 1e3 * statistics.median(one.optimizer_seconds),
            "mfu": speed * self.plan.flops_per_token / peak if peak else None,
            "graphs": self.graphs,
            "peak_bytes": one.memory,
            "state_bytes": state_bytes(one.optimizer),
        }

    def cell(self, name: str, base: Kept | None) -> dict[str, Any]:
        """The row of an optimizer; ``base`` is how AdamW is kept, None if it does not fit."""
        row = {
            "size": self.size, "model": SIZES[self.size], "optimizer": name,
            "elements": self.plan.elements, "micro_batch": self.micro,
            "tokens": self.batch[0].numel(),
        }  # fmt: skip
        for kept in fitting(self.plan, self.place, self.micro, name, DOUBT):
            measured = self._attempt(name, kept, base)
            if measured is not None:
                return {**row, "status": "measured", **measured}
        least = needs(self.plan, self.place.gpu, 1, name, forms(name)[-1])
        return {**row, "status": "does not fit", "needs_bytes": least}

    def _attempt(self, name: str, kept: Kept, base: Kept | None) -> dict[str, Any] | None:
        """What was measured, or None if the memory was not enough."""
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._measure(name, kept, base)
        self.close()  # here, where no traceback holds tensors any more
        return None

    def _measure(self, name: str, kept: Kept, base: Kept | None) -> dict[str, Any]:
        entrants = [(name, kept)]
        if base is not None and name != "adamw":
            entrants.insert(0, ("adamw", base))
        groups = [entrants] if self._together(entrants) else [[one] for one in entrants]
        found: dict[str, dict[str, Any]] = {}
        for group in groups:
            found |= self.race(group)
            release(self.place.device)
        adamw = None if name == "adamw" else found.get("adamw")
        return {**found[name], "adamw": adamw, "in_turns": len(groups) == 1}

    def _together(self, entrants: Sequence[tuple[str, Kept]]) -> bool:
        """Do all of them fit the memory at once, and train weights of one dtype?"""
        (*others, (name, kept)) = entrants
        bytes_ = needs(self.plan, self.place.gpu, self.micro, name, kept)
        for other, own in others:
            job = job_of(self.plan, self.place.gpu, self.micro, own)
            bytes_ += predict.rank_memory(job, OPTIMIZERS[other]).state
        alike = len({own.params for _, own in entrants}) == 1
        return alike and bytes_ <= (1 - FREE_SHARE) * self.place.memory_bytes


class File:
    """The results so far, written after every cell."""

    def __init__(self, path: Path | None, place: Place, args: argparse.Namespace) -> None:
        self.path = path
        settings = {"steps": args.steps, "rounds": args.rounds, "batch": args.batch,
                    "compile": args.compile, "clip": CLIP}  # fmt: skip
        self.about = {
            "format": FORMAT, "device": hardware.hardware(place.device)["name"],
            "torch": torch.__version__, "bf16": place.autocast, "settings": settings,
        }  # fmt: skip
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            rows = {(row["size"], row["optimizer"]): row for row in found["rows"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read: {error!r}; choose another --out") from error
        for name, value in self.about.items():
            if found.get(name) != value:
                raise LabError(
                    f"{path} was measured with {name} {found.get(name)!r}, not {value!r}: choose "
                    "another --out"
                )
        self.rows = {key: row for key, row in rows.items() if row["status"] != "failed"}

    def content(self) -> dict[str, Any]:
        order = [(size, name) for size in SIZES for name in ENTRANTS]
        return {**self.about, "rows": [self.rows[key] for key in order if key in self.rows]}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows |= {(row["size"], row["optimizer"]): row for row in rows}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content(), indent=1)


def cells(file: File, sizes: Sequence[str], place: Place, args: argparse.Namespace) -> int:
    """Measure what is missing until the time is up; the number of cells that are left."""
    began, longest = time.monotonic(), 0.0
    missing = [(s, n) for s in sizes for n in ENTRANTS if (s, n) not in file.rows]
    site: Site | None = None
    while missing:
        started = time.monotonic()
        # 1.5: the next may be a larger one, and has a model to compile.
        if longest and started - began + 1.5 * longest > args.seconds:
            break
        size, name = missing.pop(0)
        if site is None or site.size != size:
            if site is not None:
                site.close()
            site = Site(size, place, args)
        row = _cell(site, name, file.rows.get((size, "adamw")))
        row["seconds"] = time.monotonic() - started
        longest = max(longest, row["seconds"])
        file.add([row])
        told = row.get("why") or row["status"]
        print(f"{size} {name}: {told}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    if site is not None:
        site.close()
    return len(missing)


def _cell(site: Site, name: str, adamw: dict[str, Any] | None) -> dict[str, Any]:
    """A row, whatever happens; what failed is tried again by the next call."""
    base = None
    if adamw is not None and adamw["status"] == "measured":
        base = Kept(adamw["params"], adamw["state"])
    try:
        return site.cell(name, base)
    except Exception as error:  # any cell may break; the others shall be measured
        why = (str(error).splitlines() or [type(error).__name__])[0]
    site.close()
    return {"size": site.size, "optimizer": name, "status": "failed", "why": why}


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    measurable = [size for size in SIZES if size not in PREDICTED]
    sizes = list(ORDER) if cuda else ["tiny"]
    add("--sizes", nargs="+", choices=measurable, default=sizes, help="in this order")
    add("--seconds", type=float, default=math.inf, help="begin no cell that would end later")
    add("--device", default="auto")
    add("--batch", type=int, default=32 if cuda else 2, help="most sequences of a step")
    add("--rounds", type=int, default=3, help="in which optimizers take turns")
    add("--steps", type=int, default=4, help="of a round")
    add("--no-compile", dest="compile", action="store_false")
    add("--out", type=Path, help="JSON; a later call with the same one goes on")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    # The largest models fill the memory: pieces between tensors must not be lost.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        place = here(args.device)
        if place.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        args.compile = args.compile and place.device.type == "cuda"
        file = File(args.out, place, args)
        left = cells(file, args.sizes, place, args)
    except LabError as error:
        sys.exit(f"error: {error}")
    found = file.content()
    print(f"{found['device']}, torch {found['torch']}\n\n{terminal(found)}\n")
    print("\n".join(words.error_summary(list(of_cost(found)))))
    if left:
        print(f"{left} cells are left: the same command resumes")


if __name__ == "__main__":
    main()

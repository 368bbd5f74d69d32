"""How far averages of gradients are from the gradient: measured where the gradient can be had.

A GPT of some ten thousand parameters is trained by AdamW on a few windows of the embedded corpus,
few enough that the gradient ∇F over all of them can be computed. Beside it, on the same points and
batches, run the averages m of plain momentum, of approximate and of exact MARS, for every γ and β₁
at once: they watch, AdamW drives. No clip: it is the estimators that are asked about. m is divided
by 1 − β₁ᵗ, as all optimizers of the family do.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mars.lab import workers
from mars.lab.config import Model
from mars.lab.crew import Crew, stop, watched
from mars.lab.data import open_tokens
from mars.lab.models import GPT
from mars.rule.estimator import kappa, noise_ratio

PLAIN, APPROXIMATE, EXACT = "plain", "approximate", "exact"
EARLY, LATE = "early", "late"
Which = tuple[float, int, int]  # a trajectory: rate, batch, seed
MODEL = Model(n_layer=1, n_head=2, n_embd=24, block_size=32, vocab_size=256)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is measured: every trajectory (rate × batch × seed) carries all averages (γ × β₁)."""

    rates: tuple[float, ...] = (1e-4, 1e-3, 3e-3, 1e-2)
    batches: tuple[int, ...] = (8, 64)  # windows
    seeds: int = 2
    betas: tuple[float, ...] = (0.9, 0.95, 0.99)
    gammas: tuple[float, ...] = (0.0125, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
    steps: int = 500
    warmup: int = 50  # the rate rises, then stays
    windows: int = 512  # of the corpus: F is the mean loss over them
    every: int = 20  # steps between looks at ∇F
    redraws: int = 12  # batches at a look, for Var(c)/Var(g)
    early: tuple[int, int] = (20, 100)
    late: tuple[int, int] = (300, 500)
    model: Model = MODEL

    @property
    def trajectories(self) -> list[Which]:
        return list(product(self.rates, self.batches, range(self.seeds)))


class _Problem:
    """A model whose gradient can be asked for anywhere: over some windows, or over all."""

    def __init__(self, e: Experiment, seed: int) -> None:
        context = e.model.block_size
        tokens = open_tokens("tinyshakespeare", "train", "bytes")
        text = torch.tensor([int(t) for t in tokens.read(0, e.windows * context + 1)])
        self.inputs = text[:-1].view(e.windows, context)
        self.targets = text[1:].view(e.windows, context)
        self.model = GPT(e.model, seed=seed)
        self.parameters: list[nn.Parameter] = list(self.model.parameters())

    def where(self) -> Tensor:
        return parameters_to_vector(self.parameters).detach().clone()

    def gradient(self, rows: Tensor, at: Tensor | None = None) -> Tensor:
        """Of the mean loss over these windows, here or at a point."""
        here = self.where() if at is not None else None
        if at is not None:
            vector_to_parameters(at, self.parameters)
        loss = self.model(self.inputs[rows], self.targets[rows])
        found = torch.autograd.grad(loss, self.parameters)
        if here is not None:
            vector_to_parameters(here, self.parameters)
        return torch.cat([g.reshape(-1) for g in found])

    def full(self, at: Tensor | None = None) -> Tensor:
        """∇F, here or at a point."""
        parts = torch.arange(len(self.inputs)).split(256)
        total = torch.zeros_like(self.where(), dtype=torch.float64)
        for rows in parts:
            total += self.gradient(rows, at).double() * len(rows)
        return total / len(self.inputs)

    def move(self, g: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """A step of the driving optimizer with this gradient."""
        sizes = [p.numel() for p in self.parameters]
        for p, part in zip(self.parameters, g.split(sizes), strict=True):
            p.grad = part.view_as(p)
        optimizer.step()


Key = tuple[str, float, float]  # mode, γ, β₁


def keys(e: Experiment) -> list[Key]:
    """Every average that is watched."""
    pairs = product((APPROXIMATE, EXACT), e.gammas, e.betas)
    return [*((PLAIN, 0.0, b) for b in e.betas), *pairs]


class _Averages:
    """m of every mode, γ and β₁, as rows of one matrix: all are updated at once."""

    def __init__(self, e: Experiment, size: int) -> None:
        self.keys = keys(e)
        self.beta = torch.tensor([[beta] for _, _, beta in self.keys])
        self.kappa = torch.tensor([[kappa(gamma, beta)] for _, gamma, beta in self.keys])
        self.exact = torch.tensor([[float(mode == EXACT)] for mode, _, _ in self.keys])
        self.m = torch.zeros(len(self.keys), size)
        self.t = 0

    def add(self, g: Tensor, last: Tensor, same: Tensor) -> None:
        """A gradient, the last step's, and this batch's at the last point."""
        h = self.exact * same + (1 - self.exact) * last
        c = g + self.kappa * (g - h)
        self.m.lerp_(c, 1 - self.beta)
        self.t += 1

    def errors(self, true: Tensor) -> list[float]:
        """‖m − ∇F‖² of each."""
        found = self.m.double() / (1 - self.beta.double() ** self.t) - true
        return [float(e) for e in found.square().sum(1)]


@dataclass
class Look:
    """What was seen at one step of a trajectory."""

    step: int
    square: float  # ‖∇F‖²
    noise: float  # Var(g), of one batch
    turn: float  # cosine between ∇F here and a step before
    errors: dict[Key, float]
    ratios: dict[Key, float]  # Var(c)/Var(g)


def follow(e: Experiment, rate: float, batch: int, seed: int) -> Iterator[Look]:
    """One trajectory."""
    problem = _Problem(e, seed)
    draw = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(problem.parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    averages = _Averages(e, problem.where().numel())
    last: Tensor | None = None
    before = problem.where()

    def rows() -> Tensor:
        return torch.randint(0, e.windows, (batch,), generator=draw)

    for step in range(1, e.steps + 1):
        picked = rows()
        g = problem.gradient(picked)
        # Before the first step there is no last gradient: nothing is corrected.
        same = g if last is None else problem.gradient(picked, before)
        averages.add(g, g if last is None else last, same)
        if step % e.every == 0 and any(a <= step <= b for a, b in (e.early, e.late)):
            yield _look(e, step, problem, averages, before, rows)
        last, before = g, problem.where()
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / e.warmup)
        problem.move(g, optimizer)


def _look(
    e: Experiment, step: int, problem: _Problem, averages: _Averages, before: Tensor,
    rows: Callable[[], Tensor],
) -> Look:  # fmt: skip
    true, earlier = problem.full(), problem.full(before)
    here, there, other = [], [], []
    for _ in range(e.redraws):
        picked = rows()
        here.append(problem.gradient(picked))
        there.append(problem.gradient(picked, before))
        other.append(problem.gradient(rows(), before))
    g, same, last = (torch.stack(found).double() for found in (here, there, other))
    noise = float(g.var(0).sum())
    ratios = {}
    for key in averages.keys:
        mode, gamma, beta = key
        c = g + kappa(gamma, beta) * (g - (same if mode == EXACT else last))
        ratios[key] = float(c.var(0).sum()) / noise
    errors = dict(zip(averages.keys, averages.errors(true), strict=True))
    turn = float(torch.nn.functional.cosine_similarity(true, earlier, dim=0))
    return Look(step, float(true.square().sum()), noise, turn, errors, ratios)


def summary(
    e: Experiment, rate: float, batch: int, looks: Sequence[Look]
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each part of training, mode, γ and β₁; means over looks and seeds."""
    rows = []
    for part, (first, last) in ((EARLY, e.early), (LATE, e.late)):
        own = [look for look in looks if first <= look.step <= last]
        square = math.fsum(look.square for look in own)
        plain: dict[float, float] = {}
        sums: dict[Key, float] = defaultdict(float)
        for look in own:
            for key, error in look.errors.items():
                sums[key] += error
        for (mode, _, beta), total in sums.items():
            if mode == PLAIN:
                plain[beta] = total
        for key, total in sums.items():
            mode, gamma, beta = key
            rows.append({
                "part": part, "lr": rate, "batch": batch, "mode": mode, "gamma": gamma,
                "beta1": beta, "error": total / square, "to_plain": total / plain[beta],
                "variance_ratio": math.fsum(look.ratios[key] for look in own) / len(own),
                "independent": noise_ratio(gamma, beta),
                "noise": math.fsum(look.noise for look in own) / square,
                "turn": math.fsum(look.turn for look in own) / len(own),
            })  # fmt: skip
    return rows


def _trajectory(e: Experiment, rate: float, batch: int, seed: int) -> list[Look]:
    """In a worker: as many workers as cores, a thread each."""
    torch.set_num_threads(1)
    looks = []
    for look in follow(e, rate, batch, seed):
        if workers.asked():
            raise InterruptedError("somebody stopped it")
        looks.append(look)
    return looks


def measure(
    e: Experiment,
    processes: int,
    looks: dict[Which, list[Look]],
    watch: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """All rows. Trajectories that ``looks`` has are not followed again, and it gets the others;
    ``watch`` is told how many there are, of how many.
    """
    with workers.terminable(), Crew(processes) as crew:
        try:
            with watched(crew) as look:
                left = [which for which in e.trajectories if which not in looks]
                ordered = {crew.submit(_trajectory, e, *which): which for which in left}
                while ordered:
                    look()
                    for future in wait(ordered, 0.3, FIRST_COMPLETED).done:
                        looks[ordered.pop(future)] = future.result()
                        watch(sum(which in looks for which in e.trajectories), len(e.trajectories))
        except KeyboardInterrupt:
            sys.stderr.write("stopping: trajectories that are done are kept\n")
            stop(crew)
            raise
    found: dict[tuple[float, int], list[Look]] = defaultdict(list)
    for which in e.trajectories:
        found[which[:2]] += looks[which]
    return [row for (rate, batch), own in found.items() for row in summary(e, rate, batch, own)]

"""Settings that were measured: the best rate of an optimizer by model size and tokens, and its run.

They are data: settings.json, which bench/settings.py writes from the learning-rate grids beside it
(rates/*.json) and from the results of studies (docs/results/*/results.jsonl).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mars.lab.config import Model, Optimizer, Run

SAME = 1.05  # a model or a run this much larger is as large
FAR = 2.0  # and beyond this its rate may be another


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An optimizer at the best rate that was tried, and the runs that say so."""

    optimizer: dict[str, Any]  # fields of the configuration that are set
    recipe: str  # which the runs were made from
    parameters: int
    unit: str  # tokens or images
    seen: int  # tokens or images of a whole run
    batch: int  # of a step
    loss: float  # final validation loss, of images the share of errors; mean over seeds
    spread: float | None  # standard deviation over seeds
    seeds: int
    rates: int  # that were tried
    bracketed: bool  # was a lower and a higher rate tried?
    source: str  # file in the repository
    arm: str  # whose it is there: an arm of a study, an optimizer of a grid
    command: str  # that made the file

    @property
    def lr(self) -> float:
        return float(self.optimizer["lr"])


@cache
def read() -> tuple[Setting, ...]:
    """All of them."""
    path = resources.files("mars.lab.recipes") / "settings.json"
    return tuple(Setting(**entry) for entry in json.loads(path.read_text()))


def fields(optimizer: Optimizer) -> dict[str, Any]:
    """The fields that are set, as JSON has them.

    >>> fields(Optimizer(name="adamw", lr=0.01, betas=(0.9, 0.95), max_grad_norm=None))
    {'name': 'adamw', 'lr': 0.01, 'weight_decay': 0.0, 'betas': [0.9, 0.95]}
    """
    found = json.loads(json.dumps(dataclasses.asdict(optimizer)))
    return {name: v for name, v in found.items() if v is not None and v is not False and v != {}}


def at_rate(optimizer: Optimizer, lr: float) -> dict[str, Any]:
    """The fields of another rate; that of what is no hidden matrix keeps its proportion."""
    if optimizer.lr_1d is None:
        return {"lr": lr}
    return {"lr": lr, "lr_1d": float(f"{optimizer.lr_1d * lr / optimizer.lr:.4g}")}


def besides(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """All that is set but the rate, and the proportion of the two rates."""
    rest = {name: value for name, value in optimizer.items() if name not in ("lr", "lr_1d")}
    if "lr_1d" in optimizer:
        rest["lr_1d / lr"] = float(f"{optimizer['lr_1d'] / optimizer['lr']:.2g}")
    return rest


def seen(run: Run) -> tuple[int, str, int]:
    """What a run sees until its end, whether these are tokens or images, and how many a step."""
    if isinstance(run.model, Model):
        batch, unit = run.loop.batch_size * run.model.block_size, "tokens"
    else:
        batch, unit = run.loop.batch_size, "images"
    return run.loop.steps * batch, unit, batch


@dataclass(frozen=True)
class Recommendation:
    """The setting that was measured nearest to what is asked for, and how near that is."""

    setting: Setting
    asked: Optimizer
    larger: float  # the model asked for, times that of the setting
    longer: float  # the same of tokens
    wider: float  # of tokens a step

    @property
    def distance(self) -> tuple[float, float]:
        """In size and tokens; of equally near ones, in batch."""
        far = math.hypot(math.log(self.larger), math.log(self.longer))
        return far, abs(math.log(self.wider))

    @property
    def others(self) -> dict[str, Any]:
        """What the setting has besides the rate that is not as asked."""
        own, asked = (besides(o) for o in (self.setting.optimizer, fields(self.asked)))
        return {n: own.get(n) for n in sorted({*own, *asked}) if own.get(n) != asked.get(n)}

    @property
    def elsewhere(self) -> bool:
        """Was it measured on quite other runs: longer, shorter, or in other batches?"""
        far = max(abs(math.log(self.larger)), abs(math.log(self.longer))) > math.log(FAR)
        return far or abs(math.log(self.wider)) >= math.log(SAME)

    @property
    def runs(self) -> str:
        """What the runs that it was measured on had else; nothing where they were near."""
        unit = self.setting.unit
        parts = (
            _times(self.larger, "on a model {} times smaller", "on a model {} times larger"),
            _times(self.longer, f"with {{}} times fewer {unit}", f"with {{}} times more {unit}"),
            _times(self.wider, "in batches {} times smaller", "in batches {} times larger"),
        )
        return ", ".join(part for part in parts if part)

    @property
    def evidence(self) -> str:
        """How it was measured."""
        s = self.setting
        seeds = "one seed" if s.seeds == 1 else f"{s.seeds} seeds"
        edge = "" if s.bracketed else ", not bracketed"
        far = f", {self.runs}" if self.runs else ""
        return f"best of {s.rates} rates by {seeds}{edge}{far}"

    @property
    def source(self) -> str:
        """Where."""
        return f"{self.setting.source}, {self.setting.arm}"

    def __str__(self) -> str:
        others = "".join(f", {name} {_plain(value)}" for name, value in self.others.items())
        return f"lr {self.setting.lr:g}{others}: {self.evidence} ({self.source})"


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    return str(tuple(value) if isinstance(value, list) else value)


def _times(ratio: float, less: str, more: str) -> str:
    """How far a measurement is from what is asked for; nothing where it is near."""
    if 1 / SAME < ratio < SAME:
        return ""
    factor = max(ratio, 1 / ratio)
    return (less if ratio > 1 else more).format(
        f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
    )


def compared(
    setting: Setting, optimizer: Optimizer, parameters: int, seen: int, batch: int | None
) -> Recommendation:
    """A setting beside what is asked for."""
    wider = 1.0 if batch is None else batch / setting.batch
    ratios = parameters / setting.parameters, seen / setting.seen, wider
    return Recommendation(setting, optimizer, *ratios)


def recommended(
    optimizer: Optimizer, parameters: int, seen: int, unit: str = "tokens",
    batch: int | None = None, *, free: Collection[str] | None = None,
) -> Recommendation | None:  # fmt: skip
    """The setting nearest in log(parameters) and log(tokens); of equally near ones that with the
    nearest batch, then the best. One seed, or a rate that is not bracketed, is the beginning of a
    study: only if there is no other.

    Only such with the same mode and the same further options (which may change what a rate means);
    with ``free``, with everything the same but the rate and these.
    """
    asked = fields(optimizer)
    found = []
    for own in read():
        same = ("name", "exact", "options")
        if own.unit != unit or any(own.optimizer.get(n) != asked.get(n) for n in same):
            continue
        near = compared(own, optimizer, parameters, seen, batch)
        if free is None or near.others.keys() <= set(free):
            found.append(near)

    def order(r: Recommendation) -> tuple[Any, ...]:
        begun = r.setting.seeds < 2 or not r.setting.bracketed
        return begun, r.distance, r.setting.loss, r.setting.source

    return min(found, key=order, default=None)


def of_recipe(run: Run) -> Setting | None:
    """The setting that was measured on a run's recipe, batch and options, nearest in tokens."""
    count, unit, batch = seen(run)
    rest = besides(fields(run.optimizer))
    found = [
        s for s in read()
        if (s.recipe, s.unit, s.batch) == (run.recipe, unit, batch) and besides(s.optimizer) == rest
    ]  # fmt: skip
    return min(
        found,
        key=lambda s: (abs(math.log(count / s.seen)), -s.seeds, s.loss, s.source),
        default=None,
    )

"""What a study is: typed data. A question, a prediction, arms, and what is compared with what."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mars.lab.config import Run, check, to_json
from mars.lab.differences import is_free
from mars.lab.errors import LabError, check_name
from mars.lab.recipes.settings import at_rate

SPAN = 8  # rungs of a ladder on either side of its first rate
Changes = Mapping[str, Mapping[str, Any]]
Kind = Literal["lower", "within", "rate"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: an optimizer with its options. Its learning rate is searched."""

    label: str
    """What its results are kept under."""
    optimizer: str
    """Its registered name; settings are those of the study's base run for it."""
    lr: float
    """The first rate of the ladder."""
    changes: Changes = field(default_factory=dict)
    """Fields by part that differ from the base run: {"optimizer": {"gamma": 0.05}}."""
    factor: float = 2.0
    """From one rate of the ladder to the next."""
    shown: str = ""
    """What pages call it, if not by its label."""

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise LabError(f"arm {self.label!r}: factor must be above 1, not {self.factor:g}")
        if "data" in self.changes:
            raise LabError(f"arm {self.label!r} has data of its own: such losses do not compare")

    @property
    def name(self) -> str:
        """What pages call it."""
        return self.shown or self.label

    @property
    def folder(self) -> str:
        """Its label as a part of a file's name.

        >>> Arm(label="γ = 0.1, exact", optimizer="mars-adamw", lr=0.003).folder
        'γ-0.1-exact'
        """
        return re.sub(r"[^\w.]+", "-", self.label).strip("-.") or "arm"

    def rate(self, rung: int) -> float:
        """
        >>> Arm(label="AdamW", optimizer="adamw", lr=0.003).rate(-2)
        0.00075
        """
        return float(f"{self.lr * self.factor**rung:.3g}")

    def rung(self, lr: float) -> int:
        """The rung nearest to a rate."""
        return round(math.log(lr / self.lr) / math.log(self.factor))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is predicted of the difference D = arm − baseline of final losses.

    lower: D < −by. within: −by < D < by. rate: the arm's best rate is ``by`` times the baseline's,
    up to a factor √2 (half a rung of a ladder of doublings).
    """

    kind: Kind
    by: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise LabError(f"a claim is {', '.join(get_args(Kind))}, not {self.kind!r}")
        if self.kind != "lower" and not self.by > 0:
            raise LabError(f"a claim of kind {self.kind} needs by above 0, not {self.by:g}")

    def __str__(self) -> str:
        if self.kind == "rate":
            return f"best rate {self.by:.3g} times that of"
        if self.kind == "within":
            return f"within {self.by:g} of"
        return f"lower by {self.by:g} or more than" if self.by else "lower than"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A claim about two arms; with ``than``, about how much more they differ than two others."""

    arm: str
    baseline: str
    claim: Claim
    than: tuple[str, str] | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.arm, self.baseline, *(self.than or ()))

    def __str__(self) -> str:
        if self.than is None:
            return f"{self.arm}: {self.claim} {self.baseline}"
        other = f"{self.than[0]} minus {self.than[1]}"
        return f"{self.arm} minus {self.baseline}: {self.claim} {other}"

    def named(self, study: Study) -> Comparison:
        """With what pages call the arms, in place of their labels."""
        arm, baseline, *than = (study.arm(label).name for label in self.arms)
        than_ = (than[0], than[1]) if than else None
        return Comparison(arm=arm, baseline=baseline, claim=self.claim, than=than_)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, and the grid that answers it."""

    name: str
    question: str
    prediction: str
    base: Callable[[str], Run]
    """The run of an optimizer, before an arm changes it. All but the optimizer is the same."""
    arms: tuple[Arm, ...]
    comparisons: tuple[Comparison, ...]
    seeds: int = 3
    noise: float = 0.01
    """Spread of final losses over seeds, until it has been measured."""
    keep_checkpoints: bool = False
    """Keep the last checkpoint of finished runs: for an evaluation afterwards."""
    overrides: Changes = field(default_factory=dict)
    """Fields for all arms: where the data are here, which device."""

    def __post_init__(self) -> None:
        check_name("study", self.name)
        labels = [arm.label for arm in self.arms]
        if not labels:
            raise LabError(f"study {self.name} has no arms")
        if len({arm.folder for arm in self.arms}) < len(labels):
            raise LabError(f"study {self.name}: two arms have the same label, or nearly")
        for comparison in self.comparisons:
            for label in comparison.arms:
                if label not in labels:
                    raise LabError(f"study {self.name}: {label!r} is compared, but is not an arm")
        if self.seeds < 3:
            raise LabError(f"study {self.name}: seeds must be 3 or more, not {self.seeds}")

    def arm(self, label: str) -> Arm:
        return next(arm for arm in self.arms if arm.label == label)

    def baseline_of(self, label: str) -> str | None:
        """What an arm is compared with first."""
        return next((c.baseline for c in self.comparisons if c.arm == label), None)

    def run(self, arm: Arm, lr: float | None = None, seed: int = 0, out: Path | None = None) -> Run:
        """The run of an arm; the rate of what is no hidden matrix keeps its proportion."""
        run = self.base(arm.optimizer)
        for changes in (self.overrides, arm.changes):
            run = run.replace(**{part: dict(fields) for part, fields in changes.items()})
        fields = at_rate(run.optimizer, arm.lr if lr is None else lr)
        keep = {"out": None if out is None else str(out), "last": 1, "resume": True}
        run = run.replace(optimizer=fields, loop={"seed": seed}, keep=keep)
        return check(dataclasses.replace(run, recipe=self.name))

    def size(self, arm: Arm) -> tuple[int, int]:
        """Sequences of a batch and steps: runs that differ in them are not drawn on one page."""
        loop = self.run(arm).loop
        return loop.batch_size, loop.steps

    def common(self) -> dict[str, Any]:
        """What all arms share of the configuration: what two runs must agree in to be compared.

        That an arm differs from the others in more than it says is an error.
        """
        varied = {(p, f) for arm in self.arms for p, fs in arm.changes.items() for f in fs}
        first: dict[str, Any] = {}
        for arm in self.arms:
            own = _shared(to_json(self.run(arm)), varied)
            first = first or own
            for name, value in own.items():
                if first[name] != value:
                    raise LabError(
                        f"study {self.name}: {arm.label} has {name} = {value!r}, "
                        f"{self.arms[0].label} {first[name]!r}, and its changes do not say so"
                    )
        return first

    def own(self, arm: Arm) -> dict[str, Any]:
        """What an arm's results belong to: its optimizer and changes, without rate and seed."""
        run = to_json(self.run(arm))
        own = dict(run["optimizer"])
        lr, lr_1d = own.pop("lr"), own.pop("lr_1d")
        settings = {f"optimizer.{name}": value for name, value in own.items()}
        settings["lr_1d / lr"] = None if lr_1d is None else float(f"{lr_1d / lr:.3g}")
        for part, fields in arm.changes.items():
            if part != "optimizer":
                settings |= {f"{part}.{name}": run[part][name] for name in fields}
        return settings

    def whole(self, arm: Arm) -> dict[str, Any]:
        """`common` and `own` at once: what a run of another study is compared by."""
        return {**_shared(to_json(self.run(arm)), set()), **self.own(arm)}


def _shared(run: dict[str, Any], varied: set[tuple[str, str]]) -> dict[str, Any]:
    """Fields by dotted name, without what cannot change numbers or is meant to vary."""
    left_out = {("loop", "seed"), ("data", "source"), ("data", "valid"), *varied}
    found = {}
    for part, fields in run.items():
        if part == "optimizer" or not isinstance(fields, dict):
            continue
        for name, value in fields.items():
            if not is_free(run, part, name) and (part, name) not in left_out:
                found[f"{part}.{name}"] = value
    return found

"""Which runs to do next: a pure function of study, results and time.

First a ladder of rates for each arm at seed 0, thriftily: a rate and the next one, then whichever
neighbour of the best is missing, and on while those on a side are within noise of it. Then half a
rung from the best, if a parabola promises more than noise there and a comparison depends on it.
Then further seeds at the best rate, then at rates so near that the choice is within noise, or at
its neighbours where the claim is about rates. Arms whose comparisons are all settled come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mars.lab.study.choice import Ladder, ladders
from mars.lab.study.definition import Arm, Study
from mars.lab.study.judge import judge
from mars.lab.study.results import Key, Result


class Stage(IntEnum):
    """Why a run is wanted, the most informative first."""

    FIRST = 0  # of an arm: nothing is known of it
    LADDER = 1
    SEEDS = 2
    NEIGHBOURS = 3


@dataclass(frozen=True)
class Wanted:
    """A run that is worth doing."""

    arm: Arm
    lr: float
    seed: int
    stage: Stage

    @property
    def key(self) -> Key:
        return self.arm.label, self.lr, self.seed

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.arm.folder}-lr{self.lr:g}-s{self.seed}"


def wanted(study: Study, results: Sequence[Result], seeds: int | None = None) -> list[Wanted]:
    """The runs that are known to be needed, the most informative first; [] when there is none.

    ``seeds``: more than the study's, for arms of comparisons that are not settled.
    """
    found = ladders(study, results)
    judged = judge(study, results)
    undecided = {label for j in judged if not j.settled for label in j.comparison.arms}
    doubted = {label for j in judged for label in j.doubted}
    about_rates = {label for c in study.comparisons if c.claim.kind == "rate" for label in c.arms}
    runs = []
    for place, arm in enumerate(study.arms):
        is_open = arm.label in undecided
        many = max(study.seeds, seeds or 0) if is_open else study.seeds
        ladder = found[arm.label]
        between = ladder.between(ladder.noise) if is_open else None
        if between is None and arm.label in doubted:
            between = ladder.possible()
        own = _of_arm(ladder, range(many), between, arm.label in about_rates)
        runs += [((not is_open, want.stage, want.seed, place), want) for want in own]
    return [want for _, want in sorted(runs, key=lambda pair: pair[0])]


def _of_arm(
    ladder: Ladder, seeds: range, between: tuple[float, float] | None, about_rates: bool
) -> list[Wanted]:
    arm, missing, best = ladder.arm, ladder.missing(), ladder.best
    if missing:
        if not ladder.losses:
            stages = [Stage.FIRST, Stage.LADDER]
            return [Wanted(arm, lr, 0, s) for lr, s in zip(missing, stages, strict=True)]
        return [Wanted(arm, lr, 0, Stage.LADDER) for lr in missing]
    if best is None:
        return []
    if between is not None:
        return [Wanted(arm, between[0], 0, Stage.LADDER)]
    runs = [Wanted(arm, best, s, Stage.SEEDS) for s in seeds if s not in ladder.losses[best]]
    rivals = ladder.rivals()
    if about_rates:
        rivals += [lr for lr in ladder.beside(best) if lr is not None and lr not in rivals]
        rivals = [lr for lr in rivals if math.isfinite(sum(ladder.losses[lr].values()))]
    for lr in rivals:
        runs += [Wanted(arm, lr, s, Stage.NEIGHBOURS) for s in seeds if s not in ladder.losses[lr]]
    return runs


def pick(
    runs: Sequence[Wanted],
    left: float | None,
    seconds_of: Callable[[Wanted], tuple[float, bool]],
    whole: float | None,
    least: float = 0.0,
) -> Wanted | None:
    """The first that can be finished in the time that is left (None: there is no limit).

    ``seconds_of`` says how long a run will take and whether that was measured: a guess keeps
    nobody from beginning. A run that takes longer than the ``whole`` stretch is begun too, to be
    gone on with in the next; else it would never be run. Both only if ``least`` seconds are left.
    """
    for run in runs:
        seconds, measured = seconds_of(run)
        long = whole is not None and seconds > whole
        if left is None or seconds <= left or ((not measured or long) and left >= least):
            return run
    return None

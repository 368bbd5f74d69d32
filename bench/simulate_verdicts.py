"""How often verdicts of `mars study` are wrong, on arms whose losses are known.

    python bench/simulate_verdicts.py --studies 2000    # ten minutes on a core

Planner and judge are the real ones. An arm's loss is a parabola in log2(rate), or two that meet,
its best anywhere between two rungs, with noise that is partly the seed's, which all arms share.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from mars.lab.study.definition import Arm, Claim, Comparison, Study
from mars.lab.study.judge import judge
from mars.lab.study.planner import wanted
from mars.lab.study.results import Result

FIRST = 1e-3  # rate of every ladder


@dataclass(frozen=True, kw_only=True)
class Simulated(Study):
    """A study that nobody trains for."""

    def size(self, arm: Arm) -> int:
        return 0


@dataclass(frozen=True)
class Case:
    """Two arms, A and B, and what is claimed of A."""

    text: str
    claim: Claim
    truth: float = 0.0  # of A − B
    steep: tuple[float, float] = (0.03, 0.03)  # loss that a rung from the best rate costs
    above: tuple[float, float] | None = None  # the same on the side of higher rates, if another
    noise: float = 0.01
    shared: float = 0.7  # of the noise's variance, by the seed
    others: float | None = None  # noise of six more arms, which are compared with nothing
    seeds: int = 3
    more: int | None = None  # --seeds


WITHIN, LOWER = Claim(kind="within", by=0.01), Claim(kind="lower")
LIMIT = {"truth": 0.01, "noise": 0.003, "shared": 0.3}
# As steep as MARS-AdamW (A) and AdamW (B) were with 51M parameters.
CLIFF = {"steep": (0.08, 0.07), "above": (0.1, 0.4), "noise": 0.011}
CASES = (
    Case("within 0.01, truly 0.01", WITHIN, **LIMIT),
    Case("within 0.01, truly 0.01, other arms noisier", WITHIN, **LIMIT, others=0.0108),
    Case("lower, truly alike", LOWER),
    Case("lower, truly alike, --seeds 6", LOWER, more=6),
    Case("lower, truly alike, --seeds 10", LOWER, more=10),
    Case("lower, truly alike, seeds=6", LOWER, seeds=6),
    Case("lower, truly alike, seeds=10", LOWER, seeds=10),
    Case("lower, truly alike, A forgiving and B steep", LOWER, steep=(0.005, 0.1)),
    Case("lower, truly alike, B beside a cliff", LOWER, **CLIFF),
    Case("lower, truly alike, B beside a cliff, --seeds 6", LOWER, **CLIFF, more=6),
)


def simulate(case: Case, rng: random.Random) -> tuple[str, float | None, int]:
    """The verdict of one study, the difference it found, and how many runs it took."""
    labels = [*"ABCDEFGH"] if case.others else [*"AB"]
    curves = {label: _curve(case, label, rng) for label in labels}
    study = Simulated(
        name="simulated", question="?", prediction="!", base=None,  # type: ignore[arg-type]
        arms=tuple(Arm(label=label, optimizer="adamw", lr=FIRST) for label in labels),
        comparisons=(Comparison(arm="A", baseline="B", claim=case.claim),), seeds=case.seeds,
    )  # fmt: skip
    of_seed: dict[int, float] = {}
    results: list[Result] = []
    while runs := wanted(study, results, case.more):
        label, lr, seed = runs[0].key
        noise = case.others if case.others and label not in "AB" else case.noise
        common = of_seed.setdefault(seed, rng.gauss(0, 1))
        own = sqrt(case.shared) * common + sqrt(1 - case.shared) * rng.gauss(0, 1)
        loss = curves[label](log2(lr / FIRST)) + noise * own
        run = Result(arm=label, lr=lr, seed=seed, status="done", final=loss, fingerprint={})
        results.append(run)
    (judged,) = judge(study, results)
    found = judged.difference
    return judged.state, None if found is None else found.mean, len(results)


def _curve(case: Case, label: str, rng: random.Random) -> Callable[[float], float]:
    best = rng.uniform(-0.5, 0.5)
    steep, above = (
        dict(zip("AB", sides, strict=True)).get(label, 0.03)
        for sides in (case.steep, case.above or case.steep)
    )
    low = 4.0 + (case.truth if label == "A" else 0.0)
    return lambda x: low + (above if x > best else steep) * (x - best) ** 2


def measure(case: Case, studies: int) -> dict[str, Any]:
    rng = random.Random(case.text)
    found = [simulate(case, rng) for _ in range(studies)]
    states = Counter(state for state, *_ in found)
    return {
        "case": case.text,
        "studies": studies,
        "holds": states["holds"] / studies,
        "does not hold": states["does not hold"] / studies,
        "difference": fmean(d for _, d, _ in found if d is not None),
        "runs": fmean(runs for *_, runs in found),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--studies", type=int, default=1000, help="of each case")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args(words)
    rows = []
    print(f"{'':48} holds  does not  difference  runs")
    for case in CASES:
        row = measure(case, args.studies)
        rows.append(row)
        numbers = f"{row['holds']:5.1%}  {row['does not hold']:8.1%}  {row['difference']:+10.4f}"
        print(f"{row['case']:48} {numbers}  {row['runs']:4.0f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"studies": args.studies, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

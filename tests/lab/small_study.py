"""Studies small enough for tests, and results that nobody had to wait for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from miniature import run as miniature_run

from mars.lab.config import Optimizer, Run
from mars.lab.study import Arm, Claim, Comparison, Study
from mars.lab.study.fingerprint import of_arm
from mars.lab.study.planner import Wanted, wanted
from mars.lab.study.results import Result

HERE = {"data": "d", "config": "c", "code": "0123456789ab", "torch": "2.0", "device": "cpu"}
Loss = Callable[[str, float, int], float]


def base(optimizer: str) -> Run:
    """12 steps of a GPT of a few thousand parameters."""
    run = miniature_run(Path("unused"), diagnose_every=12).replace(
        model={"dropout": 0.0}, keep={"save_every": None}
    )
    fields = Optimizer(name=optimizer, lr=1e-2).__dict__
    return run.replace(optimizer=dict(fields))


def study(**changes: object) -> Study:
    """AdamW against MARS-AdamW."""
    fields: dict[str, object] = {
        "name": "small",
        "question": "Is it lower?",
        "prediction": "It is.",
        "base": base,
        "arms": (
            Arm(label="AdamW", optimizer="adamw", lr=1e-2),
            Arm(label="MARS", optimizer="mars-adamw", lr=1e-2),
        ),
        "comparisons": (Comparison(arm="MARS", baseline="AdamW", claim=Claim(kind="lower")),),
    }
    return Study(**{**fields, **changes})  # type: ignore[arg-type]


def result(of: Study, arm: str, lr: float, seed: int, loss: float, **fields: object) -> Result:
    """A finished run; an infinite loss is one that diverged."""
    final = loss if math.isfinite(loss) else None
    end = 9.0 if final is None else final
    values: dict[str, object] = {
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "status": "diverged" if final is None else "done",
        "final": final,
        "fingerprint": {**HERE, "arm": of_arm(of, of.arm(arm))},
        "curve": {
            "step": [0.0, 6.0, 12.0],
            "tokens": [0.0, 600.0, 1200.0],
            "seconds": [0.0, 6.0, 12.0],
            "loss": [6.0, end + 1, end],
        },
        "seconds": 12.0,
        "wall": 20.0,
        "step_seconds": 1.0,
        "tokens": 1200.0,
    }
    return Result(**{**values, **fields})  # type: ignore[arg-type]


def simulate(of: Study, loss: Loss, seeds: int | None = None, slots: int = 1) -> list[Wanted]:
    """Let the planner have its way, ``slots`` runs at a time; the runs in order."""
    done: list[Wanted] = []
    results: list[Result] = []
    while runs := wanted(of, results, seeds):
        for want in runs[:slots]:
            done.append(want)
            label, lr, seed = want.key
            results.append(result(of, label, lr, seed, loss(label, lr, seed)))
        assert len(done) < 500, "it never ends"
    return done


def results_of(of: Study, done: list[Wanted], loss: Loss) -> list[Result]:
    return [result(of, *want.key, loss(*want.key)) for want in done]

"""The interactive report of a study, made from its results file alone."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from mars.lab import log, tasks
from mars.lab.config import to_json
from mars.lab.report import load, summarise
from mars.lab.report import write as write_page
from mars.lab.study.choice import ladders
from mars.lab.study.fingerprint import EQUIVALENTS
from mars.lab.study.planner import Stage, Wanted
from mars.lab.study.results import Result
from mars.lab.study.verdict import Verdict, at_best


def write(v: Verdict, directory: Path, address: str | None = None) -> list[Path]:
    """Write report.html; where arms differ in batch or steps, one page for each kind.

    Curves are those of the best rates, in the order of seeds; every rate is in the picture of
    rates. ``address`` is what the study goes by on the command line, if not by its name.
    """
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for arm in v.study.arms:
        groups[v.study.size(arm)].append(arm.label)
    command = f"mars study {address or v.study.name}"
    written = []
    batches = [batch for batch, _ in groups]
    for (batch, steps), labels in groups.items():
        more = f"-steps{steps}" if batches.count(batch) > 1 else ""
        name = "report.html" if len(groups) == 1 else f"report-batch{batch}{more}.html"
        page = _page(v, labels, directory / name, command)
        written += [page] if page is not None else []
    return written


def _page(v: Verdict, labels: list[str], path: Path, command: str) -> Path | None:
    found = ladders(v.study, v.results)
    shown = [r for label in labels for r in at_best(found[label], v.results)]
    if not shown:
        return None
    codes = list(dict.fromkeys(result.fingerprint["code"] for result in shown))
    note = f"the runs are of {len(codes)} versions of the sources, declared to compute the same"
    notes = [f"{note} ({EQUIVALENTS})"] if len(codes) > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "race.json").write_text(json.dumps({"notes": notes}))
        for result in shown:
            _log(v, result, Path(folder), {"command": command, "same_code": codes[0]})
        runs = load([folder])
    base = next((b for label in labels if (b := v.study.baseline_of(label))), labels[0])
    name = {label: ladder.arm.name for label, ladder in found.items()}
    grid = {
        "command": command,
        "origin": "study",
        "optimizers": {
            name[label]: {
                "label": name[label],
                "best": found[label].best,
                "losses": {
                    f"{lr:g}": [None if loss == float("inf") else loss for loss in own.values()]
                    for lr, own in sorted(found[label].losses.items())
                },
            }
            for label in labels
            if found[label].best is not None
        },
    }
    summary = summarise(runs, baseline=name[base], rates=grid)
    return write_page(path, runs, summary, title=f"{v.study.name}: {v.study.question}")


def _log(v: Verdict, result: Result, folder: Path, made: dict[str, str]) -> None:
    """A log with what the results file knows; its times are those of steps alone on the device.

    ``made`` says by which command, and of which version's sources its sources are the same.
    """
    arm = v.study.arm(result.arm)
    time = next(row.time for row in v.rows if row.ladder.arm is arm)
    run = v.study.run(arm, result.lr, result.seed)
    steps, per_step = run.loop.steps, tasks.of(run).per_step
    header = {
        "kind": "header", "format": log.FORMAT, "time": result.time, "name": v.study.name,
        "label": arm.name, "optimizer": arm.optimizer, "lr": result.lr, "seed": result.seed,
        "config": to_json(run), "tokens_per_step": per_step, "steps": steps,
        "data": {"train": {"sha256": result.fingerprint["data"]}},
        "versions": {"torch": result.fingerprint["torch"]},
        "hardware": {"name": result.fingerprint["device"]},
        "code": result.fingerprint["code"], **made,
    }  # fmt: skip

    def seconds(step: float) -> float | None:
        return None if time is None else step * time.step

    place = {"step": steps, "tokens": result.tokens, "seconds": seconds(steps)}
    train = {
        "kind": "train", **place, "loss": None,
        "step_seconds": None if time is None else time.step,
        "optimizer_seconds": None if time is None else time.optimizer,
        "tokens_per_second": None if time is None else per_step / time.step,
        "memory": result.memory,
    }  # fmt: skip
    names = list(result.curve)
    valid: list[dict[str, Any]] = []
    for row in zip(*result.curve.values(), strict=True):
        values = dict(zip(names, row, strict=True))
        valid.append({"kind": "valid", **values, "seconds": seconds(values["step"])})
    end = {"kind": "end", **place, "status": "done", "valid": result.final}
    own = folder / Wanted(arm, result.lr, result.seed, Stage.SEEDS).name
    own.mkdir()
    lines = [json.dumps(record) + "\n" for record in (header, *valid, train, end)]
    (own / log.NAME).write_text("".join(lines))

"""The data that the page draws from, as JSON that is safe inside a <script> element."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mars.lab.report import thin
from mars.lab.report.palette import colours
from mars.lab.report.rates import Sensitivity
from mars.lab.report.runs import Record, RunLog, Series
from mars.lab.report.summary import Entry, Summary

LIMIT = 1500  # points in a series
TOTAL = 30_000  # points in all training curves together, before each is thinned further
FEWEST = 300
SPEEDS = ("tokens_per_second", "images_per_second")
TRAIN = ("loss", "grad_norm", *SPEEDS, "lr", "mfu")
EXTREMES = ("loss", "grad_norm", *SPEEDS)
AXES = ("step", "tokens", "epoch", "seconds")
READINGS = ("clipped", "c_norm", "cosine", "variance_ratio", "independent")


def payload(summary: Summary) -> dict[str, Any]:
    """Everything the charts need; text and tables are in the page already."""
    looks = colours([entry.optimizer for entry in summary.entries])
    count = sum(len(entry.runs) + len(entry.others) for entry in summary.entries)
    limit = max(FEWEST, min(LIMIT, TOTAL // max(1, count)))
    return {
        "unit": summary.measure.unit,
        "progress": summary.measure.progress,
        "score": summary.measure.score,
        "entries": [
            _entry(entry, look, limit) for entry, look in zip(summary.entries, looks, strict=True)
        ],
        "rates": [_rates(curve, *look) for curve, look in _curve_looks(summary, looks)],
    }


def _curve_looks(
    summary: Summary, looks: Sequence[tuple[str, str]]
) -> list[tuple[Sensitivity, tuple[str, str]]]:
    """Sensitivity curves look like their optimizer's other curves."""
    curves = summary.sensitivity
    names = [curve.optimizer for curve in summary.rates]
    found = dict(zip(names, colours(names), strict=True))
    for entry, look in reversed(list(zip(summary.entries, looks, strict=True))):
        found[entry.optimizer] = found[entry.label] = look
    return [(curve, found.get(curve.label, found[curve.optimizer])) for curve in curves]


def embed(data: object) -> str:
    """JSON for a <script type="application/json">: ASCII, and no character that ends it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _entry(entry: Entry, look: tuple[str, str], limit: int) -> dict[str, Any]:
    runs = [*((run, True) for run in entry.runs), *((run, False) for run in entry.others)]
    return {
        "label": entry.label,
        "colour": look[0],
        "dash": look[1],
        "compared": entry.incomparable is None,
        "runs": [{**_run(run, limit), "best": best} for run, best in runs],
    }


def _run(run: RunLog, limit: int) -> dict[str, Any]:
    at = thin.keep(run.train, EXTREMES, limit)
    train = _columns(run.train, (*AXES, *TRAIN), at)
    if len(at) < len(run.train["step"]):
        train["smooth"] = _numbers(thin.local_mean(run.train["loss"], at), 6)
    metrics = [name for name in run.valid if name not in (*AXES, "images")]
    few = thin.keep(run.valid, tuple(metrics), limit)
    return {
        "lr": run.lr,
        "seed": run.seed,
        "status": run.status,
        "train": train,
        "valid": _columns(run.valid, (*AXES, *metrics), few),
        "diagnostics": _diagnostics(run.diagnostics),
    }


def _columns(series: Series, names: Iterable[str], at: NDArray[np.intp]) -> dict[str, Any]:
    """The chosen rows of the columns that hold anything."""
    found = {name: series[name][at] for name in names if name in series}
    columns: dict[str, Any] = {
        name: _numbers(column, 12 if name in ("step", "tokens") else 6)
        for name, column in found.items()
        if name in AXES or np.isfinite(column).any()
    }
    if "tokens" not in found:
        return columns
    each = found["tokens"][-1] / found["step"][-1] if len(at) and found["step"][-1] else 0.0
    if each and np.array_equal(found["tokens"], found["step"] * each):
        columns["tokens"] = _number(each, 12)  # a step: the page multiplies
    return columns


def _numbers(values: NDArray[np.float64], digits: int) -> list[float | int | None]:
    return [_number(float(v), digits) for v in values]


def _number(value: float, digits: int = 6) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _diagnostics(records: Sequence[Record]) -> dict[str, Any]:
    """By group: columns of step, tokens, seconds and the readings; "all" weighs by tensors."""
    rows: dict[str, list[dict[str, float | None]]] = defaultdict(list)
    for record in records:
        axes = {name: _float(record.get(name)) for name in AXES}
        groups = [g for g in record.get("groups") or [] if isinstance(g, dict)]
        for group in groups:
            values = {name: _reading(group, name) for name in READINGS}
            if any(values[name] is not None for name in ("clipped", "c_norm", "cosine")):
                rows[str(group.get("name"))].append({**axes, **values})
        whole = {name: _weighted(groups, name) for name in READINGS}
        if any(value is not None for value in whole.values()):
            rows["all"].append({**axes, **whole})
    if len(rows) == 2:  # one group: "all" says the same
        rows = defaultdict(list, {"all": rows["all"]})
    return {
        group: {
            name: [None if row[name] is None else _number(row[name] or 0.0) for row in some]
            for name in (*AXES, *READINGS)
        }
        for group, some in rows.items()
    }


def _reading(group: Record, name: str) -> float | None:
    """Of independent noise, what so few steps would show; older logs do not have that."""
    known = "expected" if name == "independent" and "expected" in group else name
    return _float(group.get(known))


def _weighted(groups: Sequence[Record], name: str) -> float | None:
    """The mean over groups that have a reading, by their number of tensors."""
    pairs = [(_reading(g, name), _float(g.get("tensors")) or 0.0) for g in groups]
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    total = math.fsum(weight for _, weight in known)
    return math.fsum(v * w for v, w in known) / total if total else None


def _float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _rates(curve: Sensitivity, colour: str, dash: str) -> dict[str, Any]:
    return {
        "label": curve.label,
        "colour": colour,
        "dash": dash,
        "best": curve.best,
        "points": [
            {"lr": p.lr, "losses": list(p.losses.values()), "mean": p.mean, "dead": p.dead}
            for p in curve.points
        ],
    }

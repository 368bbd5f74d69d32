"""Results of one or several models: a table to read, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mars.lab.evaluation.metrics import Result, average, difference
from mars.lab.report import fit

Number = tuple[float, float | None]


def number(value: Number | None, *, sign: bool = False) -> str:
    """Per cent with its standard error.

    >>> number((0.2531, 0.0044)), number((0.0123, None), sign=True)
    ('25.31 ± 0.44', '+1.23')
    """
    if value is None:
        return "–"
    text = f"{100 * value[0]:+.2f}" if sign else f"{100 * value[0]:.2f}"
    text = text.replace("-", "−")
    return text if value[1] is None else f"{text} ± {100 * value[1]:.2f}"


def table(
    names: Sequence[str], results: Sequence[Sequence[Result]], room: int | None = None
) -> str:
    """A line a task; the first model, then others and how they differ from it.

    Args:
        names: of the models.
        results: of each model, the same tasks in the same order.
        room: columns of the terminal, if it is one.
    """
    first, others = results[0], results[1:]
    head = ["task", "metric", "items", "chance", *names, *(f"{n} − first" for n in names[1:])]
    rows = [head]
    for column in zip(*results, strict=True):
        one = column[0]
        chance = "–" if one.chance is None else f"{100 * one.chance:.2f}"
        cells = [number((r.mean(r.metric), r.error(r.metric))) for r in column]
        cells += [number(difference(one, other), sign=True) for other in column[1:]]
        rows.append([one.task, one.metric, str(len(one.groups)), chance, *cells])
        if one.perplexity is not None:
            rows.append(["", "perplexity", "", "", *(_perplexity(r) for r in column)])
    if len(_choices(first)) > 1:
        guessed = average([(r.chance or 0.0, None) for r in _choices(first)])[0]
        cells = [number(_average(own)) for own in results]
        cells += [number(_mean_difference(first, other), sign=True) for other in others]
        rows.append(["average", "", "", f"{100 * guessed:.2f}", *cells])
    full = [row + [""] * (len(head) - len(row)) for row in rows]
    return "\n\n".join(_aligned(part) for part in fit.blocks(full, room, labels=2))


def _perplexity(r: Result) -> str:
    assert r.perplexity is not None
    value, error = r.perplexity
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def _choices(results: Sequence[Result]) -> list[Result]:
    """What the average is over, as in the authors' tables: multiple choice."""
    return [r for r in results if r.chance is not None]


def _average(results: Sequence[Result]) -> Number:
    return average([(r.mean(r.metric), r.error(r.metric)) for r in _choices(results)])


def _mean_difference(a: Sequence[Result], b: Sequence[Result]) -> Number:
    pairs = zip(_choices(a), _choices(b), strict=True)
    return average([difference(one, other) for one, other in pairs])


def _aligned(rows: fit.Rows) -> str:
    lines = fit.aligned(rows, 2).split("\n")
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


def as_json(names: Sequence[str], results: Sequence[Sequence[Result]]) -> list[dict[str, Any]]:
    """Everything of the table, unrounded, a model at a time."""
    out = []
    for name, own in zip(names, results, strict=True):
        tasks = {r.task: _task(r, base) for r, base in zip(own, results[0], strict=True)}
        entry: dict[str, Any] = {"name": name, "tasks": tasks}
        if _choices(own):
            entry["average"] = _pair(_average(own))
            if own is not results[0]:
                entry["average_minus_first"] = _pair(_mean_difference(results[0], own))
        out.append(entry)
    return out


def _task(r: Result, base: Result) -> dict[str, Any]:
    found: dict[str, Any] = {"items": len(r.groups), "metric": r.metric, "chance": r.chance}
    for metric in r.values:
        found[metric] = _pair((r.mean(metric), r.error(metric)))
    if r.perplexity is not None:
        found["perplexity"] = _pair(r.perplexity)
    if r is not base:
        found["minus_first"] = _pair(difference(base, r))
    return found


def _pair(value: Number) -> dict[str, float | None]:
    return {"value": value[0], "stderr": value[1]}

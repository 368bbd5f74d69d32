"""The verdict: a table of arms and a sentence a comparison, as Markdown and for the terminal."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mars.diagnostics import shown_over
from mars.lab.report import fit, units
from mars.lab.report.statistics import Difference, Spread, first_reach, paired, spread
from mars.lab.session import DIAGNOSED
from mars.lab.study.choice import Ladder, ladders
from mars.lab.study.definition import Study
from mars.lab.study.fingerprint import PARTS
from mars.lab.study.judge import Judged, judge
from mars.lab.study.planner import wanted
from mars.lab.study.results import Result
from mars.lab.study.times import Time, middle


@dataclass(frozen=True)
class Row:
    """One arm at its best rate. None: not known, or nothing to compare with."""

    ladder: Ladder
    loss: Spread | None
    baseline: str | None = None  # its name
    difference: Difference | None = None
    tokens_ratio: float | None = None  # to the baseline's final loss, of the baseline's own
    time_ratio: float | None = None
    time: Time | None = None  # of a step
    variance_ratio: float | None = None
    independent: float | None = None


@dataclass(frozen=True)
class Verdict:
    """All that the results of a study say so far."""

    study: Study
    results: tuple[Result, ...]
    rows: tuple[Row, ...]
    judged: tuple[Judged, ...]
    missing: int  # runs that are known to be wanted

    @property
    def count(self) -> str:
        """How far it is, in a few words."""
        left = f"{self.missing} wanted next" if self.missing else "complete"
        states = Counter(j.state for j in self.judged)
        many = {"holds": "hold", "does not hold": "do not hold"}
        said = ", ".join(f"{n} {many.get(s, s) if n > 1 else s}" for s, n in states.items())
        claims = units.count(len(self.judged), "claim")
        return f"{units.count(len(self.results), 'run')}, {left}; of {claims} {said}"


def verdict(
    study: Study,
    results: Sequence[Result],
    times: Mapping[str, Time] | None = None,
    seeds: int | None = None,
    failed: Mapping[str, str] | None = None,
) -> Verdict:
    """Judge what there is.

    ``times``: of steps, as measured apart from the runs. ``seeds``: as many as are wanted, if more
    than the study's. ``failed``: arms of which runs failed, and where that is told.
    """
    known = {arm.label for arm in study.arms}
    results = [result for result in results if result.arm in known]
    times = times or _own_times(results)
    found = ladders(study, results)
    rows = tuple(_row(study, found, results, times, arm.label) for arm in study.arms)
    judged = tuple(judge(study, results, failed))
    return Verdict(study, tuple(results), rows, judged, len(wanted(study, results, seeds)))


def _own_times(results: Sequence[Result]) -> dict[str, Time]:
    """From the runs, if each had the device for itself."""
    if any(r.at_once > 1 for r in results):
        return {}
    steps: dict[str, list[Time]] = defaultdict(list)
    for r in results:
        if r.step_seconds is not None:
            steps[r.arm].append(Time(r.step_seconds, r.step_seconds * (r.optimizer_share or 0.0)))
    return {label: middle(own) for label, own in steps.items()}


def at_best(ladder: Ladder, results: Sequence[Result]) -> list[Result]:
    """The finished runs of an arm at its best rate, by seed."""
    label, best = ladder.arm.label, ladder.best
    own = [r for r in results if r.arm == label and r.lr == best and r.final is not None]
    return sorted(own, key=lambda r: r.seed)


def _row(
    study: Study, found: dict[str, Ladder], results: Sequence[Result],
    times: Mapping[str, Time], label: str,
) -> Row:  # fmt: skip
    own = at_best(found[label], results)
    exact = study.run(found[label].arm).optimizer.exact
    row = Row(
        found[label],
        spread([r.loss for r in own]),
        time=times.get(label),
        variance_ratio=_mean([r.variance_ratio for r in own]),
        independent=shown_over(_mean([r.independent for r in own]), 0 if exact else DIAGNOSED),
    )
    base = study.baseline_of(label)
    theirs = at_best(found[base], results) if base is not None else []
    shared = {r.seed for r in own} & {r.seed for r in theirs}
    if base is None or not shared:
        return row
    own, theirs = ([r for r in runs if r.seed in shared] for runs in (own, theirs))
    target = math.fsum(r.loss for r in theirs) / len(theirs)
    steps = _ratio(own, theirs, "step", target)
    timed = steps is not None and label in times and base in times
    return replace(
        row,
        baseline=found[base].arm.name,
        difference=paired(_finals(own), _finals(theirs)),
        tokens_ratio=_ratio(own, theirs, "tokens", target),
        time_ratio=steps * times[label].step / times[base].step if steps and timed else None,
    )


def _finals(results: Sequence[Result]) -> dict[int, float]:
    return {r.seed: r.loss for r in results}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def _ratio(
    own: Sequence[Result], theirs: Sequence[Result], axis: str, target: float
) -> float | None:  # fmt: skip
    """Where the mean curve reaches the target, relative to where the other does."""
    reached = [_reach(results, axis, target) for results in (own, theirs)]
    first, second = reached
    return first / second if first is not None and second else None


def _reach(results: Sequence[Result], axis: str, target: float) -> float | None:
    steps = set.intersection(*(set(r.curve.get("step", [])) for r in results))
    columns = []
    for r in results:
        at = [i for i, step in enumerate(r.curve.get("step", [])) if step in steps]
        columns.append([[r.curve[name][i] for i in at] for name in (axis, "loss")])
    x, y = np.array(columns, dtype=np.float64).mean(axis=0)
    return first_reach(x, y, target)


# In words.

HEAD = ("arm", "best rate", "seeds", "loss", "to", "difference, 95 % interval", "tokens", "time",
        "step", "Var(c)/Var(g)")  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    ladder, loss, d = row.ladder, row.loss, row.difference
    best = ladder.best
    if best is None:
        rate = "all diverged" if ladder.losses else "–"
    else:
        rate = units.rate(best) + ("" if ladder.bracketed else " (not bracketed)")
    spread_ = "" if loss is None or loss.sd is None else f" ± {units.loss(loss.sd)}"
    gap = "–" if d is None else units.signed(d.mean)
    if d is not None and d.low is not None:
        gap += f" [{units.signed(d.low)}, {units.signed(d.high)}]"
    ratio = "–"
    if row.variance_ratio is not None:
        ratio = f"{row.variance_ratio:.2f}"
        ratio += "" if row.independent is None else f" ({row.independent:.2f} if independent)"
    return (
        ladder.arm.name, rate, str(0 if loss is None else loss.n),
        "–" if loss is None else units.loss(loss.mean) + spread_, row.baseline or "–", gap,
        _share(row, row.tokens_ratio), _share(row, row.time_ratio),
        units.seconds(None if row.time is None else row.time.step), ratio,
    )  # fmt: skip


def _share(row: Row, value: float | None) -> str:
    return "–" if row.difference is None or value is None else f"{value:.0%}"


def sentence(j: Judged, study: Study) -> str:
    """One comparison."""
    d, said = j.difference, ""
    if d is not None and d.low is not None and d.high is not None:
        seeds = f"{d.n} seeds"
        if j.comparison.claim.kind == "rate":
            low, mean, high = (math.exp(v) for v in (d.low, d.mean, d.high))
            said = f" (measured {mean:.2f} times, 95 % interval {low:.2f} to {high:.2f}, {seeds})"
        else:
            interval = f"{units.signed(d.low)} to {units.signed(d.high)}"
            said = f" (difference {units.signed(d.mean)}, 95 % interval {interval}, {seeds})"
    why = f": {j.why}" if j.why else ""
    claim = j.comparison.named(study)
    return f"{claim} — {j.state.upper() if j.settled else j.state}{said}{why}."


def _table(v: Verdict) -> list[tuple[str, ...]]:
    """With the columns that hold anything."""
    rows = [HEAD, *(cells(row) for row in v.rows)]
    kept = [i for i in range(len(HEAD)) if any(row[i] != "–" for row in rows[1:])]
    return [tuple(row[i] for i in kept) for row in rows]


def terminal(v: Verdict, room: int | None = None) -> str:
    """Plain text, for a terminal with this many columns."""
    lines = [fit.fold(f"{v.study.name}: {v.study.question}", room), v.count, ""]
    for rows in fit.blocks(_table(v), room):
        lines += [fit.aligned(rows), ""]
    return "\n".join([*lines, *(fit.fold(sentence(j, v.study), room) for j in v.judged)])


def markdown(v: Verdict) -> str:
    """The page verdict.md."""
    rows = _table(v)
    marks = ["---"] * len(rows[0])
    table = [f"| {' | '.join(row)} |" for row in (rows[0], tuple(marks), *rows[1:])]
    made = {k: sorted({r.fingerprint[k] for r in v.results if k in r.fingerprint}) for k in PARTS}
    said = "; ".join(f"{part} {', '.join(own)}" for part, own in made.items() if own)
    diverged = [r for r in v.results if r.status == "diverged"]
    lines = [
        f"# {v.study.name}", "", f"**{v.study.question}**", "",
        f"Predicted: {v.study.prediction}", "",
        *(f"- {sentence(j, v.study)}" for j in v.judged), "",
        *table, "",
        "Loss: final validation loss at the best rate, mean ± standard deviation over seeds. "
        "Difference: paired by seed (same initial weights, same batches). Tokens, time: to the "
        "baseline's final loss, relative to the baseline's own; time is that of the steps, as they "
        "take when nothing else is on the device.", "",
        f"{v.count}.", "",
    ]  # fmt: skip
    if diverged:
        which = ", ".join(
            f"{v.study.arm(r.arm).name} at {units.rate(r.lr)} (seed {r.seed})" for r in diverged
        )
        lines += [f"Diverged: {which}.", ""]
    where = f"Runs: [results.jsonl](results.jsonl), made with {said}."
    lines += [where if v.results else "Nothing has been run.", ""]
    return "\n".join(lines)

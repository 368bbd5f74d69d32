"""What a set of runs says: one row an optimizer, compared with the baseline seed by seed.

Never mixes runs that are not comparable, never drops a run that failed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mars.lab import optimizers
from mars.lab.errors import LabError
from mars.lab.report import compare, statistics, units
from mars.lab.report.measure import Measure
from mars.lab.report.rates import Sensitivity, from_grid, from_runs
from mars.lab.report.runs import RunLog, Series
from mars.lab.report.statistics import Difference, Spread

STEADY = 0.3  # a relative spread of step times above which the report doubts them


@dataclass(frozen=True)
class Entry:
    """One optimizer at its best learning rate. None: not known, or nothing to compare with."""

    label: str
    optimizer: str
    lr: float
    runs: tuple[RunLog, ...]  # at lr, one a seed
    others: tuple[RunLog, ...]  # at other rates
    sensitivity: Sensitivity
    score: Spread | None  # what it is judged by, over the seeds that finished; lower is better
    loss: Spread | None  # final validation loss
    accuracy: Spread | None  # final, of images
    best_accuracy: Spread | None  # the highest on the way
    incomparable: str | None = None  # why it must not be compared with the rest
    difference: Difference | None = None  # to the baseline, on equal seeds
    progress_to_baseline: float | None = None  # tokens or epochs until the baseline's final score
    progress_ratio: float | None = None  # of that to the baseline's own
    seconds_to_baseline: float | None = None
    seconds_ratio: float | None = None
    step_seconds: float | None = None
    optimizer_share: float | None = None  # of a step's time
    speed: float | None = None  # tokens or images in a second
    memory: float | None = None  # peak bytes
    state: float | None = None  # bytes of optimizer state

    @property
    def measure(self) -> Measure:
        return self.runs[0].measure

    @property
    def scores(self) -> dict[int, float]:
        """Final score by seed."""
        return {run.seed: run.score for run in self.runs if run.score is not None}

    @property
    def ranked(self) -> bool:
        return self.score is not None and self.incomparable is None


@dataclass(frozen=True)
class Summary:
    """Entries by final score, the best first; those without one, or not comparable, last."""

    entries: tuple[Entry, ...]
    baseline: Entry | None
    asked: str  # the baseline that was asked for
    warnings: tuple[str, ...] = ()
    rates: tuple[Sensitivity, ...] = ()  # from a committed grid
    origin: str = ""  # of that grid: "package", "study"; else it was given
    runs: tuple[RunLog, ...] = field(default=(), repr=False)
    times: str = ""  # why they do not compare

    @property
    def measure(self) -> Measure:
        return (self.baseline or self.entries[0]).measure

    @property
    def ranked(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.ranked)

    @property
    def sensitivity(self) -> tuple[Sensitivity, ...]:
        """A curve an optimizer that was run at two rates or more, else from the committed grid."""
        own = [e.sensitivity for e in self.entries if e.incomparable is None]
        own = [curve for curve in own if len(curve.points) > 1]
        seen = {curve.optimizer for curve in own}
        return (*own, *(curve for curve in self.rates if curve.optimizer not in seen))

    def with_rates(self, rates: Mapping[str, Any] | None) -> Summary:
        """The same with the curves of a committed grid beside it, if that is of such runs."""
        if rates is None:
            return self
        there = {name for entry in self.entries for name in (entry.optimizer, entry.label)}
        curves = [c for c in from_grid(rates) if {c.optimizer, c.label} & there]
        unit = self.measure.unit
        steps = [run.header.get(f"{unit}_per_step") for run in self.runs]
        own = max((n * r.steps for n, r in zip(steps, self.runs, strict=True) if n), default=0)
        told = rates.get(unit)
        if curves and own and isinstance(told, int) and not 0.5 <= own / told <= 2:
            text = f"the recipe's grid of rates is not drawn: its runs had {told:,} {unit}, these "
            text += f"{own:,}"
            return dataclasses.replace(self, warnings=(*self.warnings, text))
        origin = str(rates.get("origin") or "")
        return dataclasses.replace(self, rates=tuple(curves), origin=origin)


def summarise(
    runs: Sequence[RunLog], baseline: str = "adamw", rates: Mapping[str, Any] | None = None
) -> Summary:
    """Compare runs; `baseline` is an optimizer's name or label."""
    if not runs:
        raise LabError("nothing to summarise: no run was given")
    usual = compare.reference(runs, baseline)
    groups: dict[tuple[compare.Setting, str], list[RunLog]] = defaultdict(list)
    for run, label in zip(runs, compare.labels(runs), strict=True):
        groups[compare.setting(run), label].append(run)
    entries, warnings = [], []
    for (setting, label), members in groups.items():
        why = None if setting == usual else compare.contrast(setting, usual)
        if why is not None:
            warnings.append(f"not comparable: {label}, {units.count(len(members), 'run')}: {why}")
        entry, said = _entry(label, members, why)
        entries.append(entry)
        warnings += said
    base = _baseline(entries, baseline)
    entries = [_against(entry, base) for entry in entries]
    entries.sort(key=lambda e: (not e.ranked, e.score.mean if e.score else math.inf, e.label))
    found = next((e for e in entries if base is not None and e.runs == base.runs), None)
    asked = optimizers.label(baseline)
    doubts = _of_times(entries)
    warnings += _general(entries, found, asked)
    warnings += doubts
    told, times = tuple(warnings), "; ".join(doubts)
    summary = Summary(tuple(entries), found, asked, told, runs=tuple(runs), times=times)
    return summary.with_rates(rates)


def _entry(label: str, members: Sequence[RunLog], why: str | None) -> tuple[Entry, list[str]]:
    """One optimizer's row at its best rate, not yet compared with anything."""
    kept, warnings = _newest(label, members)
    curve = from_runs(label, kept)
    lr = curve.best if curve.best is not None else _fallback_rate(kept)
    at = sorted((run for run in kept if run.lr == lr), key=lambda run: run.seed)
    if curve.bracketed is False:
        edge = "lowest" if lr == curve.tried[0] else "highest"
        warnings.append(
            f"{label}: the best rate, {lr:g}, is the {edge} that ended: a better one may lie beyond"
        )
    entry = Entry(
        label=label,
        optimizer=members[0].optimizer,
        lr=lr,
        runs=tuple(at),
        others=tuple(run for run in kept if run.lr != lr),
        sensitivity=curve,
        score=_over(at, lambda run: run.score),
        loss=_over(at, lambda run: run.final),
        accuracy=_over(at, lambda run: run.accuracy),
        best_accuracy=_over(at, lambda run: run.best_accuracy),
        incomparable=why,
        **_cost([run for run in at if run.final is not None] or at),
    )
    ratios = [r for run in kept if (r := _ratio_1d(run)) is not None]
    if ratios and max(ratios) > 1.05 * min(ratios):  # more than by rounding
        between = f"{min(ratios):.2g} to {max(ratios):.2g}"
        warnings.append(f"{label}: its runs have different lr_1d / lr ({between}): not one grid")
    if any(event.get("what") == "extended" for run in at for event in run.events):
        warnings.append(
            f"{label}: a run was extended to more steps: its rates were not those of a run of this "
            "length"
        )
    for run in members:
        if run.status != "done":
            warnings.append(f"{label}, lr {run.lr:g}, seed {run.seed}: {describe(run)}")
        if run.ignored:
            lines = units.count(run.ignored, "line")
            warnings.append(f"{label}, seed {run.seed}: {lines} of its log could not be read")
    return entry, warnings


def _ratio_1d(run: RunLog) -> float | None:
    """The rate of what is no hidden matrix, in that of the matrices."""
    lr_1d = run.at("config", "optimizer", "lr_1d")
    return lr_1d / run.lr if isinstance(lr_1d, (int, float)) and run.lr else None


def _over(runs: Sequence[RunLog], get: Callable[[RunLog], float | None]) -> Spread | None:
    """A number of runs over the seeds that have it."""
    return statistics.spread([value for value in map(get, runs) if value is not None])


def describe(run: RunLog) -> str:
    """How a run that is not done stands."""
    said = f"{run.status} at step {run.step} of {run.steps}"
    return f"{said}: {run.why}" if run.why else said


def _newest(label: str, members: Sequence[RunLog]) -> tuple[list[RunLog], list[str]]:
    """One run a rate and seed: of equal ones the newest that has ended, else the newest."""
    groups: dict[tuple[float, int], list[RunLog]] = defaultdict(list)
    for run in members:
        groups[run.lr, run.seed].append(run)
    warnings = []
    for (lr, seed), same in groups.items():
        same.sort(key=lambda r: (r.status in ("done", "diverged"), str(r.header.get("time"))))
        if len(same) > 1:
            warnings.append(
                f"{label}, lr {lr:g}, seed {seed}: {len(same)} runs; the newest that ended counts"
            )
    return [same[-1] for same in groups.values()], warnings


def _fallback_rate(runs: Sequence[RunLog]) -> float:
    """No run has finished: the rate that got furthest, then the lowest loss."""
    lowest = min(runs, key=lambda r: (-r.step, math.inf if r.last is None else r.last))
    return lowest.lr


def _baseline(entries: Sequence[Entry], asked: str) -> Entry | None:
    """The baseline; of several with that name the strongest."""
    found = [e for e in entries if e.incomparable is None]
    found = [e for e in found if compare.is_baseline(e.runs[0], asked) or e.label == asked]
    return min(found, key=lambda e: e.score.mean if e.score else math.inf, default=None)


def _against(entry: Entry, base: Entry | None) -> Entry:
    """The entry compared with the baseline."""
    if base is None or base.score is None or not entry.ranked:
        return entry
    found: dict[str, Any] = {}
    own, theirs = mean_curve(entry.runs), mean_curve(base.runs)
    for name in ("progress", "seconds"):
        reached = statistics.first_reach(own[name], own["score"], base.score.mean)
        unit = statistics.first_reach(theirs[name], theirs["score"], base.score.mean)
        found[f"{name}_to_baseline"] = reached
        found[f"{name}_ratio"] = reached / unit if reached is not None and unit else None
    grain = entry.runs[0].grain
    if entry is not base:
        found["difference"] = statistics.paired(entry.scores, base.scores, grain)
    return dataclasses.replace(entry, **found)


def mean_curve(runs: Sequence[RunLog]) -> Series:
    """The mean validation curve of the finished runs, at the steps that all of them have."""
    curves = [_with_final(run) for run in runs if run.score is not None]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    names = ("progress", "seconds", "score")
    rows = [np.mean([curve[step] for curve in curves], axis=0) for step in steps]
    table = np.array(rows).reshape(-1, len(names))
    return {"step": np.array(steps), **{name: table[:, i] for i, name in enumerate(names)}}


def _with_final(run: RunLog) -> dict[float, tuple[float, float, float]]:
    """(tokens or epochs, seconds, score) by step; the final score closes the curve."""
    v = run.valid
    scores = v["loss"] if run.accuracy is None else 1.0 - v["accuracy"]
    columns = zip(v["step"], v[run.measure.progress], v["seconds"], scores, strict=True)
    curve = {float(step): (float(t), float(s), float(y)) for step, t, s, y in columns}
    if run.score is not None:
        curve[float(run.step)] = (run.progress, run.seconds, run.score)
    return curve


def _cost(runs: Sequence[RunLog]) -> dict[str, Any]:
    """Time and memory: the median over a run, the mean over runs."""

    def over(get: Callable[[RunLog], float | None]) -> float | None:
        known = [value for value in map(get, runs) if value is not None]
        return math.fsum(known) / len(known) if known else None

    step = over(lambda run: typical(run.train, "step_seconds"))
    own = over(lambda run: typical(run.train, "optimizer_seconds"))
    peaks = [p for run in runs if (p := _peak(run.train)) is not None]
    return {
        "step_seconds": step,
        "optimizer_share": own / step if own is not None and step else None,
        "speed": over(lambda run: typical(run.train, f"{run.measure.unit}_per_second")),
        "memory": max(peaks, default=None),
        "state": over(_state),
    }


def typical(series: Series, name: str) -> float | None:
    """The median of a column; the first record, which pays for compilation, does not count."""
    values = series.get(name, np.array([]))
    values = values[1:] if len(values) > 2 else values
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _unsteady(series: Series) -> float:
    """The middle half of the step times, as a part of their median."""
    values = series.get("step_seconds", np.array([]))[1:]
    values = values[np.isfinite(values)]
    if len(values) < 4 or np.median(values) <= 0:
        return 0.0
    low, high = np.quantile(values, [0.25, 0.75])
    return float((high - low) / np.median(values))


def _peak(series: Series) -> float | None:
    values = series.get("memory", np.array([]))
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else None


def _state(run: RunLog) -> float | None:
    value = run.header.get("state_bytes")
    return float(value) if isinstance(value, (int, float)) else None


def _general(entries: Sequence[Entry], base: Entry | None, asked: str) -> list[str]:
    """What concerns the comparison as a whole."""
    races = [run.race.get("notes") for e in entries for run in e.runs]
    notes = [note for own in races if isinstance(own, list) for note in own]
    warnings = [note for note in dict.fromkeys(notes) if isinstance(note, str)]
    if base is None and len(entries) > 1:
        warnings.append(f"no run of the baseline, {asked}: differences are not shown")
    elif base is not None and base.score is None:
        warnings.append(f"the baseline, {base.label}, has no finished run to compare with")
    for e in entries:
        if base and e.difference and e.score and e.difference.n < e.score.n:
            pairs = f"{e.difference.n} of {e.score.n} seeds, which both have"
            warnings.append(f"{e.label}: its difference to {base.label} is over {pairs}")
    for what, value in compare.UNEQUAL.items():
        values = sorted({str(value(run)) for e in entries for run in e.runs if e.ranked})
        if len(values) > 1:
            warnings.append(f"the runs differ in {what} ({'; '.join(values)}): compare with care")
    # What a study declares to compute the same counts as one; its own note says so.
    codes = {
        str(r.header.get("same_code") or r.header.get("code")) for e in entries for r in e.runs
    }
    if len(codes) > 1:
        warnings.append("the runs were made by different versions of the sources")
    return warnings


def _of_times(entries: Sequence[Entry]) -> list[str]:
    """Why the times of these runs do not compare."""
    warnings = []
    told = [run.header.get("hardware") for e in entries for run in e.runs]
    known = [machine for machine in told if isinstance(machine, dict)]
    machines = {str({**machine, "threads": None}) for machine in known}
    threads = {machine.get("threads") for machine in known if machine.get("device") == "cpu"}
    if len(machines) > 1:
        warnings.append("the runs come from different hardware: do not compare their times")
    elif len(threads) > 1:
        warnings.append("the runs had different numbers of threads: do not compare their times")
    busy = max((_unsteady(run.train) for e in entries for run in e.runs), default=0.0)
    if busy > STEADY:
        warnings.append(
            f"the time of a step varies by {busy:.0%} within a run: the machine was busy, "
            "do not compare times"
        )
    return warnings

"""Tables of races, grids of learning rates and bench/convert_rates.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from table_cells import RESULTS, bold, interval, mean_loss, result, table

from mars.lab import optimizers
from mars.lab.report import RunLog, load, summarise, units
from mars.lab.report.rates import from_grid, read_rates
from mars.lab.report.statistics import Spread, paired
from mars.lab.report.summary import Entry, Summary


def race(folder: str) -> Summary:
    return summarise(load([RESULTS / folder]))


def _label(entry: Entry, base: Entry | None) -> str:
    """Its name; and that it has the baseline's betas, which are not its own."""
    own, other = (_betas(e) for e in (entry, base or entry))
    return f"{entry.label}, AdamW's betas" if entry is not base and own == other else entry.label


def _betas(entry: Entry) -> Any:
    return entry.runs[0].header["config"]["optimizer"]["betas"]


def every_rate(summary: Summary) -> str:
    """Mean loss at every rate of a race, and at the best one the difference from the baseline."""
    rates = sorted({p.lr for e in summary.ranked for p in e.sensitivity.points})
    rows = []
    for e in sorted(summary.ranked, key=lambda entry: entry is not summary.baseline):
        means = {p.lr: p.mean for p in e.sensitivity.points}
        cells = [bold(f"{m:.3f}" if (m := means.get(r)) else "", r == e.lr) for r in rates]
        rows.append([_label(e, summary.baseline), *cells, interval(e.difference)])
    return table(["", *map(units.rate, rates), "to AdamW (95 % interval)"], rows)


PUBLISHED = {"adamw": 94.81, "muon": 95.08, "mars-adamw-2d": 95.29}  # arXiv 2411.10438, CIFAR-10


def accuracies(seeds: str, shorter: str, bare: str) -> str:
    """Images: a race of the short schedule, beside shorter ones and what is published."""
    before = [{e.optimizer: e.accuracy for e in race(name).ranked} for name in (shorter, bare)]
    rows = []
    for e in race(seeds).ranked:
        gap = e.measure.shown(e.difference) if e.difference else None
        rows.append([
            e.label, units.rate(e.lr), f"{_decay(e):g}", _percents(e.accuracy),
            interval(gap, decimals=2), *(_percents(known[e.optimizer]) for known in before),
            f"{PUBLISHED.get(e.optimizer, '')}",
        ])  # fmt: skip
    return table(
        ["", "rate", "decay", "accuracy", "to AdamW, points (95 % interval)",
         "30 epochs, no cutout", "and hard labels, no decay", "published, 200 epochs"], rows,
    )  # fmt: skip


def complete(folder: str) -> list[RunLog]:
    """The runs that came to their end.

    Beside them lies AdamW with MARS's settings, apart: a control, no candidate of that report.
    """
    found = [run for run in load(RESULTS.glob(f"{folder}*")) if run.status == "done"]
    return sorted(found, key=lambda run: run.path.name)


def whole_schedule(folder: str, short: str) -> str:
    """Images: runs of 200 epochs, beside the short schedule."""
    means = {e.optimizer: e.accuracy for e in race(short).ranked}
    rows = []
    for run in complete(folder):
        o, name = run.at("config", "optimizer"), run.optimizer
        betas, decay = o["betas_1d"] or o["betas"], o["weight_decay_1d"] or o["weight_decay"]
        rows.append([
            run.label, units.rate(run.lr), f"({betas[0]:g}, {betas[1]:g})",
            f"{decay:g}", _accuracy(run.accuracy), _accuracy(run.best_accuracy),
            _percents(means[name]), f"{PUBLISHED[name]}" if o["weight_decay"] == 5e-4 else "",
        ])  # fmt: skip
    return table(
        ["", "rate", "betas, convolutions", "decay, convolutions", "accuracy, 200 epochs",
         "highest on the way", "40 epochs, short schedule", "published"], rows,
    )  # fmt: skip


def _decay(entry: Entry) -> float:
    """Of convolutions."""
    options = entry.runs[0].header["config"]["optimizer"]
    return float(options["weight_decay_1d"] or options["weight_decay"])


def accuracy_rates(grid: str) -> str:
    """Images: every rate of a grid."""
    rows = [
        [
            optimizers.label(curve.optimizer),
            ", ".join(
                bold(f"{units.rate(p.lr)}: {_percent(p.mean)}", p.lr == curve.best)
                for p in curve.points
            ),
        ]
        for curve in race(grid).sensitivity
    ]
    return table(["", "rate: accuracy"], rows)


def decays(folder: str) -> str:
    """Images: what decay and smoothed labels do, one run each."""
    found = []
    for run in load([RESULTS / folder]):
        decay = run.at("config", "optimizer", "weight_decay")
        smoothing = run.at("config", "model", "label_smoothing")
        assert run.accuracy is not None
        found.append((run.label, run.lr, decay, smoothing, run.accuracy))
    best = {label: max(row[4] for row in found if row[0] == label) for label, *_ in found}
    rows = [
        [label, units.rate(lr), f"{decay:g}", f"{smoothing:g}",
         bold(_accuracy(accuracy), accuracy == best[label])]
        for label, lr, decay, smoothing, accuracy in sorted(found)
    ]  # fmt: skip
    return table(["", "rate", "decay", "smoothing", "accuracy"], rows)


def _accuracy(share: float | None) -> str:
    assert share is not None
    return f"{100 * share:.2f}"


def _percent(error: float | None) -> str:
    return "diverged" if error is None else f"{100 * (1 - error):.2f}"


def _percents(found: Spread | None) -> str:
    assert found is not None
    return f"{100 * found.mean:.2f}" + ("" if found.sd is None else f" ± {100 * found.sd:.2f}")


def grid(path: Path) -> str:
    """The optimizers of a committed grid at their best rates, the lowest first."""
    curves = from_grid(read_rates(path))
    losses = {c.label: next(p.losses for p in c.points if p.lr == c.best) for c in curves}
    rates = {c.label: f"{units.rate(c.best)}" for c in curves if c.best is not None}
    rows = []
    for label in sorted(losses, key=lambda name: sum(losses[name].values()) / len(losses[name])):
        difference = None if label == "AdamW" else paired(losses[label], losses["AdamW"])
        values = list(losses[label].values())
        rows.append([label, rates[label], mean_loss(values), interval(difference)])
    return table(["", "best rate", "validation loss", "to AdamW (95 % interval)"], rows)


CURVES = {
    "adamw": "AdamW, betas (0.9, 0.95)",
    "mars-adamw, AdamW's betas": "MARS-AdamW, betas (0.9, 0.95)",
    "adamw, betas of MARS": "AdamW, betas (0.95, 0.99)",
    "mars-adamw": "MARS-AdamW, betas (0.95, 0.99)",
    "muon": "Muon",
    "mars-m": "MARS-M",
    "step-size": "`from_adamw`",
    "published": '`from_adamw(rule="published")`',
}


def conversion(name: str) -> str:
    """The best of each curve; all but AdamW's are over multiples of AdamW's base rate."""
    found = result(name)
    rows = []
    for curve, label in CURVES.items():
        points = found["points"][curve]
        best = min(points, key=lambda point: point["mean"])
        rate = best["x"] * (1 if curve == "adamw" else found["base_rate"])
        tried = "one rate" if len(points) == 1 else f"best of {len(points)}"
        rows.append([f"{label}, {tried}", f"{rate:.3g}", f"{best['mean']:.3f}"])
    return table(["", "rate", "validation loss"], rows)

"""Draw a study's results: loss over tokens at the best rates, and over the rates that were tried.

    python bench/study_figure.py docs/results/optimizers-50m     # needs matplotlib

The picture is `figure.png` beside the results. `summary.png` has the difference of every arm to the
first one, with its interval, in one panel that is read on a phone as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mars.lab.report import units
from mars.lab.report.statistics import paired
from mars.lab.study import questions
from mars.lab.study.choice import Ladder, ladders
from mars.lab.study.definition import Study
from mars.lab.study.results import Result, Results

# Families by hue, MARS the stronger of each. Other arms have matplotlib's colours.
COLORS = {
    "AdamW": "#444444",
    "MARS-AdamW (.9, .95)": "#c96f12",
    "MARS-AdamW": "#c96f12",
    "MARS-AdamW (.95, .99)": "#a8752a",
    "MARS-AdamW, no clip, raw": "#c2185b",
    "Muon": "#4f86bd",
    "Muon, original scale": "#5b9b6b",
    "MARS-M": "#1f5fa8",
    "MARS-Shampoo": "#2e8b57",
    "SOAP": "#9467bd",
    "Lion": "#b97474",
    "MARS-Lion": "#b03a3a",
    "γ = 0": "#444444",
    "γ = 0.0125": "#c98a00",
    "γ = 0.025": "#1f5fa8",
    "γ = 0.05": "#2e8b57",
    "γ = 0.1": "#b03a3a",
}
EXACT = ", exact"  # has the colour of the same γ in approximate mode, dashed
FEW = 6  # rungs that have room for their names
FAINT = 0.45  # single runs, beside the lines of their means
CLIFF = 4.0  # times as far above the lowest loss as three quarters of the runs: learned nothing
SKIPPED = 0.25  # of the tokens: before that, curves fall too fast to tell them apart


def color_of(label: str, other: str) -> str:
    return COLORS.get(label.removesuffix(EXACT), other)


def dashes(label: str) -> str:
    return "--" if label.endswith(EXACT) else "-"


def by_tokens(axes: Any, ladder: Ladder, results: Sequence[Result], color: str) -> None:
    """The mean curve over seeds at the best rate."""
    label = ladder.arm.label
    own = [r for r in results if r.arm == label and r.lr == ladder.best and r.status == "done"]
    rows = zip(*(r.curve["loss"] for r in own), strict=True)
    points = [
        (tokens, fmean(losses))
        for tokens, losses in zip(own[0].curve["tokens"], rows, strict=True)
        if tokens >= SKIPPED * own[0].tokens
    ]
    xs, ys = zip(*points, strict=True)
    axes.plot([x / 1e6 for x in xs], ys, color=color, ls=dashes(label))
    at = "" if len(own) > 1 else f" at {units.rate(ladder.best)}"
    axes.annotate(
        f" {ladder.arm.name}{at}: {ys[-1]:.3f}", (xs[-1] / 1e6, ys[-1]), color=color,
        va="center", fontsize=8, annotation_clip=False,
    )  # fmt: skip


def by_rate(axes: Any, ladder: Ladder, color: str) -> None:
    """Every run, and the mean of seeds."""
    rates = sorted(lr for lr, own in ladder.losses.items() if max(own.values()) < float("inf"))
    means = [fmean(ladder.losses[lr].values()) for lr in rates]
    axes.plot(rates, means, color=color, lw=1.3, ls=dashes(ladder.arm.label))
    for lr in rates:
        losses = list(ladder.losses[lr].values())
        several = len(losses) > 1
        axes.plot([lr] * len(losses), losses, "o", color=color, ms=3, alpha=FAINT if several else 1)


def cut(axes: Any, found: Sequence[Ladder]) -> None:
    """Keep rates at which nothing was learned from flattening the others: they stand at the top."""
    points = [(fmean(own.losses[lr].values()), lr, own) for own in found for lr in own.losses]
    losses = sorted(loss for loss, *_ in points if loss < float("inf"))
    low, usual = losses[0], losses[3 * len(losses) // 4] - losses[0]
    if losses[-1] - low <= CLIFF * usual:
        return
    top = low + 2 * usual
    axes.set_ylim(low - 0.1 * usual, top)
    over = sorted((point for point in points if point[0] > top), key=lambda point: point[0])
    for place, (loss, lr, own) in enumerate(over):
        beside = max((r for r in own.losses if r < lr), default=lr)  # left of the line up there
        axes.annotate(
            f"{own.arm.name} at {units.rate(lr)}: {loss:.2f}",
            (beside, top - (0.02 + 0.1 * place) * usual),
            color=color_of(own.arm.label, "#444444"), ha="right", va="top", fontsize=8,
        )  # fmt: skip


def spread_labels(axes: Any) -> None:
    """Move the names at the ends of curves apart, those that collide by as little as they can."""
    low, high = axes.get_ylim()
    gap = (high - low) / 25
    clusters: list[list[Any]] = []
    for text in sorted(axes.texts, key=lambda text: text.xy[1]):
        clusters.append([text])
        while len(clusters) > 1 and _bottom(clusters[-1], gap) < _top(clusters[-2], gap) + gap:
            clusters[-2].extend(clusters.pop())
    for cluster in clusters:
        for place, text in enumerate(cluster):
            text.set_y(max(low + gap / 2, _bottom(cluster, gap)) + place * gap)


def _bottom(cluster: Sequence[Any], gap: float) -> float:
    """Where the lowest of names stands that are a gap apart about the middle of their curves."""
    return fmean(text.xy[1] for text in cluster) - gap * (len(cluster) - 1) / 2


def _top(cluster: Sequence[Any], gap: float) -> float:
    return _bottom(cluster, gap) + gap * (len(cluster) - 1)


def opened(directory: Path) -> tuple[Any, Study, list[Result], list[Ladder]]:
    """Something to draw with, a study, its results, and the arms that have a best rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    study, results = questions.find(directory.name), Results(directory).read()
    found = [own for own in ladders(study, results).values() if own.best is not None]
    return plt, study, results, found


def draw(directory: Path) -> Path:
    plt, study, results, found = opened(directory)
    colors = [color_of(own.arm.label, f"C{i % 10}") for i, own in enumerate(found)]
    searched = any(len(own.losses) > 1 for own in found)
    figure, panels = plt.subplots(
        1, 1 + searched, figsize=(11 if searched else 8, 4.4), squeeze=False, layout="constrained"
    )
    first = panels[0][0]
    for own, color in zip(found, colors, strict=True):
        by_tokens(first, own, results, color)
    spread_labels(first)
    first.set_xlabel("million tokens")
    first.set_ylabel("validation loss")
    title = study.question.partition(":")[0]
    if searched:
        several = any(len(seeds) > 1 for own in found for seeds in own.losses.values())
        title = "at the best rate, mean over seeds" if several else "one seed, best rate so far"
    first.set_title(title, fontsize=10)
    for panel in panels[0]:
        panel.spines[["top", "right"]].set_visible(False)
    if searched:
        second = panels[0][1]
        for own, color in zip(found, colors, strict=True):
            by_rate(second, own, color)
        cut(second, found)
        second.set_xscale("log")
        tried = sorted({lr for own in found for lr in own.losses})
        rungs = sorted({lr for o in found for lr in o.losses if lr == o.arm.rate(o.arm.rung(lr))})
        ticks = rungs if len(rungs) <= FEW else [10**e for e in range(-5, 0)]
        second.set_xticks(ticks, [units.rate(t) for t in ticks])
        second.set_xlim(tried[0] / 1.5, tried[-1] * 1.5)
        second.minorticks_off()
        second.set_xlabel("learning rate")
        means = "; lines: means" * several
        second.set_title(f"every run by rate{means}; colours as left", fontsize=10)
    path = directory / "figure.png"
    figure.savefig(path, dpi=150)
    return path


def summarise(directory: Path) -> Path:
    """Every arm's final loss relative to the first arm's, paired by seed, at the best rates."""
    plt, study, _, (base, *others) = opened(directory)
    rows = [(own, paired(own.losses[own.best], base.losses[base.best])) for own in others]
    rows.sort(key=lambda row: -row[1].mean)
    figure, axes = plt.subplots(figsize=(6.4, 0.42 * len(rows) + 1.3), layout="constrained")
    for y, (own, d) in enumerate(rows):
        color = color_of(own.arm.label, "#444444")
        if d.low is not None:
            axes.plot([d.low, d.high], [y, y], color=color, lw=2)
        axes.plot(d.mean, y, "o", color=color, ms=6)
        side = 1 if d.mean > 0 else -1  # away from zero
        end = d.mean if d.low is None else max(d.low, d.high, key=lambda x: side * x)
        axes.annotate(
            f"{d.mean:+.3f}".replace("-", "\N{MINUS SIGN}"), (end, y), (7 * side, 0),
            textcoords="offset points", color=color, va="center", fontsize=8,
            ha="left" if side > 0 else "right",
        )  # fmt: skip
    base_label = base.arm.label
    axes.axvline(0, color=COLORS.get(base_label, "#444444"), lw=1)
    axes.set_yticks(range(len(rows)), [own.arm.name for own, _ in rows])
    axes.margins(x=0.18)
    loss = fmean(base.losses[base.best].values())
    axes.set_xlabel(f"validation loss relative to {base_label} ({loss:.3f}); left is better")
    fewest = min((d.n for _, d in rows), default=0)
    seeds = f"{fewest} seeds, 95 % intervals" if fewest > 1 else "one seed or more"
    figure.suptitle(f"{study.question.partition(':')[0]}, {seeds}", fontsize=10)
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    path = directory / "summary.png"
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="of a study of this project, with its results")
    directory = parser.parse_args().directory
    print(f"drew {draw(directory)} and {summarise(directory)}")

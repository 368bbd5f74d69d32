"""Draw a study's results: loss over tokens at the best rates, and over the rates that were tried.

    python bench/study_figure.py docs/results/optimizers-50m     # needs matplotlib

The picture is `figure.png` beside the results. `summary.png` has the difference of every arm to the
first one, with its interval, in one panel that is read on a phone as well.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from mars.lab.report import units
from mars.lab.report.statistics import paired
from mars.lab.study import questions
from mars.lab.study.choice import Ladder, ladders
from mars.lab.study.definition import Study
from mars.lab.study.results import Result, Results

# Arms have the colours of their optimizers in the report. What a colour-blind reader might mistake
# for another (blue and pink, where pink is seen as blue) differs in its line or its marker, too.
REPORT = dict(
    re.findall(
        r"--([\w-]+): light-dark\((#\w{6})",
        resources.files("mars.lab.report").joinpath("page.css").read_text(encoding="utf-8"),
    )
)
COLORS = {
    "AdamW": "adamw",
    "MARS-AdamW (.9, .95)": "mars-adamw",
    "MARS-AdamW": "mars-adamw",
    "MARS-AdamW (.95, .99)": "mars-adamw",
    "MARS-AdamW, no clip, raw": "mars-adamw",
    "Muon": "muon",
    "Muon, original scale": "muon",
    "MARS-M": "mars-m",
    "MARS-Shampoo": "mars-shampoo",
    "SOAP": "soap",
    "Lion": "lion",
    "MARS-Lion": "mars-lion",
    "γ = 0": "adamw",
    "γ = 0.0125": "lion",
    "γ = 0.025": "muon",
    "γ = 0.05": "mars-shampoo",
    "γ = 0.1": "mars-adamw",
}
SECOND = {"MARS-AdamW (.95, .99)", "MARS-AdamW, no clip, raw", "Muon, original scale"}  # dashed
EXACT = ", exact"  # has the colour of the same γ in approximate mode, in panels of its own
FEW = 6  # rungs that have room for their names
FAINT = 0.45  # single runs, beside the lines of their means
CLIFF = 4.0  # times as far above the lowest loss as three quarters of the runs: learned nothing
SKIPPED = 0.25  # of the tokens: before that, curves fall too fast to tell them apart


def color_of(label: str, other: str) -> str:
    name = COLORS.get(label.removesuffix(EXACT))
    return other if name is None else REPORT[name]


def dashes(label: str) -> str:
    return "--" if label in SECOND else "-"


def marker(label: str) -> str:
    """Squares for what is compared with MARS."""
    return "o" if label.startswith(("MARS", "γ")) else "s"


def seeds_of(found: Sequence[Ladder]) -> list[int]:
    """The seeds that all arms have at their best rates: means over others do not compare."""
    shared = set.intersection(*(set(own.losses[own.best]) for own in found))
    return sorted(shared)


def by_tokens(
    axes: Any, ladder: Ladder, results: Sequence[Result], color: str, seeds: Sequence[int]
) -> None:
    """The mean curve over these seeds, or all that there are, at the best rate."""
    label = ladder.arm.label
    own = [r for r in results if r.arm == label and r.lr == ladder.best and r.status == "done"]
    own = [r for r in own if r.seed in seeds] or own
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


def most_seeds(found: Sequence[Ladder]) -> int:
    return max(len(seeds) for own in found for seeds in own.losses.values())


def by_rate(axes: Any, ladder: Ladder, color: str, most: int) -> None:
    """The mean of seeds by rate, hollow where they are fewer than this many; every run, faint."""
    losses = ladder.losses
    rates = sorted(lr for lr, own in losses.items() if max(own.values()) < float("inf"))
    means = [fmean(losses[lr].values()) for lr in rates]
    label = ladder.arm.label
    axes.plot(rates, means, color=color, lw=1.3, ls=dashes(label))
    for lr, mean in zip(rates, means, strict=True):
        own = list(losses[lr].values())
        face = color if len(own) >= most else "white"
        axes.plot(lr, mean, marker(label), mec=color, mfc=face, ms=4.5, mew=1.1, zorder=3)
        if len(own) > 1:
            axes.plot([lr] * len(own), own, "_", color=color, ms=6, alpha=FAINT)


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


def rows_of(found: Sequence[Ladder]) -> dict[str, list[Ladder]]:
    """Arms by the row of panels that they are in: exact mode has its own, with the baseline."""
    exact = [own for own in found if own.arm.label.endswith(EXACT)]
    if not exact:
        return {"": list(found)}
    rest = [own for own in found if own not in exact]
    return {"approximate: ": rest, "exact: ": [rest[0], *exact]}


def over(seeds: Sequence[int], found: Sequence[Ladder]) -> str:
    """Over which seeds curves are means."""
    if all(len(own.losses[own.best]) == len(seeds) for own in found):
        return f"mean of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    if not seeds:
        return "mean over the seeds that each has"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, which all have"


def draw(directory: Path) -> Path:
    plt, study, results, found = opened(directory)
    colors = {o.arm.label: color_of(o.arm.label, f"C{i % 10}") for i, o in enumerate(found)}
    searched = any(len(own.losses) > 1 for own in found)
    rows = rows_of(found)
    size = (11 if searched else 8, 4.4 if len(rows) == 1 else 7.6)
    figure, panels = plt.subplots(
        len(rows), 1 + searched, figsize=size, squeeze=False, layout="constrained", sharey="col"
    )
    seeds = seeds_of(found)
    title = study.question.partition(":")[0]
    if searched:
        title = f"at the best rate so far, {over(seeds, found)}"
        if any(len(own) > 1 for o in found for own in o.losses.values()):
            title = f"at the best rate, {over(seeds, found)}"
    for (mode, arms), (first, *more) in zip(rows.items(), panels, strict=True):
        for own in arms:
            by_tokens(first, own, results, colors[own.arm.label], seeds)
            for second in more:
                by_rate(second, own, colors[own.arm.label], most_seeds(found))
        first.set_title(mode + title, fontsize=10)
        for second in more:
            axis_of_rates(second, found)
            several = any(len(own) > 1 for o in arms for own in o.losses.values())
            single = ", – single runs" * several
            second.set_title(f"{mode}final loss by rate{single}; colours as left", fontsize=10)
    for (first, *more), arms in zip(panels, rows.values(), strict=True):
        for second in more:
            cut(second, arms)
        spread_labels(first)
        first.set_ylabel("validation loss")
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1][0].set_xlabel("million tokens")
    path = directory / "figure.png"
    figure.savefig(path, dpi=150)
    return path


def axis_of_rates(axes: Any, found: Sequence[Ladder]) -> None:
    axes.set_xscale("log")
    tried = sorted({lr for own in found for lr in own.losses})
    rungs = sorted({lr for o in found for lr in o.losses if lr == o.arm.rate(o.arm.rung(lr))})
    ticks = rungs if len(rungs) <= FEW else [10**e for e in range(-5, 0)]
    axes.set_xticks(ticks, [units.rate(t) for t in ticks])
    axes.set_xlim(tried[0] / 1.5, tried[-1] * 1.5)
    axes.minorticks_off()
    most = most_seeds(found)
    fewer = any(len(seeds) < most for own in found for seeds in own.losses.values())
    hollow = f"\nhollow: fewer than {most} seeds" * fewer
    axes.set_xlabel(f"learning rate, logarithmic{hollow}")


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
        axes.plot(d.mean, y, marker(own.arm.label), color=color, ms=6)
        side = 1 if d.mean > 0 else -1  # away from zero
        end = d.mean if d.low is None else max(d.low, d.high, key=lambda x: side * x)
        axes.annotate(
            f"{d.mean:+.3f}".replace("-", "\N{MINUS SIGN}"), (end, y), (7 * side, 0),
            textcoords="offset points", color=color, va="center", fontsize=8,
            ha="left" if side > 0 else "right",
        )  # fmt: skip
    base_label = base.arm.label
    axes.axvline(0, color=color_of(base_label, "#444444"), lw=1)
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

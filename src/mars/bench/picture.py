"""The ratios as bars from 1, one panel for each parameter set."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mars.bench.rows import Row

COLORS = {"torch": "#8a8f98", "mars": "#c8442e", "plain": "#c8442e"}
PEER = "#2f6db3"
WIDE = 10.0  # a range of ratios above which the axis is logarithmic


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the picture. Needs matplotlib, and says so if it is not there."""
    try:
        figure_of = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise RuntimeError("no picture: matplotlib is missing (pip install matplotlib)") from None
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.ratio is not None:
            panels.setdefault(row.parameters, []).append(row)
    if not panels:
        raise RuntimeError("no picture: nothing was timed")
    heights = [1.0 + 0.24 * len(panel) for panel in panels.values()]
    figure = figure_of(figsize=(9.0, sum(heights) + 0.4), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for ax, (name, panel) in zip(axes[:, 0], panels.items(), strict=True):
        _panel(ax, name, panel)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


def _panel(ax: Any, name: str, panel: Sequence[Row]) -> None:
    ratios = [row.ratio or 1.0 for row in panel]
    queued = [row.gpu_ratio for row in panel]
    ends = [max(1.0, a, b or a) for a, b in zip(ratios, queued, strict=True)]
    beyond = [ratio - 1.0 for ratio in ratios]  # left of the line is faster, right of it slower
    ax.barh(range(len(panel)), beyond, left=1.0, color=[_color(row) for row in panel], height=0.7)
    for y, (row, end) in enumerate(zip(panel, ends, strict=True)):
        ax.annotate(
            f"{_figure(row.ratio)}  ({_figure(row.ms)} ms)", (end, y), xytext=(7, 0), fontsize=7,
            textcoords="offset points", va="center", color="#333333",
        )  # fmt: skip
    if None not in queued:
        style = {"ls": "", "marker": "D", "ms": 3.5, "mfc": "white", "mec": "#222222", "zorder": 5}
        ax.plot(queued, range(len(panel)), **style, label="of GPU time, steps queued")
        ax.legend(frameon=False, fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    names = [row.name + (", hidden" if _unsaid(row) else "") for row in panel]
    ax.set_yticks(range(len(panel)), names, fontsize=8)
    ax.invert_yaxis()
    _scale(ax, min(ratios + [r for r in queued if r is not None]), max(ends))
    ax.axvline(1.0, color="#222222", lw=1.0)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title(f"{name}: time of a step, ratio to torch's AdamW", fontsize=9, loc="left")
    ax.spines[["top", "right"]].set_visible(False)


def _scale(ax: Any, low: float, high: float) -> None:
    """Room for labels on the right; a logarithmic axis if the range is wide."""
    if high <= WIDE * low:
        ax.set_xlim(0.0, 1.25 * max(high, 1.0))
        return
    ax.set_xscale("log")
    ax.set_xlabel("ratio, logarithmic", fontsize=8)  # lengths of bars are no ratios then
    ax.set_xlim(0.6 * low, high * (high / low) ** 0.25)
    locator = importlib.import_module("matplotlib.ticker").LogLocator
    ax.xaxis.set_major_locator(locator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()


def _figure(value: float | None) -> str:
    """Three digits, and no exponent."""
    value = value or 0.0
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _unsaid(row: Row) -> bool:
    return row.on == "hidden" and "hidden" not in row.name


def _color(row: Row) -> str:
    return COLORS.get(row.name.split()[0].split("-")[0], PEER)

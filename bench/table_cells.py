"""What the tables of README.md and docs/ are made of: files of results, cells, rows of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mars.lab.report.statistics import Difference, spread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [[f" {cell} " if cell else " " for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def mean_loss(losses: Sequence[float]) -> str:
    found = spread(losses)
    assert found is not None
    return f"{found.mean:.3f}" + ("" if found.sd is None else f" ± {found.sd:.3f}")


def interval(d: Difference | None, decimals: int = 3) -> str:
    if d is None:
        return ""
    mean, low, high = (
        None if value is None else f"{value:+.{decimals}f}".replace("-", "−")
        for value in (d.mean, d.low, d.high)
    )
    if low is None:
        return f"{mean} (one seed)"
    return f"{mean} ({low} to {high}){'' if d.resolved else ', not resolved'}"


def bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text

"""What is printed in a narrow terminal: tables part between columns, prose between words."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from mars.table import format_table

Rows = Sequence[Sequence[str]]
GAP = 2  # between columns


def room() -> int | None:
    """Columns of the terminal; None where standard output is a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def aligned(rows: Rows, left: int | None = None) -> str:
    """The table, the first ``left`` of its columns (None: all) to the left, others right."""
    width = len(rows[0])
    return format_table(rows, right=range(width if left is None else left, width))


def blocks(rows: Rows, room: int | None, labels: int = 1) -> list[Rows]:
    """The table in parts that have room, one below the other; its first columns are in each.

    >>> blocks([("", "rate", "loss"), ("AdamW", "0.01", "2.5")], room=12)
    [[('', 'rate'), ('AdamW', '0.01')], [('', 'loss'), ('AdamW', '2.5')]]
    """
    widths = [max(map(len, column)) + GAP for column in zip(*rows, strict=True)]
    if room is None or sum(widths) - GAP <= room:
        return [rows]
    parts: list[list[int]] = [[]]
    used = first = sum(widths[:labels])
    for i, width in enumerate(widths[labels:], labels):
        if parts[-1] and used + width - GAP > room:
            parts.append([])
            used = first
        parts[-1].append(i)
        used += width
    return [[tuple(row[i] for i in (*range(labels), *part)) for row in rows] for part in parts]


def fold(text: str, room: int | None, indent: str = "  ") -> str:
    """The text with its long lines folded; what follows in a line is indented."""
    if room is None:
        return text
    return "\n".join(
        piece
        for line in text.split("\n")
        for piece in (
            textwrap.wrap(
                line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            if len(line) > room
            else [line]
        )
    )

"""What is printed in a narrow terminal: tables part between columns, prose between words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mars.table import format_table, parted
from mars.table import room as room

Rows = Sequence[Sequence[str]]
GAP = 2  # between columns


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
    parts = parted(widths[labels:], sum(widths[:labels]) - GAP, room)
    if len(parts) == 1:
        return [rows]
    return [[(*row[:labels], *(row[labels + i] for i in part)) for row in rows] for part in parts]


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

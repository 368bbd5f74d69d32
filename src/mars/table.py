"""Rows of text as a table, and how many of its columns a terminal has room for."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Container, Sequence


def room() -> int | None:
    """Columns of the terminal; None where standard output is a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def parted(widths: Sequence[int], first: int, room: int | None) -> list[list[int]]:
    """Which columns of these widths, gaps included, have room beside ``first`` characters.

    The others stand together below. One that has no room by itself stands alone.

    >>> parted([6, 8, 7], first=10, room=24)
    [[0, 1], [2]]
    """
    parts: list[list[int]] = [[]]
    used = first
    for i, width in enumerate(widths):
        if room is not None and parts[-1] and used + width > room:
            parts.append([])
            used = first
        parts[-1].append(i)
        used += width
    return parts


def format_table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Aligned columns, those of these numbers to the right; no trailing blanks.

    >>> print(format_table([("", "loss"), ("AdamW", "12.5")], right=[1]))
           loss
    AdamW  12.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )

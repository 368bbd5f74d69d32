"""Rows of text as a table."""

from __future__ import annotations

from collections.abc import Container, Sequence


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

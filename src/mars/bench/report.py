"""The table in the terminal, and the facts about the machine that go into the JSON file."""

from __future__ import annotations

import datetime
import importlib
import platform
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mars.bench.rows import Row, Settings
from mars.bench.shapes import PARAMETER_SETS, Shape
from mars.table import parted

WIDTH = 110  # of prose
TITLES = {"all": "all parameters", "hidden": "hidden matrices only"}
STEADY = 0.3  # a relative spread above which the table doubts itself


def say(text: str, error: bool = False) -> None:
    """Print; progress goes to stderr, so that stdout is the tables alone."""
    stream = sys.stderr if error else sys.stdout
    stream.write(text + "\n")
    stream.flush()


class Column(NamedTuple):
    title: str
    get: Callable[[Row], float | None]
    form: str
    unit: float = 1.0


COLUMNS = (
    Column("ms/step", lambda row: row.ms, ".3f"),
    Column("ratio", lambda row: row.ratio, ".2f"),
    Column("GPU ms", lambda row: row.gpu_ms, ".3f"),
    Column("GPU ratio", lambda row: row.gpu_ratio, ".2f"),
    Column("state", lambda row: row.state, ".1f"),
    Column("floor", lambda row: row.floor, ".1f"),
    Column("GB/s", lambda row: row.bandwidth, ".1f", 1e9),
    Column("of copy", lambda row: row.of_copy, ".0%"),
    Column("extra MiB", lambda row: row.extra, ".1f", 2**20),
)


def table(rows: Sequence[Row], settings: Settings, room: int | None = None) -> str:
    """The rows of one parameter set, and how to read them; for a terminal with so many columns."""
    shapes = PARAMETER_SETS[rows[0].parameters]()
    columns = [c for c in COLUMNS if any(c.get(row) is not None for row in rows)]
    width = max(len(text) for row in rows for text in (row.name, TITLES[row.on]))
    lines = [_fold(_headline(rows[0].parameters, shapes, settings), room), ""]
    why: dict[str, str] = {}  # reasons that have no room in their rows, and their marks
    for on, title in TITLES.items():
        here = [row for row in rows if row.on == on]
        reasons = {row.skipped for row in here}
        if None not in reasons and len(reasons) == 1:
            lines += [_fold(f"{title}: skipped: {_cut(here[0].skipped or '')}", room), ""]
        elif here:
            for part in _parts(columns, rows, width, room):
                lines.append(f"{title:{width}s}" + "".join(f"{c.title:>{w}s}" for c, w in part))
                for row in here:
                    if row.skipped is None:
                        lines.append(f"{row.name:{width}s}" + _cells(row, part))
                    elif part[0][0] is columns[0]:  # once is enough
                        text = _skipped(row.skipped, width, room, why)
                        lines.append(f"{row.name:{width}s}  {text}")
                lines.append("")
    notes = [f"{mark} {_cut(reason)}" for reason, mark in why.items()]
    notes += _footnotes(rows, shapes, settings)
    return "\n".join([*lines, *(_fold(note, room) for note in notes)])


def _fold(text: str, room: int | None) -> str:
    return textwrap.fill(text, min(room or WIDTH, WIDTH), subsequent_indent="  ")


Part = list[tuple[Column, int]]  # columns of a table and how wide they are


def _parts(
    columns: Sequence[Column], rows: Sequence[Row], first: int, room: int | None
) -> list[Part]:  # fmt: skip
    """The columns, those beyond the room in a table of their own."""
    measured = [row for row in rows if row.skipped is None]
    widths = [
        2 + max(map(len, (column.title, *(_cell(row, column) for row in measured))))
        for column in columns
    ]
    return [[(columns[i], widths[i]) for i in part] for part in parted(widths, first, room)]


def _headline(name: str, shapes: Sequence[Shape], settings: Settings) -> str:
    def amount(some: Sequence[Shape]) -> str:
        return f"{sum(s.numel for s in some) / 1e6:.1f}M in {len(some)}"

    hidden = [s for s in shapes if s.hidden]
    return (
        f"{name}: {amount(shapes)} tensors, "
        f"{amount(hidden) if hidden else 'no'} hidden matrices; {_short(settings.dtype)}, "
        f"{device_name(settings.device)}, gradients of norm {settings.grad_norm:g}"
    )


def _cells(row: Row, part: Part) -> str:
    return "".join(f"{_cell(row, column):>{width}s}" for column, width in part)


def _cell(row: Row, column: Column) -> str:
    value = column.get(row)
    return "-" if value is None else format(value / column.unit, column.form)


def _skipped(reason: str, used: int, room: int | None, why: dict[str, str]) -> str:
    text = f"skipped: {_cut(reason)}"
    if room is None or used + 2 + len(text) <= room:
        return text
    return f"skipped {why.setdefault(reason, f'[{len(why) + 1}]')}"


def _cut(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _footnotes(rows: Sequence[Row], shapes: Sequence[Shape], settings: Settings) -> list[str]:
    timed = "GPU ms" if settings.device.type == "cuda" else "ms/step"
    first = {row.on: row for row in reversed(rows)}
    base = " and ".join(first[on].name for on in ("all", "hidden") if on in first and first[on].ms)
    notes = [
        f"ms/step: median of {settings.repeat}, from idle to idle. ratio: to the first row "
        f"of the same parameters ({base or 'which failed'}), timed again before and after each.",
        "state: bytes a parameter. floor: bytes a parameter that the step has to move (read g, "
        "read and write x and "
        f"each buffer). GB/s: floor by {timed}. of copy: of the {settings.copy / 1e9:.0f} GB/s "
        "that a large copy moves in this run.",
    ]
    if settings.device.type == "cuda":
        notes.append("GPU ms: steps queued without waiting. extra: peak beside x, g and state.")
    else:
        notes.append("A step in place may pass 100%: a CPU's copy also reads what it overwrites.")
    busy = max(r.spread or 0.0 for r in rows)
    if busy > STEADY:
        notes.append(f"Timings of one row vary by up to {busy:.0%}: is the machine busy?")
    high = sum(len(s.size) > 2 for s in shapes)
    if high:
        notes.append(
            f"{high} tensors have more than two dimensions (convolutions): MARS trains them by "
            'AdamW, as matrix_rule="2d" is its default.'
        )
    return notes


def progress(row: Row) -> str:
    if row.skipped is not None:
        return f"{row.parameters}  {row.name}: skipped: {_cut(row.skipped)}"
    ratio = "" if row.ratio is None else f", ratio {row.ratio:.2f}"
    return f"{row.parameters}  {row.name}: {row.ms:.3f} ms{ratio}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, torch threads: {torch.get_num_threads()}"


def machine(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """Where and how the figures were made."""
    return {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton(),
        "driver": _driver() if device.type == "cuda" else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "mars.bench", *arguments]),
    }


def _triton() -> str | None:
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def _driver() -> str | None:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None

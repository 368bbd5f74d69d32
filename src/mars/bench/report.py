"""The table in the terminal, and the facts about the machine that go into the JSON file."""

from __future__ import annotations

import datetime
import importlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mars.bench.rows import Row, Settings
from mars.bench.shapes import PARAMETER_SETS, Shape

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


def table(rows: Sequence[Row], settings: Settings) -> str:
    """The rows of one parameter set, and how to read them."""
    shapes = PARAMETER_SETS[rows[0].parameters]()
    columns = [c for c in COLUMNS if any(c.get(row) is not None for row in rows)]
    width = 2 + max(len(row.name) for row in rows)
    lines = [_headline(rows[0].parameters, shapes, settings), ""]
    for on, title in (("all", "all parameters"), ("hidden", "hidden matrices only")):
        here = [row for row in rows if row.on == on]
        reasons = {row.skipped for row in here}
        if None not in reasons and len(reasons) == 1:
            lines += [f"{title}: skipped: {_cut(here[0].skipped or '')}", ""]
        elif here:
            lines.append(f"{title:{width}s}" + "".join(f"{c.title:>10s}" for c in columns))
            lines += [f"{row.name:{width}s}" + _cells(row, columns) for row in here]
            lines.append("")
    return "\n".join(lines + _footnotes(rows, shapes, settings))


def _headline(name: str, shapes: Sequence[Shape], settings: Settings) -> str:
    def amount(some: Sequence[Shape]) -> str:
        return f"{sum(s.numel for s in some) / 1e6:.1f}M in {len(some)}"

    hidden = [s for s in shapes if s.hidden]
    return (
        f"{name}: {amount(shapes)} tensors, "
        f"{amount(hidden) if hidden else 'no'} hidden matrices; {_short(settings.dtype)}, "
        f"{device_name(settings.device)}, gradients of norm {settings.grad_norm:g}"
    )


def _cells(row: Row, columns: Sequence[Column]) -> str:
    if row.skipped is not None:
        return f"   skipped: {_cut(row.skipped)}"
    values = ((column, column.get(row)) for column in columns)
    return "".join(f"{'-' if v is None else format(v / c.unit, c.form):>10s}" for c, v in values)


def _cut(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _footnotes(rows: Sequence[Row], shapes: Sequence[Shape], settings: Settings) -> list[str]:
    timed = "GPU ms" if settings.device.type == "cuda" else "ms/step"
    first = {row.on: row for row in reversed(rows)}
    base = " and ".join(first[on].name for on in ("all", "hidden") if on in first and first[on].ms)
    notes = [
        f"ms/step: median of {settings.repeat}, from idle to idle. ratio: to the first row "
        f"of the same parameters ({base or 'which failed'}).",
        "state: bytes a parameter. floor: bytes a parameter that the step has to move (read g, "
        "read and write x and",
        f"  each buffer). GB/s: floor by {timed}. of copy: of the {settings.copy / 1e9:.0f} GB/s "
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

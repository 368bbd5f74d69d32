"""The table of bench/cost.py, for a terminal and for Markdown, from its file alone."""

from __future__ import annotations

from typing import Any

from cost_plan import STEP_TOKENS

from mars.lab.planner.steps import OPTIMIZERS
from mars.lab.planner.validate import Compared
from mars.lab.planner.words import table

HEAD = (
    "size", "optimizer", "kept as", "batch", "optimizer, ms", "to AdamW", "tokens/s", "to AdamW",
    f"at {STEP_TOKENS >> 10}k tokens a step", "peak, GB", "state, GB",
)  # fmt: skip
UNITS = {
    "optimizer_ms": ("optimizer, ms", 1.0), "tokens_per_second": ("tokens/s", 1.0),
    "peak_bytes": ("peak, GB", 1e9), "state_bytes": ("state, GB", 1e9),
}  # fmt: skip


def compared(found: dict[str, Any]) -> list[Compared]:
    """Every measured figure that was predicted, too."""
    return [
        Compared(row["size"], row["optimizer"], quantity, guess / unit, row[name] / unit, False)
        for row in found["rows"]
        if row["status"] == "measured"
        for name, (quantity, unit) in UNITS.items()
        if (guess := row["predicted"].get(name)) and row[name]
    ]


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells of text, the head first. In brackets: by how much the planner's prediction is off."""
    return [HEAD, *(_row(row) for row in found["rows"])]


def terminal(found: dict[str, Any]) -> str:
    return table(rows(found), left=3)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    label = OPTIMIZERS[row["optimizer"]].label
    if row["status"] not in ("measured", "predicted"):
        why = row.get("why", "")
        if row["status"] == "does not fit":
            why = f"does not fit (needs {row['needs_bytes'] / 1e9:.0f} GB)"
        return (row["size"], label, why, *["–"] * (len(HEAD) - 3))
    batch = f"{row['micro_batch']} × {row['tokens'] // row['micro_batch']}"
    optimizer, speed, peak, state = (_figure(row, name) for name in UNITS)
    return (
        row["size"], label, kept(row), batch, optimizer, _ratio(row, "optimizer_ms"), speed,
        _ratio(row, "tokens_per_second"), _ratio(row, "accumulated"), peak, state,
    )  # fmt: skip


def kept(row: dict[str, Any]) -> str:
    """The format of weights and state, as people say it."""
    weights = "" if row["params"] == "float32" else "bf16 weights"
    if weights and not OPTIMIZERS[row["optimizer"]].torch:
        weights += " and low halves"
    state = {"float32": "fp32", "bfloat16": "bf16 state", "8bit": "8-bit state"}[row["state"]]
    said = ", ".join(filter(None, (weights, state)))
    return f"predicted for {row['gpu']}: {said}" if row["status"] == "predicted" else said


def _ratio(row: dict[str, Any], name: str) -> str:
    return "–" if row["to_adamw"] is None else f"{row['to_adamw'][name]:.2f}"


def _figure(row: dict[str, Any], name: str) -> str:
    """Measured, and the prediction's error; or the prediction alone."""
    guess, unit = row["predicted"].get(name), UNITS[name][1]
    if row["status"] == "predicted":
        return f"≈ {_digits(guess / unit)}"
    if row[name] is None:
        return "–"
    error = "" if guess is None else f" ({guess / row[name] - 1:+.0%})"
    return _digits(row[name] / unit) + error.replace("-", "−")


def _digits(value: float) -> str:
    """Three, but all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""The table of bench/cost.py, for a terminal and for Markdown, from its file alone."""

from __future__ import annotations

from typing import Any

from cost_plan import STEP_TOKENS, planned_rows, ratios

from mars.lab.planner import gpus
from mars.lab.planner.predict import predict
from mars.lab.planner.steps import OPTIMIZERS
from mars.lab.planner.validate import job_of_cost, of_cost
from mars.lab.planner.words import table

HEAD = (
    "size", "optimizer", "kept as", "batch", "optimizer, ms", "to AdamW", "tokens/s", "to AdamW",
    f"at {STEP_TOKENS >> 10}k tokens a step", "peak, GB", "state, GB",
)  # fmt: skip
UNITS = {
    "optimizer_ms": ("optimizer, ms", 1.0), "tokens_per_second": ("tokens/s", 1.0),
    "peak_bytes": ("peak, GB", 1e9), "state_bytes": ("state, GB", 1e9),
}  # fmt: skip


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells of text, the head first. In brackets: by how much the planner's prediction is off.

    Predictions are today's planner's: what is in the file was measured.
    """
    errors = {(c.where, c.name, c.quantity): c.error for c in of_cost(found)}
    gpu = gpus.by_driver(found["device"]) or gpus.find("h200")
    every, base = [*found["rows"], *planned_rows(gpu, found["settings"]["batch"])], None
    cells = []
    for row in every:
        if row["status"] == "predicted":
            row = {**row, **_planned(row, gpu), "gpu": gpu.name}
            base = row if row["optimizer"] == "adamw" else base
            row["adamw"] = base
        cells.append(_row(row, errors))
    return [HEAD, *cells]


def _planned(row: dict[str, Any], gpu: gpus.Gpu) -> dict[str, float]:
    own = predict(job_of_cost(row, gpu), OPTIMIZERS[row["optimizer"]])
    return {
        "optimizer_ms": 1e3 * own.optimizer_seconds, "tokens_per_second": own.tokens_per_second,
        "peak_bytes": own.memory.peak, "state_bytes": own.memory.state,
    }  # fmt: skip


def terminal(found: dict[str, Any]) -> str:
    return table(rows(found), left=3)


def _row(row: dict[str, Any], errors: dict[tuple[str, str, str], float]) -> tuple[str, ...]:
    label = OPTIMIZERS[row["optimizer"]].label
    if row["status"] not in ("measured", "predicted"):
        why = row.get("why", "")
        if row["status"] == "does not fit":
            why = f"does not fit (needs {row['needs_bytes'] / 1e9:.0f} GB)"
        return (row["size"], label, why, *["–"] * (len(HEAD) - 3))
    batch = f"{row['micro_batch']} × {row['tokens'] // row['micro_batch']}"
    base = row if row["optimizer"] == "adamw" else row["adamw"]
    to_adamw = None if base is None else ratios(row, base, row["tokens"])
    figures = {}
    for name, (quantity, unit) in UNITS.items():
        error = errors.get((f"training, {row['size']}", label, quantity))
        if name == "tokens_per_second":  # the errors are those of its step
            slower = errors.get((f"training, {row['size']}", label, "step, ms"))
            error = None if slower is None else 1 / (1 + slower) - 1
        figures[name] = _figure(row, row[name], unit, error)
    return (
        row["size"], label, kept(row), batch, figures["optimizer_ms"],
        _ratio(to_adamw, "optimizer_ms"), figures["tokens_per_second"],
        _ratio(to_adamw, "tokens_per_second"), _ratio(to_adamw, "accumulated"),
        figures["peak_bytes"], figures["state_bytes"],
    )  # fmt: skip


def kept(row: dict[str, Any]) -> str:
    """The format of weights and state, as people say it."""
    weights = "" if row["params"] == "float32" else "bf16 weights"
    if weights and not OPTIMIZERS[row["optimizer"]].torch:
        weights += " and low halves"
    state = {"float32": "fp32", "bfloat16": "bf16 state", "8bit": "8-bit state"}[row["state"]]
    said = ", ".join(filter(None, (weights, state)))
    return f"predicted for {row['gpu']}: {said}" if row["status"] == "predicted" else said


def _ratio(to_adamw: dict[str, float] | None, name: str) -> str:
    return "–" if to_adamw is None else f"{to_adamw[name]:.2f}"


def _figure(row: dict[str, Any], value: float | None, unit: float, error: float | None) -> str:
    """Measured, and the prediction's error; or the prediction alone."""
    if value is None:
        return "–"
    if row["status"] == "predicted":
        return f"≈ {_digits(value / unit)}"
    off = "" if error is None else f" ({error:+.0%})"
    return _digits(value / unit) + off.replace("-", "−")


def _digits(value: float) -> str:
    """Three, but all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""The table of bench/cost.py, for a terminal and for a page, and its picture; from its file alone.

python bench/cost_table.py docs/results/cost_h200.json docs/results/cost_h200.png
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
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


SHORT = {"adamw": "AdamW", "muon": "Muon"}  # torch's
PAGE = (
    "parameters", "optimizer", "optimizer, ms", "of AdamW's", "tokens/s", "of AdamW's",
    f"at {STEP_TOKENS >> 10}k a step", "peak, GB", "state, GB",
)  # fmt: skip
COLORS = {
    "adamw": "#777777", "mars-adamw": "#c2410c", "mars-lion": "#d9a400", "mars-m": "#0f6fb5",
    "mars-shampoo": "#1b8a5a", "muon": "#7a3fa0",
}  # fmt: skip


def whole(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every row, those that are planned too; "adamw" is what it is compared with, if anything."""
    gpu = gpus.by_driver(found["device"]) or gpus.find("h200")
    for row in found["rows"]:
        yield {**row, "adamw": row} if row["optimizer"] == "adamw" else row
    base = None
    for row in planned_rows(gpu, found["settings"]["batch"]):
        if row["status"] == "predicted":
            row = {**row, **_planned(row, gpu), "gpu": gpu.name}
            base = row if row["optimizer"] == "adamw" else base
            row["adamw"] = base
        yield row


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells of text, the head first. In brackets: by how much the planner's prediction is off.

    Predictions are today's planner's: what is in the file was measured.
    """
    errors = {(c.where, c.name, c.quantity): c.error for c in of_cost(found)}
    return [HEAD, *(_row(row, errors) for row in whole(found))]


def page(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The same without the planner's errors, narrow enough to be read."""
    cells = []
    for row in whole(found):
        name = SHORT.get(row["optimizer"], OPTIMIZERS[row["optimizer"]].label)
        if row["status"] not in ("measured", "predicted"):
            cells.append((row["size"], f"{name}: {row['status']}", *["–"] * (len(PAGE) - 2)))
            continue
        planned = row["status"] == "predicted"
        if (how := kept(row)) != "fp32":
            name += f", {how}"
        to_adamw = row["adamw"] and ratios(row, row["adamw"], row["tokens"])
        sign = "≈ " if planned else ""
        figures = [
            "–" if row[of] is None else sign + _digits(row[of] / unit)
            for of, (_, unit) in UNITS.items()
        ]
        cells.append((
            row["size"] + ", planned" * planned, name, figures[0], _ratio(to_adamw, "optimizer_ms"),
            figures[1], _ratio(to_adamw, "tokens_per_second"), _ratio(to_adamw, "accumulated"),
            *figures[2:],
        ))  # fmt: skip
    return [PAGE, *cells]


def draw(found: dict[str, Any], path: Path) -> None:
    """Tokens a second of AdamW's, over the size: in a micro-batch, and with many added up."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 4.2))
    measured = [row for row in whole(found) if row["status"] == "measured" and row["adamw"]]
    sizes = {row["size"]: row["elements"] for row in measured}
    titles = {
        "tokens_per_second": "one micro-batch per step (32k tokens; 3B: 16k, 7B: 1k)",
        "accumulated": f"{STEP_TOKENS >> 10}k tokens per step, computed (another axis)",
    }
    for place, (quantity, title) in enumerate(titles.items(), 1):
        ax = figure.add_subplot(1, 2, place)
        for name, color in COLORS.items():
            own = [row for row in measured if row["optimizer"] == name]
            speed = [ratios(row, row["adamw"], row["tokens"])[quantity] for row in own]
            label = SHORT.get(name, OPTIMIZERS[name].label)
            line = {"color": color, "marker": "o", "markersize": 4, "label": label}
            if name == "mars-shampoo":  # lies on MARS-M's, which shows between the dashes
                line |= {"linestyle": (0, (3, 3)), "markersize": 2.5}
            ax.plot([row["elements"] for row in own], speed, **line)
            for row, y in zip(own, speed, strict=True):
                if quantity == "tokens_per_second" and (how := kept(row)) != "fp32":
                    where = {"textcoords": "offset points", "xytext": (-6, 2), "ha": "right"}
                    ax.annotate(f"{label}: {how}", (row["elements"], y), fontsize=8, **where)
        ax.set_xscale("log")
        ax.set_xticks(list(sizes.values()), list(sizes))
        ax.minorticks_off()
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("parameters")
        ax.grid(alpha=0.25)
    figure.axes[0].set_ylabel("tokens per second, of AdamW's")
    figure.axes[0].legend(fontsize=8, loc="lower left")
    figure.suptitle(f"{found['device']}, torch {found['torch']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


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
    how = f"predicted for {row['gpu']}: " if row["status"] == "predicted" else ""
    to_adamw = row["adamw"] and ratios(row, row["adamw"], row["tokens"])
    figures = {}
    for name, (quantity, unit) in UNITS.items():
        error = errors.get((f"training, {row['size']}", label, quantity))
        if name == "tokens_per_second":  # the errors are those of its step
            slower = errors.get((f"training, {row['size']}", label, "step, ms"))
            error = None if slower is None else 1 / (1 + slower) - 1
        figures[name] = _figure(row, row[name], unit, error)
    return (
        row["size"], label, how + kept(row), batch, figures["optimizer_ms"],
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
    return ", ".join(filter(None, (weights, state)))


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


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))

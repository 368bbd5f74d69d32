"""Tables of what a step costs."""

from __future__ import annotations

import cost_table
from table_cells import mean_loss, result, table


def step_cost() -> str:
    found = {row["name"]: row for row in result("bench_xl_h200.json")["rows"]}
    ours = "mars-adamw fused"

    def row(label: str, *names: str, digits: int = 1, of: str | None = None) -> list[str]:
        cells = [" / ".join(f"{found[name]['ms']:.{digits}f}" for name in names)]
        for time, ratio in (("ms", "ratio"), ("gpu_ms", "gpu_ratio")):
            ratios = [found[n][time] / found[of][time] if of else found[n][ratio] for n in names]
            cells.append(" / ".join("1" if r == 1 else f"{r:.2f}" for r in ratios))
        if of:
            cells[2] = "the same" if cells[1] == cells[2] else f"{cells[2]} of Muon"
            cells[1] += " of Muon"
        return [label, *cells]

    def unclipped(label: str, name: str) -> list[str]:
        """Of another run: its ratios are to its own AdamW."""
        (own,) = (
            one
            for run in result("bench_clip_h200.json")["runs"]
            for one in run["rows"]
            if (one["parameters"], one["name"]) == ("gpt2-xl", name)
        )
        cells = [f"{own['ms']:.1f}", f"{own['ratio']:.2f}", f"{own['gpu_ratio']:.2f}"]
        return [label.format(**own), *cells]

    lean = found[f"{ours}, bfloat16 state"]["state"]
    usual = found["torch AdamW fused"]["state"]
    rows = [
        row("torch AdamW, fused / foreach", "torch AdamW fused", "torch AdamW foreach"),
        row("MARS-AdamW / with `consume_grads=True`", ours, f"{ours}, consume_grads"),
        row(
            'MARS-AdamW with `state_dtype="bfloat16"` '
            f"({lean:.0f} bytes of state per parameter; AdamW has {usual:.0f})",
            f"{ours}, bfloat16 state",
        ),
        unclipped(
            'MARS-AdamW with `clip=None, second_moment="raw"` ({state:.0f} bytes)',
            f"{ours}, no clip, raw",
        ),
        row("MARS-Lion", "mars-lion fused"),
        unclipped("MARS-Lion with `clip=None` ({state:.0f} bytes)", "mars-lion fused, no clip"),
        row("plain AdamW, ours", "plain-adamw fused"),
        row(
            "fused AdamW + `clip_grad_norm_` / MARS-AdamW with `max_grad_norm=1.0`",
            "torch AdamW fused + clip_grad_norm_",
            f"{ours}, max_grad_norm",
        ),
        row(
            "hidden matrices: torch Muon / MARS-M / MARS-Shampoo",
            *("torch Muon", "mars-m fused", "mars-shampoo fused"),
            digits=0,
            of="torch Muon",
        ),
    ]
    head = ["GPT-2 XL, one H200, torch 2.11, float32", "ms", "ratio", "GPU time, queued"]
    return table(head, rows)


def short_step_cost() -> str:
    """What most want to know of the above: wall time and state, by variant."""
    rows = {row["name"]: row for row in result("bench_xl_h200.json")["rows"]}
    (unclipped,) = (
        run["rows"]
        for run in result("bench_clip_h200.json")["runs"]
        if run["rows"][0]["parameters"] == "gpt2-xl"
    )
    bare = {row["name"]: row for row in unclipped}
    ours, muon = "mars-adamw fused", rows["torch Muon"]
    matrices = [rows[name] for name in ("mars-m fused", "mars-shampoo fused")]
    (hidden,) = {f"{row['ratio']:.1f}" for row in matrices}  # AdamW on these alone is 1
    cells = [
        ("MARS-AdamW", rows[ours]),
        ('MARS-AdamW with `state_dtype="bfloat16"`', rows[f"{ours}, bfloat16 state"]),
        ('MARS-AdamW with `clip=None, second_moment="raw"`', bare[f"{ours}, no clip, raw"]),
        ("MARS-Lion", rows["mars-lion fused"]),
        ("MARS-Lion with `clip=None`", bare["mars-lion fused, no clip"]),
    ]
    usual = f"{rows['torch AdamW fused']['state']:.0f}"
    return table(["", "time of a step", "bytes of state per parameter"], [
        ["torch AdamW, fused", "1", usual],
        *([label, f"{row['ratio']:.2f}", f"{row['state']:.0f}"] for label, row in cells),
        ["MARS-Shampoo, MARS-M, on hidden matrices", hidden, f"{matrices[0]['state']:.0f}"],
        ["torch's Muon, on the same", f"{muon['ratio']:.1f}", f"{muon['state']:.0f}"],
    ])  # fmt: skip


def lean_state() -> str:
    """Bytes of state, the time of a step by them, and the loss."""
    steps = {row["name"]: row for row in result("bench_xl_h200.json")["rows"]}
    suffix = {None: "", "bfloat16": ", bfloat16 state", "8bit": ", 8-bit state"}
    rows = []
    for row in result("lean_state_h200.json")["rows"]:
        step = steps[f"mars-adamw fused{suffix[row['state_dtype']]}"]
        times = f"{step['ratio']:.2f} / {step['gpu_ratio']:.2f}"
        rows.append(
            [f"`{row['state_dtype']!r}`", f"{row['bytes']:.3g}", times, mean_loss(row["losses"])]
        )
    rows.append(["torch AdamW", "8", "1", ""])
    head = ["`state_dtype`", "bytes of state per parameter", "GPT-2 XL, wall / GPU"]
    return table([*head, "loss, 30M GPT, 20M tokens, 3 seeds"], rows)


def train_speed() -> str:
    rows = [
        [
            f"{row['name']}, {row['batch']} × 1024", f"{row['tokens_per_second'] / 1e3:.0f}k",
            f"{row['ratio']:.2f}", f"{100 * row['mfu']:.1f} %", f"{row['peak_memory'] / 2**30:.1f}",
        ]
        for row in result("train_speed_h200.json")["rows"]
    ]  # fmt: skip
    return table(["GPT-2 small", "tokens/s", "to plain AdamW", "MFU", "peak GiB"], rows)


def on_cpu() -> str:
    """Ratios of the CPU engine, by model."""
    found = result("bench_cpu.json")["rows"]
    models = list(dict.fromkeys(row["parameters"] for row in found))
    ratio = {(row["parameters"], row["name"]): row["ratio"] for row in found}
    names = [name for model, name in ratio if model == models[0] and name != "torch AdamW"]
    rows = [[f"`{name}`", *(f"{ratio[model, name]:.2f}" for model in models)] for name in names]
    return table(["", *models], rows)


def cost() -> str:
    """bench/cost.py."""
    head, *rows = cost_table.page(result("cost_h200.json"))
    return table(head, rows)

"""`mars study variance`: measure, draw, and say what is seen."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.lab import hardware
from mars.lab.errors import INTERRUPTED, LabError
from mars.lab.pool import cores
from mars.lab.report import units
from mars.lab.rundir import RunDirectory, write_atomically
from mars.lab.study.variance import (
    APPROXIMATE,
    EARLY,
    EXACT,
    LATE,
    PLAIN,
    Experiment,
    Look,
    Which,
    measure,
)
from mars.lab.study.variance_kept import Kept

Rows = Sequence[dict[str, Any]]
SHOWN = 0.95  # β₁ of the figure and of the tables
GAMMAS = (0.025, 0.1, 0.5, 1.0)  # of the tables


@dataclass(frozen=True, kw_only=True)
class VarianceArgs:
    """Measure E‖m − ∇F‖² and Var(c)/Var(g) of plain, approximate and exact averages."""

    out: Path = Path("runs/study-variance")
    """Where results.json, variance.md and variance.png go."""
    seeds: int = 2
    """Of initial weights and batches."""


def variance_command(args: VarianceArgs) -> int:
    """The command."""
    if args.seeds < 1:
        raise LabError(f"--seeds must be 1 or more, not {args.seeds}")
    e = Experiment(seeds=args.seeds)
    directory = RunDirectory(args.out)
    with directory.lock():
        kept = Kept(directory.path, e)
        looks = _begun(kept)
        before, began = len(looks), time.monotonic()

        def watch(done: int, of: int) -> None:
            took = time.monotonic() - began
            kept.write(looks, took)
            pace = took / (len(looks) - before)
            left = f", {units.seconds(pace * (of - done))} left" if done < of else ""
            sys.stderr.write(f"[{done}/{of}] trajectories{left}\n")

        try:
            rows = measure(e, min(cores(), len(e.trajectories)), looks, watch)
        except (KeyboardInterrupt, InterruptedError):  # a worker may be asked alone
            sys.stdout.write("stopped; the same command resumes from here\n")
            return INTERRUPTED
        write(e, rows, directory.path, kept.seconds + time.monotonic() - began)
        kept.remove()
    sys.stdout.write(text(rows) + f"\n{directory.path}\n")
    return 0


def _begun(kept: Kept) -> dict[Which, list[Look]]:
    """What an earlier process has done of it."""
    looks = kept.read()
    if looks is None:
        made = "other code, another torch or another machine"
        sys.stderr.write(f"starting again: {kept.path} was made by {made}\n")
    elif looks:
        sys.stderr.write(f"resuming: {len(looks)} trajectories are done\n")
    return looks or {}


def write(e: Experiment, rows: Rows, directory: Path, seconds: float) -> None:
    """The three files."""
    about = {
        "command": "mars study variance",
        "versions": hardware.versions(),
        "seconds": round(seconds),
        "experiment": dataclasses.asdict(e),
    }
    lines = ",\n".join(json.dumps(_short(row)) for row in rows)
    found = f'{{"about": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n'
    write_atomically(directory / "results.json", found.encode())
    write_atomically(directory / "variance.md", (text(rows) + "\n").encode())
    draw(rows, directory / "variance.png")


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def _select(rows: Rows, **fields: object) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[k] == v for k, v in fields.items())]


def text(rows: Rows) -> str:
    """Two tables in Markdown, for one β₁."""
    modes = [(mode, gamma) for mode in (APPROXIMATE, EXACT) for gamma in GAMMAS]
    names = [f"{mode[:6]}. {gamma:g}" for mode, gamma in modes]
    head = ["part", "batch", "lr", "noise", "turn", "plain", *names]
    lines = [
        f"E‖m − ∇F‖² at β₁ = {SHOWN}: plain averaging relative to ‖∇F‖², the others (mode and γ) "
        "relative to plain. noise: Var(g)/‖∇F‖² of one batch; turn: the cosine between ∇F and ∇F "
        "one step before.", "", *_head(head),
    ]  # fmt: skip
    cases = sorted({(r["part"], r["batch"], r["lr"]) for r in rows})
    for part, batch, lr in cases:
        own = _select(rows, part=part, batch=batch, lr=lr, beta1=SHOWN)
        (plain,) = _select(own, mode=PLAIN)
        cells = [part, str(batch), f"{lr:g}"]
        cells += [f"{plain['noise']:.2f}", f"{plain['turn']:.2f}", f"{plain['error']:.3f}"]
        for mode, gamma in modes:
            cells += [f"{row['to_plain']:.2f}" for row in _select(own, mode=mode, gamma=gamma)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "", f"Var(c)/Var(g) at β₁ = {SHOWN}, late; predicted: (1+κ)² + κ² where noise is "
        "independent (approximate), 1 where it is shared (exact).", "",
        *_head([*head[1:3], *names]),
    ]  # fmt: skip
    for part, batch, lr in cases:
        if part == LATE:
            own = _select(rows, part=part, batch=batch, lr=lr, beta1=SHOWN)
            cells = [str(batch), f"{lr:g}"]
            for mode, gamma in modes:
                for row in _select(own, mode=mode, gamma=gamma):
                    said = f" ({row['independent']:.2f})" if mode == APPROXIMATE else ""
                    cells.append(f"{row['variance_ratio']:.2f}{said}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _head(names: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def draw(rows: Rows, path: Path) -> None:
    """Errors early and late and the variance of c, over γ: a row of panels a batch size."""
    try:
        import matplotlib
    except ImportError as error:
        raise LabError("the figure needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    batches = sorted({row["batch"] for row in rows})
    rates = sorted({row["lr"] for row in rows})
    gammas = sorted({row["gamma"] for row in rows if row["gamma"]})
    colours = plt.get_cmap("viridis")
    figure, axes = plt.subplots(len(batches), 3, figsize=(12, 3.6 * len(batches)), squeeze=False)
    for place, batch in enumerate(batches):
        line, labelled = axes[place], place == 0
        for panel, (part, what) in zip(
            line, ((EARLY, "to_plain"), (LATE, "to_plain"), (LATE, "variance_ratio")), strict=True
        ):
            for i, lr in enumerate(rates):
                for mode, style in ((APPROXIMATE, "--"), (EXACT, "-")):
                    own = _select(rows, part=part, batch=batch, lr=lr, beta1=SHOWN, mode=mode)
                    label = f"lr {lr:g}, {mode}" if labelled else None
                    panel.plot(
                        [r["gamma"] for r in own], [r[what] for r in own], style, marker=".",
                        color=colours(i / max(1, len(rates) - 0.5)), label=label,
                    )  # fmt: skip
            is_error = what == "to_plain"
            if not is_error:
                panel.plot(
                    [r["gamma"] for r in own], [r["independent"] for r in own], ":k",
                    label="(1+κ)² + κ²" if labelled else None,
                )  # fmt: skip
            panel.axhline(1.0, color="0.6", linewidth=0.8)
            panel.set(xscale="log", yscale="log", xlabel="γ")
            panel.set_xticks(gammas, [f"{gamma:g}" for gamma in gammas], fontsize=8)
            panel.minorticks_off()
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            name = "E‖m − ∇F‖², relative to plain" if is_error else "Var(c)/Var(g)"
            panel.set_title(f"{name}\n{part}, batch of {batch}", fontsize=9)
    handles, labels = axes[0][2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(f"Estimates of the gradient, β₁ = {SHOWN}: dashed approximate, solid exact")
    figure.tight_layout(rect=(0, 0.08, 1, 0.98))
    figure.savefig(path, dpi=110)
    plt.close(figure)

"""Rewrite the tables of README.md and docs/ that come from result files, so that they cannot drift.

    python bench/readme_tables.py            # rewrite them
    python bench/readme_tables.py --check    # say which are not what the files say; status 1

A table stands between `<!-- table: NAME, by bench/readme_tables.py -->` and `<!-- end -->`; NAME is
a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cost_table

from mars.lab import optimizers
from mars.lab.recipes import settings
from mars.lab.report import load, summarise, units
from mars.lab.report.rates import from_grid, read_rates
from mars.lab.report.statistics import Difference, Spread, paired, spread
from mars.lab.report.summary import Entry, Summary
from mars.lab.study import questions, times
from mars.lab.study.choice import ladders
from mars.lab.study.results import Results
from mars.lab.study.templates import lower
from mars.lab.study.verdict import Verdict, verdict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
BLOCK = re.compile(
    r"(?P<head><!-- table: (?P<name>[\w-]+), by bench/readme_tables\.py -->\n)"
    r".*?(?P<end><!-- end -->)",
    flags=re.S,
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [[f" {cell} " if cell else " " for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


# ---- races


def race(folder: str) -> Summary:
    return summarise(load([RESULTS / folder]))


def _label(entry: Entry, base: Entry | None) -> str:
    """Its name; and that it has the baseline's betas, which are not its own."""
    own, other = (_betas(e) for e in (entry, base or entry))
    return f"{entry.label}, AdamW's betas" if entry is not base and own == other else entry.label


def _betas(entry: Entry) -> Any:
    return entry.runs[0].header["config"]["optimizer"]["betas"]


def _loss(losses: Sequence[float]) -> str:
    found = spread(losses)
    assert found is not None
    return f"{found.mean:.3f}" + ("" if found.sd is None else f" ± {found.sd:.3f}")


def _difference(d: Difference | None, decimals: int = 3) -> str:
    if d is None:
        return ""
    mean, low, high = (
        None if value is None else f"{value:+.{decimals}f}".replace("-", "−")
        for value in (d.mean, d.low, d.high)
    )
    if low is None:
        return f"{mean} (one seed)"
    return f"{mean} ({low} to {high}){'' if d.resolved else ', not resolved'}"


def every_rate(summary: Summary) -> str:
    """Mean loss at every rate of a race, and at the best one the difference from the baseline."""
    rates = sorted({p.lr for e in summary.ranked for p in e.sensitivity.points})
    rows = []
    for e in sorted(summary.ranked, key=lambda entry: entry is not summary.baseline):
        means = {p.lr: p.mean for p in e.sensitivity.points}
        cells = [_bold(f"{m:.3f}" if (m := means.get(r)) else "", r == e.lr) for r in rates]
        rows.append([_label(e, summary.baseline), *cells, _difference(e.difference)])
    return table(["", *map(units.rate, rates), "to AdamW (95 % interval)"], rows)


PUBLISHED = {"adamw": 94.81, "muon": 95.08, "mars-adamw-2d": 95.29}  # arXiv 2411.10438, CIFAR-10


def accuracies(seeds: str, shorter: str, bare: str) -> str:
    """Images: a race of the short schedule, beside shorter ones and what is published."""
    before = [{e.optimizer: e.accuracy for e in race(name).ranked} for name in (shorter, bare)]
    rows = []
    for e in race(seeds).ranked:
        gap = e.measure.shown(e.difference) if e.difference else None
        rows.append([
            e.label, units.rate(e.lr), f"{_decay(e):g}", _percents(e.accuracy),
            _difference(gap, decimals=2), *(_percents(known[e.optimizer]) for known in before),
            f"{PUBLISHED.get(e.optimizer, '')}",
        ])  # fmt: skip
    return table(
        ["", "rate", "decay", "accuracy", "to AdamW, points (95 % interval)",
         "30 epochs, no cutout", "and hard labels, no decay", "published, 200 epochs"], rows,
    )  # fmt: skip


def complete(folder: str) -> list[tuple[Any, Any, float]]:
    """Header, last record and highest accuracy of the runs that came to their end.

    Beside them lies AdamW with MARS's settings, apart: a control, no candidate of that report.
    """
    found = []
    for log in sorted(RESULTS.glob(f"{folder}*/*/log.jsonl"), key=lambda path: path.parent.name):
        header, *records = map(json.loads, log.read_text().splitlines())
        if records[-1]["kind"] == "end" and records[-1]["status"] == "done":
            best = max(r["accuracy"] for r in records if r["kind"] == "valid")
            found.append((header, records[-1], best))
    return found


def whole_schedule(folder: str, short: str) -> str:
    """Images: runs of 200 epochs, beside the short schedule."""
    means = {e.optimizer: e.accuracy for e in race(short).ranked}
    rows = []
    for header, end, best in complete(folder):
        o, name = header["config"]["optimizer"], header["optimizer"]
        betas, decay = o["betas_1d"] or o["betas"], o["weight_decay_1d"] or o["weight_decay"]
        rows.append([
            header["label"], units.rate(header["lr"]), f"({betas[0]:g}, {betas[1]:g})",
            f"{decay:g}", f"{100 * end['accuracy']:.2f}", f"{100 * best:.2f}",
            _percents(means[name]), f"{PUBLISHED[name]}" if _as_published(header) else "",
        ])  # fmt: skip
    return table(
        ["", "rate", "betas, convolutions", "decay, convolutions", "accuracy, 200 epochs",
         "highest on the way", "40 epochs, short schedule", "published"], rows,
    )  # fmt: skip


def _as_published(header: Any) -> bool:
    return bool(header["config"]["optimizer"]["weight_decay"] == 5e-4)


def _decay(entry: Entry) -> float:
    """Of convolutions."""
    options = entry.runs[0].header["config"]["optimizer"]
    return float(options["weight_decay_1d"] or options["weight_decay"])


def accuracy_rates(grid: str) -> str:
    """Images: every rate of a grid."""
    rows = [
        [
            optimizers.label(curve.optimizer),
            ", ".join(
                _bold(f"{units.rate(p.lr)}: {_percent(p.mean)}", p.lr == curve.best)
                for p in curve.points
            ),
        ]
        for curve in race(grid).sensitivity
    ]
    return table(["", "rate: accuracy"], rows)


def decays(folder: str) -> str:
    """Images: what decay and smoothed labels do, one run each."""
    found = []
    for log in (RESULTS / folder).glob("*/log.jsonl"):
        header, *_, end = map(json.loads, log.read_text().splitlines())
        options, smoothing = header["config"]["optimizer"], header["config"]["model"]
        found.append((
            header["label"], header["lr"], options["weight_decay"], smoothing["label_smoothing"],
            end["accuracy"],
        ))  # fmt: skip
    best = {label: max(row[4] for row in found if row[0] == label) for label, *_ in found}
    rows = [
        [label, units.rate(lr), f"{decay:g}", f"{smoothing:g}",
         _bold(f"{100 * accuracy:.2f}", accuracy == best[label])]
        for label, lr, decay, smoothing, accuracy in sorted(found)
    ]  # fmt: skip
    return table(["", "rate", "decay", "smoothing", "accuracy"], rows)


def _percent(error: float | None) -> str:
    return "diverged" if error is None else f"{100 * (1 - error):.2f}"


def _percents(found: Spread | None) -> str:
    assert found is not None
    return f"{100 * found.mean:.2f}" + ("" if found.sd is None else f" ± {100 * found.sd:.2f}")


def _bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


def grid(path: Path) -> str:
    """The optimizers of a committed grid at their best rates, the lowest first."""
    curves = from_grid(read_rates(path))
    losses = {c.label: next(p.losses for p in c.points if p.lr == c.best) for c in curves}
    rates = {c.label: f"{units.rate(c.best)}" for c in curves if c.best is not None}
    rows = []
    for label in sorted(losses, key=lambda name: sum(losses[name].values()) / len(losses[name])):
        difference = None if label == "AdamW" else paired(losses[label], losses["AdamW"])
        values = list(losses[label].values())
        rows.append([label, rates[label], _loss(values), _difference(difference)])
    return table(["", "best rate", "validation loss", "to AdamW (95 % interval)"], rows)


# ---- studies


def arms(name: str) -> str:
    """The arms of a study that have runs, as its verdict has them."""
    lines = (RESULTS / name / "verdict.md").read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    kept = [cells[0].index(column) for column in ("best rate", "seeds", "loss", "to")]
    kept += [cells[0].index("difference, 95 % interval")]
    return table(["", *(cells[0][i] for i in kept)], [
        [row[0], *(row[i].replace("–", "") for i in kept)]
        for row in cells[2:]
        if row[kept[1]] != "0"
    ])  # fmt: skip


def headline(name: str) -> str:
    """The arms that end below the first, each compared with it, the lowest first."""
    study, results = questions.find(name), Results(RESULTS / name).read()
    base, *others = (arm.label for arm in study.arms)
    against = replace(study, comparisons=tuple(lower(arm, base) for arm in others))
    found = verdict(against, results, times.read(study, RESULTS / name, results))
    rows = []
    for row in found.rows:
        d, loss = row.difference, row.loss
        assert loss is not None
        if d is not None and d.mean > 0:
            continue
        shares = [f"{100 * s:.0f} %" if s else "" for s in (row.tokens_ratio, row.time_ratio)]
        gap = "" if d is None else f"{-d.mean:.3f} ({-d.high:.3f} to {-d.low:.3f})"
        assert row.time is not None
        step = f"{1e3 * row.time.optimizer:.1f}"
        rows.append((loss.mean, [row.ladder.arm.name, f"{loss.mean:.3f}", gap, *shares, step]))
    head = ["", "final loss", f"below {base}, 95 % interval", f"tokens to {base}'s loss"]
    head += ["time to it", "optimizer, ms a step"]
    return table(head, [cells for _, cells in sorted(rows)])


def every_rung(name: str) -> str:
    """Mean loss at every rate that a study has tried, the best of each arm in bold."""
    study = questions.find(name)
    found = [lad for lad in ladders(study, Results(RESULTS / name).read()).values() if lad.losses]
    tried = sorted({lr for ladder in found for lr in ladder.losses})
    rows = []
    for ladder in found:
        means = {lr: spread(list(own.values())) for lr, own in ladder.losses.items()}
        cells = [_bold(f"{m.mean:.3f}" if (m := means.get(lr)) else "", lr == ladder.best)
                 for lr in tried]  # fmt: skip
        rows.append([ladder.arm.name, *cells])
    return table(["", *map(units.rate, tried)], rows)


def by_decay(name: str) -> str:
    """Loss at the best rate, by optimizer and decay, which ends a label if it is not the usual."""
    study = questions.find(name)
    found: dict[str, dict[float, str]] = {}
    for label, ladder in ladders(study, Results(RESULTS / name).read()).items():
        assert ladder.best is not None
        own, decay = label.partition(", decay ")[0], study.run(ladder.arm).optimizer.weight_decay
        losses = list(ladder.losses[ladder.best].values())
        cell = f"{_loss(losses)} ({len(losses)} seeds, {units.rate(ladder.best)})"
        found.setdefault(own, {})[decay] = cell
    decays = sorted({decay for cells in found.values() for decay in cells})
    rows = [[f"{decay:g}", *(cells[decay] for cells in found.values())] for decay in decays]
    return table(["decay", *found], rows)


def every_run(name: str, kind: str) -> str:
    """The losses of all seeds at every rate, of the arms that have this in their names."""
    found = ladders(questions.find(name), Results(RESULTS / name).read())
    own = {label: ladder.losses for label, ladder in found.items() if kind in label}
    tried = sorted({lr for losses in own.values() for lr in losses})
    rows = [
        [label, *(", ".join(f"{x:.3f}" for x in losses.get(lr, {}).values()) for lr in tried)]
        for label, losses in own.items()
    ]
    return table(["", *map(units.rate, tried)], rows)


def judged(name: str) -> Verdict:
    study, results = questions.find(name), Results(RESULTS / name).read()
    return verdict(study, results, times.read(study, RESULTS / name, results))


def durations(name: str) -> str:
    """What a step of each arm took, alone on the device, and the time to the baseline's loss."""
    head = ["", "a step, ms", "optimizer, ms", "to the loss of", "tokens", "time"]
    rows = []
    for row in judged(name).rows:
        if row.time is not None:
            shares = (row.tokens_ratio, row.time_ratio)
            cells = [f"{1e3 * s:.1f}" for s in (row.time.step, row.time.optimizer)]
            cells.append(row.baseline or "" if any(shares) else "")
            cells += [f"{100 * share:.0f} %" if share else "" for share in shares]
            rows.append([row.ladder.arm.name, *cells])
    return table(head, rows)


def moved(name: str) -> str:
    """How far the best rate moves, in both modes: claimed, and measured."""
    head = ["", "approximate: predicted", "measured, 95 % interval"]
    head += ["exact: predicted", "measured, 95 % interval"]
    cells: dict[str, list[str]] = {}
    for j in judged(name).judged:
        d, c = j.difference, j.comparison
        if c.claim.kind == "rate" and d is not None:
            ends = [math.exp(x) for x in (d.low, d.high) if x is not None]
            span = " [" + ", ".join(f"{end:.2f}" for end in ends) + f"], {j.state}"
            found = f"{math.exp(d.mean):.2f}" + (span if ends else f", {j.why}")
            cells.setdefault(c.arm.partition(",")[0], []).extend([f"{c.claim.by:.3g}", found])
    return table(head, [[gamma, *own] for gamma, own in cells.items()])


def variances(name: str) -> str:
    """Var(c)/Var(g) in both modes, and how gradients of one batch at two points correlate."""
    head = ["", "approximate", "if gradients were independent", "exact", "correlation ρ of g and h"]
    rows = {row.ladder.arm.label: row for row in judged(name).rows}
    lines = []
    for label, row in rows.items():
        exact = rows.get(f"{label}, exact")
        if exact is None or row.variance_ratio is None or exact.variance_ratio is None:
            continue
        run = questions.find(name).run(row.ladder.arm).optimizer
        kappa = run.gamma * run.betas[0] / (1 - run.betas[0])
        rho = 1 - (exact.variance_ratio - 1) / (2 * kappa * (1 + kappa))
        figures = (row.variance_ratio, row.independent, exact.variance_ratio, rho)
        lines.append([label, *(f"{x:.2f}" for x in figures)])
    return table(head, lines)


def to_adamw(name: str, base: str) -> str:
    """The arms of a study against the AdamW of another on the same batches, by seed."""
    study, other = questions.find(name), questions.find(base)
    found = ladders(study, Results(RESULTS / name).read())
    adamw = ladders(other, Results(RESULTS / base).read())["AdamW"]
    rows = []
    for label, own in found.items():
        d = paired(own.losses[own.best], adamw.losses[adamw.best])
        rows.append([label, f"{d.n}", _difference(d, 4)])
    return table(["", "seeds", "to AdamW (95 % interval)"], rows)


def scored(name: str) -> str:
    """The runs of a study whose models were scored by `mars eval`: loss, and every task."""
    study = questions.find(name)
    folders = {arm.label: arm.folder for arm in study.arms}
    done = {f"{folders[r.arm]}-lr{r.lr:g}-s{r.seed}": r for r in Results(RESULTS / name).read()}
    head, rows = ["", "rate", "seed", "validation loss"], []
    models = {model["name"]: model for model in result(f"{name}/eval.json")["models"]}
    order = [arm.label for arm in study.arms]

    def place(key: str) -> tuple[float, ...]:
        return order.index(done[key].arm), done[key].lr, done[key].seed

    for key in sorted(models, key=place):
        run, model = done[key], models[key]
        cells = [f"{task}, {t['metric']}, %" for task, t in model["tasks"].items()]
        scores = [t[t["metric"]] for t in model["tasks"].values()]
        rows.append([
            study.arm(run.arm).name, units.rate(run.lr), f"{run.seed}", _loss([run.final]),
            *(f"{100 * s['value']:.2f} ± {100 * s['stderr']:.2f}" for s in scores),
        ])  # fmt: skip
    return table([*head, *cells], rows)


# ---- bench/settings.py


COMMON = ("name", "max_grad_norm")  # said elsewhere, and the same for all


def measured() -> str:
    """For every optimizer of a grid or a study its best setting there."""
    best: dict[tuple[Any, ...], settings.Setting] = {}
    for s in settings.read():
        key = s.source, s.parameters, s.seen, s.batch, _named(s), "exact" in s.optimizer
        if key not in best or s.loss < best[key].loss:
            best[key] = s
    order = {source: i for i, source in enumerate(dict.fromkeys(s.source for s in best.values()))}
    rows = []
    for s in sorted(best.values(), key=lambda s: (order[s.source], s.batch, s.loss)):
        rest = {n: v for n, v in settings.besides(s.optimizer).items() if n not in COMMON}
        score = f"error rate {units.share(s.loss)}" if s.unit == "images" else f"{s.loss:.3f}"
        score += f" ± {s.spread:.3f}" if s.spread is not None and s.unit != "images" else ""
        source = Path(s.source)
        file = f"`{source.parent.name}/{source.name}`"
        if source.is_relative_to("docs"):
            file = f"[{source.parent.name}]({source.relative_to('docs').as_posix()})"
        rows.append([
            _named(s),
            f"`{s.recipe}`, {units.tokens(s.parameters)}",
            f"{units.tokens(s.seen)} {s.unit}",
            units.tokens(s.batch),
            units.rate(s.lr) + ("" if s.bracketed else " (not bracketed)"),
            ", ".join(f"{n} {_value(v)}" for n, v in rest.items()),
            f"{score}, {s.seeds} seed{'s' * (s.seeds > 1)}",
            file,
        ])  # fmt: skip
    head = ["", "model", "seen", "batch", "best rate", "with", "validation loss", "from"]
    return table(head, rows)


def _named(s: settings.Setting) -> str:
    """What steps its matrices. Without correction and clip MARS-AdamW is AdamW."""
    o = s.optimizer
    plain = o.get("gamma") == 0 and o.get("options", {}).get("clip") == "None"
    return f"{optimizers.label(o['name'])}, γ = 0: AdamW" if plain else optimizers.label(o["name"])


SHOWN = ("adamw", "mars-adamw", "mars-shampoo", "mars-m", "muon", "mars-lion")


def rates() -> str:
    """The best rate of each optimizer by model, tokens and batch.

    Of several betas of MARS-AdamW and scales of Muon, those that did best.
    """
    best: dict[tuple[Any, ...], settings.Setting] = {}
    for s in settings.read():
        key = s.recipe, s.parameters, s.seen, s.batch, s.optimizer["name"]
        if _usual(s) and (key not in best or s.loss < best[key].loss):
            best[key] = s
    rows = []
    for recipe, parameters, seen, batch in sorted({key[:4] for key in best}, key=lambda k: k[1:]):
        found = [best.get((recipe, parameters, seen, batch, name)) for name in SHOWN]
        if len(SHOWN) - found.count(None) < 2:  # nothing to compare it with
            continue
        rows.append([
            f"`{recipe}`, {units.tokens(parameters)}", units.tokens(seen), units.tokens(batch),
            *("" if s is None else _rate(s) for s in found),
        ])  # fmt: skip
    return table(["model", "tokens", "a step", *map(optimizers.label, SHOWN)], rows)


def _usual(s: settings.Setting) -> bool:
    """Several seeds, and the default γ, clip, second moment and lr_1d, whose rate it then is.

    AdamW has its usual betas: others were tried to see whether it is held back by them.
    """
    o = s.optimizer
    if o["name"] == "adamw" and o["betas"] != [0.9, 0.95]:
        return False
    options = o.get("options", {}).keys() - {"adjust_lr_fn"}
    plain = o.get("gamma", 0.025) == 0.025 and "exact" not in o and not options
    half = "lr_1d" not in o or math.isclose(o["lr_1d"], o["lr"] / 2, rel_tol=0.01)
    return s.unit == "tokens" and s.seeds > 1 and plain and half


def _rate(s: settings.Setting) -> str:
    lr_1d = s.optimizer.get("lr_1d")
    beside = "" if lr_1d is None else f" ({units.rate(lr_1d)})"
    return units.rate(s.lr) + beside + ("" if s.bracketed else ", not bracketed")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{n}={v}" for n, v in value.items())
    return str(tuple(value) if isinstance(value, list) else value)


# ---- bench/convert_rates.py

CURVES = {
    "adamw": "AdamW, betas (0.9, 0.95)",
    "mars-adamw, AdamW's betas": "MARS-AdamW, betas (0.9, 0.95)",
    "adamw, betas of MARS": "AdamW, betas (0.95, 0.99)",
    "mars-adamw": "MARS-AdamW, betas (0.95, 0.99)",
    "muon": "Muon",
    "mars-m": "MARS-M",
    "step-size": "`from_adamw`",
    "published": '`from_adamw(rule="published")`',
}


def conversion(name: str) -> str:
    """The best of each curve; all but AdamW's are over multiples of AdamW's base rate."""
    found = result(name)
    rows = []
    for curve, label in CURVES.items():
        points = found["points"][curve]
        best = min(points, key=lambda point: point["mean"])
        rate = best["x"] * (1 if curve == "adamw" else found["base_rate"])
        tried = "one rate" if len(points) == 1 else f"best of {len(points)}"
        rows.append([f"{label}, {tried}", f"{rate:.3g}", f"{best['mean']:.3f}"])
    return table(["", "rate", "validation loss"], rows)


# ---- the cost of a step


def simulated() -> str:
    """How often verdicts of simulated studies came out either way."""
    rows = result("simulated_verdicts.json")["rows"]
    return table(["claim, truth", "holds", "does not hold", "runs"], [
        [row["case"], *(f"{100 * row[state]:.1f} %" for state in ("holds", "does not hold")),
         f"{row['runs']:.0f}"]
        for row in rows
    ])  # fmt: skip


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
            [f"`{row['state_dtype']!r}`", f"{row['bytes']:.3g}", times, _loss(row["losses"])]
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


TABLES: dict[str, Callable[[], str]] = {
    "optimizers-50m": lambda: arms("optimizers-50m"),
    "headline": lambda: headline("optimizers-50m"),
    "optimizers-50m-times": lambda: durations("optimizers-50m"),
    "correction-50m": lambda: arms("correction-50m"),
    "correction-50m-times": lambda: durations("correction-50m"),
    "correction-50m-rates": lambda: moved("correction-50m"),
    "correction-50m-variance": lambda: variances("correction-50m"),
    "batch-50m": lambda: every_run("batch-50m", "512k"),
    "clip-50m": lambda: arms("clip-50m"),
    "clip-50m-adamw": lambda: to_adamw("clip-50m", "optimizers-50m"),
    "gpt-50m-rates": lambda: every_rate(race("gpt-50m")),
    "gpt-tiny": lambda: grid(ROOT / "src/mars/lab/recipes/rates/gpt-tiny.json"),
    "conversion-h200": lambda: conversion("convert_rates_h200.json"),
    "conversion-cpu": lambda: conversion("convert_rates_cpu.json"),
    "step-cost": step_cost,
    "step-cost-short": short_step_cost,
    "lean-state": lean_state,
    "train-speed": train_speed,
    "cost": cost,
    "cpu-cost": on_cpu,
    "cifar10": lambda: accuracies(
        "cifar10-resnet18-short", "cifar10-resnet18-30", "cifar10-resnet18-bare"
    ),
    "cifar10-200": lambda: whole_schedule("cifar10-resnet18-200", "cifar10-resnet18-short"),
    "cifar10-decay": lambda: decays("cifar10-resnet18-decay"),
    "cifar10-rates": lambda: accuracy_rates("cifar10-resnet18-grid"),
    "simulated": simulated,
    "tiny-optimizers": lambda: arms("tiny-optimizers"),
    "tiny-correction": lambda: arms("tiny-correction"),
    "tiny-clip": lambda: arms("tiny-clip"),
    "search-50m": lambda: arms("search-50m"),
    "baseline-50m": lambda: arms("baseline-50m"),
    "tiny-search": lambda: arms("tiny-search"),
    "tiny-length": lambda: arms("tiny-length"),
    "tiny-tokens": lambda: arms("tiny-tokens"),
    "tiny-momentum": lambda: arms("tiny-momentum"),
    "tiny-decay": lambda: by_decay("tiny-decay"),
    "tiny-baseline": lambda: arms("tiny-baseline"),
    "tiny-scale": lambda: arms("tiny-scale"),
    "gpt2-small": lambda: scored("gpt2-small"),
    "gpt2-small-times": lambda: durations("gpt2-small"),
    "gpt2-small-rates": lambda: every_rung("gpt2-small-rates"),
    "settings": measured,
    "rates": rates,
}


def pages() -> list[Path]:
    """Every page that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(text: str) -> str:
    """The page with all its tables made anew."""
    return BLOCK.sub(lambda found: found["head"] + TABLES[found["name"]]() + found["end"], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if behind")
    check = parser.parse_args().check
    behind = [page for page in pages() if rewritten(page.read_text()) != page.read_text()]
    for page in behind:
        print(f"{'behind its results' if check else 'rewritten'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(rewritten(page.read_text()))
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())

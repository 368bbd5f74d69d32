"""Tables of studies, and of bench/settings.py and bench/simulate_verdicts.py."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from table_cells import RESULTS, bold, interval, mean_loss, result, table

from mars.lab import optimizers
from mars.lab.recipes import settings
from mars.lab.report import units
from mars.lab.report.statistics import paired, spread
from mars.lab.study import questions, times
from mars.lab.study.choice import ladders
from mars.lab.study.results import Results
from mars.lab.study.templates import lower
from mars.lab.study.verdict import HEAD, Verdict, verdict
from mars.lab.study.verdict import cells as in_words


def arms(name: str) -> str:
    """The arms of a study that have runs, as its verdict has them."""
    shown = ("best rate", "seeds", "loss", "to", "difference, 95 % interval")
    kept = [HEAD.index(column) for column in shown]
    rows = [in_words(row) for row in judged(name).rows if row.loss is not None]
    return table(["", *shown], [[row[0], *(row[i].replace("–", "") for i in kept)] for row in rows])


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


LEADS = (  # what was trained, study, arms, baseline
    ("51M parameters, 1.1 tokens per parameter", "optimizers-50m",
     ("MARS-Shampoo", "Muon, original scale"), "AdamW"),
    ("the same, and AdamW has a longer warm-up", "baseline-50m",
     ("MARS-Shampoo",), "AdamW, warm-up 30 %"),
    ("GPT-2 small, 1.6 tokens per parameter", "gpt2-small", ("MARS-M", "Muon"), "AdamW"),
    ("a tiny GPT, 1 byte per parameter", "tiny-tokens",
     ("MARS-Shampoo, 1 a parameter",), "AdamW, 1 a parameter"),
    ("the same, 20 bytes per parameter", "tiny-tokens",
     ("MARS-Shampoo, 20 a parameter",), "AdamW, 20 a parameter"),
)  # fmt: skip


def leads() -> str:
    """How far optimizers of matrices end below AdamW, and where they reach its loss: in brief."""
    lines = []
    for trained, name, ours, base in LEADS:
        study, results = questions.find(name), Results(RESULTS / name).read()
        against = replace(study, comparisons=tuple(lower(arm, base) for arm in ours))
        rows = {row.ladder.arm.label: row for row in verdict(against, results).rows}
        for arm in ours:
            d, share = rows[arm].difference, rows[arm].tokens_ratio
            assert d is not None
            assert share is not None
            shown = rows[arm].ladder.arm.name.partition(",")[0]
            lines.append([trained, shown, f"{-d.mean:.2f}", f"{100 * share:.0f} %", str(d.n)])
            trained = ""
    return table(["", "", "below AdamW, nats per token", "of its tokens", "seeds"], lines)


def every_rung(name: str) -> str:
    """Mean loss at every rate that a study has tried, the best of each arm in bold."""
    study = questions.find(name)
    found = [lad for lad in ladders(study, Results(RESULTS / name).read()).values() if lad.losses]
    tried = sorted({lr for ladder in found for lr in ladder.losses})
    rows = []
    for ladder in found:
        means = {lr: spread(list(own.values())) for lr, own in ladder.losses.items()}
        cells = [bold(f"{m.mean:.3f}" if (m := means.get(lr)) else "", lr == ladder.best)
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
        cell = f"{mean_loss(losses)} ({len(losses)} seeds, {units.rate(ladder.best)})"
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
        rows.append([label, f"{d.n}", interval(d, 4)])
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
            study.arm(run.arm).name, units.rate(run.lr), f"{run.seed}", mean_loss([run.final]),
            *(f"{100 * s['value']:.2f} ± {100 * s['stderr']:.2f}" for s in scores),
        ])  # fmt: skip
    return table([*head, *cells], rows)


def simulated() -> str:
    """How often verdicts of simulated studies came out either way."""
    rows = result("simulated_verdicts.json")["rows"]
    return table(["claim, truth", "holds", "does not hold", "runs"], [
        [row["case"], *(f"{100 * row[state]:.1f} %" for state in ("holds", "does not hold")),
         f"{row['runs']:.0f}"]
        for row in rows
    ])  # fmt: skip


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

"""The result in words and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from mars.lab.report import fit, statistics, units
from mars.lab.report.measure import percent
from mars.lab.report.statistics import Difference, Spread
from mars.lab.report.summary import Entry, Summary

WIDTH = 100
ENOUGH = 3  # seeds for a lead that was picked from the table to count
TEXT = ("optimizer", "lr", "seeds", "final loss", "{}", "tokens", "step", "opt")
IMAGES = ("optimizer", "lr", "n", "accuracy", "best", "loss", "{}", "epochs", "images/s")
LEGENDS = {
    "tokens": "final loss: mean ± standard deviation over seeds. to …: paired difference, 95% "
    "interval. tokens: to reach the baseline's final loss, as a part of its own. opt: the "
    "optimizer's share of a step.",
    "images": "accuracy: at the end, in %, mean ± standard deviation over n seeds; best: the "
    "highest on the way. to …: paired difference in points, 95% interval. epochs: to reach the "
    "baseline's final accuracy, as a part of its own.",
}


def headline(summary: Summary) -> str:
    """Who is lowest, and whether that is more than noise."""
    if not summary.ranked:
        return _nothing_yet(summary)
    return " ".join(part for part in (_ranking(summary), _unranked(summary)) if part)


def _unranked(summary: Summary) -> str:
    """Who is missing from the ranking, and why."""
    missing = [e for e in summary.entries if e.score is None and e.incomparable is None]
    if not missing:
        return ""
    said = [f"{entry.label} ({entry.runs[0].status})" for entry in missing[:4]]
    more = len(missing) - len(said)
    return f"Not ranked: {', '.join(said)}{f' and {more} more' if more else ''}."


def _ranking(summary: Summary) -> str:
    ranked = summary.ranked
    best, m = ranked[0], summary.measure
    assert best.score is not None
    value, n = m.value(best.score.mean), best.score.n
    article = "an" if m.name[0] in "aeiou" else "a"
    if len(ranked) == 1:
        return f"{best.label} ends at {article} {m.name} of {value} ({seeds(n)})."
    parts = [f"{best.label} is {m.best}, at {article} {m.name} of {value}"]
    base = summary.baseline
    if base is None or base.score is None:
        parts[0] += f" ({seeds(n)})."
    elif best is base:
        parts[0] += f": no other optimizer beats the baseline ({seeds(n)})."
    else:
        parts[0] += f", {_against(best, base)}."
        if best.progress_ratio is not None and best.difference and best.difference.resolved:
            what = f"{base.label}'s final {m.name.split()[-1]}"
            share = f"{best.progress_ratio:.0%} of the {m.progress_words}"
            parts.append(f"It reaches {what} with {share}.")
    second = next((e for e in ranked[1:] if e is not base or best is base), None)
    if second is not None:
        parts.append(_runner_up(best, second))
    return " ".join(parts)


def seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def _nothing_yet(summary: Summary) -> str:
    states = [run.status for run in summary.runs]
    said = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states) if s != "done")
    if all(e.incomparable is not None or e.score is None for e in summary.entries) and not said:
        return "The runs finished without a validation loss: there is nothing to rank."
    return f"No comparable run has finished yet ({said or 'no validation loss'})."


def _against(best: Entry, base: Entry) -> str:
    d = best.difference
    if d is None:
        return f"but has no seed in common with {base.label}, so the two are not compared"
    gap = f"{best.measure.gap(d)} {best.measure.beyond} {base.label}"
    if d.resolved is None:
        return f"{gap}, with one seed: whether that is more than noise is not known"
    if not d.resolved:
        return f"{gap}, a difference that is not resolved with {seeds(d.n)} ({_interval(best, d)})"
    return f"{gap} ({_interval(best, d)}, {seeds(d.n)})"


def _runner_up(best: Entry, second: Entry) -> str:
    d = statistics.paired(best.scores, second.scores, best.runs[0].grain)
    if d is None:
        return ""
    gap = f"Its lead over {second.label}, {best.measure.gap(d)}, is"
    if d.mean >= 0:
        return f"On equal seeds it does not lead {second.label}."
    if d.resolved is None:
        return f"{gap} from one seed."
    if not d.resolved:
        return f"{gap} not resolved with {seeds(d.n)}."
    if d.n < ENOUGH:
        return f"{gap} more than noise by {seeds(d.n)} alone ({_interval(best, d)}): run more."
    return f"{gap} resolved ({_interval(best, d)})."


def _interval(entry: Entry, d: Difference) -> str:
    m = entry.measure
    shown = m.shown(d)
    return f"95% CI {m.signed(shown.low)} to {m.signed(shown.high)}"


def table(summary: Summary, room: int | None = None) -> str:
    """Plain text for so many columns, at most 100 but for long labels in a pipe: rows, warnings."""
    base = summary.baseline.label if summary.baseline else summary.asked
    columns = IMAGES if summary.measure.unit == "images" else TEXT
    head = tuple(title.format(_cut(f"to {base}", 20)) for title in columns)
    rows = [head, *(_row(entry, columns, summary.times) for entry in summary.entries)]
    others = sum(max(len(row[i]) for row in rows) + 2 for i in range(1, len(head)))
    width = min(WIDTH, room or WIDTH)
    short = [_cut(row[0], max(12, WIDTH - others)) for row in rows]
    if len(set(short)) == len(rows):  # else nobody could tell them apart
        rows = [(label, *row[1:]) for label, row in zip(short, rows, strict=True)]
    parts = fit.blocks(rows, None if room is None else width)
    text = "\n\n".join(fit.aligned(part, 1) for part in parts)
    said = [f"! {warning}" for warning in summary.warnings]
    said.append(LEGENDS[summary.measure.unit])
    above, *below = (fit.fold(line, width, "") for line in (headline(summary), *said))
    return "\n".join([above, "", text, "", *below])


def _row(entry: Entry, columns: Sequence[str], doubt: str) -> tuple[str, ...]:
    finished = 0 if entry.score is None else entry.score.n
    cells = {
        "optimizer": entry.label,
        "lr": ("!" if entry.sensitivity.bracketed is False else "") + units.rate(entry.lr),
        "seeds": f"{finished}" if finished == len(entry.runs) else f"{finished}/{len(entry.runs)}",
        "final loss": _loss(entry.loss),
        "loss": "–" if entry.loss is None else units.loss(entry.loss.mean),
        "accuracy": percent(entry.accuracy),
        "best": percent(entry.best_accuracy),
        "{}": _versus(entry),
        "tokens": _ratio(entry.progress_ratio),
        "epochs": _ratio(entry.progress_ratio),
        "images/s": units.about(units.tokens(entry.speed), doubt),
        "step": units.about(units.seconds(entry.step_seconds), doubt),
        "opt": units.about(units.share(entry.optimizer_share), doubt),
    }
    cells["n"] = cells["seeds"]
    return tuple(cells[name] for name in columns)


def _loss(loss: Spread | None) -> str:
    if loss is None:
        return "–"
    return units.loss(loss.mean) + ("" if loss.sd is None else f" ± {units.loss(loss.sd)}")


def _versus(entry: Entry) -> str:
    if entry.incomparable is not None:
        return "not comparable"
    if entry.difference is None:
        return "–"
    m = entry.measure
    d = m.shown(entry.difference)
    between = "" if d.low is None else f" [{m.signed(d.low)}, {m.signed(d.high)}]"
    return m.signed(d.mean) + between


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _cut(text: str, width: int) -> str:
    """Without its middle, if it is too long: labels of one optimizer differ at the end."""
    tail = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}"

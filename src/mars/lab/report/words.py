"""The result in words and as a table for the terminal."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence

from mars.lab.report import fit, statistics, units
from mars.lab.report.measure import percent
from mars.lab.report.statistics import Difference, Spread
from mars.lab.report.summary import Entry, Summary

WIDTH = 100
ENOUGH = 3  # seeds for a lead that was picked from the table to count
MORE = 5  # that a race should have, if its two best are to be told apart
TEXT = ("optimizer", "lr", "seeds", "final loss", "{}", "tokens", "step", "opt")
IMAGES = ("optimizer", "lr", "n", "accuracy", "best", "loss", "{}", "epochs", "images/s")
LEGENDS = {
    "tokens": "final loss: mean ± standard deviation over seeds. to …: paired difference, 95% "
    "interval. tokens: until the baseline's final loss, in percent of what the baseline needed. "
    "opt: the optimizer's share of a step.",
    "images": "accuracy: at the end, in %, mean ± standard deviation over n seeds; best: the "
    "highest on the way. to …: paired difference in points, 95% interval. epochs: until the "
    "baseline's final accuracy, in percent of what the baseline needed.",
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
        parts.append(_runner_up(best, second, summary))
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
        return f"{gap}, on one seed, which does not tell it from noise"
    if not d.resolved:
        return f"{gap}, which may be noise ({_interval(best, d)}, {seeds(d.n)})"
    return f"{gap} ({_interval(best, d)}, {seeds(d.n)})"


def _runner_up(best: Entry, second: Entry, summary: Summary) -> str:
    d = statistics.paired(best.scores, second.scores, best.runs[0].grain)
    if d is None:
        return ""
    lead, gap = f"Its lead over {second.label}", best.measure.gap(d)
    if d.mean >= 0:
        return f"On the seeds that both have, {second.label} is as good or better."
    if d.resolved is None:
        return f"{lead}, {gap}, rests on one seed{_run_more(summary)}."
    if not d.resolved:
        return f"{lead}, {gap}, may be noise ({_interval(best, d)}, {seeds(d.n)})."
    if d.n < ENOUGH:
        told = f"{gap} ({_interval(best, d)}), rests on {seeds(d.n)} only"
        return f"{lead}, {told}{_run_more(summary)}."
    return f"{lead} is {gap} ({_interval(best, d)}, {seeds(d.n)})."


def _run_more(summary: Summary) -> str:
    """How to get more seeds, as far as it is known what made these runs."""
    first = summary.runs[0]
    words = _split(str(first.race.get("command") or first.header.get("command") or ""))
    if words[:2] == ["mars", "race"]:  # which goes on if it is given its directory
        usual = f"runs/race-{first.race.get('recipe')}"
        what = [*words[:2], _option(words, "--out", "--keep.out") or usual]
    elif words[:2] == ["mars", "study"]:
        what = words
    else:
        return ": run more"
    command = " ".join(map(shlex.quote, [*what, "--seeds", str(MORE)]))
    return f": `{command}` goes on with this {words[1]}"


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _option(words: Sequence[str], *names: str) -> str | None:
    """The value of an option, however it was written."""
    pairs = [word.partition("=")[::2] for word in words]
    pairs += list(itertools.pairwise(words))
    return next((value for name, value in reversed(pairs) if name in names and value), None)


def _interval(entry: Entry, d: Difference) -> str:
    """Signed as in the table if it has zero inside, else as far apart as the words say."""
    m = entry.measure
    if not d.resolved:
        shown = m.shown(d)
        return f"95% interval {m.signed(shown.low)} to {m.signed(shown.high)}"
    ends = sorted(abs(end) for end in (d.low or 0.0, d.high or 0.0))
    low, high = (m.gap(Difference(d.n, end, None, None)) for end in ends)
    return f"95% interval {low.split()[0]} to {high}"


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

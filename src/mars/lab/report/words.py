"""The result in words and as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mars.lab.report import statistics, units
from mars.lab.report.statistics import Difference
from mars.lab.report.summary import Entry, Summary

WIDTH = 100


def headline(summary: Summary) -> str:
    """Who is lowest, and whether that is more than noise."""
    if not summary.ranked:
        return _nothing_yet(summary)
    return " ".join(part for part in (_ranking(summary), _unranked(summary)) if part)


def _unranked(summary: Summary) -> str:
    """Who is missing from the ranking, and why."""
    missing = [e for e in summary.entries if e.loss is None and e.incomparable is None]
    if not missing:
        return ""
    said = [f"{entry.label} ({entry.runs[0].status})" for entry in missing[:4]]
    more = len(missing) - len(said)
    return f"Not ranked: {', '.join(said)}{f' and {more} more' if more else ''}."


def _ranking(summary: Summary) -> str:
    ranked = summary.ranked
    best = ranked[0]
    assert best.loss is not None
    value = units.loss(best.loss.mean)
    if len(ranked) == 1:
        return f"{best.label} ends at a validation loss of {value} ({seeds(best.loss.n)})."
    parts = [f"{best.label} is lowest, at a validation loss of {value}"]
    base = summary.baseline
    if base is None or base.loss is None:
        parts[0] += f" ({seeds(best.loss.n)})."
    elif best is base:
        parts[0] += f": no other optimizer beats the baseline ({seeds(best.loss.n)})."
    else:
        parts[0] += f", {_against(best, base)}."
        if best.tokens_ratio is not None and best.difference and best.difference.resolved:
            parts.append(
                f"It reaches {base.label}'s final loss with {best.tokens_ratio:.0%} of the tokens."
            )
    second = next((e for e in ranked[1:] if e is not base or best is base), None)
    if second is not None:
        parts.append(_runner_up(best, second))
    return " ".join(parts)


def seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def _nothing_yet(summary: Summary) -> str:
    states = [run.status for run in summary.runs]
    said = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states) if s != "done")
    if all(e.incomparable is not None or e.loss is None for e in summary.entries) and not said:
        return "The runs finished without a validation loss: there is nothing to rank."
    return f"No comparable run has finished yet ({said or 'no validation loss'})."


def _against(best: Entry, base: Entry) -> str:
    d = best.difference
    if d is None:
        return f"but has no seed in common with {base.label}, so the two are not compared"
    gap = f"{abs(d.mean):.{units.DECIMALS}f} below {base.label}"
    if d.resolved is None:
        return f"{gap}, with one seed: whether that is more than noise is not known"
    if not d.resolved:
        return f"{gap}, a difference that is not resolved with {seeds(d.n)} ({interval(d)})"
    return f"{gap} ({interval(d)}, {seeds(d.n)})"


def _runner_up(best: Entry, second: Entry) -> str:
    d = statistics.paired(best.finals, second.finals)
    if d is None:
        return ""
    gap = f"Its lead over {second.label}, {abs(d.mean):.{units.DECIMALS}f}, is"
    if d.mean >= 0:
        return f"On equal seeds it does not lead {second.label}."
    if d.resolved is None:
        return f"{gap} from one seed."
    if not d.resolved:
        return f"{gap} not resolved with {seeds(d.n)}."
    return f"{gap} resolved ({interval(d)})."


def interval(d: Difference) -> str:
    return f"95% CI {units.signed(d.low)} to {units.signed(d.high)}"


def table(summary: Summary) -> str:
    """Plain text of at most 100 columns: the rows, then what to be warned of."""
    base = summary.baseline.label if summary.baseline else summary.asked
    head = ("optimizer", "lr", "seeds", "final loss", f"to {base}"[:24], "tokens", "step", "opt")
    rows = [head, *(_row(entry) for entry in summary.entries)]
    others = sum(max(len(row[i]) for row in rows) + 2 for i in range(1, len(head)))
    room = max(12, WIDTH - others)
    rows = [(_cut(row[0], room), *row[1:]) for row in rows]
    text = _align(rows)
    lines = [headline(summary), "", text, ""]
    lines += [f"! {warning}" for warning in summary.warnings]
    lines.append(
        "final loss: mean ± standard deviation over seeds. to …: paired difference, 95% interval. "
        "tokens: to reach the baseline's final loss, as a part of its own. opt: the optimizer's "
        "share of a step."
    )
    return "\n".join(piece for line in lines for piece in _wrap(line))


def _row(entry: Entry) -> tuple[str, ...]:
    loss, d = entry.loss, entry.difference
    spread = "" if loss is None or loss.sd is None else f" ± {units.loss(loss.sd)}"
    mark = "!" if entry.sensitivity.bracketed is False else ""
    finished = 0 if loss is None else loss.n
    n = f"{finished}" if finished == len(entry.runs) else f"{finished}/{len(entry.runs)}"
    versus = "–"
    if entry.incomparable is not None:
        versus = "not comparable"
    elif d is not None:
        versus = units.signed(d.mean)
        if d.low is not None:
            versus += f" [{units.signed(d.low)}, {units.signed(d.high)}]"
    ratio = "–" if entry.tokens_ratio is None else f"{entry.tokens_ratio:.0%}"
    return (
        entry.label, mark + units.rate(entry.lr), n,
        (units.loss(loss.mean) + spread) if loss else "–", versus, ratio,
        units.seconds(entry.step_seconds), units.share(entry.optimizer_share),
    )  # fmt: skip


def _align(rows: Sequence[tuple[str, ...]]) -> str:
    """Names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _wrap(line: str) -> list[str]:
    """Prose is wrapped; rows of the table fit already."""
    if len(line) <= WIDTH:
        return [line]
    return [
        piece
        for part in line.split("\n")
        for piece in (textwrap.wrap(part, WIDTH) if len(part) > WIDTH else [part])
    ]

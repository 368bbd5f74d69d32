"""The page's result: the table with a picture of each difference, and what a step costs."""

from __future__ import annotations

from collections.abc import Sequence

from mars.lab.report import units
from mars.lab.report.markup import Child, Markup, join, tag
from mars.lab.report.palette import colours
from mars.lab.report.statistics import Spread
from mars.lab.report.summary import Entry, Summary

BAR = 136  # width of the picture of a difference


def looks(summary: Summary) -> list[str]:
    """The colour of each entry, as CSS."""
    return [f"var(--{name})" for name, _ in colours([e.optimizer for e in summary.entries])]


def result_table(summary: Summary) -> Markup:
    """One row an optimizer, the best first."""
    columns = _columns(summary)
    head = [
        tag("th", *_title(title, summary), scope="col", class_=kind, title=_doubt(title, summary))
        for title, kind in columns
    ]
    scale = _scale(summary.entries)
    body = [
        _row(entry, colour, columns, scale, summary)
        for entry, colour in zip(summary.entries, looks(summary), strict=True)
    ]
    inner = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_="result")
    box = tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label="Results")
    return join([box, tag("p", "The table goes on to the right →", class_="hint swipe")])


TITLES = {
    "optimizer": ("Optimizer",),
    "lr": ("Learning rate",),
    "seeds": ("Seeds",),
    "accuracy": ("Accuracy", "mean ± sd, range"),
    "best": ("Best accuracy", "on the way"),
    "loss": ("Validation loss", "mean ± sd, range"),
    "difference": ("To {base}", "95% interval"),
    "picture": ("{better}",),
    "progress": ("{progress}", "to {base}’s {measure}"),  # noqa: RUF001
    "seconds": ("Time", "to {base}’s {measure}"),  # noqa: RUF001
    "step": ("Step", "optimizer’s share"),  # noqa: RUF001
    "speed": ("{unit}/s",),
    "memory": ("Memory", "peak"),
    "state": ("State",),
}


TIMES = ("seconds", "step", "speed")  # columns of what a busy machine changes


def _doubt(name: str, summary: Summary) -> str | None:
    """Why the figures of a column do not compare, if they do not."""
    return (summary.times or None) if name in TIMES else None


def _title(name: str, summary: Summary) -> list[Child]:
    m = summary.measure
    words = {
        "base": summary.baseline.label if summary.baseline else "baseline",
        "progress": m.progress_words.capitalize(),
        "measure": m.name.split()[-1],
        "unit": m.unit.capitalize(),
        "better": "better →" if m.unit == "images" else "← better",
    }
    first, *rest = (text.format(**words) for text in TITLES[name])
    return [first, *(tag("small", text) for text in rest if text)]


def _columns(summary: Summary) -> list[tuple[str, str]]:
    """(name, class) of the columns for which there is anything to show."""
    entries = summary.entries
    shown = {
        "difference": any(e.difference for e in entries),
        "picture": any(e.difference for e in entries),
        "accuracy": any(e.accuracy for e in entries),
        "best": any(e.best_accuracy for e in entries),
        "progress": any(e.difference and e.progress_ratio for e in entries),
        "seconds": any(e.difference and e.seconds_ratio for e in entries),
        "step": any(e.step_seconds for e in entries),
        "speed": any(e.speed for e in entries),
        "memory": any(e.memory for e in entries),
        "state": any(e.state for e in entries),
    }
    text = ("optimizer", "picture")
    return [(n, "" if n in text else "number") for n in TITLES if shown.get(n, True)]


def _row(
    entry: Entry,
    colour: str,
    columns: Sequence[tuple[str, str]],
    scale: tuple[float, float],
    summary: Summary,
) -> Markup:
    is_base = entry is summary.baseline
    cells: list[Child] = [
        tag("th", tag("i", class_="swatch", style=f"background:{colour}"), entry.label,
            tag("small", "baseline") if is_base else None, scope="row")
    ]  # fmt: skip
    kind = "base" if is_base else None
    if entry.incomparable is not None:
        said = tag("strong", f"not comparable: {entry.incomparable}")
        last = "–" if entry.score is None else entry.measure.value(entry.score.mean)
        cells += [tag("td", units.rate(entry.lr), class_="number"),
                  tag("td", str(len(entry.runs)), class_="number"),
                  tag("td", last, class_="number"),
                  tag("td", said, colspan=max(1, len(columns) - 4))]  # fmt: skip
        return tag("tr", *cells, class_="apart")
    for name, kinds in columns[1:]:
        doubt = _doubt(name, summary)
        inner = _cell(name, entry, colour, scale, is_base, doubt)
        cls = f"{kinds} muted" if doubt else kinds
        cells.append(tag("td", inner, class_=cls or None, title=doubt))
    return tag("tr", *cells, class_=kind)


def _cell(
    name: str,
    entry: Entry,
    colour: str,
    scale: tuple[float, float],
    is_base: bool,
    doubt: str | None,
) -> Markup:
    if name == "lr":
        return _rate(entry)
    if name == "loss":
        return _loss(entry)
    if name in ("accuracy", "best"):
        return _accuracy(entry.accuracy if name == "accuracy" else entry.best_accuracy)
    if name == "difference":
        return _difference(entry, is_base)
    if name == "picture":
        return _picture(entry, colour, scale, is_base)
    if name in ("progress", "seconds"):
        return _reach(entry, name, is_base, doubt)
    return join(_plain(name, entry, doubt))


def _plain(name: str, entry: Entry, doubt: str | None) -> list[Child]:
    if name == "seeds":
        finished = entry.score.n if entry.score else 0
        whole = len(entry.runs)
        return [str(whole) if finished == whole else f"{finished} of {whole}"]
    if name == "step":
        share = entry.optimizer_share
        own = None if share is None else tag("small", units.about(units.share(share), doubt))
        return [units.about(units.seconds(entry.step_seconds), doubt), own]
    if name == "speed":
        return [units.about(units.tokens(entry.speed), doubt)]
    return [units.size(entry.memory if name == "memory" else entry.state)]


def _rate(entry: Entry) -> Markup:
    note = {True: "bracketed", False: "at the grid’s edge", None: None}  # noqa: RUF001
    said = note[entry.sensitivity.bracketed]
    small = tag("small", said, class_="warn" if said and "edge" in said else None) if said else None
    return join([units.rate(entry.lr), small])


def _loss(entry: Entry) -> Markup:
    loss = entry.loss
    if loss is None:
        seen = [run.last for run in entry.runs if run.last is not None]
        so_far = f"{units.loss(min(seen))} so far" if seen else None
        return join(["–", tag("small", so_far) if so_far else None])
    bold = "b" if entry.accuracy is None else "span"  # what it is judged by
    if loss.sd is None:
        return join([tag(bold, units.loss(loss.mean))])
    span = f"{units.loss(loss.low)}–{units.loss(loss.high)}"
    return join([tag(bold, units.loss(loss.mean)), f" ± {units.loss(loss.sd)}", tag("small", span)])


def _accuracy(found: Spread | None) -> Markup:
    if found is None:
        return join(["–"])
    if found.sd is None:
        return join([tag("b", units.accuracy(found.mean))])
    span = f"{100 * found.low:.2f}–{100 * found.high:.2f}"
    spread = f" ± {100 * found.sd:.2f}"
    return join([tag("b", units.accuracy(found.mean)), spread, tag("small", span)])


def _difference(entry: Entry, is_base: bool) -> Markup:
    if entry.difference is None:
        return join(["" if is_base else "–"])
    m = entry.measure
    d = m.shown(entry.difference)
    if d.low is None:
        return join([m.signed(d.mean), tag("small", "one seed")])
    said = f"{m.signed(d.low)} to {m.signed(d.high)}"
    resolved = None if d.resolved else tag("small", "not resolved", class_="warn")
    return join([m.signed(d.mean), tag("small", said), resolved])


def _reach(entry: Entry, name: str, is_base: bool, doubt: str | None) -> Markup:
    ratio = entry.progress_ratio if name == "progress" else entry.seconds_ratio
    if ratio is None:
        return join(["–" if entry.score is None else tag("span", "not reached", class_="quiet")])
    if is_base:
        return join(["100%"])
    at = (
        entry.measure.far(entry.progress_to_baseline)
        if name == "progress"
        else units.seconds(entry.seconds_to_baseline)
    )
    return join([units.about(f"{ratio:.0%}", doubt), tag("small", units.about(at, doubt))])


def _scale(entries: Sequence[Entry]) -> tuple[float, float]:
    """The range of the pictures: all means and zero, and intervals as far as they are sane."""
    found = [e.measure.shown(e.difference) for e in entries if e.difference is not None]
    means = [0.0, *(d.mean for d in found)]
    room = max(abs(v) for v in means) or 1.0
    ends = [v for d in found for v in (d.low, d.high) if v is not None]
    low = max(min([*means, *ends]), min(means) - room)
    high = min(max([*means, *ends]), max(means) + room)
    return low, high


def _picture(entry: Entry, colour: str, scale: tuple[float, float], is_base: bool) -> Markup:
    """Zero as a line, the interval as a bar, the mean as a dot; arrows where it goes on."""
    low, high = scale
    unit = (BAR - 16) / (high - low or 1.0)

    def at(value: float) -> float:
        return round(8 + (min(max(value, low), high) - low) * unit, 1)

    zero = tag("line", x1=at(0), x2=at(0), y1=0, y2=28, stroke="var(--quiet)", stroke_opacity=0.45)
    parts: list[Child] = [zero]
    d = None if entry.difference is None else entry.measure.shown(entry.difference)
    if d is not None:
        if d.low is not None and d.high is not None:
            parts.append(tag("line", x1=at(d.low), x2=at(d.high), y1=14, y2=14, stroke=colour,
                             stroke_width=2))  # fmt: skip
            for end, side, beyond in ((d.low, -1, d.low < low), (d.high, 1, d.high > high)):
                x = at(end)
                shape = f"M{x - 4 * side},10 l{4 * side},4 l{-4 * side},4"
                shape = shape if beyond else f"M{x},10 v8"
                parts.append(tag("path", d=shape, stroke=colour, fill="none", stroke_width=2))
        parts.append(tag("circle", cx=at(d.mean), cy=14, r=4, fill=colour))
    elif is_base:
        parts.append(tag("circle", cx=at(0), cy=14, r=4, fill=colour))
    return tag("svg", *parts, width=BAR, height=28, viewBox=f"0 0 {BAR} 28", aria_hidden="true")


def cost_bars(summary: Summary) -> Markup:
    """Seconds of a step as bars: the optimizer's part in colour."""
    doubt = summary.times or None
    known = [
        (e, colour)
        for e, colour in zip(summary.entries, looks(summary), strict=True)
        if e.step_seconds and e.optimizer_share is not None
    ]
    if not known:
        return Markup("")
    longest = max(e.step_seconds or 0.0 for e, _ in known)
    rows = []
    for e, colour in known:
        step, share = e.step_seconds or 0.0, e.optimizer_share or 0.0
        bar = tag("div",
                  tag("i", style=f"width:{100 * share:.2f}%;background:{colour}"),
                  class_="bar", style=f"width:{100 * step / longest:.2f}%")  # fmt: skip
        part = units.about(units.share(share), doubt)
        own, whole = (units.about(units.seconds(t), doubt) for t in (step * share, step))
        rows.append(tag("div", tag("span", e.label), tag("div", bar),
                        tag("span", tag("b", part), f" · {own} of {whole}"),
                        class_="cost muted" if doubt else "cost", title=doubt))  # fmt: skip
    about = "The coloured part of a bar is the optimizer’s share of the time of a step."  # noqa: RUF001
    bars = tag("div", *rows, class_="costs", id="bars")
    return join([tag("p", about, class_="lead"), bars])

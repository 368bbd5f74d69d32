"""The page's small print: every run and event, the configuration, machines, versions, data."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence

from mars.lab.report import units
from mars.lab.report.compare import flatten
from mars.lab.report.markup import Child, Markup, escape, join, table, tag
from mars.lab.report.runs import RunLog
from mars.lab.report.summary import Summary

MANY = 16  # runs that are shown at once
QUIET = ("saved",)  # events that say nothing about a result


def facts(summary: Summary, title: str) -> Markup:
    """One line under the title: what was trained on what."""
    run = next(iter(summary.entries[0].runs), summary.runs[0])
    total, unit = run.at("parameters", "total"), run.measure.unit
    said = [
        str(run.at("name") or ""),
        f"{units.tokens(total)} parameters" if isinstance(total, (int, float)) else "",
        f"{units.tokens(_planned(run))} {unit}" if _planned(run) else f"{run.steps:,} steps",
        str(run.at("data", "train", "source") or ""),
        str(run.at("hardware", "name") or ""),
        f"{len(summary.runs)} runs" if len(summary.runs) > 1 else "one run",
        _dates(summary.runs),
    ]
    return join((tag("span", text) for text in said if text and text != title), " ")


def runs_section(summary: Summary) -> Markup:
    """Every run; of many, those that went well are folded away."""
    if len(summary.runs) <= MANY:
        return _runs_table(summary, summary.runs)
    odd = [run for run in summary.runs if run.status != "done"]
    fold = _fold(f"All {len(summary.runs)} runs", _runs_table(summary, summary.runs))
    if not odd:
        return fold
    said = tag("p", f"{len(odd)} of {len(summary.runs)} did not finish:")
    return join([said, _runs_table(summary, odd), fold])


def _runs_table(summary: Summary, runs: Sequence[RunLog]) -> Markup:
    """Those that did not finish first."""
    labels = {id(r): e.label for e in summary.entries for r in (*e.runs, *e.others)}
    order = {"failed": 0, "diverged": 0, "stopped": 1, "unfinished": 1}
    runs = sorted(runs, key=lambda r: order.get(r.status, 2))
    names = _names(summary.runs)
    images = summary.measure.unit == "images"
    body = []
    for run in runs:
        body.append([
            names[id(run)], labels.get(id(run), run.label), units.rate(run.lr), str(run.seed),
            tag("span", run.status, class_=f"status {run.status}"),
            f"{run.step:,} of {run.steps:,}", run.measure.far(run.progress),
            units.seconds(run.seconds) if run.seconds else "–",
            *([units.accuracy(run.accuracy)] if images else []), units.loss(run.last), run.why,
        ])  # fmt: skip
    head = ["Run", "Optimizer", "lr", "Seed", "Status", "Steps",
            summary.measure.progress_words.capitalize(), "Time",
            *(["Accuracy"] if images else []), "Loss", ""]  # fmt: skip
    return table(head, body, "wide")


def events_table(summary: Summary) -> Markup | None:
    """What happened on the way, checkpoints apart."""
    names = _names(summary.runs)
    body: list[list[Child]] = [
        [names[id(run)], _whole(event.get("step")), str(event.get("what")), str(event.get("text"))]
        for run in summary.runs
        for event in run.events
        if event.get("what") not in QUIET
    ]
    return table(["Run", "Step", "What", ""], body) if body else None


def configuration(summary: Summary) -> Markup:
    """Fields that differ between runs first, then those that all share."""
    runs = summary.runs
    flat = [(run, flatten(run.header.get("config"))) for run in runs]
    keys = dict.fromkeys(key for _, config in flat for key in config)
    differ: list[list[Child]] = []
    same: list[list[Child]] = []
    for key in keys:
        if any(other.startswith(f"{key}.") for other in keys):
            continue  # an empty dict here, names and values in another run
        who: dict[str, list[str]] = defaultdict(list)
        for run, config in flat:
            labels = who[_value(config[key]) if key in config else "not set"]
            if run.label not in labels:
                labels.append(run.label)
        if len(who) == 1:
            same.append([_breakable(key), next(iter(who))])
        elif not key.startswith("keep."):
            differ.append([_breakable(key), _values(who, len({run.label for run in runs}))])
    parts: list[Child] = []
    if differ:
        parts += [tag("h3", "Differs between runs"), table(["Field", "Values"], differ, "differ")]
    if same:
        parts.append(_fold(f"The same in all runs ({len(same)} fields)",
                           table(["Field", "Value"], same), open_=len(runs) == 1))  # fmt: skip
    return join(parts)


def _breakable(key: str) -> Markup:
    """The name of a field, which may break after a dot where there is no room."""
    return Markup(escape(key).replace(".", ".<wbr>"))


def provenance(summary: Summary) -> Markup:
    """Data, machine, versions and commands, each distinct value once."""
    facets = {
        "Training data": lambda r: _data(r, "train"),
        "Validation data": lambda r: _data(r, "valid"),
        "Hardware": lambda r: _pairs(r.header.get("hardware")),
        "Versions": lambda r: _pairs(r.header.get("versions")),
        "Sources": lambda r: str(r.header.get("code") or ""),
    }
    body: list[list[Child]] = []
    for name, get in facets.items():
        who: dict[str, list[str]] = defaultdict(list)
        for run in summary.runs:
            text = get(run)
            if text and run.label not in who[text]:
                who[text].append(run.label)
        if who:
            body.append([name, _values(who, len({run.label for run in summary.runs}))])
    commands = dict.fromkeys(str(run.header.get("command") or "") for run in summary.runs)
    races = dict.fromkeys(str(run.race.get("command") or "") for run in summary.runs)
    parts: list[Child] = [table(["What", "Value"], body)] if body else []
    said = [text for text in (*races, *commands) if text]
    if said:
        box = tag("pre", "\n".join(dict.fromkeys(said)), tabindex="0")
        parts.append(_fold(f"Commands ({len(dict.fromkeys(said))})", box, open_=len(said) < 4))
    return join(parts)


def _values(who: dict[str, list[str]], labels: int) -> Markup:
    """Values with the optimizers that have them, unless all do."""
    items = []
    if len(who) > max(labels, 4):  # a grid: shorter by optimizer
        by_label: dict[str, list[str]] = defaultdict(list)
        for value, names in who.items():
            for name in names:
                by_label[name].append(value)
        items = [
            tag("li", tag("b", name), ", ".join(sorted(values, key=_numeric)))
            for name, values in by_label.items()
        ]
        return tag("ul", *items, class_="values")
    for value, names in who.items():
        whose = (
            None if len(names) == labels else tag("small", "; ".join(names))
        )  # labels have commas
        items.append(tag("li", value, whose))
    return tag("ul", *items, class_="values")


def _fold(title: str, inside: Markup, open_: bool = False) -> Markup:
    return tag("details", tag("summary", title), inside, open=open_)


def _names(runs: Sequence[RunLog]) -> dict[int, str]:
    """Paths below their common folder: a report does not tell where somebody keeps files."""
    paths = [run.path.resolve() for run in runs]
    top = os.path.commonpath([path.parent for path in paths])
    return {id(run): os.path.relpath(path, top) for run, path in zip(runs, paths, strict=True)}


def _planned(run: RunLog) -> float | None:
    each = run.header.get(f"{run.measure.unit}_per_step")
    return each * run.steps if isinstance(each, (int, float)) else None


def _dates(runs: Sequence[RunLog]) -> str:
    days = sorted(str(run.header["time"])[:10] for run in runs if run.header.get("time"))
    if not days:
        return ""
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _data(run: RunLog, part: str) -> str:
    unit = run.measure.unit
    source, sha, count = (run.at("data", part, name) for name in ("source", "sha256", unit))
    known = f"{units.tokens(count)} {unit}" if isinstance(count, (int, float)) else ""
    said = [str(source or ""), known, f"sha256 {sha}" if sha else ""]
    return ", ".join(text for text in said if text)


def _pairs(record: object) -> str:
    if not isinstance(record, dict):
        return ""
    return ", ".join(f"{key} {_value(v)}" for key, v in record.items() if v is not None)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _numeric(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return 0.0, text


def _whole(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else ""

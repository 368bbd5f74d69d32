"""One self-contained HTML file: result, curves, settings. It needs no network and no server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from mars.lab.report import details, result
from mars.lab.report.markup import Child, Markup, escape, tag
from mars.lab.report.payload import embed, payload
from mars.lab.report.runs import RunLog
from mars.lab.report.summary import Summary
from mars.lab.report.words import headline
from mars.lab.rundir import write_atomically

SCRIPTS = ("base.js", "scale.js", "curves.js", "chart.js", "hand.js", "save.js", "page.js")


def render(runs: Sequence[RunLog], summary: Summary, title: str | None = None) -> str:
    """The page."""
    script = "(() => {\n'use strict';\n" + "".join(map(_resource, SCRIPTS)) + "})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = title or default_title(runs)
    fields: dict[str, Child] = {
        "title": title,
        "hash": digest,
        "style": Markup(_resource("page.css")),
        "facts": details.facts(summary, title),
        "headline": _with_code(headline(summary)),
        "warnings": _warnings(summary),
        "result": result.result_table(summary),
        "score": summary.measure.score,
        "progress": summary.measure.progress_words.capitalize(),
        "measure": summary.measure.name.split()[-1],
        "grid": _grid(summary),
        "cost": result.cost_bars(summary),
        "runs": details.runs_section(summary),
        "events": details.events_table(summary) or Markup("<p class=quiet>None.</p>"),
        "configuration": details.configuration(summary),
        "provenance": details.provenance(summary),
        "data": Markup(embed(payload(summary))),
        "script": Markup(script),
    }
    # One pass: what is filled in is never searched for more to fill in.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: escape(fields[m[1]]), _resource("page.html"))


def write(
    path: str | Path, runs: Sequence[RunLog], summary: Summary, title: str | None = None
) -> Path:
    """Render into a file, which is replaced as a whole or not at all."""
    path = Path(path)
    text = render(runs, summary, title)
    write_atomically(path, text.encode())
    return path


def default_title(runs: Sequence[RunLog]) -> str:
    """The race's name, else the recipe's."""
    race = next((str(run.race["name"]) for run in runs if run.race.get("name")), None)
    names = dict.fromkeys(str(run.header.get("name") or run.path.name) for run in runs)
    labels = dict.fromkeys(run.label for run in runs)
    return race or ", ".join(names) + (f": {next(iter(labels))}" if len(labels) == 1 else "")


def _grid(summary: Summary) -> Markup:
    """Where curves of rates come from that are not of these runs, before what they show."""
    found = [curve for curve in summary.sensitivity if curve.source != "runs"]
    if not found:
        return Markup("")
    made = tag("code", found[0].source)
    if summary.origin == "study":
        return tag("p", "From all runs of ", made, ".", class_="lead")
    whose = "Not from these runs"
    if len(found) < len(summary.sensitivity):
        whose = f"{', '.join(curve.label for curve in found)}: not from these runs"
    what = "a grid that comes with the package" if summary.origin == "package" else "a grid"
    rates = {name: e.lr for e in summary.entries for name in (e.label, e.optimizer)}
    chosen = all(rates.get(c.label, rates.get(c.optimizer)) == c.best for c in found)
    so = "; the rates of the table were chosen from it." if chosen else "."
    return tag("p", f"{whose}: {what}, made with ", made, so, class_="lead")


def _with_code(text: str) -> Markup:
    """Commands of this project, which words have between backticks, as code."""
    return Markup(re.sub("`(mars [^`]*)`", r"<code>\1</code>", escape(text)))


def _warnings(summary: Summary) -> Markup:
    if not summary.warnings:
        return Markup("")
    loud = [tag("li", tag("strong", w)) for w in summary.warnings if w.startswith("not comp")]
    rest = [tag("li", w) for w in summary.warnings if not w.startswith("not comp")]
    shown, folded = [*loud, *rest][:6], [*loud, *rest][6:]
    more = tag("details", tag("summary", f"{len(folded)} more"), tag("ul", *folded))
    return tag("div", tag("ul", *shown), more if folded else None, class_="warnings", role="note")


def _resource(name: str) -> str:
    return resources.files("mars.lab.report").joinpath(name).read_text(encoding="utf-8")

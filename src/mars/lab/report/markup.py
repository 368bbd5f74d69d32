"""HTML that cannot be broken by what it shows: every string is escaped unless it is Markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None


def escape(text: object) -> Markup:
    """
    >>> print(escape("<b>"), escape(Markup("<b>")))
    &lt;b&gt; <b>
    """
    if isinstance(text, Markup):
        return text
    clean = str(text).encode("utf-8", "replace").decode("utf-8")  # no lone surrogates
    return Markup(html.escape(clean, quote=True))


def tag(name: str, *children: Child, **attributes: object) -> Markup:
    """One element; `class_` is class, `data_x` is data-x, None and False are left out.

    >>> print(tag("td", "a & b", class_="number"))
    <td class="number">a &amp; b</td>
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape("" if value is True else value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{said}>{join(children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    return Markup(between.join(escape(child) for child in children if child is not None))


def rows(cells: Iterable[Sequence[Child]], head: bool = False) -> Markup:
    """Table rows; the first cell of a row of the body is its head."""
    out = []
    for row in cells:
        first, *rest = row
        if head:
            out.append(tag("tr", *(tag("th", cell, scope="col") for cell in row)))
        else:
            out.append(tag("tr", tag("th", first, scope="row"), *(tag("td", c) for c in rest)))
    return join(out)


def table(head: Sequence[Child], body: Iterable[Sequence[Child]], class_: str = "") -> Markup:
    """A table in a box that scrolls sideways where it does not fit."""
    inner = tag("table", tag("thead", rows([head], head=True)), tag("tbody", rows(body)))
    return tag("div", inner, class_=f"scroll {class_}".strip(), tabindex="0", role="region",
               aria_label=" ".join(["Table:", str(head[0])]))  # fmt: skip

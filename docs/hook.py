"""What Markdown cannot say of the site.

Links that leave docs/ are text there, figures do not wrap, a picture leads to itself, and
a page without sections has no list of them.

Links out of docs/ lead somewhere in a checkout, but not on the site.
"""

from __future__ import annotations

import re
from typing import Any

LEAVING = re.compile(r"\[(?P<text>[^]]+)]\(\.\./(?P<path>[^)#]+)(?P<anchor>#[^)]*)?\)")
# A cell that is a figure, with a spread, an interval or a unit, and no sentence; or names a γ.
FIGURE = re.compile(r"<td(?P<how>[^>]*)>(?P<text>[−+≈]?\d[^<]{,28}|γ = [\d.]+)</td>")
# A picture by itself: on a phone one has to open it to read it.
PICTURE = re.compile(r'<p>(?P<image><img [^>]*src="(?P<where>[^"]+)"[^>]*>)</p>')


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page after it is rendered."""
    if not any(title.children for title in page.toc):  # a page of one table has the room of two
        page.meta.setdefault("hide", ["toc"])
    html = FIGURE.sub(r'<td class="figure"\g<how>>\g<text></td>', html)
    return PICTURE.sub(r'<p><a href="\g<where>">\g<image></a></p>', html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page before it is rendered."""
    return LEAVING.sub(_on_site, markdown)


def _on_site(link: re.Match[str]) -> str:
    text, path = link["text"], link["path"]
    if path.endswith(text.strip("`")):
        return f"`{path}`"
    breakable = text.strip("`").replace("_", "_<wbr>")  # names of tests are long
    return f'<code title="{path}">{breakable}</code>'

"""The documentation site: built strictly, whole without a network, and seen in a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import chromium

if not os.environ.get("CI"):  # there, what is missing is a failure
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = sorted(page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md"))


class Html(HTMLParser):
    """What a page refers to: what it loads, where it leads, and what can be led to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag != "a":
            self.loads += [found[name] for name in ("src", "href", "srcset") if name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    """Every page but the one for a server that does not find another, which has no place."""
    return {path: Html(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium.skip_if_missing()
    with chromium.opened(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def visit(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(page.as_uri())


def wait(browser: Any, condition: str, seconds: float = 10) -> Any:
    """Until the expression is true, and its value."""
    script = """const done = arguments[2], end = Date.now() + 1000 * arguments[1]
        const ask = () => { const found = eval(arguments[0])
            found || Date.now() > end ? done(found) : setTimeout(ask, 50) }
        ask()"""
    return browser.execute_async_script(script, condition, seconds)


def test_every_page_is_there(site: Path, pages: dict[Path, Html]) -> None:
    """Reports of races and studies are pages of their own making."""
    made = {path.relative_to(site).with_suffix("").as_posix() for path in pages}
    report = re.compile(r"/report(-batch\d+(-steps\d+)?)?$")
    assert {name for name in made if not report.search(name)} == set(SOURCES)


def test_nothing_is_loaded_from_a_network(site: Path, pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        for target in page.loads:
            assert not re.match(r"(https?:)?//", target), (path.name, target)
            if not target.startswith(("data:", "#")):
                assert (path.parent / unquote(urlsplit(target).path)).exists(), (path.name, target)
    for path in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", path.read_text()), path


def test_every_link_leads_somewhere(pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme in ("http", "https"):
                continue
            file = (path.parent / unquote(to.path)).resolve() if to.path else path
            assert file.is_file(), (path.name, link)
            if to.fragment and file in pages:
                assert unquote(to.fragment) in pages[file].ids, (path.name, link)


def test_links_that_leave_docs_are_text(site: Path) -> None:
    text = (site / "trainers.html").read_text()
    assert "<code>examples/plain_loop.py</code>" in text
    assert 'href="results.html"' in (site / "lab.html").read_text()  # what was in the README


def test_every_public_name_is_in_the_reference(pages: dict[Path, Html]) -> None:
    import mars

    (reference,) = (page for path, page in pages.items() if path.stem == "api")
    for name in mars.__all__:
        assert any(found.startswith(f"mars.{name}") for found in reference.ids), name


@pytest.mark.parametrize("name", SOURCES)
def test_it_opens_on_a_phone_and_a_desk(browser: Any, site: Path, name: str) -> None:
    for width in (375, 1280):
        visit(browser, site / f"{name}.html", width)
        # Material wraps tables, so that they scroll by themselves, when its script runs.
        assert wait(browser, "document.documentElement.classList.contains('js')")
        table = "document.querySelector('.md-typeset table:not([class])')"
        wrapped = "document.querySelector('.md-typeset__scrollwrap table')"
        assert wait(browser, f"!{table} || {wrapped}")
        sizes = "const d = document.documentElement; return [d.scrollWidth, d.clientWidth]"
        inside, window = browser.execute_script(sizes)
        assert inside <= window, "it must not scroll sideways"
        loaded = browser.execute_script("return performance.getEntriesByType('resource')")
        assert [entry["name"] for entry in loaded if entry["name"].startswith("http")] == []
        problems = [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]
        assert problems == []


def test_the_search_finds(browser: Any, site: Path) -> None:
    visit(browser, site / "index.html", 1280)
    browser.find_element("css selector", "input.md-search__input").send_keys("lr_1d")
    results = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    assert wait(browser, f"{results}.length")
    found = browser.execute_script(f"return {results}")
    assert any("choosing.html" in href for href in found), found
    assert any("api.html" in href for href in found), found
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []


def test_colours_follow_the_system_and_the_button(browser: Any, site: Path) -> None:
    scheme = "document.body.dataset.mdColorScheme"
    visit(browser, site / "index.html", 1280, "dark")
    assert wait(browser, f"{scheme} === 'slate'")
    visit(browser, site / "index.html", 1280, "light")
    assert wait(browser, f"{scheme} === 'default'")
    for expected in ("default", "slate"):  # from the system's to light, then to dark
        browser.find_element("css selector", "form label.md-header__button:not([hidden])").click()
        assert wait(browser, f"{scheme} === '{expected}'"), expected

"""The page in a real browser: headless Chromium, from a file, with no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic_logs as logs

import chromium
from mars.lab.report import load, summarise, units, write

EVIL = '<img src=x onerror="document.title=1"><script>document.title=1</script>'

LATE = {59.97: "1 min", 3599.7: "1 h", 86399.9: "1 d"}  # seconds that round up to the next unit

chromium.skip_if_missing()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a race, a grid, and of everything that is odd."""
    top = tmp_path_factory.mktemp("report")
    odd = top / "odd"
    logs.run(odd / "one", "adamw", accuracy=True, head={"label": EVIL, "name": EVIL})
    logs.run(odd / "two", "muon", upto=150, status=None)
    logs.run(odd / "three", "lion", diverge=60, status="failed", text=EVIL)
    logs.run(odd / "four", "mars-m", valid=False)
    logs.run(odd / "five", "my.module:Optimizer" * 4, head={"steps": 200})
    logs.write(odd / "six", [logs.header("soap")])
    logs.run(top / "mixed" / "text", "adamw")
    clock = [{"kind": "valid", "step": i, "loss": 5.0, "seconds": s} for i, s in enumerate(LATE)]
    logs.write(top / "clock", [logs.header("adamw"), *clock])
    logs.vision(top / "mixed" / "images", seeds=1)
    folders = {
        "race": logs.race(top / "race"), "grid": logs.grid(top / "grid"), "odd": odd,
        "single": logs.run(top / "single", "mars-adamw"), "header": odd / "six",
        "images": logs.vision(top / "images"), "mixed": top / "mixed", "clock": top / "clock",
    }  # fmt: skip
    written = {}
    for name, folder in folders.items():
        runs = load([folder])
        written[name] = write(top / f"{name}.html", runs, summarise(runs))
    return written


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium.opened(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


class Page:
    """One open page and what a reader does with it."""

    def __init__(self, browser: Any, path: Path, hash: str = "", width: int = 1280) -> None:
        self.browser = browser
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(path.as_uri() + hash)
        self.js("try { localStorage.clear() } catch {}")

    def js(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def lines(self, figure: str = "#main", role: str = "main") -> dict[str, str]:
        """The drawn path of each labelled line."""
        return dict(
            self.js(
                "return [...document.querySelectorAll(arguments[0])]"
                ".map(p => [p.dataset.label, p.getAttribute('d')])",
                f"{figure} path.line.{role}",
            )
        )

    def label(self) -> str:
        return self.js("return document.querySelector('#main .x-label').textContent")

    def tick_texts(self) -> list[str]:
        query = "return [...document.querySelectorAll('#main .axes text')].map(t => t.textContent)"
        return self.js(query)

    def press(self, key: str, value: str) -> None:
        self.find(f'button[data-key="{key}"][value="{value}"]').click()

    def drag(self, dx: int, dy: int = 0) -> None:
        from selenium.webdriver import ActionChains

        plot = self.find("#main .plot")
        self.js("arguments[0].scrollIntoView({block: 'center'})", plot)
        chain = ActionChains(self.browser, duration=20).move_to_element(plot)
        chain.click_and_hold().move_by_offset(dx, dy).release().perform()

    def zoom(self) -> str:
        return self.js("return new URLSearchParams(location.hash.slice(1)).get('zoom') || ''")

    def errors(self) -> list[str]:
        found = self.browser.get_log("browser")
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]


@pytest.mark.parametrize("name", ["race", "grid", "odd", "single", "header", "images"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_opens_cleanly(
    browser: Any, pages: dict[str, Path], name: str, width: int
) -> None:
    page = Page(browser, pages[name], width=width)
    assert page.errors() == []
    entries = page.js(
        "return performance.getEntries().filter(e => e.entryType === 'resource').map(e => e.name)"
    )
    assert [entry for entry in entries if not entry.startswith("data:")] == []
    sizes = page.js("const d = document.documentElement; return [d.scrollWidth, d.clientWidth]")
    assert sizes[0] <= sizes[1], "it must not scroll sideways"
    drawn = page.lines()
    expected = {"race": 7, "grid": 7, "odd": 4, "single": 1, "header": 0, "images": 7}[name]
    assert len(drawn) == expected
    assert all(path.count("L") >= 2 for path in drawn.values())
    assert page.js("return document.title") != "1"
    bad = "return [...document.querySelectorAll('svg *')].filter(e => [...e.attributes]"
    bad += ".some(a => /NaN|undefined|Infinity/.test(a.value))).map(e => e.outerHTML)"
    assert page.js(bad) == []


def test_a_long_name_leaves_room_for_figures_on_a_phone(
    browser: Any, pages: dict[str, Path]
) -> None:
    """The column of names stays in view while the table scrolls."""
    page = Page(browser, pages["odd"], width=390)
    names = page.js(
        "return [...document.querySelectorAll('.result tbody th')]"
        ".map(e => e.getBoundingClientRect().width)"
    )
    assert names
    assert max(names) < 390 / 2


def test_a_table_that_is_cut_on_a_phone_shows_that_it_goes_on(
    browser: Any, pages: dict[str, Path]
) -> None:
    box = "document.querySelector('.result').parentNode"
    look = f"const b = {box}; return [b.className, getComputedStyle(b).maskImage !== 'none', "
    look += "getComputedStyle(b.nextSibling).display]"
    page = Page(browser, pages["race"], width=400)
    assert page.js(look) == ["scroll over more", True, "block"]
    page.js(f"const b = {box}; b.scrollLeft = b.scrollWidth")
    page.js("return new Promise(requestAnimationFrame)")
    assert page.js(look) == ["scroll over", False, "block"]
    assert Page(browser, pages["race"], width=1280).js(look) == ["scroll", False, "none"]


def test_a_click_in_the_legend_hides_and_a_double_click_isolates(
    browser: Any, pages: dict[str, Path]
) -> None:
    from selenium.webdriver import ActionChains

    page = Page(browser, pages["race"])
    button = page.find('#legend button[data-label="Muon"]')
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert "Muon" not in page.lines()
    assert len(page.lines()) == 6
    assert "Muon" not in page.lines("#t-norm")
    pressed = page.find('#diagnostics-legend button[data-label="MARS-M"]')
    assert pressed.get_attribute("aria-pressed") == "true"
    pressed.click()
    assert page.find('#legend button[data-label="MARS-M"]').get_attribute("aria-pressed") == "false"
    pressed.click()
    button.send_keys("\ue007")  # Enter: by keyboard too
    assert len(page.lines()) == 7
    ActionChains(browser).double_click(button).perform()
    assert list(page.lines()) == ["Muon"]
    ActionChains(browser).double_click(button).perform()
    assert len(page.lines()) == 7
    assert page.errors() == []


def test_axes_switch(browser: Any, pages: dict[str, Path]) -> None:
    page = Page(browser, pages["race"])
    before = page.lines()
    assert page.label() == "Tokens"
    assert "1M" in page.tick_texts()
    page.press("x", "seconds")
    assert page.label() == "Wall-clock time, without validation"
    assert "10 s" in page.tick_texts()
    assert page.lines() != before
    page.press("x", "step")
    assert page.label() == "Steps"
    linear = page.lines()
    page.press("ylog", "1")
    assert page.lines() != linear
    page.press("xlog", "1")
    page.press("range", "all")
    page.press("metric", "train.loss")
    assert page.js("return document.querySelector('#main .y-label').textContent") == "Training loss"
    smooth = page.lines()
    page.js("const s = document.querySelector('input[type=range]'); s.value = 0;"
            "s.dispatchEvent(new Event('input'))")  # fmt: skip
    assert page.lines() != smooth
    page.press("seeds", "")
    assert page.lines(role="thin") == {}
    assert page.errors() == []


def test_drag_zooms_and_a_double_click_resets(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver import ActionChains

    page = Page(browser, pages["race"])
    whole, ticks = page.lines(), page.tick_texts()
    page.drag(200)
    low, high = (float(v) for v in page.zoom().split(" "))
    assert 0 < low < high < 400 * logs.PER_STEP
    assert page.lines() != whole
    assert page.tick_texts() != ticks
    page.drag(150, 80)
    assert len(page.zoom().split(" ")) == 4  # a box sets y too
    ActionChains(browser).double_click(page.find("#main .plot")).perform()
    assert page.zoom() == ""
    assert page.lines() == whole
    assert page.errors() == []


def test_the_wheel_zooms_a_chart_that_was_chosen_and_scrolls_otherwise(
    browser: Any, pages: dict[str, Path]
) -> None:
    page = Page(browser, pages["race"])
    wheel = (
        "const p = document.querySelector('#main .plot'), r = p.getBoundingClientRect();"
        "return p.dispatchEvent(new WheelEvent('wheel', {deltaY: -100, bubbles: true,"
        "cancelable: true, clientX: r.left + r.width / 2, clientY: r.top + 100}))"
    )
    assert page.js(wheel) is True  # not prevented: the page may scroll
    assert page.zoom() == ""
    page.js("document.querySelector('#main .plot').focus()")
    assert page.js(wheel) is False
    assert page.zoom() != ""


def test_hover_and_keys_read_values(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver import ActionChains

    page = Page(browser, pages["race"])
    plot = page.find("#main .plot")
    page.js("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser, duration=20).move_to_element(plot).perform()
    tip = page.find("#main .tip")
    assert tip.is_displayed()
    first = tip.text.splitlines()[0]
    measured = {f"{step * logs.PER_STEP / 1e6:.3g}M tokens" for step in range(125, 300, 25)}
    assert first in measured  # it snaps to a validation
    assert len(tip.find_elements("css selector", "tr")) == 7
    inside = page.js("return document.querySelectorAll('#main svg > g:last-child circle').length")
    assert inside == 7
    plot.send_keys("\ue014" * 20)  # arrow to the right
    assert tip.text.splitlines()[0] > first
    plot.send_keys("+")
    assert page.zoom() != ""
    plot.send_keys("\ue00c")
    assert page.zoom() == ""


def test_times_are_read_as_in_the_tables(browser: Any, pages: dict[str, Path]) -> None:
    for seconds, text in LATE.items():
        page = Page(browser, pages["clock"], f"#x=seconds&zoom={seconds - 0.1}+{seconds + 0.1}")
        page.find("#main .plot").send_keys("\ue014")  # arrow to the right
        assert page.find("#main .tip").text.splitlines()[0] == text == units.seconds(seconds)


def test_a_chart_of_single_points_is_left_out(browser: Any, tmp_path: Path) -> None:
    """A study has one time of a step for a run: the bars say it."""
    for name in ("adamw", "muon"):
        logs.run(tmp_path / name, name, log_every=400)
    runs = load([tmp_path])
    page = Page(browser, write(tmp_path / "report.html", runs, summarise(runs)))
    assert page.js("return document.querySelectorAll('.cost').length") == 2
    assert not page.find("#t-speed").is_displayed()
    assert "the optimizer’s share of the time of a step" in page.find("#cost").text  # noqa: RUF001


def test_a_run_without_times_is_not_drawn_over_them(browser: Any, tmp_path: Path) -> None:
    """As an arm of a study is that was not there when steps were timed."""
    logs.run(tmp_path / "timed", "adamw")
    head = logs.header("muon")
    body = [{**record, "seconds": None} for record in logs.records(head)]
    logs.write(tmp_path / "untimed", [head, *body, logs.end(body)])
    runs = load([tmp_path])
    page = Page(browser, write(tmp_path / "report.html", runs, summarise(runs)))
    assert sorted(page.lines()) == ["AdamW", "Muon"]
    page.press("x", "seconds")
    assert list(page.lines()) == ["AdamW"]


def test_settings_live_in_the_address(browser: Any, pages: dict[str, Path]) -> None:
    page = Page(browser, pages["race"], "#x=seconds&metric=train.loss&hide=Muon%0ALion&zoom=5+20")
    assert page.label() == "Wall-clock time, without validation"
    assert sorted(set(logs.OPTIMIZERS) - {"muon", "lion"}) == sorted(
        label.lower() for label in page.lines()
    )
    assert "10 s" in page.tick_texts()
    assert "40 s" not in page.tick_texts()
    page.press("ylog", "1")
    assert "ylog=1" in browser.current_url
    assert "hide=Muon" in browser.current_url
    nonsense = Page(browser, pages["race"], "#x=__proto__&metric=constructor&zoom=a+b&smooth=x")
    assert len(nonsense.lines()) == 7
    assert nonsense.errors() == []


def test_the_theme_button_changes_the_page_and_is_remembered(
    browser: Any, pages: dict[str, Path]
) -> None:
    page = Page(browser, pages["race"])
    ground = "return getComputedStyle(document.body).backgroundColor"
    before, ink = page.js(ground), page.lines()
    stroke = "return document.querySelector('#main path.line.main').getAttribute('stroke')"
    colour = page.js(stroke)
    page.find("#theme").click()
    after = page.js(ground)
    assert after != before
    assert page.js(stroke) != colour
    assert page.lines() == ink
    browser.refresh()
    assert page.js(ground) == after
    page.find("#theme").click()
    assert page.js(ground) == before


def test_sensitivity_marks_what_diverged(browser: Any, pages: dict[str, Path]) -> None:
    page = Page(browser, pages["grid"])
    assert len(page.lines("#rates-chart")) == 7
    named = page.js("return [...document.querySelectorAll('#rates-legend button')].length")
    assert named == 7
    crosses = page.js("return document.querySelectorAll('#rates-chart path.top').length")
    assert crosses == 2
    assert page.lines(role="thin") == {}
    page.press("rates", "1")
    assert len(page.lines(role="thin")) == 7  # labels; each has its other rates


def test_diagnostics_and_accuracy_are_drawn(browser: Any, pages: dict[str, Path]) -> None:
    page = Page(browser, pages["race"])
    for figure in ("#d-clipped", "#d-norm", "#d-cosine", "#d-variance"):
        assert len(page.lines(figure)) == 4, figure
    assert "2.402 if noise" in page.find("#d-variance").text
    odd = Page(browser, pages["odd"])
    odd.press("metric", "valid.accuracy")
    assert list(odd.lines()) == [EVIL]
    assert "80%" in odd.tick_texts()


def test_charts_can_be_downloaded(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    page = Page(browser, pages["race"])
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    for button in browser.find_elements("css selector", "#d-norm .save button"):
        page.js("arguments[0].click()", button)
    names = {f"norm-of-the-corrected-gradient-c.{ending}" for ending in ("svg", "png", "csv")}
    for _ in range(100):
        if names <= {path.name for path in tmp_path.iterdir()}:
            break
        page.js("return new Promise(done => setTimeout(done, 50))")
    (svg, png, csv) = (
        tmp_path / f"norm-of-the-corrected-gradient-c.{e}" for e in ("svg", "png", "csv")
    )
    assert "MARS-Shampoo" in svg.read_text()
    assert "var(" not in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(csv.read_text().splitlines()) == 1 + 4 * 8
    assert page.errors() == []


def test_it_prints_in_light_colours(browser: Any, pages: dict[str, Path]) -> None:
    page = Page(browser, pages["race"])
    page.find("#theme").click()
    stroke = "return document.querySelector('#main path.line.main').getAttribute('stroke')"
    dark = page.js(stroke)
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert page.js(stroke) != dark
    page.js("dispatchEvent(new Event('afterprint'))")
    assert page.js(stroke) == dark
    assert len(browser.print_page()) > 20_000


def test_text_and_images_in_one_report_are_drawn(browser: Any, pages: dict[str, Path]) -> None:
    page = Page(browser, pages["mixed"])
    assert page.lines()
    page.press("x", "step")
    assert len(page.lines()) > 1
    assert page.errors() == []


def test_images_are_shown_by_accuracy_over_epochs(browser: Any, pages: dict[str, Path]) -> None:
    page = Page(browser, pages["images"], "#x=tokens")
    pressed = "return [...document.querySelectorAll('#controls [aria-pressed=true]')]"
    assert page.js(f"{pressed}.map(b => b.value)")[:2] == ["valid.accuracy", "epoch"]
    assert page.label() == "Epochs"
    assert any(text.endswith("%") for text in page.tick_texts())
    accuracies = page.lines()
    assert set(accuracies) == {label for label, *_ in logs.OPTIMIZERS.values()}
    page.press("metric", "valid.loss")
    assert page.lines() != accuracies
    page.press("x", "seconds")
    assert "Wall-clock" in page.label()
    assert "Images per second" in page.find("#t-speed").text
    shown = page.js("return document.body.innerText")
    assert "Best accuracy" in shown
    assert "token" not in shown.lower()
    assert page.errors() == []

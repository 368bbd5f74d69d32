"""The page as text: complete, self-contained, and harmless whatever the logs say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import synthetic_logs as logs

from mars.lab.errors import LabError
from mars.lab.report import ReportArgs, load, render, report_command, summarise, write
from mars.lab.report.thin import keep, local_mean

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>"\'</title>{{data}}&amp;'


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the two scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def page(*paths: Path, title: str | None = None) -> str:
    runs = load(paths)
    return render(runs, summarise(runs), title=title)


def data(text: str) -> dict:
    return json.loads(Elements(text).scripts[0])


def test_a_page_is_self_contained_and_small(tmp_path: Path) -> None:
    text = page(logs.race(tmp_path / "race"))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    links = [a for t, a in Elements(text).found if t == "link" or "src" in a]
    assert links == [{"rel": "icon", "href": "data:,"}]
    bare = len(text) - len(Elements(text).scripts[0])
    assert bare < 120_000


def test_rendering_is_deterministic_and_leaks_no_path(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw", "muon"))
    assert page(race) == page(race)
    assert str(tmp_path) not in page(race)


def test_what_logs_say_cannot_become_markup(tmp_path: Path) -> None:
    head = {
        "label": EVIL, "name": EVIL, "command": EVIL, "code": EVIL, "engine": EVIL, "time": EVIL,
        "versions": {EVIL: EVIL}, "hardware": {"name": EVIL}, "config": {EVIL: {EVIL: [EVIL]}},
        "data": {"train": {"source": EVIL, "sha256": EVIL}},
    }  # fmt: skip
    for seed in (0, 1):
        where = tmp_path / "race" / f"a{seed}<script>"
        logs.run(where, "mars-" + EVIL, head=dict(head), seed=seed, status="failed", text=EVIL)
        with open(where / "log.jsonl", "a") as log:
            event = {"kind": "event", **logs.at(400), "what": EVIL, "text": EVIL + "\ud800"}
            log.write(json.dumps(event) + "\n")
    text = page(tmp_path, title=EVIL)
    clean = page(logs.race(tmp_path / "clean", names=("adamw",)))
    text.encode()
    elements = Elements(text)
    assert sum(t == "script" for t, _ in elements.found) == 2
    assert not [t for t, _ in elements.found if t == "img"]
    handlers = [k for _, attributes in elements.found for k in attributes if k.startswith("on")]
    assert handlers == []
    assert elements.scripts[1] == Elements(clean).scripts[1]
    assert json.loads(elements.scripts[0])["entries"][0]["label"] == EVIL
    assert "<" not in elements.scripts[0]


def test_the_policy_allows_our_script_alone(tmp_path: Path) -> None:
    text = page(logs.run(tmp_path / "a", "adamw"))
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_the_page_says_what_the_summary_says(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw", "muon"))
    logs.run(race / "short", "lion", head={"steps": 200})
    text = page(race)
    assert "Muon is lowest" in text
    assert "not comparable: steps 200 (not 400)" in text
    assert "mars race gpt-tiny" in text
    assert "a1" * 32 in text


def test_a_grid_of_the_package_is_not_shown_as_if_it_were_ones_own(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw", "muon"))
    grid = {"label": "AdamW", "best": 3e-3, "losses": {"0.003": [4.8], "0.006": [4.9]}}
    rates = {"command": "mars race gpt-tiny --rates 1 2", "optimizers": {"adamw": grid}}
    shipped = {**rates, "origin": "package"}

    def lead(rates: dict) -> str:
        runs = load([race])
        text = render(runs, summarise(runs, rates=rates))
        return text.partition("<h2>Learning rates</h2>")[2].partition("<div")[0]

    said = "Not from these runs: a grid that comes with the package, made with <code>mars race "
    assert said in lead(shipped)
    assert "; the rates of the table were chosen from it.</p>" in lead(shipped)
    assert "comes with the package" not in lead(rates)
    grid["best"] = 6e-3  # the table has another rate
    assert "chosen from it" not in lead(shipped)
    logs.run(race / "muon-more", "muon", 4e-2)
    assert "AdamW: not from these runs" in lead(shipped)
    assert "From all runs of <code>mars race" in lead({**rates, "origin": "study"})


def test_long_series_are_thinned_but_keep_their_extremes(tmp_path: Path) -> None:
    head = logs.header("adamw", steps=20_000)
    body = [{"kind": "train", **logs.at(i), "loss": 3.0, "grad_norm": 1.0} for i in range(20_000)]
    body[777]["loss"], body[12_345]["loss"], body[4_321]["grad_norm"] = 9.5, 0.5, 88.0
    body[9_999]["loss"] = None
    logs.write(tmp_path / "a", [head, *body])
    (entry,) = data(page(tmp_path / "a"))["entries"]
    train = entry["runs"][0]["train"]
    assert 300 < len(train["loss"]) <= 1500
    assert (train["step"][0], train["step"][-1]) == (0, 19_999)
    known = [value for value in train["loss"] if value is not None]
    assert (max(known), min(known), max(train["grad_norm"])) == (9.5, 0.5, 88)
    assert len(train["smooth"]) == len(train["loss"])


def test_local_means_are_those_of_the_whole_series() -> None:
    """Smoothing kept extremes only would give (0 + 9)/2 here, not the mean, 1."""
    values = np.tile([0.0] * 8 + [9.0], 2000)
    series = {"step": np.arange(18_000.0), "loss": values}
    at = keep(series, ("loss",), 500)
    assert np.mean(values[at]) > 3
    inner = local_mean(values, at)[5:-5]
    np.testing.assert_allclose(inner, 1.0, atol=0.15)


def test_many_runs_share_the_room(tmp_path: Path) -> None:
    for seed in range(40):
        logs.run(tmp_path / str(seed), "adamw", seed=seed, log_every=1, head={"steps": 1200})
    text = page(tmp_path)
    runs = data(text)["entries"][0]["runs"]
    assert len(runs) == 40
    assert {len(run["train"]["loss"]) <= 900 for run in runs} == {True}
    assert "All 40 runs" in text


def test_diagnostics_are_weighed_by_tensors(tmp_path: Path) -> None:
    groups = [
        {"name": "matrices", "tensors": 3, "cosine": 0.4, "c_norm": 1.0, "clipped": 1.0},
        {"name": "head", "tensors": 1, "cosine": 0.0, "c_norm": None, "clipped": 0.0},
        {"name": "vectors", "tensors": 0, "cosine": None, "c_norm": None, "clipped": None},
    ]
    record = {"kind": "diagnostics", **logs.at(10), "groups": groups}
    logs.write(tmp_path / "a", [logs.header("mars-m"), record])
    found = data(page(tmp_path / "a"))["entries"][0]["runs"][0]["diagnostics"]
    assert sorted(found) == ["all", "head", "matrices"]
    assert found["all"]["cosine"] == [pytest.approx(0.3)]
    assert found["all"]["c_norm"] == [1]
    assert found["all"]["clipped"] == [0.75]


def test_the_command_writes_beside_the_first_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    race = logs.race(tmp_path / "race", names=("adamw", "muon"))
    settings = json.loads((race / "race.json").read_text()) | {"baseline": "muon"}
    (race / "race.json").write_text(json.dumps(settings))
    written = report_command(ReportArgs(runs=(race,)))
    said = capsys.readouterr().out
    assert written == race / "report.html"
    assert said.endswith(f"\n{written}\n")
    assert "to Muon" in said  # the race's baseline
    report_command(ReportArgs(runs=(race / "muon-s0" / "log.jsonl",)))
    assert (race / "muon-s0" / "report.html").exists()
    (race / "results.jsonl").touch()  # a study's, which has a page of its own
    assert report_command(ReportArgs(runs=(race,))) == race / "runs.html"


def test_bad_input_leaves_the_old_report_alone(tmp_path: Path) -> None:
    race = logs.race(tmp_path / "race", names=("adamw",))
    (race / "report.html").write_text("old")
    with pytest.raises(LabError, match="nope"):
        report_command(ReportArgs(runs=(race, tmp_path / "nope")))
    with pytest.raises(LabError, match="does not exist"):
        report_command(ReportArgs(runs=(race,), out=tmp_path / "no" / "where.html"))
    with pytest.raises(LabError, match="--baseline foo: no run is by it; there are adamw"):
        report_command(ReportArgs(runs=(race,), baseline="foo"))
    assert (race / "report.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["race"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    runs = load([logs.run(tmp_path / "a", "adamw")])
    (tmp_path / "folder").mkdir()
    with pytest.raises(LabError, match="folder"):
        write(tmp_path / "folder", runs, summarise(runs))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]

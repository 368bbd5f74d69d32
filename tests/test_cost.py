"""bench/cost.py: its file and how it goes on, formats that fit, its tables; never its seconds."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cost
import cost_plan
import cost_table
import pytest
import readme_tables
import table_cells
import torch
from cost_plan import ENTRANTS, Kept, Place

from mars.lab.planner import gpus, validate
from mars.lab.planner.gpus import RESERVED_BYTES
from mars.lab.planner.steps import OPTIMIZERS

H200 = gpus.find("h200")
CPU = Place(torch.device("cpu"), H200, known=False, memory_bytes=float("inf"))
ON_H200 = Place(torch.device("cuda"), H200, known=True, memory_bytes=H200.memory_bytes)
ARGS = argparse.Namespace(batch=2, rounds=1, steps=1, compile=False, seconds=float("inf"))


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> None:
    options = ["--device", "cpu", "--sizes", "tiny", "--rounds", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["cost.py", *options, "--out", str(out), *words])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # which the script sets; ours again afterwards
    cost.main()


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that was made in two calls: the first had time for one cell only."""
    out = tmp_path_factory.mktemp("cost") / "deep" / "cost.json"
    with pytest.MonkeyPatch.context() as patch:
        run(patch, out, "--seconds", "0.001")
        first = read(out)["rows"]
        assert [r["optimizer"] for r in first if r["status"] == "measured"] == ["adamw"]
        run(patch, out)
    assert read(out)["rows"][0] == first[0]  # what is there is not measured again
    return out


def test_every_cell_is_measured_beside_adamw(made: Path) -> None:
    rows = [row for row in read(made)["rows"] if row["size"] == "tiny"]
    assert [row["optimizer"] for row in rows] == list(ENTRANTS)
    for row in rows:
        assert row["status"] == "measured"
        assert (row["params"], row["state"]) == ("float32", "float32")
        assert min(row["tokens_per_second"], row["optimizer_ms"]) > 0
        assert row["step_ms"] > row["optimizer_ms"]
        assert row["micro_batch"] == 2
        assert not row["graphs"]
        assert row["in_turns"]
        assert (row["adamw"] is None) == (row["optimizer"] == "adamw")
    head, *cells = cost_table.rows(read(made))
    ratio = head.index("to AdamW")
    assert cells[0][ratio] == "1.00"
    by = rows[1]["optimizer_ms"] / rows[1]["adamw"]["optimizer_ms"]
    assert cells[1][ratio] == f"{by:.2f}"


def test_of_a_device_that_is_not_known_only_the_state_is_predicted(made: Path) -> None:
    found = list(validate.of_cost(read(made)))
    assert {c.quantity for c in found} == {"state, GB"}
    assert len(found) == len(ENTRANTS)
    assert max(abs(c.error) for c in found) < 1e-3


def test_the_largest_is_the_planners_and_says_so(made: Path) -> None:
    assert all(row["size"] == "tiny" for row in read(made)["rows"])  # the file is what was measured
    rows = list(cost_plan.planned_rows(H200, 32))
    assert [row["status"] for row in rows] == ["predicted"] * len(ENTRANTS)
    text = cost_table.terminal(read(made)).splitlines()
    assert all("predicted for h200" in line and "≈" in line for line in text if "13B" in line)
    assert sum("13B" in line for line in text) == len(ENTRANTS)
    bf16 = next(row for row in rows if row["optimizer"] == "adamw")
    assert bf16["params"] == "bfloat16"  # 16 bytes a parameter would be 205 GB


def test_what_was_measured_otherwise_is_not_mixed(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = made.read_bytes()
    with pytest.raises(SystemExit, match=r"was measured with settings .*choose another --out"):
        run(monkeypatch, made, "--steps", "2")
    assert made.read_bytes() == before
    torn = made.parent / "torn.json"
    torn.write_text('{"rows": [')
    with pytest.raises(SystemExit, match=r"torn\.json cannot be read"):
        run(monkeypatch, torn)


def room(name: str, kept: Kept) -> float:
    """Bytes that are enough for a format of a tiny model, and for none before it."""
    model = cost_plan.model_of("tiny")
    return cost_plan.needs(model, H200, 1, name, kept) / cost_plan.DOUBT + 1


@pytest.mark.parametrize("kept", cost_plan.forms("mars-adamw")[1:], ids=str)
def test_the_first_format_that_fits_is_taken(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_plan, "RESERVED_BYTES", 0)  # of a tiny model it would be everything
    place = replace(CPU, memory_bytes=room("mars-adamw", kept))
    site = cost.Site("tiny", place, argparse.Namespace(**{**vars(ARGS), "batch": 1}))
    row = site.cell("mars-adamw", Kept("float32", "float32"))
    assert (row["params"], row["state"]) == kept
    assert not row["in_turns"]  # there is no room for AdamW's state besides
    assert row["adamw"]["params"] == "float32"
    content = {"device": "unknown", "rows": [row]}
    (state,) = validate.of_cost(content)
    assert abs(state.error) < 0.02


def test_out_of_memory_leads_to_the_next_format_then_to_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = cost.Site("tiny", CPU, ARGS)
    tried: list[Kept] = []
    race = cost.Site.race

    def full(self: cost.Site, entrants: list[tuple[str, Kept]]) -> Any:
        tried.append(entrants[-1][1])
        if tried[-1].state != "8bit":
            raise torch.OutOfMemoryError("full")
        return race(self, entrants)

    monkeypatch.setattr(cost.Site, "race", full)
    row = site.cell("mars-lion", None)
    assert (row["params"], row["state"]) == ("float32", "8bit")
    assert row["adamw"] is None  # AdamW itself does not fit
    about = {"device": "NVIDIA H200", "settings": {"batch": 2}}
    assert " – " in cost_table.terminal({**about, "rows": [{**row, "peak_bytes": 1}]})
    assert tried == cost_plan.forms("mars-lion")[:3]
    row = site.cell("adamw", None)
    assert row["status"] == "does not fit"
    assert tried[3:] == cost_plan.forms("adamw")
    needed = f"does not fit (needs {row['needs_bytes'] / 1e9:.0f} GB)"
    assert needed in cost_table.terminal({**about, "rows": [row]})


def test_what_fails_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cost.File(tmp_path / "cost.json", CPU, ARGS)
    monkeypatch.setattr(cost.Site, "race", lambda *_: 1 / 0)
    assert cost.cells(file, ["tiny"], CPU, ARGS) == 0
    assert {row["why"] for row in file.content()["rows"]} == {"division by zero"}
    assert "tiny muon: division by zero" in capsys.readouterr().err
    assert not cost.File(tmp_path / "cost.json", CPU, ARGS).rows


def test_passes_are_replayed_where_training_would(monkeypatch: pytest.MonkeyPatch) -> None:
    site = cost.Site("tiny", CPU, ARGS)
    assert not site.graphs
    site.place = ON_H200
    assert site.graphs
    monkeypatch.setattr(cost, "SHORT_PASS", 1.0)
    assert not site.graphs


def test_batches_are_as_large_as_fit_for_all() -> None:
    sizes = {size: cost_plan.micro_batch(cost_plan.model_of(size), ON_H200, 32) for size in
             ("125M", "1.5B", "7B")}  # fmt: skip
    assert sizes["125M"] == sizes["1.5B"] == 32
    assert 1 < sizes["7B"] < 32
    seven = cost_plan.model_of("7B")
    for name in ENTRANTS:
        assert cost_plan.fitting(seven, ON_H200, sizes["7B"], name)[0].params == "float32"
    small = replace(ON_H200, memory_bytes=24e9)
    assert cost_plan.micro_batch(seven, small, 32) == 1
    assert not cost_plan.fitting(seven, small, 1, "mars-adamw")
    assert cost_plan.needs(seven, H200, 1, "adamw", Kept("float32", "float32")) == (
        16 * seven.elements + RESERVED_BYTES
    )


def test_accumulation_spreads_the_optimizers_time() -> None:
    own = {"optimizer_ms": 200.0, "tokens_per_second": 1024 / 0.4}
    base = {"optimizer_ms": 100.0, "tokens_per_second": 1024 / 0.3}
    found = cost_plan.ratios(own, base, 1024)
    assert found == {
        "optimizer_ms": 2.0,
        "tokens_per_second": pytest.approx(0.75),
        "accumulated": pytest.approx((512 * 0.2 + 0.1) / (512 * 0.2 + 0.2)),
    }


def test_the_page_gets_the_table_of_the_file(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cost_h200.json").write_bytes(made.read_bytes())
    monkeypatch.setattr(table_cells, "RESULTS", tmp_path)
    block = "<!-- table: cost, by bench/readme_tables.py -->\n{}<!-- end -->\n"
    text = readme_tables.rewritten(block.format("old\n"))
    assert "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * len(ENTRANTS)
    assert len({line.count("|") for line in rows}) == 1
    for name in ENTRANTS:
        label = cost_table.SHORT.get(name, OPTIMIZERS[name].label)
        assert f"| tiny | {label} | " in text
    assert "| 13B, planned | MARS-M, 8-bit state | ≈ " in text
    assert readme_tables.rewritten(text) == text


def test_it_is_drawn(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cost_table.draw(read(made), tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")

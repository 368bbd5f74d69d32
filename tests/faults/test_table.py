"""The table of faults is true: every row has its tests, every test of a fault its row."""

from __future__ import annotations

import ast
from pathlib import Path

from faults import FAULTS, PAGE, with_table

TESTS = Path(__file__).parents[1]


def functions(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test")}


def test_every_row_has_its_tests() -> None:
    for row in FAULTS:
        assert row.tests, row.name
        for test in row.tests:
            file, _, name = test.partition("::")
            assert name in functions(TESTS / file), test


def test_every_scripted_fault_is_in_the_table() -> None:
    named = {test for row in FAULTS for test in row.tests}
    for path in sorted((TESTS / "faults").glob("test_*.py")):
        if path != Path(__file__):
            for name in functions(path):
                assert f"faults/{path.name}::{name}" in named, name


def test_the_page_shows_the_table() -> None:
    """If not: python tests/faults/faults.py --write"""
    page = PAGE.read_text()
    assert with_table(page) == page
    assert len(FAULTS) >= 33
    assert len({row.name for row in FAULTS}) == len(FAULTS)

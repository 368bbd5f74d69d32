"""What tests of the laboratory share: workers that begin at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
from processes import MODULES

from mars.lab import crew


@pytest.fixture(scope="session", autouse=True)
def _workers_begin_at_once() -> Iterator[None]:
    """Workers are forked from a server that has imported torch, as `processes` does it.

    That they can begin anew, as they do elsewhere, is seen where `mars` is a process of its own:
    test_race, test_study, tests/faults.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(MODULES)
    usual, crew.START = crew.START, "forkserver"
    yield
    crew.START = usual

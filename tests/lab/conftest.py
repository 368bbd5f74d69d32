"""What tests of the laboratory share: workers that begin at once, a run to read."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
from miniature import run
from processes import MODULES

from mars.lab import crew
from mars.lab.train import train


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with checkpoints of steps 9 and 12, the best being that of step 12."""
    out = tmp_path_factory.mktemp("runs") / "mini"
    train(run(out))
    return out

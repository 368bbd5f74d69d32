"""What every scripted fault needs: real `mars` processes, and runs to harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nursery import Nursery


@pytest.fixture(scope="session")
def mars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts `mars` processes: ``mars.run("train", …)``."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def _nobody_outlives_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "mars" in request.fixturenames:
        request.getfixturevalue("mars").clear()

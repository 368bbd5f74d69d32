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

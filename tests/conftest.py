"""Settings shared by all tests. Without a GPU, Triton's kernels run in its interpreter."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from interpreter import patch_once_a_launch

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    patch_once_a_launch()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m faults` is what the table of faults names, wherever it is."""
    from faults import FAULTS

    named = {test for row in FAULTS for test in row.tests}
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            name = getattr(item, "originalname", item.name)
            if f"{item.path.relative_to(here).as_posix()}::{name}" in named:
                item.add_marker(pytest.mark.faults)

"""Settings shared by all tests. Without a GPU, Triton's kernels run in its interpreter."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from interpreter import patch_once_a_launch

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    patch_once_a_launch()

# A shell starts `make test &` with Ctrl-C ignored, and nohup with SIGHUP: our processes would
# inherit that, and tests of what they do when interrupted wait in vain.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler),
                        (signal.SIGHUP, signal.SIG_DFL)):  # fmt: skip
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    """What one test leaves must not change the numbers of another, on any CPU."""
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    yield
    assert torch.get_float32_matmul_precision() == precision  # "high" is other bits where AMX is


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

"""Settings shared by all tests. Without a GPU, Triton's kernels run in its interpreter."""

import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""A module with an optimizer of a user's, which tests write and change."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from mars.lab import hardware

NAME = "own_sgd:Own"
TEXT = """import torch
class Own(torch.optim.SGD):
    def __init__(self, params, lr=0.125):
        super().__init__(params, lr=lr)
"""


def written(directory: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Path:
    """The module as another process would find it, in a directory that becomes the current one."""
    path = directory / "own_sgd.py"
    path.write_text(TEXT + more)
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    sys.modules.pop("own_sgd", None)
    importlib.invalidate_caches()
    hardware.own_code.cache_clear()
    return path

"""How a list of tensors is stepped: a function an engine, for every kind; one signature."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from mars.engines import cpu, foreach, reference
from mars.engines.batch import COLUMNS, Batch, Cell
from mars.rule import KINDS

# The engines. Fused needs Triton, is imported only when it is used, and steps many batches at a
# time by a plan (mars.plan); the others are functions that step one batch.
ENGINES = ("reference", "foreach", "cpu", "fused")
CELLS: dict[str, Cell] = {
    "reference": reference.step,
    "foreach": foreach.step,
    "cpu": cpu.step,
}


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in its interpreter (slow: for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


@cache
def no_triton() -> str | None:
    """Why the Triton here, if any, is not used; None if it is."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    version: str = import_module("triton").__version__
    if tuple(map(int, version.split(".")[:2])) < (3, 4):
        return f"Triton {version}: it needs 3.4 or newer"
    return None


def available() -> list[str]:
    """The engines that can run here."""
    fused = no_triton() is None and (torch.cuda.is_available() or interpreted())
    return [name for name in ENGINES if name != "fused" or fused]


def table() -> list[tuple[str, str]]:
    """Every (engine, kind) cell there is here."""
    return [(name, kind) for name in available() for kind in KINDS]


__all__ = [
    "CELLS",
    "COLUMNS",
    "ENGINES",
    "Batch",
    "Cell",
    "available",
    "interpreted",
    "no_triton",
    "table",
]

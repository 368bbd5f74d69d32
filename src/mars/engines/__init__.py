"""How a list of tensors is stepped: one table of (engine, kind) cells, one signature."""

from __future__ import annotations

from types import ModuleType

from mars.engines import foreach, reference
from mars.engines.batch import Batch, Cell

# An engine is a module with CELLS (kind -> Cell) and norms (‖c‖₂ of each tensor of a batch, nothing
# written). To add one, add it here.
ENGINES: dict[str, ModuleType] = {"reference": reference, "foreach": foreach}


def table() -> dict[tuple[str, str], Cell]:
    """Every (engine, kind) cell there is."""
    return {(name, kind): cell for name, e in ENGINES.items() for kind, cell in e.CELLS.items()}


__all__ = ["ENGINES", "Batch", "Cell", "table"]

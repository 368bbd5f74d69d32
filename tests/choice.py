"""How a test asks for an engine."""

from __future__ import annotations

ENGINE_OPTIONS = {
    "reference": {"foreach": False},
    "foreach": {"foreach": True},
    "cpu": {},  # on a CPU; on a GPU it is fused
    "fused": {"fused": True},
}


def choose(engine: str) -> dict[str, bool]:
    """Options of MARS that select this engine."""
    return dict(ENGINE_OPTIONS[engine])

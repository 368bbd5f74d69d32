"""How a test asks for an engine."""

from __future__ import annotations

ENGINE_OPTIONS = {
    "reference": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def choose(engine: str) -> dict[str, bool]:
    """Options of MARS that select this engine."""
    return dict(ENGINE_OPTIONS[engine])

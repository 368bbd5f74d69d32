"""What people write themselves and name as ``package.module:name``: an optimizer, a study."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def imported(name: str) -> Any:
    """What has this name. Whatever a module of somebody's does when it is imported is raised."""
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    return getattr(importlib.import_module(module), attribute)

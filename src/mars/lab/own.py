"""What people write and name as ``package.module:name``: an optimizer, a study, a recipe."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from mars.lab.errors import first_line


def imported(name: str) -> Any:
    """What has this name. Whatever a module of somebody's does when it is imported is raised."""
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    return getattr(importlib.import_module(module), attribute)


def in_a_line(error: Exception) -> str:
    """What somebody's code raised, and where: the last place that is neither ours nor Python's."""
    said = first_line(error, named=True)
    ours = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
    ]
    where = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return said + where

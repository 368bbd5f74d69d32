"""A recipe of somebody's own: package.module:function, which returns a run.

It may take the name of an optimizer, as the recipes here do: then it is one for every optimizer.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any

from mars.lab.config import Run, check
from mars.lab.errors import LabError
from mars.lab.own import imported, in_a_line

USUAL = "mars-adamw"  # for a function that needs an optimizer, where nobody names one


def make(name: str, optimizer: str | None, taken: Collection[str]) -> Run:
    """The run that a function returns. It is called after the function, unless it has a name of its
    own; those that are ``taken`` are no such.
    """
    try:
        made = _called(imported(name), optimizer)
        if not isinstance(made, Run):
            raise LabError("it returned no mars.lab.config.Run")
        if optimizer is not None and optimizer != made.optimizer.name:
            raise LabError(
                f"it is for {made.optimizer.name}: for {optimizer} it must take the optimizer's "
                "name, and return what has settings for that"
            )
        if made.recipe in taken:
            made = dataclasses.replace(made, recipe=name.replace(":", "."))
        return check(made)
    except LabError as error:
        raise LabError(f"recipe {name!r}: {error}") from error
    except Exception as error:  # whatever a module of somebody's does
        raise LabError(f"recipe {name!r} cannot be made: {in_a_line(error)}") from error


def is_for_all(name: str) -> bool:
    """Whether a function takes the name of an optimizer, after it could be called."""
    return _argument(imported(name)) is not None


def _called(function: Callable[..., Any], optimizer: str | None) -> Any:
    found = _argument(function)
    if found is None or (optimizer is None and found.default is not found.empty):
        return function()
    name = optimizer or USUAL
    return function(name) if found.kind is found.POSITIONAL_ONLY else function(**{found.name: name})


def _argument(function: Callable[..., Any]) -> inspect.Parameter | None:
    """What takes an optimizer's name: an argument called so, or the first that must be given."""
    found = inspect.signature(function).parameters
    needed = [
        p for p in found.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    if len({*(p.name for p in needed), "optimizer"} & found.keys()) > 1:
        names = ", ".join(p.name for p in needed)
        raise LabError(f"it needs {names}: a recipe takes nothing but an optimizer's name")
    return found.get("optimizer") or next(iter(needed), None)

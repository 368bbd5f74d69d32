"""What a user can do something about."""

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """One clear line for the user; the command prints it and exits with status 1."""


class Diverged(LabError):
    """The loss is not finite: a result of its own in a grid of learning rates."""


class Elsewhere(LabError):
    """An error that another process of the run reports: this one ends without a word."""


def meant(name: str, known: Iterable[str]) -> str:
    """A question, if one of the known names is near to this one; else nothing.

    >>> meant("muonn", ["adamw", "muon"]), meant("sgd", ["adamw", "muon"])
    ('did you mean muon?', '')
    """
    near = difflib.get_close_matches(name.lower(), list(known), 1)
    return f"did you mean {near[0]}?" if near else ""

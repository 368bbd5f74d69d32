"""What a user can do something about."""


class LabError(Exception):
    """One clear line for the user; the command prints it and exits with status 1."""


class Diverged(LabError):
    """The loss is not finite: a result of its own in a grid of learning rates."""


class Elsewhere(LabError):
    """An error that another process of the run reports: this one ends without a word."""

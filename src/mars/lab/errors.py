"""What a user can do something about."""


class LabError(Exception):
    """One clear line for the user; the command prints it and exits with status 1."""

"""What a user can do something about."""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path

INTERRUPTED = 130  # exit status of what was stopped before its end, as a shell has it of Ctrl-C


class LabError(Exception):
    """One clear line for the user; the command prints it and exits with this status."""

    status = 1


class UsageError(LabError):
    """The command line itself is wrong: exit status 2, as is usual."""

    status = 2


class Diverged(LabError):
    """The loss is not finite: a result of its own in a grid of learning rates."""


class Elsewhere(LabError):
    """An error that another process of the run reports: this one ends without a word."""


def first_line(error: BaseException, *, named: bool = False) -> str:
    """The first line of what an error says; ``named``, after its type, which an empty one gives.

    >>> first_line(ValueError("no such file\\nor directory")), first_line(MemoryError())
    ('no such file', 'MemoryError')
    >>> first_line(ValueError("no"), named=True)
    'ValueError: no'
    """
    name, (line, *_) = type(error).__name__, [*str(error).strip().splitlines(), ""]
    if not line:
        return name
    return f"{name}: {line}" if named else line


def check_name(what: str, name: str) -> str:
    """The name, or a LabError if it would lead somewhere else as a part of a path."""
    if name.startswith(".") or "/" in name or "\\" in name:
        raise LabError(
            f"{what} {name!r} is no name that a directory could have: leave out / and \\, and do "
            "not begin with a dot"
        )
    return name


def unexpected(error: Exception, directory: Path) -> str:
    """A line on what nobody foresaw, an optimizer of the user's that raises, say; all of it is
    written to the run's directory, if that can be.
    """
    trace = directory / "error.txt"
    line = first_line(error, named=True)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        trace.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return line
    return f"{line} (full traceback: {trace})"


UTF16 = (b"\xff\xfe", b"\xfe\xff")  # the marks that begin such a text


def not_utf8(where: Path | str, error: UnicodeDecodeError) -> str:
    if error.object.startswith(UTF16):
        return f"{where} is UTF-16 text, not UTF-8: convert it (iconv -f UTF-16 -t UTF-8)"
    return f"{where} is not UTF-8 text ({error.reason}): convert it (iconv -f LATIN1 -t UTF-8)"


def meant(name: str, known: Iterable[str]) -> str:
    """A question, if one of the known names is near to this one; else nothing.

    >>> meant("muonn", ["adamw", "muon"]), meant("sgd", ["adamw", "muon"])
    ('did you mean muon?', '')
    >>> meant("gpt2", ["gpt2-small", "gpt2-xl"])
    'did you mean gpt2-small, gpt2-xl?'
    """
    names = list(known)
    begins = [other for other in names if name and other.startswith(name.lower())]
    near = [name.lower()] if name.lower() in names else begins
    near = near or difflib.get_close_matches(name.lower(), names, 1)
    return f"did you mean {', '.join(near)}?" if near else ""

"""The directory of a run: writable or refused, owned by one process, files whole or absent.

Written for POSIX: the lock is flock, which the kernel releases however its owner ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mars.lab.errors import LabError

# What a killed writer leaves behind begins so; the directory's next owner removes it.
TEMPORARY = ".tmp-"

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EEXIST: "a file of that name is in the way",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
}


class Held(NamedTuple):
    """What a directory holds, and what that is good for where a run was looked for."""

    what: str
    use: str | None = None


# By which file it is known.
HOLDS = {
    "config.json": Held("a run"),
    "race.json": Held("a race", "`mars race DIR` resumes it"),
    "tune.json": Held("a search", "`mars tune` resumes it, and its best.json is a recipe"),
    "results.jsonl": Held("a study", "`mars study` resumes it"),
    "manifest.json": Held("prepared data, or a checkpoint"),  # `arguments` tells these apart
}

# Seconds for an owner to go: a worker whose command was killed first saves what it trained.
PATIENCE = 3.0

# Descriptors of the locks held by this process.
_held: set[int] = set()


def _forget_locks() -> None:
    """In a forked child: a data worker that outlives its killed parent must not hold the lock."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def reason(error: OSError) -> str:
    """Why the operating system refused, in words."""
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


def temporary_name(path: Path) -> Path:
    """A name beside this one that nobody uses."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def digest_of(path: Path, digest: Any) -> str:
    """What a new digest of hashlib makes of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def drop_torn_line(descriptor: int) -> None:
    """Cut what follows the last newline of a file, so that what is appended begins a line."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - 65536)
        last = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if last >= 0:
            end = begin + last + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)


def write_atomically(path: Path, data: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file such that, whatever happens, the old or the new one is there as a whole.

    ``data`` is the content, or a function that writes it to the file it is given.
    """
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise LabError(f"cannot write {path}: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, values: object, indent: int | None = 2, *, ascii: bool = True) -> None:
    """Write values as JSON, like `write_atomically`; without ``ascii`` letters stay as they are."""
    text = json.dumps(values, indent=indent, ensure_ascii=ascii) + "\n"
    write_atomically(path, text.encode())


def refuse_other(path: Path, own: str) -> None:
    """A LabError for a directory that is known by another file of ``HOLDS`` than ``own``."""
    for other, held in HOLDS.items():
        if other != own and (path / other).exists():
            raise LabError(f"{path} holds {held.what} ({other}): choose another directory")


class RunDirectory:
    """A directory in which a run may write: made if need be, refused at once if it cannot be.

    ``own`` is the file of ``HOLDS`` that it will be known by: what holds anything else is refused.

    >>> import tempfile
    >>> run = RunDirectory(Path(tempfile.mkdtemp()) / "gpt-tiny")
    >>> with run.lock():
    ...     write_atomically(run.path / "config.json", b"{}")
    """

    def __init__(self, path: str | os.PathLike[str], own: str | None = None) -> None:
        self.path = Path(path)
        probe = temporary_name(self.path / "probe")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with open(probe, "xb") as file:
                    file.write(bytes(4096))
                    file.flush()
                    os.fsync(file.fileno())  # a full disk may only now be noticed
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise LabError(
                f"cannot write in run directory {self.path}: {reason(error)}; choose another one"
            ) from error
        if own is not None:
            refuse_other(self.path, own)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Own the directory; LabError if a process does, and keeps it.

        Removes what killed writers left.
        """
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise LabError(f"cannot lock run directory {self.path}: {reason(error)}") from error
        _held.add(descriptor)
        try:
            self._take(descriptor)
            self._clean()
            yield
            os.ftruncate(descriptor, 0)  # the file stays: two owners must lock one and the same
        finally:
            if descriptor in _held:  # not in a child that was forked meanwhile
                _held.discard(descriptor)
                os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: nobody else is kept out there
            return
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                owner = _owner(os.pread(descriptor, 4096, 0))
                raise LabError(f"run directory {self.path} is in use by {owner}") from None
            except OSError as error:
                raise LabError(f"cannot lock run directory {self.path}: {reason(error)}") from error
        me = {"pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.pwrite(descriptor, json.dumps(me).encode(), 0)

    def _clean(self) -> None:
        for folder in (self.path, self.path / "checkpoints"):
            for left in folder.glob(TEMPORARY + "*"):
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        left.unlink()


def _owner(text: bytes) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on host {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"

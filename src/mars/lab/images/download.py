"""One file over HTTP: goes on where it broke off, and is used only with the right checksum.

The part that has come lies beside the file as NAME.part, through retries, Ctrl-C and kill -9.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO

from mars.lab.errors import LabError
from mars.lab.rundir import digest_of, reason, sync_directory

Progress = Callable[[int, int | None], None]
BLOCK = 1 << 18
RETRIES = 5  # in a row without a new byte


def download(
    url: str,
    path: Path,
    md5: str,
    progress: Progress | None = None,
    *,
    wait: float = 1.0,
    timeout: float = 30.0,
) -> None:
    """Bring a file to ``path``, with the md5 that its makers publish.

    Args:
        url: http or https.
        path: where it goes; if it is there with the right checksum, nothing is done.
        md5: in hexadecimal.
        progress: called with the bytes so far and, if the server told, those of the whole.
        wait: seconds before the first retry; each next one waits twice as long.
        timeout: seconds of silence that are taken for a broken connection.
    """
    part = path.with_name(path.name + ".part")
    try:
        if path.exists():
            os.replace(path, part)  # it has to pass the same check
        if not (part.exists() and _md5(part) == md5):
            _fetch_all(url, part, progress, wait, timeout)
        if _md5(part) != md5:
            part.unlink()
            raise LabError(
                f"{url} came with a wrong checksum (md5 not {md5}): nothing was kept; try "
                "again, or fetch it by hand from elsewhere and give `mars data` the file"
            )
        os.replace(part, path)
        sync_directory(path.parent)
    except OSError as error:
        raise LabError(f"cannot write {part}: {reason(error)}") from error


def _fetch_all(
    url: str, part: Path, progress: Progress | None, wait: float, timeout: float
) -> None:
    try:
        with part.open("ab") as file:
            _persist(url, file, progress, wait, timeout)
            file.flush()
            os.fsync(file.fileno())
    finally:
        if part.exists() and not part.stat().st_size:
            part.unlink()


def _persist(
    url: str, file: BinaryIO, progress: Progress | None, wait: float, timeout: float
) -> None:
    """Connect again and again, as long as something comes now and then."""
    failures = 0
    while True:
        before = file.tell()
        try:
            if _fetch(url, file, progress, timeout):
                return
            problem = "the connection broke off"
        except _Network as error:
            problem = str(error)
            if error.final:
                raise LabError(f"cannot download {url}: {problem}") from error
        failures = 0 if file.tell() > before else failures + 1
        if failures >= RETRIES:
            kept = f"; {file.tell():,} bytes are kept" if file.tell() else ""
            raise LabError(
                f"cannot download {url}: {problem}, {RETRIES} times in a row{kept}: run the same "
                "command to resume"
            )
        time.sleep(wait * 2**failures)


class _Network(Exception):
    """Whatever a network or a server can do; final if it will do it again."""

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


def _fetch(url: str, file: BinaryIO, progress: Progress | None, timeout: float) -> bool:
    """One connection: append to the file what comes; whether that was all."""
    at = file.tell()
    request = urllib.request.Request(url, headers={"User-Agent": "mars"})
    if at:
        request.add_header("Range", f"bytes={at}-")
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and at:  # nothing is there: the part is whole, or of another file
                return True
            raise _Network(
                f"the server says {error.code} {error.reason}", 400 <= error.code < 500
            ) from error
    except (OSError, HTTPException, ValueError) as error:
        raise _Network(
            str(getattr(error, "reason", error)), isinstance(error, ValueError)
        ) from error
    with response:
        total = _begin(response, file, at)
        while block := _receive(response):
            file.write(block)
            if progress is not None:
                progress(file.tell(), total)
    return total is None or file.tell() >= total


def _begin(response: HTTPResponse, file: BinaryIO, at: int) -> int | None:
    """Put the file where the answer begins; how long the whole is, if the server tells."""
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    if response.status == 206:
        found = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip()
        )
        if found and int(found[1]) == at:
            return int(found[2]) if found[2] != "*" else None if total is None else at + total
    file.seek(0)  # it sends the whole, or something that was not asked for
    file.truncate()
    if response.status == 206:
        raise _Network("the server sent another part than was asked for")
    return total


def _receive(response: HTTPResponse) -> bytes:
    try:
        return response.read(BLOCK)
    except (OSError, HTTPException) as error:
        raise _Network(f"the connection broke off ({error or type(error).__name__})") from error


def _md5(path: Path) -> str:
    return digest_of(path, hashlib.md5(usedforsecurity=False))

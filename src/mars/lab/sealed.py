"""A directory of files under a seal: a manifest with the size and sha256 of each, and its own.

Every format of tensors that we know loads a flipped bit without a word. The checksums are of the
bytes handed to the operating system, taken while they are written; the manifest is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mars.lab.errors import LabError
from mars.lab.rundir import digest_of, reason, sync_directory

MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointError(LabError):
    """A checkpoint that cannot be written, or is refused."""


class HashedFile:
    """A new file that hashes what is written to it; on disk when closed."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115 (closed by our own close)
        self._hash = hashlib.sha256()
        self.bytes = 0
        self.error: BaseException | None = None  # torch.save hides it behind a RuntimeError

    def write(self, data: bytes | memoryview) -> int:
        """Write all of it."""
        try:
            self._file.write(data)
            self._hash.update(data)
        except BaseException as error:  # a full disk, or Ctrl-C
            self.error = error
            raise
        size = len(data) if isinstance(data, bytes) else data.nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def tell(self) -> int:
        """Where the next byte goes."""
        return self.bytes

    def fileno(self) -> int:
        """For who syncs it."""
        self._file.flush()
        return self._file.fileno()

    def sync(self) -> None:
        """Wait until it is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close it; what was not synced may be lost."""
        with contextlib.suppress(OSError):
            self._file.close()

    @property
    def seal(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}


def write(
    folder: Path, files: Mapping[str, Callable[[HashedFile], object]], about: Mapping[str, Any],
    others: Mapping[str, dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Write the files, then a manifest of them with what else there is to say ``about`` them.

    ``others`` are seals of files that are there already.
    """
    seals = {name: _write_file(folder / name, content) for name, content in files.items()}
    seals.update(others or {})
    manifest = _encode({"format": FORMAT, **about, "files": seals})
    _write_file(folder / MANIFEST, lambda file: file.write(manifest))
    sync_directory(folder)


def _write_file(path: Path, content: Callable[[HashedFile], object]) -> dict[str, Any]:
    file = HashedFile(path)
    try:
        content(file)
        file.sync()
    except RuntimeError as error:
        if file.error is not None:
            raise file.error from error
        raise
    finally:
        file.close()
    return file.seal


def _encode(manifest: Mapping[str, Any]) -> bytes:
    """The one way to spell a manifest, its own checksum included."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True).encode() + b"\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, if it is what was written and the files have their sizes; cheap."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder.name}: {MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(
            f"{folder.name}: {MANIFEST} cannot be read: {reason(error)}"
        ) from error
    damaged = CheckpointError(f"{folder.name}: {MANIFEST} is damaged")
    try:
        manifest = json.loads(raw)
    except ValueError:
        raise damaged from None
    # Byte for byte, so that no flipped bit is too small to count.
    if not isinstance(manifest, dict) or _encode(manifest) != raw:
        raise damaged
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder.name}: format {manifest.get('format')}, and this version of mars reads "
            f"{FORMAT}"
        )
    for name, seal in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{folder.name}: {name} is missing") from None
        if size != seal["bytes"]:
            raise CheckpointError(
                f"{folder.name}: {name} has {size} bytes instead of {seal['bytes']}"
            )
    return manifest


def verify(folder: Path, part: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """The manifest, if every byte of every file is what was written; else CheckpointError.

    With ``part`` (k, n), of every n-th file from the k-th on: n processes share the work.
    """
    manifest = read_manifest(folder)
    for name, seal in list(manifest["files"].items())[part[0] :: part[1]]:
        try:
            found = digest_of(folder / name, hashlib.sha256())
        except OSError as error:
            raise CheckpointError(
                f"{folder.name}: {name} cannot be read: {reason(error)}"
            ) from error
        if found != seal["sha256"]:
            raise CheckpointError(f"{folder.name}: {name} does not match its checksum")
    return manifest

"""manifest.json: what a prepared directory holds, and how far its preparation came.

{"format": "mars.data", "version": 1, "complete": true, "tokenizer": "gpt2",
 "source": "…", "documents": 8013769,
 "settings": {what decides the bytes of the shards},
 "shards": {"train": [{"file", "tokens", "bytes", "sha256"}, …], "valid": […]},
 "position": null, or while it is incomplete
             {"source": …, "split": …, "open": {"train": tokens of the open shard, …}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mars.lab.errors import LabError
from mars.lab.rundir import digest_of, write_atomically

FILE = "manifest.json"
FORMAT = "mars.data"
SPLITS = ("train", "valid")


@dataclass(frozen=True)
class Entry:
    """One finished shard."""

    file: str
    tokens: int
    bytes: int
    sha256: str


@dataclass
class Manifest:
    """The contents of manifest.json."""

    tokenizer: str
    source: str
    settings: dict[str, Any]
    documents: int = 0
    complete: bool = False
    shards: dict[str, list[Entry]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    position: dict[str, Any] | None = None
    format: str = FORMAT
    version: int = 1

    def save(self, directory: Path) -> None:
        """Replace the directory's manifest; a kill leaves the old one or the new one."""
        text = json.dumps(asdict(self), indent=1)
        write_atomically(directory / FILE, text.encode("utf-8"))

    def tokens(self, split: str) -> int:
        return sum(entry.tokens for entry in self.shards[split])


def contents(directory: Path, kind: str = "data") -> dict[str, Any]:
    """What a directory's manifest says, of tokens or of images; {} if that is no JSON object."""
    path = directory / FILE
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LabError(f"{path} is not JSON ({error}): prepare the {kind} again") from error
    return data if isinstance(data, dict) else {}


def check_version(path: Path, data: dict[str, Any]) -> None:
    """Refuse a manifest of another version than this one's."""
    if data.get("version") != 1:
        raise LabError(f"{path} has version {data.get('version')!r}; this mars reads version 1")


def load_manifest(directory: Path) -> Manifest:
    """Read and check a directory's manifest."""
    path, data = directory / FILE, contents(directory)
    if data.get("format") == "mars.images":
        raise LabError(f"{directory} holds images, not tokens: train a recipe for images on it")
    if data.get("format") != FORMAT:
        raise LabError(f"{path} is not a manifest of `mars data`")
    check_version(path, data)
    try:
        data["shards"] = {s: [_entry(entry) for entry in data["shards"][s]] for s in SPLITS}
        return Manifest(**data)
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"{path} is incomplete or ill-typed ({error}): prepare it again") from error


def _entry(data: dict[str, Any]) -> Entry:
    entry = Entry(**data)
    if Path(entry.file).name != entry.file or entry.bytes != 2 * entry.tokens:
        raise ValueError(f"shard {entry.file!r}")
    return entry


def check_shard(directory: Path, entry: Entry, *, content: bool) -> None:
    """Refuse a shard that is missing, has another size, or (when asked) other content."""
    path = directory / entry.file
    try:
        size = path.stat().st_size
    except OSError as error:
        raise LabError(f"{path}: the manifest names it, but it is missing") from error
    if size != entry.bytes:
        raise LabError(f"{path} has {size} bytes, but the manifest says {entry.bytes}")
    if content and sha256_of(path) != entry.sha256:
        raise LabError(f"{path} is damaged: its sha256 is not the manifest's; prepare it again")


def verify(directory: Path, progress: Callable[[str], None] | None = None) -> Manifest:
    """Check every shard of a prepared directory, sizes and sha256."""
    if not (directory / FILE).exists():
        raise LabError(f"{directory} was not made by `mars data`: it has no {FILE}")
    manifest = load_manifest(directory)
    if not manifest.complete:
        raise LabError(f"{directory} is not finished: run the same `mars data` command again")
    for split in SPLITS:
        for entry in manifest.shards[split]:
            check_shard(directory, entry, content=True)
            if progress is not None:
                progress(entry.file)
    return manifest


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes."""
    return digest_of(path, hashlib.sha256())

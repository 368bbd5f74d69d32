"""Named files of a directory, a zip or a tar, read without unpacking anything to disk."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mars.lab.errors import LabError

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
SPLIT_NAMES = ("train", "valid", "val", "test")
TAR_BYTES = 1 << 30  # a tar is held in memory: CIFAR's have 0.2 GB
MEMBER_BYTES = 256 << 20


@dataclass(frozen=True)
class Tree:
    """Files by their names, without the folder that all of them are in."""

    source: str
    names: frozenset[str]
    _read: Callable[[str], bytes]
    _top: str

    def read(self, name: str) -> bytes:
        """The content of a file."""
        if name not in self.names:
            raise LabError(f"{self.source} lacks {name}: it is incomplete")
        try:
            return self._read(self._top + name)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise LabError(f"{name} of {self.source} cannot be read: {error}") from error


def is_archive(path: Path) -> bool:
    """Whether a file's name says that it packs others."""
    return path.name.lower().endswith(ARCHIVES)


@contextmanager
def open_tree(path: Path) -> Iterator[Tree]:
    """The files of a directory or an archive, as long as the context lasts."""
    if path.is_dir():
        names = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
        yield _tree(path, names, lambda name: (path / name).read_bytes())
    elif zipfile.is_zipfile(path):
        with _zip(path) as packed:
            files = {i.filename: i for i in packed.infolist() if not i.is_dir()}
            large = [name for name, info in files.items() if info.file_size > MEMBER_BYTES]
            if large:
                raise LabError(f"{large[0]} of {path} is too large: unpack it, and give the folder")
            yield _tree(path, list(files), packed.read)
    else:
        content = _tar(path)
        yield _tree(path, list(content), content.__getitem__)


def _tree(path: Path, names: list[str], read: Callable[[str], bytes]) -> Tree:
    names = [n for n in names if not any(p.startswith((".", "__MACOSX")) for p in n.split("/"))]
    first = {name.split("/")[0] for name in names}
    top = next(iter(first)) if len(first) == 1 else ""
    # One folder that holds everything, which is not itself a split.
    top = "" if top in SPLIT_NAMES or top in names or not top else f"{top}/"
    return Tree(str(path), frozenset(name.removeprefix(top) for name in names), read, top)


def _zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise LabError(f"{path} is damaged ({error}): download it again") from error


def _tar(path: Path) -> dict[str, bytes]:
    """All files of a tar, in one pass: going back in a packed one means to begin again."""
    content: dict[str, bytes] = {}
    room = TAR_BYTES
    try:
        with tarfile.open(path) as packed:
            for member in packed:
                if not member.isfile():  # a link could lead anywhere
                    continue
                room -= member.size
                if room < 0:
                    raise LabError(f"{path} holds over 1 GB: unpack it, and give the folder")
                file = packed.extractfile(member)
                assert file is not None
                content[member.name.removeprefix("./")] = file.read()
            # tarfile stops at its own end; gzip's checksum of everything lies behind that.
            while more := packed.fileobj.read(1 << 20) if packed.fileobj else b"":
                room -= len(more)
                if room < 0:
                    raise LabError(f"{path} goes on after its end: it is damaged")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        lines = str(error).splitlines()  # tarfile lists all that it tried
        why = f" ({lines[0]})" if len(lines) == 1 else ""
        raise LabError(
            f"{path} is not a tar or zip file, or is damaged{why}: download it again"
        ) from error
    return content

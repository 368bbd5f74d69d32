"""Documents of local files, in a fixed order, with a position to go on from.

A text file (.txt, .md, …) is one document; .jsonl has one a line, .parquet one a row. Each may be
packed by gzip (.gz) or, but for .parquet, zstandard (.zst).
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from mars.lab.data.tokenizers import last_border
from mars.lab.errors import LabError, meant, not_utf8

# What `mars data` fetches by these names: text from the Hugging Face hub, images from their makers.
NAMED = ("openwebtext", "fineweb-edu", "cifar10", "cifar100", "tiny-imagenet")

TEXT = (".txt", ".md", ".rst", ".text")
LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst")
UTF8 = "utf-8-sig"  # a mark that an editor put first is not of the text
BLOCK = 1 << 21  # characters of a long document that are handled at a time


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one, cut where it does not change the tokens."""

    text: str
    first: bool = True  # begins a document, or the part of one that is for another split
    split: str | None = None  # where it goes, if the source itself decides
    rest: bool = False  # of a document whose beginning went to the other split

    @property
    def new(self) -> bool:
        """Whether a document begins here that was not counted yet."""
        return self.first and not self.rest and bool(self.text)


class Documents(Protocol):
    """Where documents come from."""

    name: str

    def settings(self) -> dict[str, Any]:
        """What identifies the content, to be compared when a preparation goes on."""
        ...

    def pieces(self, position: Any) -> Iterator[Piece]:
        """The pieces after a position (None: from the start)."""
        ...

    def position(self) -> Any:
        """After the last piece that was yielded; can be written as JSON."""
        ...


CONTENT = "content"  # of settings: what may change while a preparation is not complete
ENDS = "valid_ends"  # of settings: validation is the end of each document, for they are few
SAMPLE, PIECES = 1 << 20, 64  # bytes of a piece, and how many of them at the most


def _sample(path: Path) -> str:
    """By which a file that was changed is known: a digest of it, or, above 64 MiB, of pieces of it.

    (To read all of a corpus again would take minutes; an edit between pieces that keeps the size
    is not seen.)
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            for i in range(min(PIECES, -(-size // SAMPLE))):
                file.seek(i * max(SAMPLE, size // PIECES))
                digest.update(file.read(SAMPLE))
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()[:16]


class LocalDocuments:
    """The documents of files, in the order given.

    With a `tail`, the last part of each document, this share of its characters, is for validation.
    Otherwise whole documents are.
    """

    def __init__(self, name: str, files: list[Path], field: str) -> None:
        self.name = name
        self.files = files
        self.field = field
        self.tail: float | None = None
        self._at = [0, 0]

    def settings(self) -> dict[str, Any]:
        files = [[str(file), file.stat().st_size] for file in self.files]
        # A single text file is always split so, and its manifests do not say it.
        ends = self.tail is not None and not single_text(self.files)
        found = {"files": files, CONTENT: [_sample(file) for file in self.files]}
        return {**found, ENDS: True} if ends else found

    def fewer_than(self, count: float) -> bool:
        """Whether there are fewer documents; reads no more of them than it must."""
        seen = 0
        for path in self.files:
            if kind_of(path) == "text":
                seen += path.stat().st_size > 0
            else:
                some = islice((p for p in self._file(path, 0) if p.text), math.ceil(count - seen))
                seen += sum(1 for _ in some)
            if seen >= count:
                return False
        return True

    def position(self) -> list[int]:
        return list(self._at)

    def pieces(self, position: list[int] | None) -> Iterator[Piece]:
        first, done = position or [0, 0]
        for i in range(first, len(self.files)):
            skip = done if i == first else 0
            for k, piece in enumerate(self._file(self.files[i], skip), skip):
                self._at = [i, k + 1]
                yield piece

    def _file(self, path: Path, skip: int) -> Iterator[Piece]:
        kind = kind_of(path)
        try:
            if kind == "text":
                yield from _after(_text(path, self.tail), skip)
                return
            records = _lines if kind == "lines" else _parquet
            if self.tail is None:
                yield from records(path, self.field, skip)
            else:
                yield from _after(_cut(records(path, self.field, 0), self.tail), skip)
        except OSError as error:
            raise LabError(f"{path} cannot be read: {error.strerror or error}") from error
        except EOFError as error:
            raise LabError(f"{path} is truncated") from error
        except zlib.error as error:
            raise LabError(f"{path} is damaged: {error}") from error
        except UnicodeDecodeError as error:
            raise LabError(not_utf8(path, error)) from error


def kind_of(path: Path) -> str | None:
    """ "text", "lines" or "parquet"; None for a file of another kind."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in PACKED
    last = suffixes[-2:-1] if packed else suffixes[-1:]
    if last == [".parquet"] and not packed:
        return "parquet"
    if last and last[0] in LINES:
        return "lines"
    return "text" if last and last[0] in TEXT else None


def single_text(files: list[Path]) -> bool:
    """Whether it is one text file, that is one document."""
    return len(files) == 1 and kind_of(files[0]) == "text"


def local_files(source: str) -> list[Path]:
    """The files that a path or a glob means, sorted; of a directory, all of a known kind."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and kind_of(p))
        if not found:
            raise LabError(
                f"{source} holds no .txt, .md, .jsonl or .parquet files (also .gz, .zst); "
                "pictures belong in train/CLASS/ and valid/CLASS/"
            )
        return found
    names = sorted(glob.glob(str(path), recursive=True))
    found = [Path(name) for name in names if Path(name).is_file()]
    if not found:
        near = "" if path.suffix else meant(source, NAMED)
        known = f"by name there are {', '.join(NAMED)} and hf:org/name[:config[:split]]"
        raise LabError(f"no such file: {source}; {near or known}")
    return found


def checked_files(source: str) -> list[Path]:
    """Like `local_files`, refusing what cannot be read as documents."""
    files = local_files(source)
    for path in files:
        if kind_of(path) is None:
            raise LabError(f"{path} is not .txt, .md, .jsonl or .parquet (or packed by .gz, .zst)")
    return files


def _after(pieces: Iterator[Piece], skip: int) -> Iterator[Piece]:
    for _ in range(skip):
        next(pieces, None)
    yield from pieces


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        try:
            import pyarrow  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise LabError(f"{path} needs pyarrow to unpack: pip install pyarrow") from error
        stream: IO[bytes] = io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
        return stream
    return path.open("rb")


def _text(path: Path, tail: float | None) -> Iterator[Piece]:
    """One document in pieces; with a tail, its beginning for training, its end for validation."""
    with _open(path) as raw, io.TextIOWrapper(raw, UTF8, newline="") as file:
        if tail is None:
            yield from _blocks(file, None, None)
            return
        count = sum(len(block) for block in iter(lambda: file.read(BLOCK), ""))
    with _open(path) as raw, io.TextIOWrapper(raw, UTF8, newline="") as file:
        begins = int(count * (1 - tail))
        yield from _blocks(file, begins, "train")
        yield from _blocks(file, None, "valid", rest=begins > 0)


def _cut(records: Iterator[Piece], tail: float) -> Iterator[Piece]:
    """Two pieces a record: its beginning for training, its end for validation."""
    for record in records:
        begins = int(len(record.text) * (1 - tail))
        yield Piece(record.text[:begins], split="train")
        yield Piece(record.text[begins:], split="valid", rest=begins > 0)


def _blocks(
    file: IO[str], characters: int | None, split: str | None, rest: bool = False
) -> Iterator[Piece]:
    """The next so many characters of a file (None: all) as one document, or the rest of one."""
    held, first, left = "", True, characters
    while block := file.read(BLOCK if left is None else min(BLOCK, left)):
        left = None if left is None else left - len(block)
        held += block
        cut = last_border(held)
        if cut:
            yield Piece(held[:cut], first, split, rest)
            held, first = held[cut:], False
    if held:
        yield Piece(held, first, split, rest)


def _lines(path: Path, field: str, skip: int) -> Iterator[Piece]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number <= skip:
                continue
            try:
                record = json.loads(line) if line.strip() else {field: ""}
            except UnicodeDecodeError as error:
                raise LabError(not_utf8(f"{path}, line {number}", error)) from error
            except (ValueError, RecursionError) as error:
                raise LabError(f"{path}, line {number}: not JSON ({error})") from error
            yield Piece(text_of(record, field, f"{path}, line {number}"))


def _parquet(path: Path, field: str, skip: int) -> Iterator[Piece]:
    try:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]
        from pyarrow import parquet
    except ImportError as error:
        raise LabError(f"{path} needs pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                text_of(dict.fromkeys(names), field, str(path))
            row = 0
            for batch in file.iter_batches(256, columns=[field]):
                if row + len(batch) > skip:
                    for text in batch.column(0).slice(max(0, skip - row)).to_pylist():
                        yield Piece(text_of({field: text}, field, str(path)))
                row += len(batch)
    except pyarrow.ArrowException as error:
        raise LabError(f"{path} is not a whole parquet file: {error}") from error


def text_of(record: Any, field: str, where: str) -> str:
    """The text of a record, or an error that names what it has instead."""
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    if not isinstance(record, dict):
        raise LabError(f"{where}: a {type(record).__name__}, not an object with a field {field!r}")
    if field in record:
        raise LabError(f"{where}: the field {field!r} holds {record[field]!r:.40}, not text")
    has = ", ".join(map(str, record)) or "none"
    raise LabError(f"{where}: no field {field!r} (there are: {has}); give --text-field")

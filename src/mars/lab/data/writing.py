"""Appending to shards so that a kill at any moment loses nothing that was committed.

The open shard of a split is `NAME.bin.part`, which only grows. A commit flushes it to the disk and
then replaces the manifest, which says how long it is. Who goes on after a kill cuts it back to that
length: what was written after the commit is written again, the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from mars.lab.data.manifest import Entry, sha256_of
from mars.lab.data.tokenizers import Array
from mars.lab.errors import LabError
from mars.lab.rundir import sync_directory


class SplitWriter:
    """The shards of one split."""

    def __init__(
        self, directory: Path, split: str, shard_tokens: int, done: list[Entry], committed: int
    ) -> None:
        self.directory = directory
        self.split = split
        self.shard_tokens = shard_tokens
        self.done = done
        self.open_tokens = committed
        self._file: BinaryIO | None = None
        self._recover()

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.done) + self.open_tokens

    def write(self, tokens: Array) -> None:
        """Append tokens, closing shards as they fill."""
        while len(tokens):
            part = tokens[: self.shard_tokens - self.open_tokens]
            if self._file is None:
                self._file = self._part().open("ab")
            self._file.write(part.astype("<u2").tobytes())
            self.open_tokens += len(part)
            tokens = tokens[len(part) :]
            if self.open_tokens == self.shard_tokens:
                self.finish()

    def flush(self) -> None:
        """Bring all that was written to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Close the open shard, if there is one, and give it its name."""
        if self.open_tokens:
            self.close()
            part, final = self._part(), self._final()
            entry = Entry(final.name, self.open_tokens, part.stat().st_size, sha256_of(part))
            if entry.bytes != 2 * entry.tokens:
                raise LabError(
                    f"{part} was changed by somebody else: is another `mars data` running?"
                )
            os.replace(part, final)
            sync_directory(self.directory)
            self.done.append(entry)
            self.open_tokens = 0

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _final(self) -> Path:
        return self.directory / f"{self.split}_{len(self.done):06d}.bin"

    def _part(self) -> Path:
        return self._final().with_suffix(".bin.part")

    def _recover(self) -> None:
        """Undo what happened after the last commit."""
        last, known = len(self.done), {entry.file for entry in self.done}
        part, final = self._part(), self._final()
        if self.open_tokens and not part.exists() and final.exists():
            os.replace(final, part)  # the shard got its name, but the manifest did not hear of it
        for path in self.directory.glob(f"{self.split}_*.bin*"):
            number = path.name.removeprefix(f"{self.split}_").split(".")[0]
            if path.name not in known and number.isdigit() and int(number) >= last and path != part:
                path.unlink()
        size = part.stat().st_size if part.exists() else 0
        if size < 2 * self.open_tokens:
            raise LabError(
                f"{part} has {size} bytes, fewer than the {2 * self.open_tokens} written: "
                f"delete {self.directory} and start again"
            )
        if self.open_tokens:
            os.truncate(part, 2 * self.open_tokens)
        else:
            part.unlink(missing_ok=True)

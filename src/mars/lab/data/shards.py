"""A read-only stream of uint16 tokens over memory-mapped shards, and the shard formats.

A shard is raw (nanoGPT's .bin: little-endian uint16 and nothing else) or headered (llm.c, FineWeb:
256 int32, of which magic 20240520, version 1 and the number of tokens, then the same).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from mars.lab.data.tokenizers import Array
from mars.lab.errors import LabError

HEADER_BYTES = 1024
# As raw tokens both would begin with a number over 50257, so no GPT-2 or byte stream looks so.
MAGIC, MAGIC_UINT32 = 20240520, 20240801
OPEN_MAPS = 256  # a mapping holds a file descriptor; processes may have 1024
SMALL = 64 << 20  # bytes that are searched in full
HASHED = 2_000_000_000  # bytes that are hashed in full: a second or two


@dataclass(frozen=True)
class Shard:
    """Tokens of a file from an offset in bytes on, or of an array."""

    tokens: int
    path: Path | None = None
    offset: int = 0
    array: Array | None = None

    def open(self) -> Array:
        if self.array is not None:
            return self.array
        assert self.path is not None
        if not self.tokens:
            return np.empty(0, np.uint16)
        try:
            return np.memmap(self.path, "<u2", mode="r", offset=self.offset, shape=(self.tokens,))
        except (OSError, ValueError) as error:
            raise LabError(f"{self.path} changed or vanished while in use ({error})") from error

    def cut(self, start: int, stop: int) -> Shard:
        """The tokens start … stop of this shard."""
        array = None if self.array is None else self.array[start:stop]
        return replace(self, tokens=stop - start, offset=self.offset + 2 * start, array=array)


class Tokens:
    """A read-only stream of uint16 tokens.

    Args:
        shards: where the tokens lie, in order.
        source: what the user called it, and which part.
        sha256: a fingerprint, or None to take it from the content (or, if that is big, from
            names, sizes, heads and tails); `fingerprint` says which it is.
        tokenizer: the name of the tokenizer that made it, None if nobody knows.
        check: verifies the whole content, if there is something to compare it with.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        source: str,
        *,
        sha256: str | None = None,
        tokenizer: str | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.shards = [shard for shard in shards if shard.tokens]
        self.source = source
        self.tokenizer = tokenizer
        self._check = check
        self._ends = list(accumulate(shard.tokens for shard in self.shards))
        self._maps: dict[int, Array] = {}
        if sha256 is not None:
            self.sha256, self.fingerprint = sha256, "manifest"
        elif 2 * len(self) <= HASHED:
            self.sha256, self.fingerprint = self._hash(self.shards), "content"
        else:
            self.sha256, self.fingerprint = self._outline(), "names, sizes, heads and tails"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __repr__(self) -> str:
        return f"Tokens({self.source!r}, {len(self):,} tokens, tokenizer={self.tokenizer!r})"

    def read(self, start: int, stop: int) -> Array:
        """A copy of the tokens start … stop."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{start} … {stop} is not within the {len(self)} of {self.source}")
        out = np.empty(stop - start, np.uint16)
        done, i = 0, bisect_right(self._ends, start)
        while done < len(out):
            begin = start + done - (self._ends[i - 1] if i else 0)
            piece = self._map(i)[begin : begin + len(out) - done]
            out[done : done + len(piece)] = piece
            done, i = done + len(piece), i + 1
        return out

    def verify(self) -> None:
        """Compare the whole content with the manifest, where there is one."""
        if self._check is not None:
            self._check()

    def _map(self, i: int) -> Array:
        if i not in self._maps:
            if len(self._maps) >= OPEN_MAPS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[i] = self.shards[i].open()
        return self._maps[i]

    def _hash(self, shards: Sequence[Shard]) -> str:
        digest = hashlib.sha256()
        for shard in shards:
            digest.update(np.ascontiguousarray(shard.open()).data)  # mapped, not copied
        return digest.hexdigest()

    def _outline(self) -> str:
        edge = 1 << 16
        digest = hashlib.sha256()
        for shard in self.shards:
            name = shard.path.name if shard.path else ""
            ends = [shard.cut(0, min(edge, shard.tokens))]
            ends.append(shard.cut(max(0, shard.tokens - edge), shard.tokens))
            digest.update(f"{name} {shard.offset} {shard.tokens} {self._hash(ends)}\n".encode())
        return digest.hexdigest()


def open_shard(path: Path) -> tuple[Shard, str | None]:
    """A raw or headered file as a shard, with its tokenizer if the format tells."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = np.frombuffer(file.read(12) if size >= 12 else b"", "<u4")
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    if size % 2:
        raise LabError(f"{path} has {size} bytes, an odd number: it is cut short or not of uint16")
    if len(head) == 0 or head[0] not in (MAGIC, MAGIC_UINT32):
        return Shard(size // 2, path), None
    _, version, count = (int(word) for word in head)
    if head[0] == MAGIC_UINT32 or version != 1:
        raise LabError(f"{path} is a headered shard of another kind (only uint16, version 1)")
    if HEADER_BYTES + 2 * count != size:
        there = max(0, size - HEADER_BYTES) // 2
        raise LabError(f"{path}: its header says {count} tokens, but it holds {there}: cut short?")
    return Shard(count, path, HEADER_BYTES), "gpt2"


def cut_shards(shards: Sequence[Shard], start: int, stop: int) -> list[Shard]:
    """The tokens start … stop of the shards laid end to end."""
    found, at = [], 0
    for shard in shards:
        low, high = max(start - at, 0), min(stop - at, shard.tokens)
        if low < high:
            found.append(shard.cut(low, high))
        at += shard.tokens
    return found


def check_vocabulary(tokens: Tokens, vocab_size: int) -> None:
    """Refuse a stream with tokens that a model of this vocabulary does not have.

    A small stream is searched in full, a big one in a thousand places.
    """
    block, count = 1 << 14, len(tokens)
    starts = range(0, count, block)
    if 2 * count > SMALL:
        starts = range(0, count - block, (count - block) // 1024)
    for start in starts:
        part = tokens.read(start, min(start + block, count))
        if part.size and int(part.max()) >= vocab_size:
            at = start + int(np.argmax(part >= vocab_size))
            raise LabError(
                f"{tokens.source}: token {int(part[at - start])} (at {at}) is outside the model's "
                f"vocabulary of {vocab_size}: raise model.vocab_size (GPT-2 has 50257 tokens), or "
                "take data made by another tokenizer"
            )

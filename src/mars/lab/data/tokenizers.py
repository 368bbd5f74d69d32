"""Text to tokens and back: GPT-2's BPE from the merges that ship with the package, or bytes.

>>> tokenizer("bytes").encode("hi").tolist()
[104, 105]
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from mars.lab.data.embedded import embedded
from mars.lab.errors import LabError

if TYPE_CHECKING:
    import tiktoken

Array = npt.NDArray[np.uint16]

# Equal to the pattern of the GPT-2 release: contractions, words, numbers, signs, white space.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# White space as the pattern's engine means it (Python's \s has four control characters more).
SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BORDER = re.compile(f"(?<=[^{SPACES}])[{SPACES}]")
_LONG_SPACE = re.compile(f"[{SPACES}]{{4096,}}")


class Tokenizer(Protocol):
    """What the laboratory asks of a tokenizer."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eot(self) -> int | None: ...
    def encode(self, text: str) -> Array: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Array]: ...
    def decode(self, tokens: npt.ArrayLike) -> str: ...


class Bytes:
    """The bytes of UTF-8, 256 tokens; no end-of-text token."""

    name = "bytes"
    vocab_size = 256
    eot = None

    def encode(self, text: str) -> Array:
        return np.frombuffer(_whole(text).encode("utf-8"), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[Array]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: npt.ArrayLike) -> str:
        return _checked(tokens, self).astype(np.uint8).tobytes().decode("utf-8", "replace")


class GPT2:
    """The byte-pair encoding of GPT-2, 50257 tokens, the last being the end of text.

    Text that spells a special token ("<|endoftext|>") is ordinary text.
    """

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        try:
            import tiktoken
        except ImportError as error:
            raise LabError(
                "the gpt2 tokenizer needs tiktoken: pip install tiktoken, or take 'bytes'"
            ) from error
        return tiktoken.Encoding(
            "gpt2",
            explicit_n_vocab=self.vocab_size,
            pat_str=PATTERN,
            mergeable_ranks=_ranks(),
            special_tokens={"<|endoftext|>": self.eot},
        )

    def encode(self, text: str) -> Array:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Array]:
        """Each text's tokens; the chunks of all of them are shared by the processor's cores."""
        chunks = [(i, chunk) for i, text in enumerate(texts) for chunk in chunks_of(_whole(text))]
        parts: list[list[Array]] = [[] for _ in texts]
        if len(chunks) > 1 and sum(len(chunk) for _, chunk in chunks) > 100_000:
            # tiktoken works without the interpreter's lock.
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                encoded = list(pool.map(self._encode, (chunk for _, chunk in chunks)))
        else:
            encoded = [self._encode(chunk) for _, chunk in chunks]
        for (i, _), tokens in zip(chunks, encoded, strict=True):
            parts[i].append(tokens)
        return [np.concatenate(part) if part else np.empty(0, np.uint16) for part in parts]

    def _encode(self, chunk: str) -> Array:
        return self._encoding.encode_to_numpy(chunk, disallowed_special=()).astype(np.uint16)

    def decode(self, tokens: npt.ArrayLike) -> str:
        return self._encoding.decode(_checked(tokens, self).tolist(), errors="replace")


def chunks_of(text: str, size: int = 1 << 18) -> Iterator[str]:
    """Cut a text so that the tokens of the chunks are the tokens of the text.

    No match of GPT-2's pattern goes on from a non-space to a space, and none looks back, so a cut
    there changes nothing. The inside of a long run of spaces (all but its last, which may belong to
    the next word) is a match too: as a chunk of its own it spares the pattern's engine a
    backtracking that overflows its stack.
    """
    start = 0
    for run in _LONG_SPACE.finditer(text):
        yield from _by_size(text, start, run.start(), size)
        start = run.end() - (run.end() < len(text))
        yield text[run.start() : start]
    yield from _by_size(text, start, len(text), size)


def _by_size(text: str, start: int, end: int, size: int) -> Iterator[str]:
    while start < end:
        border = _BORDER.search(text, start + size, end) if end - start > size else None
        stop = border.start() if border else end
        yield text[start:stop]
        start = stop


def last_border(text: str) -> int:
    """The last place where `chunks_of` could cut, 0 if there is none."""
    for i in range(len(text) - 1, 0, -1):
        if text[i] in SPACES and text[i - 1] not in SPACES:
            return i
    return 0


@cache
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name: "gpt2" or "bytes"."""
    if name == "gpt2":
        return GPT2()
    if name == "bytes":
        return Bytes()
    raise LabError(f"unknown tokenizer {name!r}: it must be 'gpt2' or 'bytes'")


def _whole(text: str) -> str:
    """The text with lone surrogates, which no encoding can hold, replaced."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _checked(tokens: npt.ArrayLike, by: Tokenizer) -> npt.NDArray[np.int64]:
    array = np.asarray(tokens, dtype=np.int64).reshape(-1)
    if array.size and (array.min() < 0 or array.max() >= by.vocab_size):
        bad = array[(array < 0) | (array >= by.vocab_size)][0]
        raise LabError(f"token {bad} is not of the tokenizer {by.name!r} (0 … {by.vocab_size - 1})")
    return array


def spelling() -> dict[int, str]:
    """How the merges of GPT-2 spell a byte, in the order of its tokens.

    Those that print in Latin-1 as themselves, the others by the characters from U+0100 on.
    """
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def merges() -> list[tuple[str, str]]:
    """The merges of GPT-2, spelled as above, in order."""
    lines = embedded("gpt2.bpe").rstrip("\n").split("\n")[1:]
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


def _ranks() -> dict[bytes, int]:
    """Byte strings by rank: the 256 bytes, then what each merge makes."""
    spelled = {character: b for b, character in spelling().items()}
    ranks = {bytes([b]): i for i, b in enumerate(spelling())}
    for left, right in merges():
        ranks[bytes(spelled[c] for c in left + right)] = len(ranks)
    return ranks

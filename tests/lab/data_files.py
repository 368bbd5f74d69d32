"""Files to prepare, and what was made of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from mars.lab.data import open_tokens, tokenizer

TEXTS = [
    f"Document {i} of many.\n\n" + f"It says {i * i}, and more. " * (i % 9) for i in range(300)
]


def jsonl(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def table(path: Path, texts: list[str] = TEXTS) -> Path:
    parquet.write_table(
        pyarrow.table({"text": texts, "n": range(len(texts))}), path, row_group_size=64
    )
    return path


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def stream(directory: Path, split: str, by: str = "gpt2") -> np.ndarray:
    tokens = open_tokens(str(directory), split, by)  # type: ignore[arg-type]
    return tokens.read(0, len(tokens))


def documents(tokens: np.ndarray) -> list[str]:
    """The texts between the end-of-text tokens, each of which begins a document."""
    assert tokens[0] == 50256
    starts = [*np.flatnonzero(tokens == 50256), len(tokens)]
    gpt2 = tokenizer("gpt2")
    return [gpt2.decode(tokens[a + 1 : b]) for a, b in pairwise(starts)]

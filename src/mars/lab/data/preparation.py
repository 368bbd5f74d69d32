"""The engine of `mars data`: from documents to shards of uint16 tokens and a manifest.

Each document starts with the end-of-text token (50256 of GPT-2, as in FineWeb's shards), then come
its own tokens; "bytes" has no such token and takes a newline. Documents go on from one shard to the
next. Empty documents are left out.

A run that was interrupted, even by kill -9, goes on when the same command is given again, and ends
with the same bytes as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mars.lab.data.documents import (
    CONTENT,
    ENDS,
    Documents,
    LocalDocuments,
    Piece,
    checked_files,
    single_text,
)
from mars.lab.data.hub import NAMED, HubDocuments, dataset_of
from mars.lab.data.manifest import FILE, SPLITS, Manifest, load_manifest
from mars.lab.data.tokenizers import tokenizer as tokenizer_of
from mars.lab.data.writing import SplitWriter
from mars.lab.errors import LabError
from mars.lab.rundir import TEMPORARY, reason

Progress = Callable[[int, int], None]

BATCH_CHARACTERS = 1 << 22  # tokenised together, by all cores
SPLIT_SEED = 2357
FEW = 10  # documents, or 1 / valid_fraction of them: whole ones would miss that share by far


def prepare(
    source: str,
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    valid_fraction: float | None = None,
    valid_documents: int | None = None,
    documents: int | None = None,
    shard_tokens: int = 100_000_000,
    text_field: str = "text",
    progress: Progress | None = None,
    commit_seconds: float = 10.0,
) -> Manifest:
    """Tokenise a source into a directory of shards, or go on with it.

    Args:
        source: a file, directory or glob of .txt, .md, .jsonl, .parquet; ``"openwebtext"``,
            ``"fineweb-edu"`` or ``"hf:org/name[@revision][:config[:split]]"``.
        out: the directory, new or of the same preparation.
        tokenizer: ``"gpt2"`` or ``"bytes"``.
        valid_fraction: of the documents, for validation; by default 0.0005 of openwebtext, 0.001
            of other datasets of the hub, 0.1 of one text file, 0.01 of other files. The choice
            depends on the document's number alone. Of files that hold fewer than 1 /
            valid_fraction documents (or than 10), it is the last part of each document instead.
        valid_documents: take the first so many documents for validation instead.
        documents: stop after so many documents.
        shard_tokens: tokens of a shard.
        text_field: where a record of .jsonl, .parquet or the hub has its text.
        progress: called with (documents, tokens) so far.
        commit_seconds: how much work a kill may undo.
    """
    tokenizer_of(tokenizer)
    _check_numbers(valid_fraction, valid_documents, documents, shard_tokens)
    fraction = _fraction(source, valid_fraction)
    found = documents_of(source, text_field, fraction, valid_documents, documents)
    settings = {
        "tokenizer": tokenizer,
        "valid_fraction": fraction if valid_documents is None else None,
        "valid_documents": valid_documents,
        "documents": documents,
        "shard_tokens": shard_tokens,
        "text_field": text_field,
        **found.settings(),
    }
    directory = Path(out).expanduser()
    made = not directory.exists()
    with locked(directory):
        manifest = _begin(directory, Manifest(tokenizer, found.name, _as_json(settings)))
        if not manifest.complete:
            try:
                _Preparation(directory, manifest, found, commit_seconds, progress).run()
            except LabError:
                _forget(directory, made)
                raise
    return manifest


def documents_of(
    source: str,
    text_field: str,
    valid_fraction: float,
    valid_documents: int | None,
    limit: int | None = None,
) -> Documents:
    """The documents that a source names; of files that hold few, each is split by its end."""
    dataset = dataset_of(source)
    if dataset is not None:
        return HubDocuments(dataset, text_field)
    found = LocalDocuments(source, checked_files(source), text_field)
    if valid_documents is not None:
        if single_text(found.files):
            raise LabError(
                f"{source} is one document: give --valid-fraction, not --valid-documents"
            )
        return found
    enough = max(FEW, 1 / valid_fraction)
    if (limit is not None and limit < enough) or found.fewer_than(enough):
        found.tail = valid_fraction
    return found


class _Preparation:
    """One run from where the manifest says to the end."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        found: Documents,
        commit_seconds: float,
        progress: Progress | None,
    ) -> None:
        self.directory, self.manifest, self.found = directory, manifest, found
        self.commit_seconds, self.progress = commit_seconds, progress
        self.tokenizer = tokenizer_of(manifest.tokenizer)
        eot = self.tokenizer.eot
        self.separator = np.array([ord("\n") if eot is None else eot], np.uint16)
        self.position = manifest.position or {"source": None, "split": None, "open": {}}
        self.limit: int | None = manifest.settings["documents"]
        size = manifest.settings["shard_tokens"]
        self.writers = {
            split: SplitWriter(
                directory, split, size, manifest.shards[split], self.position["open"].get(split, 0)
            )
            for split in SPLITS
        }

    def run(self) -> None:
        committed = time.monotonic()
        try:
            for batch, last in self._batches():
                self._write(batch)
                # After the last batch the source stands behind what was taken of it.
                if not last and time.monotonic() - committed >= self.commit_seconds:
                    self._commit()
                    committed = time.monotonic()
            self._end()
        finally:
            for writer in self.writers.values():
                writer.close()

    def _batches(self) -> Iterator[tuple[list[Piece], bool]]:
        """Pieces to be tokenised together, and whether they are the last."""
        batch: list[Piece] = []
        documents, size = self.manifest.documents, 0
        for piece in self.found.pieces(self.position["source"]):
            documents += piece.new
            if self.limit is not None and documents > self.limit:
                break
            batch.append(piece)
            size += len(piece.text) + 1
            if size >= BATCH_CHARACTERS or len(batch) >= 4096:
                yield batch, False
                batch, size = [], 0
        yield batch, True

    def _write(self, batch: list[Piece]) -> None:
        encoded = self.tokenizer.encode_batch([piece.text for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            if not piece.text:
                continue
            if piece.first:
                self.position["split"] = piece.split or self._choose(self.manifest.documents)
            self.manifest.documents += piece.new
            writer = self.writers[self.position["split"]]
            if piece.first:
                writer.write(self.separator)
            writer.write(tokens)
        if self.progress is not None:
            self.progress(self.manifest.documents, sum(w.tokens for w in self.writers.values()))

    def _choose(self, number: int) -> str:
        """The split of a document by its number: the first is validation, the second training."""
        settings = self.manifest.settings
        if settings["valid_documents"] is not None:
            return "valid" if number < settings["valid_documents"] else "train"
        if number < 2:
            return SPLITS[1 - number]
        draw = hashlib.sha256(f"{SPLIT_SEED} {number}".encode()).digest()[:8]
        chosen = int.from_bytes(draw, "little") < settings["valid_fraction"] * 2**64
        return "valid" if chosen else "train"

    def _commit(self) -> None:
        for writer in self.writers.values():
            writer.flush()
        self.position["source"] = self.found.position()
        self.position["open"] = {name: w.open_tokens for name, w in self.writers.items()}
        self.manifest.position = self.position
        self.manifest.save(self.directory)

    def _end(self) -> None:
        for split, writer in self.writers.items():
            if not writer.tokens:
                if not any(w.tokens for w in self.writers.values()):
                    raise LabError(f"{self.found.name} is empty")
                raise LabError(
                    f"{self.found.name} has {self.manifest.documents} documents, and none was left "
                    f"for {split}: give more, or another --valid-documents"
                )
            writer.finish()
        self.manifest.position, self.manifest.complete = None, True
        self.manifest.save(self.directory)


def _begin(directory: Path, wanted: Manifest) -> Manifest:
    """The manifest to go on from; a new one if the directory is empty."""
    for left in directory.glob(TEMPORARY + "*"):  # of a manifest that a kill kept from being one
        left.unlink()
    if (directory / FILE).exists():
        manifest = load_manifest(directory)
        if manifest.position is None and not manifest.complete:
            manifest = wanted  # nothing was committed
        adopted = manifest.complete and CONTENT not in manifest.settings  # of an older version
        for name, value in wanted.settings.items():
            if name == CONTENT and (not manifest.complete or name not in manifest.settings):
                manifest.settings[name] = value  # a line that kept it from ending may be mended
            if manifest.settings.get(name) == value:
                continue
            if name == ENDS and manifest.complete:
                continue  # of an older version, which drew whole documents: left as it is
            if name == CONTENT:
                raise LabError(
                    f"the files have changed since {directory} was made of them: take another "
                    "--out, or delete it"
                )
            raise LabError(
                f"{directory} was begun with other settings ({name}: "
                f"{_short(manifest.settings.get(name))}, now {_short(value)}): take another "
                "--out, or delete it"
            )
        if adopted:
            manifest.save(directory)
        return manifest
    if any(directory.iterdir()):
        raise LabError(f"{directory} is not empty and has no {FILE}: take another --out")
    wanted.save(directory)
    return wanted


def _forget(directory: Path, made: bool) -> None:
    """Leave no trace of a preparation that failed before its first commit."""
    manifest = load_manifest(directory)
    if manifest.position is None and not manifest.complete:
        for split in SPLITS:
            SplitWriter(directory, split, 1, [], 0)  # removes what was not committed
        (directory / FILE).unlink()
        if made:
            directory.rmdir()


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """As they will come back from the manifest, where a tuple is a list."""
    again: dict[str, Any] = json.loads(json.dumps(settings))
    return again


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the directory, and hold it against another preparation."""
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise LabError(f"{directory} cannot be made: {reason(error)}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise LabError(f"{directory} is in use by another `mars data`") from error
    except OSError as error:
        raise LabError(f"{directory} cannot be written: {reason(error)}") from error
    finally:
        os.close(handle)


def _fraction(source: str, given: float | None) -> float:
    if given is not None:
        return given
    if source in NAMED:
        return NAMED[source][1]
    if source.startswith("hf:"):
        return 0.001
    files = checked_files(source)
    return 0.1 if single_text(files) else 0.01


def _check_numbers(
    fraction: float | None, first: int | None, documents: int | None, shard_tokens: int
) -> None:
    if fraction is not None and first is not None:
        raise LabError("give --valid-fraction or --valid-documents, not both")
    if fraction is not None and not 0 < fraction < 1:
        raise LabError(f"--valid-fraction must be between 0 and 1, not {fraction}")
    for name, value in (("valid-documents", first), ("documents", documents)):
        if value is not None and value < 1:
            raise LabError(f"--{name} must be at least 1, not {value}")
    if shard_tokens < 1:
        raise LabError(f"--shard-tokens must be at least 1, not {shard_tokens}")

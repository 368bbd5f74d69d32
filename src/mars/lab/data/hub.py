"""Documents of datasets of the Hugging Face hub, streamed: nothing but the shards is kept.

Only `mars data` comes here, and only when a dataset is named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mars.lab.data.documents import Piece, text_of
from mars.lab.errors import LabError, first_line

# The hub's own conversion of datasets that are still programs, which `datasets` runs no more.
CONVERTED = "refs/convert/parquet"
PROGRAM = "scripts are no longer supported"  # what it says of those


@dataclass(frozen=True)
class Dataset:
    """What `datasets.load_dataset` is asked for."""

    path: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: tuple[str, ...] | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.path}{at}:{self.config or ''}:{self.split}"

    @property
    def short(self) -> str:
        """As it is usually typed, without what goes without saying.

        >>> Dataset("org/name").short, Dataset("org/name", "en", "test").short
        ('hf:org/name', 'hf:org/name:en:test')
        """
        return str(self).removesuffix(":train").rstrip(":")


# Named sources and the part of the documents that they keep for validation.
NAMED = {
    # It has no validation split; nanoGPT's 0.0005 is the usual part.
    "openwebtext": (Dataset("Skylion007/openwebtext"), 0.0005),
    "fineweb-edu": (Dataset("HuggingFaceFW/fineweb-edu", "sample-10BT"), 0.001),
}


def dataset_of(source: str) -> Dataset | None:
    """The dataset that a source names, None if it names none.

    >>> dataset_of("hf:allenai/c4:en:validation")
    Dataset(path='allenai/c4', config='en', split='validation', revision=None, data_files=None)
    """
    if source in NAMED:
        return NAMED[source][0]
    if not source.startswith("hf:"):
        return None
    path, *rest = source[3:].split(":")
    path, _, revision = path.partition("@")
    if not path or len(rest) > 2:
        raise LabError(f"{source!r} is not hf:org/name[@revision][:config[:split]]")
    config, split = [*rest, "", ""][:2]
    return Dataset(path, config or None, split or "train", revision or None)


class HubDocuments:
    """The documents of a streamed dataset."""

    def __init__(self, dataset: Dataset, field: str) -> None:
        self.dataset = dataset
        self.field = field
        self._stream = self._load()
        self.name = str(self.dataset)

    def settings(self) -> dict[str, Any]:
        return {"dataset": str(self.dataset), "files": self.dataset.data_files}

    def position(self) -> Any:
        return self._stream.state_dict()

    def pieces(self, position: Any) -> Iterator[Piece]:
        if position is not None:
            self._stream.load_state_dict(position)
        name = self.dataset.short
        try:
            for record in self._stream:
                yield Piece(text_of(record, self.field, name))
        except LabError:
            raise
        except Exception as error:  # whatever a network, a server or a reader can do
            raise LabError(
                f"{name} stopped ({_said(error)}): run the same command to resume"
            ) from error

    def _load(self) -> Any:
        try:
            import datasets  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise LabError(f"{self.dataset.short} needs datasets: pip install datasets") from error
        datasets.disable_progress_bars()
        try:
            return self._open(datasets)
        except Exception as error:
            program = isinstance(error, RuntimeError) and PROGRAM in str(error)
            if not program or self.dataset.revision:
                raise self._refused(error) from error
            self.dataset = replace(self.dataset, revision=CONVERTED)
            return self._load()

    def _open(self, datasets: Any) -> Any:
        wanted = self.dataset
        files = list(wanted.data_files) if wanted.data_files else None
        with _quiet():
            stream = datasets.load_dataset(
                wanted.path,
                wanted.config,
                split=wanted.split,
                revision=wanted.revision,
                data_files=files,
                streaming=True,
            )
        if stream.column_names and self.field not in stream.column_names:
            text_of(dict.fromkeys(stream.column_names), self.field, wanted.short)
        # Other columns need not be decoded.
        return stream.select_columns([self.field])

    def _refused(self, error: Exception) -> LabError:
        if isinstance(error, LabError):
            return error
        return LabError(
            f"cannot open {self.dataset.short} ({_said(error)}): it needs a network, and the "
            "right name, config and split"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without two lines for every retry of the hub's: the error that comes in the end says it."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _said(error: Exception) -> str:
    return first_line(error, named=True)[:220]

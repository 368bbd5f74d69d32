"""The log of a run: one JSON object a line in log.jsonl, and to other places if asked.

A record is handed to the operating system in one call, so a kill tears the last line at most.
Resuming rewinds the log to the checkpoint: what was logged after it happens again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mars.lab.errors import LabError
from mars.lab.rundir import drop_torn_line, reason, write_atomically
from mars.lab.sinks import Sink, TensorBoard, WeightsAndBiases

NAME = "log.jsonl"
FORMAT = 1  # which its header says


class Log:
    """Appends records to ``directory/log.jsonl``; a torn last line is dropped first.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> with Log(directory) as log:
    ...     log.write("train", step=1, loss=float("nan"))
    >>> read(directory)
    [{'kind': 'train', 'step': 1, 'loss': None}]

    Args:
        directory: the run directory.
        tensorboard: also write TensorBoard's events, to ``directory/tensorboard``.
        wandb: also log to this project of Weights & Biases.
        config: the configuration that Weights & Biases shows.
    """

    def __init__(
        self, directory: Path, *, tensorboard: bool = False, wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.path = Path(directory) / NAME
        self._sinks: list[Sink] = []
        if tensorboard:
            self._sinks.append(TensorBoard(Path(directory)))
        if wandb is not None:
            self._sinks.append(WeightsAndBiases(Path(directory), wandb, config or {}))
        self._open()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            drop_torn_line(self._descriptor)
        except OSError as error:
            raise LabError(f"cannot write {self.path}: {reason(error)}") from error

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record. NaN and infinities become null; tensors of one element, numbers."""
        record = {"kind": kind, **_clean(fields)}
        line = _encode(record)
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # the disk was full just now; it may say so, or be no more
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise LabError(f"cannot write {self.path}: {reason(error)}") from error
        for sink in self._sinks:
            sink.write(record)

    def rewind(self, step: int | None, header: Mapping[str, Any] | None = None) -> int:
        """Drop what comes after this step, what is damaged, and that the run has ended.

        None drops everything: the run begins again. ``header`` is put in front if the log has none
        any more. Returns how many lines were damaged.
        """
        kept, headed, damaged = [], False, 0
        if step is not None:
            for line in self.path.read_bytes().split(b"\n")[:-1]:
                record = _parse(line)
                damaged += record is None
                if record and record.get("kind") != "end" and _is_until(record, step):
                    headed = headed or record.get("kind") == "header"
                    kept.append(line + b"\n")
        if header is not None and not headed:
            kept.insert(0, _encode(header))
        self._replace(b"".join(kept))
        for sink in self._sinks:
            sink.rewind(0 if step is None else step + 1)
        return damaged

    def replace_header(self, **fields: Any) -> None:
        """Change fields of the first record, when the run itself has changed."""
        lines = self.path.read_bytes().split(b"\n")
        header = {**json.loads(lines[0]), **_clean(fields)}
        lines[0] = json.dumps(header, allow_nan=False).encode()
        self._replace(b"\n".join(lines))

    def _replace(self, content: bytes) -> None:
        write_atomically(self.path, content)
        old = self._descriptor
        self._open()
        os.close(old)

    def sync(self) -> None:
        """Wait until all of it is on disk: before a checkpoint, so that a power cut leaves both."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise LabError(f"cannot write {self.path}: {reason(error)}") from error

    def close(self) -> None:
        """End it; TensorBoard and W&B write what they still hold."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            for sink in self._sinks:
                sink.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a log, given as file or run directory; a torn last line is left out."""
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LabError(f"cannot read {path}: {reason(error)}") from error
    records = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is torn
        record = _parse(line)
        if record is None:
            raise LabError(f"{path}: line {number} is damaged")
        records.append(record)
    return records


def header(directory: Path) -> dict[str, Any]:
    """What a run began with; {} if its log does not say. LabError as of `read`."""
    return next((record for record in read(directory) if record.get("kind") == "header"), {})


def ended(directory: Path) -> dict[str, Any]:
    """How a run ended; {} if it goes on, or did when it was killed. LabError as of `read`."""
    last = read(directory)[-1:]
    return last[0] if last and last[0].get("kind") == "end" else {}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_clean(record), allow_nan=False).encode() + b"\n"


def _is_until(record: Mapping[str, Any], step: int) -> bool:
    at = record.get("step", 0)
    return isinstance(at, int) and at <= step


def _clean(value: Any) -> Any:
    """The same in JSON's types."""
    if isinstance(value, (Tensor, np.generic)):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return str(value) if isinstance(value, Path) else value

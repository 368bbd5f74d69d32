"""Read run directories: what a training wrote into log.jsonl, as arrays.

The reader is forgiving where a killed process leaves traces (a torn line, steps that a resumed run
did again) and strict about files that are not logs at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mars.lab.errors import LabError, UsageError
from mars.lab.log import FORMAT
from mars.lab.log import NAME as LOG
from mars.lab.report.measure import Measure, of

Record = dict[str, Any]
Series = dict[str, NDArray[np.float64]]  # columns of equal length; null is NaN

ERROR = "error.txt"


@dataclass(frozen=True, eq=False)
class RunLog:
    """One training: its header, its curves and how it ended."""

    path: Path
    header: Record
    train: Series
    valid: Series
    diagnostics: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    end: Record | None = None
    ignored: int = 0  # lines that could not be read
    race: Record = field(default_factory=dict)  # race.json of the race it belongs to
    error: str = ""  # that broke it off

    def at(self, *keys: str) -> Any:
        """What the header has under these keys, one inside the other; None if it has not."""
        found: Any = self.header
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    @property
    def label(self) -> str:
        return str(self.header.get("label") or self.optimizer)

    @property
    def optimizer(self) -> str:
        return str(self.header["optimizer"])

    @property
    def lr(self) -> float:
        return float(self.header["lr"])

    @property
    def seed(self) -> int:
        return int(self.header["seed"])

    @property
    def steps(self) -> int:
        """Optimizer steps that were planned."""
        return int(self.header["steps"])

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return int(max(_last(self.train, "step"), _last(self.valid, "step"), _step(self.end)))

    @property
    def measure(self) -> Measure:
        return of(self.header.get("unit"))

    @property
    def progress(self) -> float:
        """How far it got: tokens, or epochs."""
        return self._furthest(self.measure.progress)

    def _furthest(self, name: str) -> float:
        ends = (self.train, self.valid)
        return max(*(_last(series, name) for series in ends), _number(self.end, name, 0.0))

    @property
    def seconds(self) -> float:
        return self._furthest("seconds")

    @property
    def status(self) -> str:
        """done, stopped, diverged, failed, or unfinished (running, or killed)."""
        if self.end is None:
            return "failed" if self.error else "unfinished"
        said = str(self.end.get("status", ""))
        if said == "done" and self._loss_at_end() is None and len(self.valid["loss"]):
            return "diverged"
        if said in ("diverged", "failed"):  # as it was called before
            return "diverged"
        return said if said in ("done", "stopped") else "unfinished"

    @property
    def why(self) -> str:
        """What is known of the reason for that."""
        return str(self.end.get("text") or "") if self.end else self.error

    @property
    def final(self) -> float | None:
        """The validation loss at the end of a training that got there."""
        return self._loss_at_end() if self.status == "done" else None

    @property
    def accuracy(self) -> float | None:
        """The accuracy at the end of a training on images that got there."""
        if self.final is None or self.measure.unit != "images":
            return None
        last = _number(self.end, "accuracy", _last(self.valid, "accuracy", math.nan))
        return last if math.isfinite(last) else None

    @property
    def best_accuracy(self) -> float | None:
        """The highest that was measured on the way."""
        seen = self.valid.get("accuracy", np.array([]))
        seen = seen[np.isfinite(seen)]
        return float(seen.max()) if len(seen) and self.accuracy is not None else None

    @property
    def score(self) -> float | None:
        """What it is judged by, the lower the better: the share of wrong images, or the loss."""
        return self.final if self.accuracy is None else 1.0 - self.accuracy

    @property
    def grain(self) -> float:
        """What scores are multiples of: one image, or nothing."""
        count = _float(self.at("data", "valid", "images"), math.inf)
        return 1.0 / count if count > 0 else 0.0

    @property
    def last(self) -> float | None:
        """The newest validation loss, whether or not the training is over."""
        seen = self.valid["loss"][np.isfinite(self.valid["loss"])]
        return self.final if self.final is not None else (float(seen[-1]) if len(seen) else None)

    def _loss_at_end(self) -> float | None:
        if self.end is None:
            return None
        loss = _number(self.end, "valid", math.nan)
        if math.isnan(loss) and "valid" not in self.end:
            loss = _last(self.valid, "loss", math.nan)
        return loss if math.isfinite(loss) else None


def load(paths: Iterable[str | Path]) -> list[RunLog]:
    """The runs at these paths, each once: run directories, race directories or log.jsonl files."""
    found: dict[Path, RunLog] = {}
    for given in paths:
        for log in _logs(Path(given)):
            key = log.resolve()
            if key not in found:
                found[key] = read(log)
    if not found:
        raise UsageError("no run given: name a run directory, a race directory or a log.jsonl")
    return list(found.values())


def read(path: Path) -> RunLog:
    """One log.jsonl."""
    records, ignored = _records(path)
    if not records:
        raise LabError(f"{path}: empty, no training has written to it yet")
    header = _header(path, records)
    kinds: dict[str, list[Record]] = {"train": [], "valid": [], "diagnostics": [], "event": []}
    end: Record | None = None
    for record in records:
        kind = record.get("kind")
        if kind == "header":
            header = {**header, **record}
        elif kind == "end":
            end = record
        elif isinstance(kind, str) and kind in kinds:
            end = None  # it went on
            if kind == "event":
                if record.get("what") == "resumed":
                    _forget(kinds, _step(record))
            else:
                _forget({kind: kinds[kind]}, _step(record) - 1)
            kinds[kind].append(record)
    measure = of(header.get("unit"))
    columns = ("step", measure.unit, measure.progress, "seconds", "loss")  # in every series
    return RunLog(
        path=path.parent,
        header=header,
        train=_series(kinds["train"], columns),
        valid=_series(kinds["valid"], columns),
        diagnostics=kinds["diagnostics"],
        events=kinds["event"],
        end=end,
        ignored=ignored,
        race=_race(path.parent),
        error=broken_off(path),
    )


def _logs(path: Path) -> list[Path]:
    """The log files that a path means."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise LabError(f"{path}: no such run, race or log file")
    if (path / LOG).exists():
        return [path / LOG]
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if name != "checkpoints")
        if LOG in files:
            found.append(Path(folder) / LOG)
    # In a race under way the next run may have opened its log and written nothing yet.
    begun = [log for log in found if log.stat().st_size > 0]
    if not begun:
        what = f"{found[0]} is empty" if found else f"no {LOG} below it"
        raise LabError(f"{path}: {what}; is this a run or a race directory?")
    return begun


def _records(path: Path) -> tuple[list[Record], int]:
    """The readable records, and how many lines were not. A torn last line is not counted."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}") from error
    records: list[Record] = []
    ignored = 0
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif not records:
            raise LabError(f"{path}: not a log of mars: line {i + 1} is not a JSON object")
        elif i < len(lines) - 1:
            ignored += 1
    return records, ignored


def _header(path: Path, records: Sequence[Record]) -> Record:
    header = records[0]
    if header.get("kind") != "header":
        raise LabError(f"{path}: not a log of mars: it does not begin with a header")
    if header.get("format") != FORMAT:
        raise LabError(
            f"{path}: log format {header.get('format')!r}, this version reads {FORMAT}: "
            "use the version of mars that wrote it"
        )
    for key in ("lr", "seed", "steps"):
        if not math.isfinite(_number(header, key, math.nan)):
            raise LabError(f"{path}: the header's {key!r} is {header.get(key)!r}, not a number")
    if not isinstance(header.get("optimizer"), str):
        raise LabError(f"{path}: the header names no optimizer")
    return header


def _forget(kinds: dict[str, list[Record]], step: float) -> None:
    """Drop what was measured after this step: the run did those steps again."""
    for kind, records in kinds.items():
        if kind != "event":
            while records and _step(records[-1]) > step:
                records.pop()


def _series(records: Sequence[Record], always: Iterable[str]) -> Series:
    names = dict.fromkeys(always)
    for record in records:
        names |= dict.fromkeys(k for k, v in record.items() if _is_number(v) and k != "kind")
    return {
        name: np.array([_number(record, name, math.nan) for record in records], dtype=np.float64)
        for name in names
    }


def _race(run: Path) -> Record:
    """The settings of the race above a run, {} if there is none."""
    for folder in list(run.resolve().parents)[:3]:
        try:
            settings = json.loads((folder / "race.json").read_bytes())
        except (OSError, ValueError):
            continue
        return settings if isinstance(settings, dict) else {}
    return {}


def broken_off(log: Path) -> str:
    """What a run's traceback says in the end; nothing if the run has gone on since."""
    path = log.parent / ERROR
    try:
        if log.exists() and path.stat().st_mtime_ns < log.stat().st_mtime_ns:
            return ""
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    lines = text.rpartition("(most recent call last):")[2].splitlines()
    said = (line for line in lines if line.strip() and not line.startswith(" "))  # stacks are
    return next(said, "for an unknown reason")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(record: Record | None, key: str, default: float) -> float:
    return _float(record.get(key) if record else None, default)


def _float(value: Any, default: float) -> float:
    if not _is_number(value):
        return default
    try:
        return float(value)
    except OverflowError:
        return default


def _step(record: Record | None) -> float:
    return _number(record, "step", 0.0)


def _last(series: Series, name: str, default: float = 0.0) -> float:
    values = series.get(name)
    if values is None or not len(values) or math.isnan(values[-1]):
        return default
    return float(values[-1])

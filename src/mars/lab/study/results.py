"""The results file: one line a finished run, appended and synced, small enough to travel.

What is in it is never run again, whether or not its logs are still there. Two files of the same
study from two machines are merged by putting one after the other; of equal runs the first counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mars.lab.errors import LabError
from mars.lab.log import NAME as LOG
from mars.lab.report.runs import ERROR, broken_off
from mars.lab.rundir import drop_torn_line, reason

NAME = "results.jsonl"
RUNS = "runs"  # the directory of their directories
FORMAT = 1
Key = tuple[str, float, int]  # arm, rate, seed


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    arm: str
    lr: float
    seed: int
    status: str  # done, diverged
    final: float | None  # validation loss at the end; None if it diverged
    fingerprint: dict[str, str]
    best: float | None = None  # lowest validation loss
    curve: dict[str, list[float]] = field(default_factory=dict)  # step, tokens, seconds, loss
    seconds: float | None = None  # of training
    wall: float | None = None  # with everything else; None if the run was interrupted
    step_seconds: float | None = None
    optimizer_share: float | None = None
    tokens: float | None = None
    memory: float | None = None
    at_once: int = 1  # runs on the device while it ran: times of other numbers do not compare
    variance_ratio: float | None = None  # Var(c)/Var(g), the mean of what the run's log says
    independent: float | None = None  # what that would be for independent noise
    text: str = ""  # why it diverged
    time: str = ""

    @property
    def key(self) -> Key:
        return self.arm, self.lr, self.seed

    @property
    def loss(self) -> float:
        """The final loss; a run that diverged is infinitely bad."""
        return math.inf if self.final is None else self.final


def failures(directory: Path, folders: Mapping[str, str]) -> dict[str, str]:
    """A traceback for each arm of which any run failed, by where it is in the study's directory.

    ``folders``: the arms, and how the names of their runs begin. Without runs/ nothing is known.
    """
    kept = sorted((directory / RUNS).glob(f"*/{ERROR}"))
    found = {}
    for label, folder in folders.items():
        own = re.compile(rf"{re.escape(folder)}-lr[\d.e+-]+-s\d+")
        of_arm = [p for p in kept if own.fullmatch(p.parent.name) and broken_off(p.with_name(LOG))]
        if of_arm:
            found[label] = str(of_arm[0].relative_to(directory))
    return found


class Results:
    """The file of a study's results."""

    def __init__(self, directory: Path) -> None:
        self.path = Path(directory) / NAME

    def read(self) -> list[Result]:
        """All results, each run once; a last line that a kill tore is left out."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LabError(f"cannot read {self.path}: {reason(error)}") from error
        found: dict[Key, Result] = {}
        for number, line in enumerate(lines[:-1], 1):
            if line.strip():
                result = self._parse(line, number)
                found.setdefault(result.key, result)
        return list(found.values())

    def _parse(self, line: bytes, number: int) -> Result:
        try:
            record = json.loads(line)
            if record.pop("format") != FORMAT:
                raise LabError(
                    f"{self.path}: line {number} has another format: use the mars that wrote it"
                )
            result = Result(**record)
            ok = isinstance(result.fingerprint, dict) and math.isfinite(result.lr + result.seed)
            if not ok or (result.status == "done") != (result.final is not None):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError):
            raise LabError(
                f"{self.path}: line {number} is damaged: remove it, and that run is done again"
            ) from None
        return result

    def add(self, results: Iterable[Result]) -> None:
        """Append, and wait until it is on disk."""
        text = "".join(
            json.dumps({"format": FORMAT, **dataclasses.asdict(result)}, allow_nan=False) + "\n"
            for result in results
        )
        try:
            with open(self.path, "a+b") as file:
                drop_torn_line(file.fileno())
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise LabError(f"cannot write {self.path}: {reason(error)}") from error

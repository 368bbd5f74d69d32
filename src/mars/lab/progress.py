"""What a person sees while a run trains: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any, TypeVar

from mars.lab.report import units

T = TypeVar("T", bound="Shown")


class Shown:
    """Bars in a terminal, if there is one and rich is installed; lines on standard error else."""

    def __init__(self) -> None:
        self.bar: Any = None

    def columns(self) -> list[Any]:
        """What a bar consists of."""
        raise NotImplementedError

    def begin(self) -> None:
        """Add the bars that are there from the start."""

    def __enter__(self: T) -> T:
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.progress import Progress as Bar

                self.bar = Bar(*self.columns(), console=Console(stderr=True))
                self.bar.start()
                self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.bar is not None:
            with contextlib.suppress(OSError):  # the terminal has gone
                self.bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


class Progress(Shown):
    """Watches the records of a run (``train(run, watch=progress)``)."""

    def __init__(self, steps: int, begun: bool = False) -> None:
        super().__init__()
        self.steps, self.valid = steps, ""
        self.begun = begun  # there is a log already: a new header means that it starts again
        self.last: dict[str, Any] = {}
        self.task: Any = None

    def columns(self) -> list[Any]:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        steps, text = map(TextColumn, ("step {task.completed}/{task.total}", "{task.description}"))
        return [steps, BarColumn(), text, TimeRemainingColumn()]

    def begin(self) -> None:
        self.task = self.bar.add_task("starting", total=self.steps)

    def __call__(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the terminal or the reader has gone; training has not
            self._show(record)

    def answer(self, text: str) -> None:
        """What follows a signal, while the step that it came in goes on."""
        with contextlib.suppress(OSError):
            self.say(text)

    def _show(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if self.bar is not None and "step" in record:
            self.bar.update(self.task, completed=record["step"])
        if kind == "train":
            self.last = record
        elif kind == "valid":
            right = (
                f", accuracy {units.accuracy(record['accuracy'])}" if "accuracy" in record else ""
            )
            self.valid = f"{record['loss']:.4f}{right}"
            if self.bar is None:
                place = f"step {record['step']}/{self.steps}, {_place(record)}"
                taken = f"{units.seconds(record['seconds'])}{self._left(record)}"
                self.say(f"{place}, {taken}: validation loss {self.valid}")
        elif kind == "header" and self.begun:
            self.say("the run here left no checkpoint: it starts again at step 0")
        elif kind == "event":
            named = record["what"] in ("resumed", "extended")
            self.say(f"{record['what']} {record['text']}" if named else record["text"])
        if self.bar is not None and self.last:
            self.bar.update(self.task, description=self._describe(self.last))

    def _left(self, record: dict[str, Any]) -> str:
        """Of training, at the pace so far."""
        done, left = record["step"], self.steps - record["step"]
        if done == 0 or left <= 0:
            return ""
        return f" ({units.seconds(record['seconds'] / done * left)} left)"

    def _describe(self, record: dict[str, Any]) -> str:
        parts = [f"loss {record['loss']:.3f}"]
        if self.valid:
            parts.append(f"valid {self.valid}")
        if "epoch" in record:
            parts.append(f"epoch {record['epoch']:.1f}")
        for unit in ("tokens", "images"):
            if record.get(f"{unit}_per_second"):
                parts.append(f"{units.tokens(record[f'{unit}_per_second'])} {unit}/s")
        if record["mfu"]:
            parts.append(f"{record['mfu']:.0%} MFU")
        return "  ".join(parts)


def _place(record: dict[str, Any]) -> str:
    """How far a run is, in what it counts."""
    if "epoch" in record:
        return f"epoch {record['epoch']:.2f}"
    return f"{units.tokens(record['tokens'])} tokens"

"""What a person sees while a run trains: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any

from mars.lab.report import units


class Progress:
    """Watches the records of a run (``train(run, watch=progress)``)."""

    def __init__(self, steps: int) -> None:
        self.steps, self.valid = steps, ""
        self.last: dict[str, Any] = {}
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            self.bar = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task = self.bar.add_task("starting", total=self.steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the terminal or the reader has gone; training has not
            self._show(record)

    def _show(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if self.bar is not None and "step" in record:
            self.bar.update(self.task, completed=record["step"])
        if kind == "train":
            self.last = record
        elif kind == "valid":
            self.valid = f"{record['loss']:.4f}"
            if self.bar is None:
                place = (
                    f"step {record['step']}/{self.steps}, {units.tokens(record['tokens'])} tokens"
                )
                self._say(
                    f"{place}, {units.seconds(record['seconds'])}: validation loss {self.valid}"
                )
        elif kind == "event":
            named = record["what"] in ("resumed", "extended")
            self._say(f"{record['what']} {record['text']}" if named else record["text"])
        if self.bar is not None and self.last:
            self.bar.update(self.task, description=self._describe(self.last))

    def _describe(self, record: dict[str, Any]) -> str:
        parts = [f"loss {record['loss']:.3f}"]
        if self.valid:
            parts.append(f"valid {self.valid}")
        if record["tokens_per_second"]:
            parts.append(f"{units.tokens(record['tokens_per_second'])} tokens/s")
        if record["mfu"]:
            parts.append(f"{record['mfu']:.0%} MFU")
        return "  ".join(parts)

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

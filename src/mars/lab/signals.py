"""Ctrl-C, SIGTERM and a closed terminal as a question that the loop answers between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Within it, the first of the SIGNALS only sets ``asked``; a further SIGINT interrupts.

    >>> with Interrupt() as interrupt:
    ...     for step in range(3):
    ...         if interrupt.asked:
    ...             break

    Handlers can be set in the main thread alone: elsewhere it does nothing. A signal that the
    parent told us to ignore (a job started in the background or by nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # the name of the signal
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: set by C code, cannot be put back
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked data worker inherits the handler but has no loop: end as if there were none.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        elif self.asked is None:
            self.asked = signal.Signals(number).name

"""Ctrl-C, SIGTERM and a closed terminal as a question that the loop answers between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_listening: set[int] = set()  # pipes that Python's own handler, the one in C, writes to


def _listen_no_more() -> None:
    """In a forked child: its signals are not its parent's."""
    if _listening:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listen_no_more)


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

    @contextlib.contextmanager
    def telling(self, say: Callable[[str], object]) -> Iterator[None]:
        """Within it, the name of the first signal is said when it comes, by a thread of its own.

        The handler cannot: it waits until torch is back in Python (a backward pass may take
        seconds), and may have interrupted somebody who prints.
        """
        if not self._before or self.asked is not None:
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # else it is refused
        thread = threading.Thread(target=self._listen, args=(reader, say), daemon=True)
        thread.start()
        _listening.add(writer)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            _listening.discard(writer)
            os.write(writer, b"\0")
            thread.join()
            os.close(reader)
            os.close(writer)

    def _listen(self, reader: int, say: Callable[[str], object]) -> None:
        while number := os.read(reader, 1)[0]:
            if number in self._before:
                say(signal.Signals(number).name)
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked data worker inherits the handler but has no loop: end as if there were none.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        elif self.asked is None:
            self.asked = signal.Signals(number).name

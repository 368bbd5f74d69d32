"""Worker processes that answer signals: a run in progress is saved, the next is not begun."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import torch

_asked: list[int] = []  # in a worker: signals that came while no run was in progress


def begin() -> None:
    """In a worker: keep a signal until there is a run that can answer it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _asked.append(number))


def answer() -> None:
    """In a run, at its records: pass on a signal that came before the run could."""
    if _asked:
        _asked.clear()
        signal.raise_signal(signal.SIGTERM)


def forget_compiled() -> None:
    """After a run: else the next model counts against the limit of recompilations."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@contextmanager
def terminable() -> Iterator[None]:
    """In the main process: SIGTERM as Ctrl-C, so that workers are not left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(pool: Executor) -> None:
    """Have runs in progress saved, and wait for that."""
    for worker in multiprocessing.active_children():
        worker.terminate()  # a run in progress takes it for a question
    pool.shutdown(wait=True, cancel_futures=True)

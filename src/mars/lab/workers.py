"""In a worker process: tasks, one after the other, and answers to signals.

A run in progress is saved, the next is not begun. The other end of the pipe is `crew`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from mars.lab.config import Run
from mars.lab.errors import Diverged, LabError, first_line, unexpected

_asked: list[int] = []  # signals that came while no run could answer them
_busy = False  # there is a run in progress
_compiled: object = None  # what the last run was compiled for
_pipe: Connection | None = None  # where tasks come from, and what is told goes
_stopped = False  # somebody asked it to

TOLD = ("kind", "step", "loss", "accuracy", "step_seconds")  # of a record


class LostGpu(LabError):
    """An earlier kernel failed: none will run in this process any more."""


def serve(pipe: Connection) -> None:
    """A worker's life: do what comes through the pipe, until it is closed."""
    global _pipe
    _pipe = pipe
    begin()
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(task: bytes) -> bytes:
    """Do a task: its result or its error, pickled as whoever asked for it can read it."""
    try:
        return _pickled("result", pickle.loads(task)(), "")
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            return _pickled("error", error, trace)
        except Exception:  # of a class that cannot be pickled, or not be made again
            text = f"{type(error).__name__}, in a worker:\n{trace}"
            return pickle.dumps(("error", RuntimeError(text), trace))


def _pickled(*answer: object) -> bytes:
    said = pickle.dumps(answer)
    pickle.loads(said)
    return said


def tell(what: object) -> None:
    """Pass something on to who asked for the task."""
    if _pipe is not None:
        with suppress(ConnectionError):  # nobody is there any more: see _end_with_parent
            _pipe.send(("record", what, ""))


def begin() -> None:
    """Keep a signal until there is a run that can answer it; end with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, frame: _asked.append(number))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def asked() -> bool:
    """Has somebody asked to stop what is being done?"""
    return bool(_asked)


def _end_with_parent() -> None:
    """A killed parent's workers would train on, hold their locks, and then wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # a run in progress takes it for a question
    while _busy:
        time.sleep(0.1)
    os._exit(1)


@contextmanager
def at_work(run: Run) -> Iterator[None]:
    """Around a run.

    What was compiled for the last one serves a model of the same sizes as it is. For other sizes
    torch begins anew: it would count them as recompilations, and give up at the eighth.
    """
    global _busy, _compiled
    loop = run.loop
    sizes = (loop.batch_size, loop.micro_batch_size)
    wanted = (run.model, run.data, *sizes, loop.precision, loop.deterministic)
    if _compiled != wanted and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    _compiled = wanted
    _busy = True
    try:
        yield
    finally:
        _busy = False
        if torch.cuda.is_initialized():  # other workers want the memory of this one's last run
            gc.collect()
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise LostGpu(f"{first_line(error)}: its process has lost the GPU") from error


def train_one(name: str, run: Run, command: str) -> tuple[str, str]:
    """Train; how it ended (done, stopped, diverged, failed), and why.

    A run that fails is told, and does not stop the others.
    """
    from mars.lab.train import train

    global _stopped
    if _stopped:
        return "stopped", ""

    def watch(record: dict[str, Any]) -> None:
        answer()
        tell((name, {key: record.get(key) for key in TOLD}))

    with at_work(run):
        try:
            status = train(run, command=command, watch=watch).status
        except Diverged as error:
            return "diverged", str(error)
        except LabError as error:
            return "failed", str(error)
        except Exception as error:  # of an optimizer of somebody's, say: the others go on
            return "failed", unexpected(error, Path(run.directory))
    _stopped = status == "stopped"
    return status, ""


def answer() -> None:
    """In a run, at its records: pass on a signal that came before the run could."""
    if _asked:
        _asked.clear()
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """In the main process: SIGTERM and SIGHUP as Ctrl-C, so that workers are not left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Worker processes that answer signals: a run in progress is saved, the next is not begun."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mars.lab.config import Run
from mars.lab.errors import Diverged, LabError, unexpected

_asked: list[int] = []  # in a worker: signals that came while no run could answer them
_busy = False  # in a worker: there is a run in progress
_compiled: object = None  # in a worker: what its last run was compiled for
_records: Any = None  # in a worker: the queue that records go to
_stopped = False  # in a worker: somebody asked it to

TOLD = ("kind", "step", "loss", "accuracy", "step_seconds")  # of a record


def begin(records: Any = None) -> None:
    """In a worker: keep a signal until there is a run that can answer it; end with the parent."""
    global _records
    _records = records
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, frame: _asked.append(number))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def asked() -> bool:
    """In a worker: has somebody asked to stop what it does?"""
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
    """In a worker: around a run.

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
            except RuntimeError as error:  # of an earlier kernel; none will run any more
                text = str(error).splitlines()[0]
                again = "the same command goes on from here"
                raise LabError(f"{text}: this process has lost the GPU; {again}") from error


def train_one(name: str, run: Run, command: str) -> tuple[str, str]:
    """In a worker: train; how it ended (done, stopped, diverged, failed), and why.

    A run that fails is told, and does not stop the others.
    """
    from mars.lab.train import train

    global _stopped
    if _stopped:
        return "stopped", ""

    def watch(record: dict[str, Any]) -> None:
        answer()
        _records.put((name, {key: record.get(key) for key in TOLD}))

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


def check(seen: set[Any]) -> None:
    """Raise BrokenProcessPool if one of the workers seen before has died.

    A pool looks after the workers it had when it last woke up: the death of one begun later goes
    unnoticed until another has a result, which may be hours, or never.
    """
    alive = set(multiprocessing.active_children())
    if seen - alive:
        raise BrokenProcessPool
    seen |= alive


@contextmanager
def guarded(pool: Executor) -> Iterator[None]:
    """Whatever goes wrong meanwhile, nobody is left training: a second Ctrl-C, say, anywhere."""
    try:
        yield
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


@contextmanager
def watched(pool: Executor) -> Iterator[None]:
    """Around waiting for runs: what goes wrong, but for Ctrl-C, has those in progress saved."""
    try:
        yield
    except KeyboardInterrupt:  # the caller's to answer
        raise
    except BrokenProcessPool as error:
        stop(pool)
        raise LabError("a worker died (memory?); the same command goes on from here") from error
    except BaseException:  # a lost GPU or a full disk, say: nobody is left training
        stop(pool)
        raise


def stop(pool: Executor) -> None:
    """Have runs in progress saved, and wait for that."""
    for worker in multiprocessing.active_children():
        worker.terminate()  # a run in progress takes it for a question
    pool.shutdown(wait=True, cancel_futures=True)

"""Worker processes, each at the end of a pipe of its own: one that dies takes nobody along.

An executor of the standard library gives up every worker when one dies, and from Python 3.12 on it
then waits for ever for those that answer SIGTERM in their own way, as ours do.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.util import Finalize
from typing import Any

from mars.lab import workers
from mars.lab.errors import LabError
from mars.lab.signals import SIGNALS

START = "spawn"  # how a worker begins: anew, for neither a GPU nor threads survive a fork
LOOK = 1.0  # seconds between looks at a worker that says nothing
PATIENCE = 5.0  # seconds for a worker that is not needed any more to end


class WorkerDied(LabError):
    """The process of a task ended, or lost its GPU, before the task was done."""


class _There(Exception):
    """Where in a worker an error was raised."""


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self) -> None:
        context: Any = multiprocessing.get_context(START)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=workers.serve, args=(theirs,))
        self.process.start()
        theirs.close()  # else nobody would notice here that the process is gone
        Finalize(self, self.pipe.close, exitpriority=10)  # before Python waits for its children

    def do(self, task: Callable[[], Any], tell: Callable[[Any], None]) -> Any:
        """Have it done; what it tells on the way is passed on."""
        self._send(task)
        kind, value, trace = self._receive()
        while kind == "record":
            tell(value)
            kind, value, trace = self._receive()
        if kind == "result":
            return value
        if isinstance(value, workers.LostGpu):
            self.dismiss()
            raise WorkerDied(str(value)) from value
        if not isinstance(value, LabError):
            value.__cause__ = _There(f"\n{trace}")
        raise value

    def _send(self, task: Callable[[], Any]) -> None:
        try:
            self.pipe.send(task)
        except ConnectionError as error:
            raise self._died() from error

    def _receive(self) -> tuple[str, Any, str]:
        """What it says next. (A child of its own may hold all pipes open when it has died.)"""
        try:
            while not self.pipe.poll(LOOK):
                if self.process.exitcode is not None and not self.pipe.poll():
                    raise EOFError
            said = self.pipe.recv_bytes()
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        try:
            answer: tuple[str, Any, str] = pickle.loads(said)
        except BaseException:  # whatever comes next belongs to this task: nobody shall take it
            self.process.kill()
            raise
        return answer

    def _died(self) -> WorkerDied:
        self.process.join()
        code = self.process.exitcode or 0
        if code >= 0:
            return WorkerDied(f"its process ended with status {code}")
        why = " (memory?)" if -code == signal.SIGKILL else ""
        return WorkerDied(f"its process was ended by {signal.Signals(-code).name}{why}")

    def dismiss(self) -> None:
        """It ends when its pipe does."""
        self.pipe.close()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Crew(Executor):
    """Does tasks in worker processes. One whose worker dies is begun ``again`` in a new one, once.

    ``records`` is what tasks tell on the way (`workers.tell`). Leaving it by an error kills
    whoever works: a second Ctrl-C, say, leaves nobody training.
    """

    def __init__(self, size: int, say: Callable[[str], object] = _say, again: bool = True) -> None:
        self.records: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._say, self._again = say, again
        self._threads = ThreadPoolExecutor(size)  # each looks after one worker
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._stopping = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._do, functools.partial(fn, *args, **kwargs))

    def _do(self, task: Callable[[], Any]) -> Any:
        try:
            return self._worker().do(task, self.records.put)
        except WorkerDied as error:
            if self._stopping or not self._again:
                raise
            self._say(f"starting a run again: {error}")
        return self._worker().do(task, self.records.put)

    def _worker(self) -> _Worker:
        """This thread's; a new one if it has none that lives."""
        with self._lock:
            if self._stopping:
                raise WorkerDied("no new worker is started")
            own: _Worker | None = getattr(self._own, "worker", None)
            if own is None or not own.process.is_alive():
                own = self._own.worker = _Worker()
                self._workers.append(own)
            return own

    def ask(self) -> None:
        """Ask all to end what they do: a run in progress is saved. No worker is begun any more."""
        for worker in self._all():
            worker.process.terminate()

    def kill(self) -> None:
        """End all at once."""
        for worker in self._all():
            worker.process.kill()

    def _all(self) -> list[_Worker]:
        with self._lock:
            self._stopping = True
            return self._workers

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            for worker in self._workers:
                worker.pipe.close()
            for worker in self._workers:
                worker.dismiss()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.shutdown(wait=kind is None, cancel_futures=kind is not None)


def stop(crew: Executor) -> None:
    """Have runs in progress saved, and wait for that."""
    if isinstance(crew, Crew):
        crew.ask()
    crew.shutdown(wait=True, cancel_futures=True)


@contextmanager
def watched(crew: Executor) -> Iterator[Callable[[], None]]:
    """Around waiting for runs: what goes wrong, but for Ctrl-C, has those in progress saved.

    It gives a function that raises KeyboardInterrupt if a signal came: to be called while nothing
    of a future is in use. Raised anywhere, as Python does it, it can leave the lock of a future
    taken, and the thread of a worker waits for that for ever. One that comes after the last call is
    raised at the end. While runs are saved, signals do what they did before.
    """
    try:
        with _held_back() if isinstance(crew, Crew) else nullcontext(lambda: None) as look:
            yield look
    except KeyboardInterrupt:  # the caller's to answer
        raise
    except BaseException:  # a full disk, say: nobody is left training
        stop(crew)
        raise


@contextmanager
def _held_back() -> Iterator[Callable[[], None]]:
    """Signals raise nothing until the function that this gives is called, or until the end."""
    came: list[int] = []

    def look() -> None:
        if came:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in SIGNALS}
        unusual = (signal.SIG_IGN, None)  # as nohup has it, or by C code
        before = {number: own for number, own in found.items() if own not in unusual}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: came.append(number))
        yield look
        look()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

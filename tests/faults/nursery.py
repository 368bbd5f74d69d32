"""Real `mars` processes, quickly: a parent that has imported everything forks one for each command.

A child is a process like any other (its own pid, signals, limits, files for its output) that runs
``mars.lab.cli.main``; it only does not spend seconds on importing torch. Run as a script, this file
is the parent: it reads requests, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT = 60.0  # seconds; nothing here takes five


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status (negative: the signal), and what it printed."""

    code: int
    out: str
    err: str


class Process:
    """A `mars` process."""

    def __init__(self, nursery: Nursery, pid: int, out: Path, err: Path) -> None:
        self.nursery, self.pid, self.out, self.err = nursery, pid, out, err
        self.ended: Ended | None = None

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Wait for the end."""
        if self.ended is None:
            code = self.nursery.ask({"wait": self.pid, "seconds": WAIT})["code"]
            err = self.err.read_text(errors="replace")
            assert code is not None, f"still running after {WAIT} s: {err}"
            self.ended = Ended(code, self.out.read_text(errors="replace"), err)
        return self.ended

    def until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.err.read_text(errors="replace")
            time.sleep(0.005)


class Nursery:
    """The parent of the processes of a test session."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.started: list[Process] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.parent = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip
        assert self.parent.stdout is not None
        assert self.parent.stdout.readline() == "ready\n"

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, return the answer."""
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps(request) + "\n")
        self.parent.stdin.flush()
        answer: dict[str, Any] = json.loads(self.parent.stdout.readline())
        return answer

    def start(self, *words: str | Path, fault: str = "", err: Path | None = None) -> Process:
        """Start `mars WORDS`. ``fault`` is Python that the child runs first, to harm itself."""
        self.count += 1
        out = self.folder / f"{self.count}.out"
        if err is None:
            err = self.folder / f"{self.count}.err"
            err.touch()  # there, and empty, when the child is killed before it opens them
        out.touch()
        request = {"words": [str(w) for w in words], "fault": fault, "out": str(out)}
        process = Process(self, self.ask({**request, "err": str(err)})["pid"], out, err)
        self.started.append(process)
        return process

    def run(self, *words: str | Path, fault: str = "") -> Ended:
        """Start `mars WORDS` and wait for its end."""
        return self.start(*words, fault=fault).wait()

    def clear(self) -> None:
        """End what a test has left running: it would take the time of all that follow."""
        for process in self.started:
            if process.ended is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send(signal.SIGKILL)
        self.started = []

    def close(self) -> None:
        """End it; it ends what it started."""
        self.parent.communicate(timeout=WAIT)


# What follows happens in the parent.


def _child(request: dict[str, Any]) -> None:
    from mars.lab.cli import main

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    flags = os.O_WRONLY | os.O_CREAT
    for descriptor, path, how in ((0, os.devnull, os.O_RDONLY), (1, request["out"], flags),
                                  (2, request["err"], flags)):  # fmt: skip
        os.dup2(os.open(path, how), descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (a pipe is not what the parent had)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        if request["fault"]:
            exec(request["fault"], {"__name__": "fault"})
        code = main(request["words"])
        sys.stdout.flush()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _reap(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _warm_up(folder: Path) -> None:
    """A run, for what is imported late."""
    from mars.lab.cli import main

    words = ["train", "gpt-tiny", "--data.tokenizer", "bytes", "--model.vocab-size", "256"]
    small = {"model.n-layer": 1, "model.n-embd": 16, "model.n-head": 2, "model.block-size": 16}
    loop = {"loop.steps": 1, "loop.batch-size": 1, "loop.eval-sequences": 1, "loop.threads": 1}
    for name, value in {**small, **loop, "keep.out": folder / "warm"}.items():
        words += [f"--{name}", str(value)]
    output = os.dup(1)
    os.dup2(2, 1)
    assert main(words) == 0
    sys.stdout.flush()
    os.dup2(output, 1)


def _serve(folder: Path) -> None:
    _warm_up(folder)
    children: set[int] = set()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer: dict[str, Any] = {"code": _reap(request["wait"], request["seconds"])}
            if answer["code"] is not None:
                children.discard(request["wait"])
        else:
            pid = os.fork()
            if pid == 0:
                _child(request)
            children.add(pid)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))

"""Signals in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from mars.lab.signals import Interrupt

# A loop of steps; the second half shows that the handlers were put back.
LOOP = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run in the background
if "ignored" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from mars.lab.signals import Interrupt
with Interrupt() as interrupt:
    print("ready", flush=True)
    for step in range(1000):
        if interrupt.asked:
            break
        time.sleep(0.01)
    print("asked", interrupt.asked, flush=True)
    if "save" in sys.argv:
        time.sleep(10)
print("restored", signal.getsignal(signal.SIGINT) is signal.default_int_handler,
      signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
"""

FORK = """
import os, signal, time
from mars.lab.signals import Interrupt
ready, tell = os.pipe()
with Interrupt() as interrupt, interrupt.telling(lambda name: print("told", name)):
    child = os.fork()
    if child == 0:
        os.write(tell, b"!")
        time.sleep(10)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), interrupt.asked)
"""

# The main thread is in C, as in a backward pass: handlers in Python have to wait for it.
BUSY = """
import hashlib, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from mars.lab.signals import Interrupt
with Interrupt() as interrupt, interrupt.telling(lambda name: print("told", name, flush=True)):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 12_000_000)
    print("asked", interrupt.asked, flush=True)
    signal.raise_signal(signal.SIGTERM)
print("over", signal.set_wakeup_fd(-1))
"""


def start(*arguments: str, program: str = LOOP) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_loop_is_asked_and_ends_cleanly(number: signal.Signals) -> None:
    process = start()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert out == f"asked {number.name}\nrestored True True\n"
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_further_ctrl_c_interrupts_at_once(first: signal.Signals) -> None:
    process = start("save")
    assert process.stdout is not None
    process.send_signal(first)
    assert process.stdout.readline() == f"asked {first.name}\n"
    process.send_signal(signal.SIGTERM)  # patience: a scheduler may ask more than once
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert err.endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


def test_the_first_is_told_while_the_step_goes_on_and_no_other() -> None:
    process = start(program=BUSY)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "told SIGINT\nasked SIGINT\nover -1\n", err


def test_what_the_parent_ignores_stays_ignored() -> None:
    process = start("ignored")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == "asked SIGTERM\nrestored False True\n"


def test_a_forked_worker_can_be_terminated() -> None:
    """A data worker would inherit the handler and never end; the parent would tell its signals."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=20
    )
    assert done.stdout == f"{-signal.SIGTERM} None\n", done.stderr


def test_in_another_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.extend([interrupt.asked, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, before]


def test_handlers_are_put_back_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def work() -> None:
        with Interrupt():
            raise ValueError(str(signal.getsignal(signal.SIGTERM)))

    with pytest.raises(ValueError, match="Interrupt"):
        work()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_workers_leave_ignored_signals_ignored() -> None:
    """A study under nohup would end with its terminal."""
    program = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); print('ready', flush=True)\n"
        "from mars.lab import workers; workers.begin()\n"
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, signal.getsignal(signal.SIGTERM))"
    )
    out, _ = start(program=program).communicate(timeout=60)
    assert out.startswith("True <function")

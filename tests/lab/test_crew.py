"""Worker processes: what they answer, and what their deaths do, and to whom."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from mars.lab import workers
from mars.lab.crew import Crew, WorkerDied, stop, watched
from mars.lab.errors import LabError

said: list[str] = []


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2, said.append) as crew:
        yield crew


def double(n: int) -> int:
    workers.tell(("half", n))
    return 2 * n


def fail(kind: type[Exception]) -> None:
    raise kind("no")


class TwoWords(Exception):
    """Cannot be made again from what it says."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def say_two() -> None:
    raise TwoWords("one", "two")


def orphan(pids: Path) -> None:
    """Leave a child behind that holds what this process held."""
    if (child := os.fork()) == 0:
        time.sleep(40)
        os._exit(0)
    pids.mkdir(exist_ok=True)
    (pids / str(child)).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def closure() -> object:
    return lambda: None


def die(number: int, flag: Path, times: int = 1) -> int:
    """End this process by a signal so many times; then say which one is left."""
    count = len(list(flag.iterdir())) if flag.exists() else 0
    if count < times:
        (flag / str(count)).mkdir(parents=True)
        os.kill(os.getpid(), number)
        time.sleep(60)
    return os.getpid()


def lose_the_gpu(flag: Path) -> int:
    if not flag.exists():
        flag.mkdir()
        raise workers.LostGpu("CUDA error: its process has lost the GPU")
    return os.getpid()


def pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def obedient(seconds: float) -> str:
    """As a run: answers when asked."""
    for _ in range(int(seconds * 20)):
        if workers.asked():
            return "saved"
        workers.tell("busy")
        time.sleep(0.05)
    return "done"


class OnlyHere:
    """Can be sent, but not received."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return __import__, ("no_such_module_anywhere",)

    def __call__(self) -> None:
        raise AssertionError


def test_results_records_and_errors(crew: Crew) -> None:
    assert [crew.submit(double, n).result() for n in range(3)] == [0, 2, 4]
    assert [crew.records.get(timeout=10) for _ in range(3)] == [("half", n) for n in range(3)]
    with pytest.raises(LabError, match=r"^no$") as plain:
        crew.submit(fail, LabError).result()
    assert plain.value.__cause__ is None
    for kind in (ValueError, EOFError, ConnectionResetError):  # of a task, not of its pipe
        with pytest.raises(kind, match="no") as caught:
            crew.submit(fail, kind).result()
        assert "in fail" in str(caught.value.__cause__)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        crew.submit(closure).result()
    with pytest.raises(RuntimeError, match=r"(?s)^TwoWords, in a worker:.*in say_two") as told:
        crew.submit(say_two).result()
    assert "Traceback" in str(told.value)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        crew.submit(OnlyHere()).result()
    assert said == []


def test_a_task_whose_worker_dies_is_begun_again_and_no_other_is(
    crew: Crew, tmp_path: Path
) -> None:
    other = crew.submit(pid_after, 0.0).result()
    slow = crew.submit(pid_after, 1.0)
    again = crew.submit(die, signal.SIGSEGV, tmp_path / "flag")
    assert again.result() not in (other, os.getpid())
    assert said == ["starting a run again: its process was ended by SIGSEGV"]
    assert slow.result() != again.result()
    assert len(said) == 1
    said.clear()


def test_one_that_dies_twice_has_failed(crew: Crew, tmp_path: Path) -> None:
    ended = crew.submit(die, signal.SIGKILL, tmp_path / "flag", 2)
    with pytest.raises(WorkerDied, match=r"^its process was ended by SIGKILL \(memory\?\)$"):
        ended.result()
    assert len(said) == 1
    said.clear()
    assert crew.submit(double, 4).result() == 8  # by a new one


def test_a_death_is_noticed_though_a_child_holds_the_pipe(crew: Crew, tmp_path: Path) -> None:
    ended = crew.submit(orphan, tmp_path / "pids")
    try:
        with pytest.raises(WorkerDied, match="SIGKILL"):
            ended.result(timeout=25)  # twice the time of beginning a worker, on a slow machine
    finally:
        for path in (tmp_path / "pids").iterdir():
            os.kill(int(path.name), signal.SIGKILL)
    said.clear()


def test_a_run_that_must_not_be_gone_on_with_is_not_begun_again(tmp_path: Path) -> None:
    with Crew(1, said.append, again=False) as crew:
        ended = crew.submit(die, signal.SIGKILL, tmp_path / "flag")
        with pytest.raises(WorkerDied, match="SIGKILL"):
            ended.result()
    assert said == []
    assert len(list((tmp_path / "flag").iterdir())) == 1


def test_a_crew_that_nobody_dismisses_does_not_keep_python_from_ending() -> None:
    program = "from mars.lab.crew import Crew; print(Crew(1).submit(abs, -1).result())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert ended.stdout == b"1\n"


def test_a_lost_gpu_is_the_process_s_not_the_crew_s(crew: Crew, tmp_path: Path) -> None:
    crew.submit(lose_the_gpu, tmp_path / "flag").result()
    assert said == ["starting a run again: CUDA error: its process has lost the GPU"]
    said.clear()


def test_stopping_waits_for_answers_and_begins_nothing() -> None:
    with Crew(1, said.append) as crew:
        asked, never = crew.submit(obedient, 60.0), crew.submit(double, 1)
        crew.records.get(timeout=60)
        stop(crew)
        assert asked.result() == "saved"
        assert never.cancelled()
    assert said == []


def interrupted(begun: list[Future[str]]) -> None:
    with Crew(1, said.append) as crew:
        begun.append(crew.submit(obedient, 60.0))
        crew.records.get(timeout=60)
        raise KeyboardInterrupt


def waiting(crew: Crew, future: Future[str]) -> None:
    with watched(crew) as look:
        while not future.done():
            look()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler: there is none where pytest runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_no_future_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in the middle of what a future does, where Python's own would leave its lock."""
    done = Future.done

    def interrupted(future: Future[str]) -> bool:
        future._condition.acquire()
        signal.raise_signal(signal.SIGINT)
        future._condition.release()
        return done(future)

    monkeypatch.setattr(Future, "done", interrupted)
    with Crew(1, said.append) as crew:
        asked = crew.submit(obedient, 60.0)
        crew.records.get(timeout=60)
        with pytest.raises(KeyboardInterrupt):
            waiting(crew, asked)
        stop(crew)
        assert asked.result() == "saved"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def last_look(crew: Crew) -> None:
    with watched(crew) as look:
        look()
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_after_the_last_look_is_not_lost() -> None:
    with Crew(1, said.append) as crew, pytest.raises(KeyboardInterrupt):
        last_look(crew)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_wait_for_runs_that_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error: who saves may take long, or never answer."""
    monkeypatch.setattr("mars.lab.crew.stop", lambda crew: signal.raise_signal(signal.SIGINT))
    with Crew(1, said.append) as crew, pytest.raises(KeyboardInterrupt), watched(crew):
        raise OSError("the disk is full")


def test_leaving_by_an_error_kills_whoever_works() -> None:
    before = set(multiprocessing.active_children())
    begun: list[Future[str]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(begun)
    assert not wait(begun, 10).not_done
    assert isinstance(begun[0].exception(), WorkerDied)
    assert set(multiprocessing.active_children()) <= before
    assert said == [], "nothing is begun again"

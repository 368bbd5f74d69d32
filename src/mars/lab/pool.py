"""Several runs in worker processes, with one picture of how far they are."""

from __future__ import annotations

import os
import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mars.lab import tasks, workers
from mars.lab.config import Run, read_config
from mars.lab.crew import Crew, WorkerDied, stop, watched
from mars.lab.errors import LabError
from mars.lab.log import ended
from mars.lab.progress import Shown
from mars.lab.report import units

FAILED = "failed: "


@dataclass(frozen=True)
class Job:
    """A run and its short name."""

    name: str
    run: Run


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(processes: int) -> int:
    """Threads of each of so many processes: of the cores, or what OMP_NUM_THREADS allows."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    most = int(asked) if asked.isdecimal() and int(asked) else cores()
    return max(1, min(most, cores() // processes))


def _work(job: Job, command: str) -> str:
    """In a worker: how a run ended, and why."""
    status, text = _ended_before(job.run) or workers.train_one(job.name, job.run, command)
    return f"{status}: {text}" if text else status


def _ended_before(run: Run) -> tuple[str, str] | None:
    """How the very run that is there ended, if it did, and why: it would again.

    Its data are not opened: whoever has the runs made has compared them, once for all.
    """
    directory = Path(run.directory)
    try:
        last = ended(directory)
        same = read_config(directory / "config.json").loop == tasks.with_steps(run).loop
    except LabError:
        return None
    status = last.get("status")
    if status not in ("done", "diverged") or not (same and run.keep.resume):
        return None
    return status, str(last.get("text")) if status == "diverged" else ""


def run_all(jobs: list[Job], processes: int, command: str) -> dict[str, str] | None:
    """Run all; what failed and why, or None if somebody stopped it.

    What is complete already takes no time. A run that diverged has not failed: it is a result. One
    whose process dies twice has failed, and the others go on.
    """
    with (
        workers.terminable(),
        Board(jobs, processes) as board,
        Crew(processes, board.say, again=all(job.run.keep.resume for job in jobs)) as crew,
    ):
        try:
            with watched(crew) as look:
                futures = {crew.submit(_work, job, command): job for job in jobs}
                while futures:
                    look()
                    done = [future for future in futures if future.done()]
                    _drain(crew.records, board)  # all that those have told, and more
                    for future in done:
                        _finish(future, futures.pop(future), board)
        except KeyboardInterrupt:
            board.say("stopping: runs in progress are saved")
            stop(crew)
            return None
        if "stopped" in board.ended.values():
            return None
        return {
            name: status.removeprefix(FAILED)
            for name, status in board.ended.items()
            if status.startswith(FAILED)
        }


def _drain(records: Any, board: Board) -> None:
    """Take records until there is none for a moment."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        try:
            board.take(*records.get(timeout=0.1))
        except queue.Empty:
            return


def _finish(future: Future[str], job: Job, board: Board) -> None:
    try:
        status = future.result()
    except WorkerDied as error:
        status = f"{FAILED}{error}"
    except LabError as error:
        raise LabError(f"{job.name}: {error}") from error
    board.finish(job.name, status)


class Board(Shown):
    """How far each run is, and how long all of them will take."""

    def __init__(self, jobs: list[Job], processes: int) -> None:
        super().__init__()
        self.jobs = {job.name: job for job in jobs}
        self.processes = processes
        self.step = dict.fromkeys(self.jobs, 0)
        self.ended: dict[str, str] = {}
        self.valid: dict[str, str] = {}  # what the last validation found
        self.pace: dict[str, float] = {}  # seconds of a step, by optimizer

    def columns(self) -> list[Any]:
        from rich.progress import BarColumn, TextColumn

        texts = ("{task.description:32}", "{task.percentage:3.0f}%", "{task.fields[status]}")
        name, share, status = map(TextColumn, texts)
        return [name, BarColumn(), share, status]

    def begin(self) -> None:
        steps = {name: job.run.loop.steps for name, job in self.jobs.items()}
        self.total = self.bar.add_task("all", total=sum(steps.values()), status="")
        self.lines = {
            name: self.bar.add_task(name, total=total, status="", visible=False)
            for name, total in steps.items()
        }

    def take(self, name: str, record: dict[str, Any]) -> None:
        """A record of a run."""
        if record["step"] is None or name in self.ended:
            return
        self.step[name] = record["step"]
        if record["kind"] == "train" and record["step_seconds"]:
            self.pace[self.jobs[name].run.optimizer.name] = record["step_seconds"]
        if record["kind"] == "valid" and record["loss"] is not None:
            right = record.get("accuracy")
            also = "" if right is None else f", accuracy {units.accuracy(right)}"
            self.valid[name] = units.loss(record["loss"]) + also
        self._draw(name)

    def finish(self, name: str, status: str) -> None:
        """A run has ended."""
        if name in self.ended:
            return
        begun = self.step[name] > 0
        again = status.startswith(FAILED) and status in self.ended.values()
        self.ended[name] = status
        self.step[name] = self.jobs[name].run.loop.steps
        if status == "done" and not begun:  # in an earlier race
            self._draw(name)
            return
        loss = f"validation loss {self.valid[name]}" if name in self.valid else "complete"
        text = loss if status == "done" else f"{FAILED}the same error" if again else status
        left = self.left()
        rest = f", {units.seconds(left)} left" if left and len(self.ended) < len(self.jobs) else ""
        self.say(f"[{len(self.ended)}/{len(self.jobs)}] {name}: {text}{rest}")
        self._draw(name)

    def left(self) -> float | None:
        """Seconds until all is done, from the pace of each optimizer so far."""
        if not self.pace:
            return None
        usual = sum(self.pace.values()) / len(self.pace)
        work = sum(
            (job.run.loop.steps - self.step[name]) * self.pace.get(job.run.optimizer.name, usual)
            for name, job in self.jobs.items()
            if name not in self.ended
        )
        return work / self.processes

    def _draw(self, name: str) -> None:
        if self.bar is None:
            return
        left = self.left()
        done = sum(self.step.values())
        time_left = f"{units.seconds(left)} left" if left else ""
        self.bar.update(self.total, completed=done, description="all", status=time_left)
        shown = name not in self.ended and self.step[name] > 0
        loss = f"valid {self.valid[name]}" if name in self.valid else ""
        self.bar.update(self.lines[name], completed=self.step[name], visible=shown, status=loss)

"""A stretch of time in which a study goes on: the next best runs, as many as can be finished."""

from __future__ import annotations

import os
import queue
import shutil
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from mars.lab import workers
from mars.lab.crew import Crew, WorkerDied, watched
from mars.lab.hardware import choose_device
from mars.lab.pool import cores, threads
from mars.lab.report import units
from mars.lab.study import fingerprint, worker
from mars.lab.study.definition import Study
from mars.lab.study.display import Display
from mars.lab.study.estimates import RESERVE, estimate
from mars.lab.study.packing import LIMIT, READINGS, Packing
from mars.lab.study.planner import Stage, Wanted, pick, wanted
from mars.lab.study.results import RUNS, Key, Result, Results
from mars.lab.study.worker import Ended, Order

MARGIN, LEAST_MARGIN = 0.05, 5.0  # of the stretch, seconds: to save what cannot be finished
BEGIN = {"cpu": 5.0, "cuda": 90.0}  # seconds left for which a run is begun that will be stopped
SHORT = 300.0  # seconds: a run that is killed without a checkpoint loses no more than that
PATIENCE = 60.0  # seconds for runs to be saved after Ctrl-C


def packed(results: Sequence[Result]) -> int | None:
    """How many runs went together mostly, since that was tried; None: it has to be tried.

    The first begins alone, and so does one for which nearly no time is left: neither decides.
    """
    counts = Counter(result.at_once for result in results[1:] or results)
    if not counts or max(counts) == 1:
        return None
    usual, times = counts.most_common(1)[0]
    return usual if 2 * times > counts.total() else None


def age() -> float:
    """Seconds since this process began, which a stretch has to count; 0 where nobody tells."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0


def _how(future: Future[Ended]) -> Ended:
    """How a run ended; one whose process died twice has failed, and the others go on."""
    try:
        return future.result()
    except WorkerDied as error:
        return Ended(failed=str(error))


class Stretch:
    """Goes on with a study for some seconds (None: until nothing is wanted)."""

    def __init__(
        self, study: Study, directory: Path, here: dict[str, str], *, seconds: float | None = None,
        jobs: int | None = None, seeds: int | None = None, command: str = "",
        without: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.study, self.directory, self.here = study, directory, here
        self.seeds, self.command, self.without = seeds, command, without
        self.file = Results(directory)
        self.results: list[Result] = self.file.read()
        self.device = choose_device(study.run(study.arms[0]).loop.device)
        on_cpu = self.device.type == "cpu"
        self.packing = Packing(jobs or (cores() if on_cpu else packed(self.results)))
        self.tried = not self.packing.settled  # how many go together is found by trying
        self.most = self.packing.slots if self.packing.settled else LIMIT
        self.seconds = seconds
        self.deadline: float | None = None
        self.margin = PATIENCE
        if seconds is not None:
            self.margin = max(LEAST_MARGIN, MARGIN * seconds)
            self.deadline = time.monotonic() - age() + seconds - self.margin
        self.active: dict[Future[Ended], Wanted] = {}
        self.at_once: dict[Key, int] = {}  # how many there were at the most, beside each
        self.readings: dict[str, list[float]] = {}  # shares of a run a second, since a run began
        self.share: dict[str, float] = {}  # of a run that is done
        self.failed: dict[Key, str] = {}

    def go(self) -> dict[str, str] | None:
        """Run until the time is up or nothing is wanted: what failed, or None if interrupted."""
        for result in self.results:  # a kill may have come between a result and this
            self._tidy(result)
        with (
            workers.terminable(),
            Display(self.deadline) as self.display,
            Crew(self.most, self.display.say) as crew,
        ):
            interrupted = self._run(crew)
            self._stop(crew, "stopping" if interrupted else "the time is up")
            failed = {f"{arm} lr {lr:g}": text for (arm, lr, _), text in self.failed.items()}
            return None if interrupted else failed

    def _run(self, crew: Crew) -> bool:
        """Whether it was interrupted."""
        try:
            with watched(crew) as look:
                while self._fill(crew) and not self._late():
                    look()
                    for future in wait(self.active, 0.3, FIRST_COMPLETED).done:
                        self._end(self.active.pop(future), _how(future))
                    self._drain(crew.records)
        except KeyboardInterrupt:
            return True
        return False

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _stop(self, crew: Crew, why: str) -> None:
        """Have runs in progress saved, and note what ended all the same.

        One that does not answer, because it compiles, say, is ended: it has its last checkpoint.
        """
        if self.active:
            self.display.say(f"{why}: {len(self.active)} in progress, saved to be gone on with")
            crew.ask()
            if wait(self.active, max(1.0, 0.7 * self.margin)).not_done:
                crew.kill()
            crew.shutdown(wait=True, cancel_futures=True)
        for future, want in self.active.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                self._end(want, future.result())

    def _wanted(self) -> list[Wanted]:
        """What is wanted and not under way; what was begun on this machine first."""
        busy = {want.key for want in self.active.values()} | self.failed.keys()
        runs = [w for w in wanted(self.study, self.results, self.seeds) if w.key not in busy]
        runs = [want for want in runs if want.arm.label not in self.without]
        return sorted(runs, key=lambda w: not self._folder(w).exists())

    def _fill(self, crew: Crew) -> bool:
        """Begin as many runs as there is room and time for; whether any is under way."""
        while len(self.active) < self.packing.slots:
            left = None if self.deadline is None else self.deadline - time.monotonic()
            beside = self.tried and bool(self.active)
            want = None if beside and not self._room(left) else self._pick(left, beside)
            if want is None and not self.active and self.packing.slots > 1:
                self.packing.fewer()  # for several the time is up; one is faster alone
                continue
            if want is None:
                break
            order = self._order(want)
            self.at_once[want.key] = order.at_once
            self.active[crew.submit(worker.attempt, order)] = want
            self.readings = {name: [] for name in (*self.readings, want.name)}
            for each in self.active.values():
                self.at_once[each.key] = max(self.at_once[each.key], len(self.active))
            self.display.add(want.name, order.run.loop.steps)
        return bool(self.active)

    def _pick(self, left: float | None, beside: bool) -> Wanted | None:
        """The next run; beside others it must surely be finished, if only by a guess."""
        runs = self._wanted()
        if beside:
            return pick(runs, left, lambda want: (self._seconds(want)[0], True), None)
        return pick(runs, left, self._seconds, self.seconds, BEGIN[self.device.type])

    def _room(self, left: float | None) -> bool:
        """Can the runs in progress still be finished if another one slows them down?"""
        slower = (len(self.active) + 1) / len(self.active)
        for want in self.active.values():
            speeds = self.readings[want.name]
            work = 1 - self.share.get(want.name, 0.0)
            if left is not None and (not speeds or RESERVE * slower * work / speeds[-1] > left):
                return False
        return True

    def _folder(self, want: Wanted) -> Path:
        return self.directory / RUNS / want.name

    def _order(self, want: Wanted) -> Order:
        run = self.study.run(want.arm, want.lr, want.seed, self._folder(want))
        if run.keep.save_every is None or self._seconds(want)[0] < SHORT:
            run = run.replace(keep={"save_every": run.loop.steps})
        if run.loop.threads is None:
            run = run.replace(loop={"threads": threads(self.packing.slots)})
        own = {**self.here, **fingerprint.made_of(self.study, want.arm)}
        return Order(want.key, want.name, run, own, self.packing.slots, self.command)

    def _seconds(self, want: Wanted) -> tuple[float, bool]:
        """What is left of a run, and whether that was measured."""
        slots = max(1, self.packing.slots)
        seconds, measured = estimate(self.study, self.results, want.arm, slots, self.device)
        saved = [int(p.name[5:]) for p in self._folder(want).glob("checkpoints/step-*")
                 if p.name[5:].isdigit()]  # fmt: skip
        steps = self.study.run(want.arm).loop.steps
        return seconds * (1 - max(saved, default=0) / steps), measured

    def _left(self) -> float | None:
        """Seconds that all that is wanted will take."""
        every = [self._seconds(want) for want in (*self.active.values(), *self._wanted())]
        if not all(measured for _, measured in every):
            return None
        return sum(seconds for seconds, _ in every) / max(1, self.packing.slots)

    def _end(self, want: Wanted, ended: Ended) -> None:
        self.readings.pop(want.name, None)
        if ended.result is not None:
            self.file.add([ended.result])
            self.results.append(ended.result)
            self._tidy(ended.result)
            loss = ended.result.final
            text = "diverged" if loss is None else f"validation loss {units.loss(loss)}"
            self.display.end(want.name, text, len(self._wanted()), self._left())
        elif (
            ended.failed is not None
            and "memory" in ended.failed
            and (at_once := self.at_once[want.key]) > 1
        ):  # the run is begun again, with more room, which another may have made already
            while self.packing.slots >= at_once:
                self.packing.fewer()
        elif ended.failed is not None:
            self.failed[want.key] = ended.failed

    def _tidy(self, result: Result) -> None:
        """A finished run needs no checkpoints, unless they are for an evaluation."""
        kept = self.study.keep_checkpoints and result.status == "done"
        if kept or result.arm not in {arm.label for arm in self.study.arms}:
            return
        want = Wanted(self.study.arm(result.arm), result.lr, result.seed, Stage.SEEDS)
        shutil.rmtree(self._folder(want) / "checkpoints", ignore_errors=True)

    def _drain(self, records: Any) -> None:
        """Take what runs have said; let it decide how many go together."""
        runs = {want.name: want for want in self.active.values()}
        while True:
            try:
                name, record = records.get_nowait()
            except queue.Empty:
                break
            if name not in runs or record["step"] is None:
                continue
            self.display.advance(name, record["step"], None)
            steps = self.study.run(runs[name].arm).loop.steps
            self.share[name] = record["step"] / steps
            if record["kind"] == "train" and record["step_seconds"]:
                self.readings[name].append(1 / (record["step_seconds"] * steps))
        self.packing.observe([
            own[-1] * (2 if self.study.run(runs[name].arm).optimizer.exact else 1)
            if len(own) >= READINGS else None
            for name, own in self.readings.items()
        ])  # fmt: skip

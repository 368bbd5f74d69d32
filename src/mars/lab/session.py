"""The loop around the step: what is due after it, and what is written."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

import mars
from mars.diagnostics import Diagnosis
from mars.lab import checkpoint
from mars.lab.dtensors import whole
from mars.lab.errors import Diverged, LabError
from mars.lab.log import Log
from mars.lab.loop import Training
from mars.lab.optimizers import state_bytes
from mars.lab.plainfile import plain
from mars.lab.signals import Interrupt

Watch = Callable[[dict[str, Any]], None]

DIAGNOSED = 4  # consecutive steps in a reading of the diagnostics: a variance needs two
TICK = 0.5  # seconds between signs of life
EARLY = 4  # validations before the first regular one, at doubling distances
PATIENCE = 25  # steps skipped in a row before a run is given up; fp16 finds its scale in fewer
NOT_SAVED = 1000  # what processes tell each other besides numbers of signals: a save has failed


@runtime_checkable
class Shows(Protocol):
    """A watcher in front of which somebody sits, and wants an answer to Ctrl-C at once."""

    def answer(self, text: str) -> None:
        """Called by another thread."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str  # done, stopped
    step: int
    valid: float | None  # the last validation's loss
    directory: Path
    accuracy: float | None = None  # of images

    @property
    def score(self) -> float | None:
        """What it is judged by, the lower the better."""
        if self.valid is None or self.accuracy is None:
            return self.valid
        return score({"loss": self.valid, "accuracy": self.accuracy})


def score(measured: Mapping[str, float]) -> float:
    """What a validation is judged by, the lower the better: the error rate of images, or the loss.

    >>> score({"loss": 0.5}), score({"loss": 0.5, "accuracy": 0.75})
    (0.5, 0.25)
    """
    return 1.0 - measured["accuracy"] if "accuracy" in measured else measured["loss"]


class Session:
    """A training with its directory: decides what is due after a step.

    All processes go through it alike; the first alone has a log.
    """

    def __init__(self, training: Training, directory: Path, log: Log | None, watch: Watch) -> None:
        self.t, self.directory, self.log, self.watch = training, directory, log, watch
        self.world = training.world
        self.saver = checkpoint.saver(self.world)
        self.valid: dict[str, float] = {}  # what the last validation measured
        self.saved_at, self.valid_at = training.step or -1, -1
        self.ticked = 0.0
        self.diagnosis: Diagnosis | None = None

    def write(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(**record)
            self.watch(record)

    def tell(self, what: str, text: str) -> None:
        self.write({"kind": "event", **self.t.position, "what": what, "text": text})

    def resume(self, where: str, records: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint, with what the log says of the time before it."""
        for record in records:
            if record["kind"] == "valid":
                self.valid = {name: record[name] for name in self.t.task.measures}
        self.tell("resumed", f"from {where}")

    def run(self, interrupt: Interrupt) -> Outcome:
        loop = self.t.run.loop
        with self._answering(interrupt):
            asked = self._first_validation(interrupt) if self.t.step == 0 else 0
            first = True  # step here, for which all is compiled: the clock stands
            while self.t.step < loop.steps and not asked:
                self._step()
                if first and self.diagnosis is None:
                    self.t.clock.start()
                first = False
                asked = self._asked(interrupt)
        self.world.settle()
        self.t.clock.stop()
        status = "done" if self.t.step >= loop.steps else "stopped"
        if status == "stopped":
            self.tell("interrupted", f"{signal.Signals(asked).name} at step {self.t.step}")
        if self.saved_at != self.t.step and self.t.run.keep.save_every is not None:
            self._save()
        self.finish()
        outcome = Outcome(
            status, self.t.step, self.valid.get("loss"), self.directory, self.valid.get("accuracy")
        )
        more = {} if outcome.accuracy is None else {"accuracy": outcome.accuracy}
        self.write(
            {"kind": "end", **self.t.position, "status": status, "valid": outcome.valid, **more}
        )
        return outcome

    def _answering(self, interrupt: Interrupt) -> contextlib.AbstractContextManager[None]:
        """Within it, who sits before the run is told at once what follows a signal."""
        watch: object = self.watch
        if self.log is None or not isinstance(watch, Shows):
            return contextlib.nullcontext()
        return interrupt.telling(lambda name: watch.answer(f"{name}: {self._promise()}"))

    def _promise(self) -> str:
        alone = self.world.mode is None
        when = "this step" if alone else "the next step"  # the others hear of it one step later
        if self.t.run.keep.save_every is None:
            return f"will stop after {when}, without saving (keep.save_every is None)"
        # torchrun does not pass a second Ctrl-C on.
        again = "; Ctrl-C again stops without saving" if alone else ""
        return f"will save after {when} and stop{again}"

    def _asked(self, interrupt: Interrupt) -> int:
        """The signal that any process got; all of them stop at the same step."""
        own = signal.Signals[interrupt.asked].value if interrupt.asked else 0
        if self.saver is not None and self.saver.failed:
            own = NOT_SAVED
        asked = self.world.poll(own)
        if asked == NOT_SAVED:
            self.finish()
            return 0
        return asked

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk."""
        if self.saver is not None:
            self.saver.wait()

    def _step(self) -> None:
        t, loop, keep = self.t, self.t.run.loop, self.t.run.keep
        self._observe()
        t.advance()
        if t.skips:
            self._skipped()
        self._observed()
        if t.step == 1 and self.log is not None:
            self.log.replace_header(state_bytes=state_bytes(t.optimizer))
            if keep.save_every is not None and self.world.mode is None:
                plain(t.optimizer.state_dict(), "optimizer")  # what cannot be saved is told now
        self._tick()
        last = t.step == loop.steps
        log = last or t.step % loop.log_every == 0
        valid = last or self._validation_due()
        save = keep.save_every is not None and (last or t.step % keep.save_every == 0)
        if log or valid or save or t.device.type == "cpu":
            self._check_loss()
        if log and t.window_steps:
            self.write(t.record())
        if valid or save:
            t.clock.stop()
            if valid:
                self._validate()
            if save:
                self._save()
            if self.diagnosis is None:
                t.clock.start()

    def _tick(self) -> None:
        """A sign of life between records, for who watches."""
        now = time.monotonic()
        if self.log is not None and now - self.ticked > TICK:
            self.ticked = now
            self.watch({"kind": "tick", "step": self.t.step})

    def _skipped(self) -> None:
        """One skipped step is told; too many in a row are no accident."""
        self.tell("skipped", f"step {self.t.step} skipped: its gradient was not finite")
        if self.t.skips >= PATIENCE:
            self._diverge(f"{PATIENCE} gradients in a row were not finite")

    def _check_loss(self) -> None:
        for what, total in (("loss", self.t.window), ("gradient", self.t.norms)):
            if not math.isfinite(float(total)):
                self._diverge(f"the {what} is not finite")

    def _diverge(self, what: str) -> None:
        text = f"{what} at step {self.t.step}: lower the learning rate"
        self.write(
            {"kind": "end", **self.t.position, "status": "diverged", "valid": None, "text": text}
        )
        with contextlib.suppress(LabError, RuntimeError):  # what is being saved is of before
            self.finish()
        kept = any((self.directory / "checkpoints").glob("step-*"))
        text = f"{text} (checkpoints before it are kept)" if kept else text
        raise self.world.error(Diverged(text))

    def _validation_due(self) -> bool:
        step, every = self.t.step, self.t.run.loop.eval_every
        early = {every >> k for k in range(1, EARLY + 1)}
        return step % every == 0 or step in early

    def _first_validation(self, interrupt: Interrupt) -> int:
        """Of the initial weights; the signal by which it was abandoned, else 0.

        It can last minutes on a CPU, and nothing is lost with it: a run that goes on from step 0
        makes it again. One process alone may: several must stay together.
        """

        def between() -> None:
            if interrupt.asked and self.world.mode is None:
                raise InterruptedError

        try:
            self._validate(between)
        except InterruptedError:
            return self._asked(interrupt)
        return 0

    def _validate(self, between: Callable[[], None] = lambda: None) -> None:
        self.valid, self.valid_at = self.t.validate(between), self.t.step
        if not math.isfinite(self.valid["loss"]):
            self._diverge("the validation loss is not finite")
        self.write({"kind": "valid", **self.t.position, **self.valid})

    def _save(self) -> None:
        t = self.t
        norm = whole(nn.utils.get_total_norm([p.detach() for p in t.model.parameters()]))
        if not bool(norm.isfinite()):  # a checkpoint must be worth going back to
            self._diverge("a parameter is not finite")
        if self.log is not None:
            self.log.sync()  # a power cut leaves both, or the checkpoint before
        save = checkpoint.save if self.saver is None else self.saver.save
        best = score(self.valid) if self.valid_at == t.step else None
        do = partial(
            save, self.directory, t.step, t.model, t.optimizer, t.training_state(),
            keep=t.run.keep.last, best=best,
        )  # fmt: skip
        self.world.on_first(do) if self.saver is None else do()
        self.saved_at = t.step

    # A few steps are taken under observation now and then; the clock stands meanwhile, because
    # observing takes longer than training.

    @property
    def _diagnose_every(self) -> int:
        loop = self.t.run.loop
        return loop.diagnose_every or loop.eval_every

    def _observe(self) -> None:
        t, every = self.t, self._diagnose_every
        # Too often, and there would be no ordinary steps to time. All of them or none: what a stop
        # has cut short would say something else.
        if self.diagnosis or every < 2 * DIAGNOSED or t.step % every != every - DIAGNOSED:
            return
        if isinstance(t.optimizer, mars.MARS):
            t.clock.stop()
            self.diagnosis = mars.diagnose(t.optimizer)
            self.diagnosis.__enter__()

    def _observed(self) -> None:
        t, diagnosis = self.t, self.diagnosis
        if diagnosis is None or (t.step % self._diagnose_every and t.step < t.run.loop.steps):
            return
        diagnosis.__exit__(None, None, None)
        self.diagnosis = None
        readings = [dataclasses.asdict(reading) for reading in diagnosis.readings]
        self.write({"kind": "diagnostics", **t.position, "groups": readings})
        t.clock.start()

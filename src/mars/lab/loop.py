"""The loop: one for every model, optimizer and device."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mars
from mars.diagnostics import Diagnosis
from mars.lab import checkpoint, hardware
from mars.lab.clock import Clock
from mars.lab.config import Run
from mars.lab.data import Batches, Tokens, validation
from mars.lab.errors import Diverged, LabError
from mars.lab.log import Log
from mars.lab.models import flops_per_token, peak_flops
from mars.lab.optimizers import build, state_bytes
from mars.lab.schedule import factor, remember_peaks, set_rate
from mars.lab.signals import Interrupt

Watch = Callable[[dict[str, Any]], None]

DIAGNOSED = 4  # consecutive steps in a reading of the diagnostics: a variance needs two
TICK = 0.5  # seconds between signs of life
EARLY = 4  # validations before the first regular one, at doubling distances
PATIENCE = 25  # steps skipped in a row before a run is given up; fp16 finds its scale in fewer


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str  # done, stopped
    step: int
    valid: float | None
    directory: Path


class Training:
    """A run in progress: model, optimizer, data, clock, and the step it stands at."""

    def __init__(self, run: Run, model: nn.Module, train: Tokens, valid: Tokens) -> None:
        loop, context = run.loop, run.model.block_size
        self.run, self.model = run, model
        self.device = next(model.parameters()).device
        self.dtype = hardware.choose_precision(loop.precision, self.device)
        self.micro = hardware.choose_micro_batch(run, self.device)
        self.optimizer = build(model, run.optimizer)
        remember_peaks(self.optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        if run.optimizer.exact and self.dtype == torch.float16:
            raise LabError("optimizer.exact does not go with loop.precision fp16: use bf16 or fp32")
        if run.optimizer.exact and loop.skip_nan:
            raise LabError("optimizer.exact does not go with loop.skip_nan")
        self.is_mars = isinstance(self.optimizer, mars.MARS)
        compile_ = self.device.type == "cuda" if loop.compile is None else loop.compile
        if compile_:
            model.compile()  # in place: names of parameters stay
        self.loss_of: Callable[..., Tensor] = model
        self.batches = Batches(train, context, loop.batch_size, loop.seed)
        self.held_out = validation(valid, context, loop.eval_sequences)
        self.flops = flops_per_token(run.model)
        self.step = 0
        self.skips = 0  # steps skipped just now, in a row
        self.clock = Clock(self.device)
        self.window = torch.zeros((), dtype=torch.float64, device=self.device)  # sum of losses
        self.window_steps = 0
        self.grad_norm: Tensor | None = None
        self.norms = torch.zeros_like(self.window)  # sum of gradients' norms: finite if all are

    # One step.

    def _autocast(self) -> Any:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def _to_device(self, pair: tuple[Tensor, Tensor]) -> list[Tensor]:
        if self.device.type == "cuda":
            return [t.pin_memory().to(self.device, non_blocking=True) for t in pair]
        return list(pair)

    def _gradients(self) -> Tensor:
        """Gradients of the mean loss over the batch of this step, whatever the micro-batches."""
        size = self.run.loop.batch_size
        total = torch.zeros((), device=self.device)
        for start in range(0, size, self.micro):
            pair = self.batches.rows(self.step, start, start + self.micro)
            with self._autocast():
                loss = self.loss_of(*self._to_device(pair)) * (self.micro / size)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _closure(self) -> Tensor:
        """Gradients, as exact mode asks for them from inside the optimizer's step."""
        self.clock.optimizer_ends()  # they are not the optimizer's time
        self.optimizer.zero_grad()
        loss = self._gradients()
        self.clock.optimizer_begins()
        self._clip()
        return loss

    def _clip(self) -> None:
        """Clip all gradients together; MARS does it inside its step, but for exact mode."""
        limit = self.run.optimizer.max_grad_norm
        if limit is not None and (not self.is_mars or self.run.optimizer.exact):
            self.scaler.unscale_(self.optimizer)
            self._note_norm(nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _note_norm(self, norm: Tensor | None) -> None:
        self.grad_norm = norm
        if norm is not None and not self.scaler.is_enabled():  # which looks after itself
            self.norms += norm

    def _apply(self) -> bool:
        """Let the optimizer step; False if a gradient is not finite and the step was skipped."""
        # A GradScaler skips by itself, and lowers its scale.
        if self.run.loop.skip_nan and not self.scaler.is_enabled() and not self._finite():
            return False
        self._clip()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if isinstance(self.optimizer, mars.MARS):
            self._note_norm(self.optimizer.grad_norm)
        return self.scaler.get_scale() >= scale

    def advance(self) -> None:
        """Take one step, or skip it (``skips``)."""
        taken = True
        set_rate(self.optimizer, factor(self.run.schedule, self.step, self.run.loop.steps))
        if self.run.optimizer.exact:
            self.clock.optimizer_begins()
            loss: Tensor = self.optimizer.step(self._closure)  # type: ignore[assignment,arg-type]
        else:
            loss = self._gradients()
            self.clock.optimizer_begins()
            taken = self._apply()
        self.clock.optimizer_ends()
        self.optimizer.zero_grad()
        self.skips = 0 if taken else self.skips + 1
        if taken:
            self.window += loss
            self.window_steps += 1
        if self.clock.running:
            self.clock.lap_steps += 1
        else:
            self.clock.credit()
        self.step += 1

    def _finite(self) -> bool:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return bool(torch.nn.utils.get_total_norm(gradients).isfinite())

    # What is told of it.

    @property
    def position(self) -> dict[str, Any]:
        """Where the run stands: in every record."""
        tokens = self.step * self.run.tokens_per_step
        return {"step": self.step, "tokens": tokens, "seconds": round(self.clock.read(), 4)}

    def record(self) -> dict[str, Any]:
        """A record of training since the last one."""
        seconds, optimizer = self.clock.lap()
        speed = self.run.tokens_per_step / seconds if seconds > 0 else None
        peak = peak_flops(self.device)
        loss = float(self.window) / max(1, self.window_steps)
        self.window.zero_()
        self.window_steps = 0
        on_gpu = self.device.type == "cuda"
        return {
            "kind": "train",
            **self.position,
            "loss": loss,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
            "tokens_per_second": speed,
            "mfu": speed * self.flops / peak if speed and peak else None,
            "step_seconds": seconds,
            "optimizer_seconds": optimizer,
            "memory": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the fixed sequences."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = len(self.held_out)
        for start in range(0, count, self.micro):
            stop = min(start + self.micro, count)
            with self._autocast():
                loss = self.loss_of(*self._to_device(self.held_out.rows(start, stop)))
            total += loss * (stop - start)
        self.model.train()
        return float(total) / count

    # What is kept of it.

    def training_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides model and optimizer."""
        return {
            "step": self.step,
            "seconds": self.clock.seconds,
            "window": float(self.window),
            "window_steps": self.window_steps,
            "scaler": self.scaler.state_dict(),
            "rng": checkpoint.rng_state(),
        }

    def restore(self, path: Path) -> None:
        state = checkpoint.load(path, self.model, self.optimizer)
        self.step = state["step"]
        self.clock.seconds = state["seconds"]
        self.window.fill_(state["window"])
        self.window_steps = state["window_steps"]
        self.scaler.load_state_dict(state["scaler"])
        checkpoint.set_rng_state(state["rng"])


class Session:
    """A training with its directory: decides what is due after a step."""

    def __init__(self, training: Training, directory: Path, log: Log, watch: Watch) -> None:
        self.t, self.directory, self.log, self.watch = training, directory, log, watch
        self.valid: float | None = None
        self.saved_at = self.valid_at = -1
        self.ticked = 0.0
        self.diagnosis: Diagnosis | None = None

    def write(self, record: dict[str, Any]) -> None:
        self.log.write(**record)
        self.watch(record)

    def tell(self, what: str, text: str) -> None:
        self.write({"kind": "event", **self.t.position, "what": what, "text": text})

    def resume(self, where: str, records: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint, with what the log says of the time before it."""
        self.saved_at = self.t.step
        for record in records:
            if record["kind"] == "valid":
                self.valid = record["loss"]
        self.tell("resumed", f"from {where}")

    def run(self, interrupt: Interrupt) -> Outcome:
        loop = self.t.run.loop
        if self.t.step == 0:
            self._validate()
        self.t.clock.start()
        while self.t.step < loop.steps:
            self._step()
            if interrupt.asked:
                break
        self.t.clock.stop()
        status = "done" if self.t.step >= loop.steps else "stopped"
        if status == "stopped":
            self.tell("interrupted", f"{interrupt.asked} at step {self.t.step}")
        if self.saved_at != self.t.step and self.t.run.keep.save_every is not None:
            self._save()
        self.write({"kind": "end", **self.t.position, "status": status, "valid": self.valid})
        return Outcome(status, self.t.step, self.valid, self.directory)

    def _step(self) -> None:
        t, loop, keep = self.t, self.t.run.loop, self.t.run.keep
        self._observe()
        t.advance()
        if t.skips:
            self._skipped()
        self._observed()
        if t.step == 1:
            self.log.replace_header(state_bytes=state_bytes(t.optimizer))
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
        if now - self.ticked > TICK:
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
            {"kind": "end", **self.t.position, "status": "failed", "valid": None, "text": text}
        )
        kept = any((self.directory / "checkpoints").glob("step-*"))
        raise Diverged(f"{text} (checkpoints before it are kept)" if kept else text)

    def _validation_due(self) -> bool:
        step, every = self.t.step, self.t.run.loop.eval_every
        early = {every >> k for k in range(1, EARLY + 1)}
        return step % every == 0 or step in early

    def _validate(self) -> None:
        self.valid, self.valid_at = self.t.validate(), self.t.step
        if not math.isfinite(self.valid):
            self._diverge("the validation loss is not finite")
        self.write({"kind": "valid", **self.t.position, "loss": self.valid})

    def _save(self) -> None:
        t = self.t
        norm = nn.utils.get_total_norm([p.detach() for p in t.model.parameters()])
        if not bool(norm.isfinite()):  # a checkpoint must be worth going back to
            self._diverge("a parameter is not finite")
        self.log.sync()  # a power cut leaves both, or the checkpoint before
        checkpoint.save(
            self.directory, t.step, t.model, t.optimizer, t.training_state(),
            keep=t.run.keep.last, best=self.valid if self.valid_at == t.step else None,
        )  # fmt: skip
        self.saved_at = t.step

    # A few steps are taken under observation now and then; the clock stands meanwhile, because
    # observing takes longer than training.

    @property
    def _diagnose_every(self) -> int:
        loop = self.t.run.loop
        return loop.diagnose_every or loop.eval_every

    def _observe(self) -> None:
        t, every = self.t, self._diagnose_every
        # Too often, and there would be no ordinary steps to time; one step has no variance.
        if (
            self.diagnosis
            or every < 2 * DIAGNOSED
            or not every - DIAGNOSED <= t.step % every < every - 1
        ):
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

"""One step: the same for every model, optimizer, device and number of processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mars
from mars.lab import checkpoint, hardware, wrapping
from mars.lab.clock import Clock
from mars.lab.config import Run
from mars.lab.dtensors import whole
from mars.lab.errors import LabError
from mars.lab.graphs import Graphs
from mars.lab.models import peak_flops
from mars.lab.muon import replay_steps
from mars.lab.optimizers import build
from mars.lab.parallel import World
from mars.lab.schedule import factor, remember_peaks, set_rate
from mars.lab.tasks import Task

# Operations; 0.1 s of an H200. In a longer pass the host is far ahead of the GPU, and gradients
# that stay where they are would only cost memory.
SHORT_PASS = 5e13


class Training:
    """A run in progress: model, optimizer, task with its data, clock, and where it stands."""

    def __init__(self, run: Run, model: nn.Module, task: Task, world: World | None = None) -> None:
        loop = run.loop
        self.run, self.model, self.task, self.world = run, model, task, world or World()
        self.device = next(model.parameters()).device
        self.dtype = hardware.choose_precision(loop.precision, self.device)
        self.micro = task.micro_batch(self.device, self.world.size)
        if loop.fp8_head:
            hardware.check_fp8(self.device, self.dtype, self.micro * task.per_row)
        task.to(self.device, self.dtype)
        # Under DDP all have the same matrices: MARS shares their orthogonalisation out.
        self.optimizer = build(model, run.optimizer, replicated=self.world.mode == "ddp")
        remember_peaks(self.optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        if run.optimizer.exact and self.dtype == torch.float16:
            raise LabError("optimizer.exact does not go with loop.precision fp16: use bf16 or fp32")
        if run.optimizer.exact and loop.skip_nan:
            raise LabError("optimizer.exact does not go with loop.skip_nan")
        self.is_mars = isinstance(self.optimizer, mars.MARS)
        compile_ = self.device.type == "cuda" if loop.compile is None else loop.compile
        if compile_:
            wrapping.compile_in_place(model, self.world)
        self.graphs = self._graphs(loop.graphs)
        if self.graphs is not None:
            replay_steps(self.optimizer)
        self.loss_of: Callable[..., Tensor] = model
        self.wrapped: Callable[..., Tensor] = model
        self.step = 0
        self.skips = 0  # steps skipped just now, in a row
        self.clock = Clock(self.device)
        self.window = torch.zeros((), dtype=torch.float64, device=self.device)  # sum of losses
        self.window_steps = 0
        self.grad_norm: Tensor | None = None
        self.norms = torch.zeros_like(self.window)  # sum of gradients' norms: finite if all are

    def connect(self) -> None:
        """Join the processes' gradients; all of them must call it, once, before the first step."""
        self.loss_of = self.wrapped = wrapping.connect(self.model, self.world)

    def _graphs(self, wanted: bool | None) -> Graphs | None:
        """Not where a pass is not the same kernels at the same addresses every time."""
        if wanted is False:
            return None
        optimizer = self.run.optimizer
        obstacles = {
            "CUDA graphs need a GPU": self.device.type != "cuda",
            "not under torchrun, where gradients are sent meanwhile": self.world.mode is not None,
            "not in exact mode": optimizer.exact,
            "not in fp16, whose scale changes": self.scaler.is_enabled(),
            "not with consume_grads, which takes the gradients' memory":
                self.is_mars and self.optimizer.defaults["consume_grads"],
        }  # fmt: skip
        reason = next((text for text, holds in obstacles.items() if holds), None)
        if reason and wanted:
            raise LabError(f"loop.graphs: {reason}")
        long = self.task.flops * self.task.per_row * self.micro > SHORT_PASS
        if reason or (long and not wanted):
            return None
        return Graphs(self._pass, self.model.parameters())

    # One step.

    def _autocast(self) -> Any:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def _gradients(self) -> Tensor:
        """Gradients of the mean loss over the batch of this step, whatever the micro-batches."""
        size, world = self.run.loop.batch_size, self.world
        total = torch.zeros((), device=self.device)
        # Of every micro-batch of all processes, this one's rows; DDP and FSDP2 take the mean.
        stride = self.micro * world.size
        for start in range(0, size, stride):
            first = start + self.micro * world.rank
            batch = self.task.rows(self.step, first, first + self.micro)
            with wrapping.accumulating(self.wrapped, more=start + stride < size):
                total += self.graphs(batch, start == 0) if self.graphs else self._pass(*batch)
        return world.mean(total)

    def _pass(self, *batch: Tensor) -> Tensor:
        """Forward and backward of a micro-batch; its part of the loss."""
        part = self.micro * self.world.size / self.run.loop.batch_size
        with self._autocast():
            loss = self.loss_of(*batch) * part
        self.scaler.scale(loss).backward()
        return loss.detach()

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
        self.grad_norm = norm = None if norm is None else whole(norm)
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
        return bool(whole(torch.nn.utils.get_total_norm(gradients)).isfinite())

    # What is told of it.

    @property
    def position(self) -> dict[str, Any]:
        """Where the run stands: in every record."""
        seconds = round(self.clock.read(), 4)
        return {"step": self.step, **self.task.progress(self.step), "seconds": seconds}

    def record(self) -> dict[str, Any]:
        """A record of training since the last one."""
        seconds, optimizer = self.clock.lap()
        speed = self.task.per_step / seconds if seconds > 0 else None
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
            f"{self.task.unit}_per_second": speed,
            "mfu": speed * self.task.flops / (peak * self.world.size) if speed and peak else None,
            "step_seconds": seconds,
            "optimizer_seconds": optimizer,
            "memory": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
        }

    @torch.no_grad()
    def validate(self, between: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Means of the task's measures over the fixed rows; processes share them.

        ``between`` is called before each pass, and may raise to abandon it.
        """
        self.model.eval()
        task = self.task
        total = torch.zeros(len(task.measures), dtype=torch.float64, device=self.device)
        count, most = task.held_out, task.validation_rows(self.micro)
        for start in range(0, count, most * self.world.size):
            between()
            first = min(start + most * self.world.rank, count)
            rows = min(most, count - first)
            # A process with nothing left joins in all the same: FSDP2 gathers its shards. It takes
            # as many rows as there are in other parts, for which the model is compiled.
            wanted = (first, first + rows) if rows else (0, min(most, count))
            batch = task.held_out_rows(*wanted)
            with self._autocast():
                measured = task.measure(self.loss_of, batch)
            total += measured * rows
        wrapping.reshard(self.model)
        self.model.train()
        means = (self.world.sum(total) / count).tolist()
        return dict(zip(task.measures, means, strict=True))

    # What is kept of it.

    def training_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides model and optimizer; all processes must ask."""
        own = checkpoint.rng_state(self.world)  # rank 0's is the one that is saved as "rng"
        return {
            "step": self.step,
            "seconds": self.clock.seconds,
            "window": float(self.window),
            "window_steps": self.window_steps,
            "scaler": self.scaler.state_dict(),
            "rng": own,
            "other_rngs": self.world.gather(own)[1:],  # of the other processes
        }

    def restore(self, path: Path, *, verified: bool = False) -> None:
        """Go on from a checkpoint that has been verified, of any number of processes."""
        state = checkpoint.load(
            path, self.model, self.optimizer, world=self.world, verified=verified
        )
        self.step = state["step"]
        self.clock.seconds = state["seconds"]
        self.window.fill_(state["window"])
        self.window_steps = state["window_steps"]
        self.scaler.load_state_dict(state["scaler"])
        known = [state["rng"], *state.get("other_rngs", [])]
        if self.world.rank < len(known):
            checkpoint.set_rng_state(known[self.world.rank], self.world)
        else:  # there were fewer processes
            self.world.seed(self.run.loop.seed + self.step)

"""`mars train`: a run from its configuration to its end, in a directory that survives."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from mars.lab import checkpoint, hardware, loading, parallel, retention, tasks, wrapping
from mars.lab.config import Run, check, read_config, to_json
from mars.lab.differences import first_difference
from mars.lab.errors import LabError, first_line
from mars.lab.log import FORMAT, Log, ended, read
from mars.lab.log import header as header_of
from mars.lab.loop import Training
from mars.lab.optimizers import label
from mars.lab.parallel import World
from mars.lab.rundir import RunDirectory, write_atomically
from mars.lab.session import Outcome, Session, Shows, Watch
from mars.lab.signals import Interrupt
from mars.lab.tasks import Task


def prepare(run: Run, world: World | None = None) -> Training:
    """Everything a run needs, checked; nothing is written yet, and no process waits for another.

    Of many processes, each must call ``connect`` of what is returned.
    """
    check(run)
    world = world or World()
    device = hardware.choose_device(run.loop.device, parallel.local_rank() if world.mode else None)
    task = tasks.of(run).open()
    if run.loop.threads:
        torch.set_num_threads(run.loop.threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        if device.index is not None:  # where kernels, events and pinned memory are by default
            torch.cuda.set_device(device)
        if torch.cuda.is_initialized():  # else there is nothing to reset, and it would be refused
            torch.cuda.reset_peak_memory_stats(device)  # a worker may have had other runs
    world.seed(run.loop.seed)
    dtype = hardware.choose_precision(run.loop.precision, device)
    try:
        model = wrapping.make(task, world, device, dtype)
    except (RuntimeError, MemoryError) as error:
        raise LabError(f"the model does not fit in memory: {first_line(error)}") from error
    return Training(run, model, task, world)


def train(
    run: Run, *, command: str = "", watch: Watch = lambda record: None, extend: bool = False
) -> Outcome:
    """Train, or go on training, in the run's directory.

    Under torchrun every process calls it; the first logs and watches, all return the same.

    Args:
        command: what the log says it was started by.
        watch: sees every record of the log, and about twice a second a "tick" with the step.
        extend: let a run that was begun with fewer steps go on to this number.
    """
    run = tasks.with_steps(check(run))
    device = hardware.choose_device(run.loop.device, parallel.local_rank())
    with hardware.deterministic(run.loop.deterministic), parallel.joined(run, device) as world:
        directory = Path(run.directory)
        begun = world.on_first(lambda: check_directory(run, directory, extend))
        if begun is not None and begun.loop.steps == run.loop.steps:
            ended = world.on_first(lambda: finished(run, directory))
            if ended is not None:
                world.on_first(lambda: _check_done(run, directory, watch))
                return ended
        training = world.together(lambda: prepare(run, world))
        training.connect()
        init, kept = getattr(run.model, "init", None), directory / "checkpoints"
        if init is not None and world.on_first(lambda: not retention.in_order(kept)):
            world.together(lambda: loading.initialise(training.model, init))
        with _owned(directory, world):
            # Again: somebody may have had the directory since, and left a run of his own.
            begun = world.on_first(lambda: check_directory(run, directory, extend))
            start, refused = _find_start(directory, world)
            if start is None:
                world.on_first(lambda: _check_unfinished(directory))
            if start is not None:
                world.on_first(lambda: check_unchanged(run, directory, training.task))
                world.together(lambda: training.restore(start, verified=True))
            with _session(training, directory, watch) as session, Interrupt() as interrupt:
                about = header(run, training, command)
                refused += world.on_first(lambda: _begin(session, start, about, begun))
                session.valid = world.on_first(lambda: session.valid)
                for text in refused:
                    session.tell("refused", text)
                return _run(session, interrupt)


@contextlib.contextmanager
def _owned(directory: Path, world: World) -> Iterator[None]:
    """The first process holds the lock for all."""
    with contextlib.ExitStack() as stack:
        world.on_first(lambda: stack.enter_context(RunDirectory(directory, "config.json").lock()))
        world.together(lambda: _check_shared(directory))
        yield


def _check_shared(directory: Path) -> None:
    """Refuse a disk of one machine's own: the others could neither save there nor resume."""
    if not (directory / "lock").exists():
        me = f"rank {parallel.own_rank()} on {socket.gethostname()}"
        raise LabError(
            f"what rank 0 writes in {directory} is not there for {me}: all machines must share the "
            "disk of --keep.out"
        )


@contextlib.contextmanager
def _session(training: Training, directory: Path, watch: Watch) -> Iterator[Session]:
    """The first process has the log."""
    run, keep = training.run, training.run.keep
    if not training.world.first:
        yield Session(training, directory, None, watch)
        return
    log = Log(directory, tensorboard=keep.tensorboard, wandb=keep.wandb, config=to_json(run))
    with log:
        yield Session(training, directory, log, watch)


def _begin(
    session: Session, start: Path | None, about: dict[str, Any], begun: Run | None
) -> list[str]:
    """Make the directory that of this run, or rewind its log to where the run goes on.

    What had to be dropped of the log is returned.
    """
    log, directory, run = session.log, session.directory, session.t.run
    assert log is not None
    if start is None:
        write_atomically(directory / "config.json", _text(run))
        log.rewind(None)
        session.write(about)
        return []
    dropped = _rewind(log, session.t.step, about)
    session.resume(start.name, read(directory))
    if begun is None or begun.loop.steps != run.loop.steps:
        write_atomically(directory / "config.json", _text(run))
    if begun is not None and begun.loop.steps != run.loop.steps:
        log.replace_header(steps=run.loop.steps, config=to_json(run))
        text = f"{begun.loop.steps} to {run.loop.steps} steps: the rate so far was for"
        session.tell("extended", f"{text} {begun.loop.steps}")
    return dropped


def _run(session: Session, interrupt: Interrupt) -> Outcome:
    try:
        return session.run(interrupt)
    except (LabError, torch.cuda.OutOfMemoryError) as error:
        # A checkpoint that is being written is a good one. Another process may be gone already.
        with contextlib.suppress(LabError, RuntimeError):
            session.finish()
        if isinstance(error, LabError):
            raise
        raise LabError(
            f"the GPU's memory is full: lower loop.micro_batch_size ({session.t.micro})"
        ) from error


def check_directory(run: Run, directory: Path, extend: bool) -> Run | None:
    """The run that was begun there, if any; another one than this is refused."""
    written = directory / "config.json"
    if not written.exists():
        return None
    if not run.keep.resume:
        raise LabError(f"{directory} holds a run already: choose another --keep.out or remove it")
    begun = read_config(written)
    if extend and run.loop.steps > begun.loop.steps:
        run = run.replace(loop={"steps": begun.loop.steps})
    difference = first_difference(to_json(begun), to_json(run))
    if difference:
        field, old, new = difference
        held = f"{directory} holds a run with {field} = {old!r}, not {new!r}"
        raise LabError(
            f"{held}: choose another --keep.out, or go on with `mars train {directory}`, changing "
            "nothing (but loop.steps to more)"
        )
    return begun


def finished(run: Run, directory: Path) -> Outcome | None:
    """The outcome of a run that has nothing left to do."""
    end = _told(ended, directory)
    if end.get("status") == "done" and end["step"] == run.loop.steps:
        return Outcome("done", end["step"], end["valid"], directory, end.get("accuracy"))
    return None


def _check_done(run: Run, directory: Path, watch: object) -> None:
    """Refuse to pass for another run's outcome; who sits before it is told that nothing is run."""
    check_unchanged(run, directory, open_if_there(run))
    if isinstance(watch, Shows):
        watch.answer("this run was done already: nothing is run")


def _check_unfinished(directory: Path) -> None:
    """Refuse to begin again what has come to its end: of a search or a study, say."""
    if _told(ended, directory).get("status") == "done":
        raise LabError(
            f"the run in {directory} is done, and has no checkpoint to go on from: choose another "
            "--keep.out, or remove it to begin again"
        )


def open_if_there(run: Run) -> Task | None:
    """The task with its data; None if these are gone: a run that is done needs them no more."""
    try:
        return tasks.of(run).open()
    except LabError:
        names = [name for name in (run.data.source, run.data.valid) if name is not None]
        if all(Path(name).expanduser().exists() for name in names):
            raise  # they are there, but not what they were
        return None


def check_unchanged(run: Run, directory: Path, task: Task | None) -> None:
    """Refuse other data, or another optimizer of the user's, than the run there began with.

    Without a task, which has the data, only the optimizer is compared.
    """
    begun = _told(header_of, directory)
    own = run.optimizer.name
    found = [(f"the module of {own}", begun.get("optimizer_code"), hardware.own_code(own))]
    for name, now in (("train", task.train), ("valid", task.valid)) if task else ():
        before = begun.get("data", {}).get(name, {}).get("sha256")
        found.append((now.source, before, now.sha256))
    for what, was, is_now in found:
        if was and is_now and was != is_now:
            raise LabError(
                f"{what} has changed since the run in {directory} began (its sha256 was "
                f"{was[:12]}, now {is_now[:12]}): restore it or choose another --keep.out"
            )


def _told(of: Callable[[Path], dict[str, Any]], directory: Path) -> dict[str, Any]:
    """What a log says, or nothing if it is lost or damaged: the checkpoints have what was done."""
    try:
        return of(directory)
    except LabError:
        return {}


def _rewind(log: Log, step: int, head: dict[str, Any]) -> list[str]:
    damaged = log.rewind(step, head)
    lines = "1 line" if damaged == 1 else f"{damaged} lines"
    return [f"{lines} of {log.path.name} dropped: damaged"] if damaged else []


def _find_start(directory: Path, world: World) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from (None for a new run), and which were refused, and why."""
    refused: list[str] = []
    start = checkpoint.newest(directory, refused.append, world)
    if start is None and refused:
        text = f"no checkpoint in {directory} is intact: remove it to begin again"
        raise world.error(LabError(f"{text} ({'; '.join(refused)})"))
    return start, refused


def _text(run: Run) -> bytes:
    return (json.dumps(to_json(run), indent=2) + "\n").encode()


def header(run: Run, t: Training, command: str) -> dict[str, Any]:
    """The first record of a log: everything the numbers depend on."""
    parameters = list(t.model.parameters())
    matrix = sum(p.numel() for p in parameters if p.ndim >= 2)
    total = sum(p.numel() for p in parameters)
    return {
        "kind": "header",
        "format": FORMAT,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "name": run.recipe,
        "label": label(run.optimizer.name),
        "optimizer": run.optimizer.name,
        "lr": run.optimizer.lr,
        "seed": run.loop.seed,
        "config": dataclasses.asdict(run),
        "parameters": {"total": total, "matrix": matrix, "other": total - matrix},
        "steps": run.loop.steps,
        **t.task.header,
        "versions": hardware.versions(),
        "hardware": hardware.hardware(t.device),
        "precision": str(t.dtype).removeprefix("torch."),
        "micro_batch_size": t.micro,
        "parallel": {"mode": t.world.mode, "ranks": t.world.size, "shards": t.world.shards},
        "command": command,
        "code": hardware.code_hash(),
        "optimizer_code": hardware.own_code(run.optimizer.name),  # of the user's; None: ours
    }

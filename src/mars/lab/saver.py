"""Sharded checkpoints written behind the training: a copy is taken, a thread writes it.

All processes take part. The thread has a channel of its own, so that its messages and those of the
training do not mix. The next save waits for the last; what went wrong is told by ``wait``.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mars.lab import optimizer_state, plainfile, retention, sealed, sharded
from mars.lab.dtensors import copy_to_cpu
from mars.lab.errors import LabError
from mars.lab.parallel import World
from mars.lab.retention import OPTIMIZER, TRAINING
from mars.lab.rundir import reason, temporary_name
from mars.lab.sealed import CheckpointError


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold: copies, which training does not touch."""

    final: Path
    step: int
    tensors: dict[str, Tensor]  # this process's pieces
    optimizer: Any  # the rest of its state_dict
    training: Any
    about: dict[str, Any]
    keep: int | None
    best: float | None


class Saver:
    """Saves the shards of a run, one checkpoint at a time."""

    def __init__(self, world: World) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.world = world.aside()
        mesh = world.mesh
        if mesh.device_type != "cpu":
            mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        self.mesh = mesh
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, run: Path, step: int, model: nn.Module, optimizer: Any, training: dict[str, Any],
        *, keep: int | None = 2, best: float | None = None,
    ) -> None:  # fmt: skip
        """Begin to save; arguments as of ``checkpoint.save``. Raises if the last one failed."""
        self.wait()
        tensors, rest = sharded.tensors_of(model, optimizer)
        about = {
            "step": step, "layout": "sharded", "ranks": self.world.size,
            "optimizer": optimizer_state.signature(model, optimizer),
            "versions": retention.versions(),
        }  # fmt: skip
        shot = Snapshot(
            Path(run) / "checkpoints" / f"step-{step:08d}", step,
            {name: copy_to_cpu(t, self.mesh) for name, t in tensors.items()},
            rest, plainfile.plain({**training, "step": step}, "training"), about, keep, best,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, args=(shot,), daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the last one is known to have failed."""
        return self._error is not None

    def wait(self) -> None:
        """Wait for the last one to be on disk; raise if it failed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, shot: Snapshot) -> None:
        try:
            self._write(shot)
        except BaseException as error:  # told by wait, in the thread that asks
            self._error = error

    def _write(self, shot: Snapshot) -> None:
        world, final = self.world, shot.final
        temporary = temporary_name(final)
        try:
            with _told(final):
                temporary = world.on_first(lambda: _made(temporary))
                own = world.together(lambda: sharded.write(temporary, shot.tensors, world))
            seals = {name: seal for part in world.gather(own) for name, seal in part.items()}
            world.on_first(lambda: _finish(shot, temporary, seals))
        finally:
            if world.first:
                shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _told(final: Path) -> Iterator[None]:
    """Errors in the words of a user, of the same kind as before."""
    try:
        yield
    except LabError as error:
        text = f"cannot save checkpoint {final}: {error}; earlier ones are untouched"
        raise type(error)(text) from error.__cause__


def _made(temporary: Path) -> Path:
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(reason(error)) from error
    return temporary


def _check_complete(temporary: Path, final: Path) -> None:
    """A process on another machine may have written its shards to a disk of its own."""
    try:
        sealed.read_manifest(temporary)
    except CheckpointError as error:
        text = str(error).removeprefix(f"{temporary.name}: ")
        raise CheckpointError(
            f"cannot save checkpoint {final}: {text} here, though a process has written it: all "
            "machines must share the disk of --keep.out; earlier ones are untouched"
        ) from error


def _finish(shot: Snapshot, temporary: Path, seals: dict[str, Any]) -> None:
    """On rank 0, when all shards are on disk: seal them, give them their name, delete old ones."""
    final = shot.final
    files = {
        OPTIMIZER: lambda file: plainfile.write(file, shot.optimizer),
        TRAINING: lambda file: plainfile.write(file, shot.training),
    }
    try:
        sealed.write(temporary, files, shot.about, seals)
        _check_complete(temporary, final)
        retention.publish(temporary, final)
        retention.note_best(final.parent, shot.step, shot.best)
    except OSError as error:
        raise CheckpointError(
            f"cannot save checkpoint {final}: {reason(error)}; earlier ones are untouched"
        ) from error
    if shot.keep is not None:
        retention.delete_old(final.parent, shot.step, shot.keep)

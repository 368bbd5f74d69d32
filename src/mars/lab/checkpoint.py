"""Checkpoints that survive a kill, a full disk and a flipped bit, and resume bit by bit.

A checkpoint is a directory ``checkpoints/step-00000200`` of four files: model.safetensors,
optimizer.pt, training.pt and manifest.json, which seals the others (see sealed.py). It is made
under another name and renamed when all of it is on disk. A sharded one (saver.py) has the files of
torch.distributed.checkpoint in place of model.safetensors; both load into any number of processes.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mars.lab import optimizer_state, plainfile, retention, sealed, tensorfile
from mars.lab.errors import LabError
from mars.lab.parallel import World
from mars.lab.retention import MODEL, OPTIMIZER, TRAINING
from mars.lab.rundir import reason, temporary_name
from mars.lab.sealed import CheckpointError
from mars.sharding import is_sharded

if TYPE_CHECKING:
    from mars.lab.saver import Saver
    from mars.lab.sharded import Shards

__all__ = ["CheckpointError", "best", "load", "newest", "rng_state", "save", "set_rng_state"]

ALONE = World()


def save(
    run: Path, step: int, model: nn.Module, optimizer: Any, training: dict[str, Any],
    *, keep: int | None = 2, best: float | None = None,
) -> Path:  # fmt: skip
    """Write the checkpoint of a step, then delete old ones; all of it or, with an error, nothing.

    Args:
        run: the run directory.
        step: steps done.
        model, optimizer: anything with a ``state_dict``; not wrapped by DDP or torch.compile, which
            would change the names of the tensors.
        training: what else is needed to go on: tensors, numbers, strings, lists, dicts. The
            random numbers' state is added as ``"rng"`` unless it is there, the step as ``"step"``.
        keep: how many to keep, besides the best; None for all.
        best: a loss, if this checkpoint may be the best: it is if no older one has a lower loss.
    """
    if keep is not None and keep < 1:
        raise LabError(f"{keep} checkpoints to keep: it must be 1 or more")
    folder = Path(run) / "checkpoints"
    final = folder / f"step-{step:08d}"
    state = plainfile.plain(optimizer.state_dict(), "optimizer")
    extra = plainfile.plain({"rng": rng_state(), **training, "step": step}, "training")
    temporary = temporary_name(final)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        files: dict[str, Callable[[sealed.HashedFile], object]] = {
            MODEL: lambda file: tensorfile.write_tensors(file, model.state_dict()),
            OPTIMIZER: lambda file: plainfile.write(file, state),
            TRAINING: lambda file: plainfile.write(file, extra),
        }
        own = optimizer_state.signature(model, optimizer)
        about = {"step": step, "optimizer": own, "versions": retention.versions()}
        sealed.write(temporary, files, about)
        retention.publish(temporary, final)
        retention.note_best(folder, step, best)
    except OSError as error:
        raise CheckpointError(
            f"cannot save checkpoint {final}: {reason(error)}; earlier ones are untouched"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if keep is not None:
        retention.delete_old(folder, step, keep)
    return final


def newest(
    run: Path, report: Callable[[str], object], world: World = ALONE
) -> Path | None:  # fmt: skip
    """The checkpoint of the highest step that is intact; every refused one is reported.

    Processes share the work of reading, and find the same.
    """
    folder = Path(run) / "checkpoints"
    there = world.on_first(lambda: [path for _, path in retention.in_order(folder)])
    for path in there:
        try:
            world.together(partial(_verify, path, (world.rank, world.size)))
        except LabError as error:
            report(f"checkpoint refused: {error}")
        else:
            return path
    return None


def best(run: Path) -> Path | None:
    """The checkpoint with the lowest loss, if there is one and it is intact."""
    folder = Path(run) / "checkpoints"
    noted = retention.noted_best(folder)
    if noted is not None:
        with contextlib.suppress(CheckpointError):
            path = folder / f"step-{noted[0]:08d}"
            _verify(path)
            return path
    return None


def load(
    path: Path, model: nn.Module, optimizer: Any = None, *, world: World = ALONE,
    verified: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Verify a checkpoint, put it into model and optimizer, return what else was saved.

    What does not fit is a CheckpointError that names the first difference, and changes nothing.
    The random numbers are the caller's to restore: ``set_rng_state(loaded["rng"])``.

    Args:
        path: the checkpoint, in one file or sharded.
        model, optimizer: to load into; sharded or not, whatever the checkpoint is.
        world: the processes; all of them must call it.
        verified: ``newest`` has just read every byte of it.
    """
    path = Path(path)
    # No rank waits for another's shards before all have read what each reads for itself.
    form, extra = world.together(lambda: _opened(path, model, optimizer, world, verified))
    if optimizer is not None:
        state = form.optimizer_state(model, optimizer)
        world.together(lambda: optimizer_state.restore(path, optimizer, state))
    form.read_into(model.state_dict())
    return extra


def _opened(
    path: Path, model: nn.Module, optimizer: Any, world: World, verified: bool
) -> tuple[_Single | Shards, dict[str, Any]]:
    """A checkpoint that fits model and optimizer, and what else was saved."""
    manifest = sealed.read_manifest(path) if verified else _verify(path)
    retention.check_manifest(path, manifest)
    form = _form(path, manifest, world)
    differs = form.difference(model.state_dict())
    if differs is not None:
        raise CheckpointError(f"{path} is not of this model: {differs}")
    if optimizer is not None:
        own = optimizer_state.signature(model, optimizer)
        differs = optimizer_state.difference(manifest["optimizer"], own)
        if differs is not None:
            raise CheckpointError(f"{path} is not of this optimizer: {differs}")
    extra: dict[str, Any] = plainfile.read(path / TRAINING)
    return form, extra


def saver(world: World) -> Saver | None:
    """What saves shards, behind the training, where there are shards."""
    if world.mode != "fsdp2":
        return None
    from mars.lab.saver import Saver  # which takes more than a second to import

    return Saver(world)


def _form(path: Path, manifest: dict[str, Any], world: World) -> _Single | Shards:
    if not retention.is_sharded(manifest):
        return _Single(path)
    from mars.lab.sharded import Shards  # which takes more than a second to import

    return Shards(path, world)


class _Single:
    """Weights in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def difference(self, target: dict[str, Any]) -> str | None:
        return tensorfile.difference(self.path / MODEL, target)

    def optimizer_state(self, model: nn.Module, optimizer: Any) -> Any:
        state = plainfile.read(self.path / OPTIMIZER)
        if any(is_sharded(p) for p in model.parameters()):
            optimizer_state.distribute(state, optimizer)
        return state

    def read_into(self, target: dict[str, Any]) -> None:
        tensorfile.read_into(self.path / MODEL, target)


def _verify(path: Path, part: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    manifest = sealed.verify(path, part)
    retention.check_manifest(path, manifest)
    return manifest


def rng_state(world: World = ALONE) -> dict[str, Any]:
    """The state of the random numbers of torch (CPU, and CUDA if in use), Python and NumPy.

    One of many processes gives that of its own GPU.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_initialized():
        many = world.mode is not None
        cuda = [torch.cuda.get_rng_state()] if many else torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
    }


def set_rng_state(state: dict[str, Any], world: World = ALONE) -> None:
    """Restore what ``rng_state`` returned, on the devices that there are."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and world.mode is not None:
        for one in state["cuda"][:1]:
            torch.cuda.set_rng_state(one)
    elif torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])

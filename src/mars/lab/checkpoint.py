"""Checkpoints that survive a kill, a full disk and a flipped bit, and resume bit by bit.

A checkpoint is a directory ``checkpoints/step-00000200`` of four files: model.safetensors,
optimizer.pt, training.pt and manifest.json, which seals the others (see sealed.py). It is made
under another name and renamed when all of it is on disk. Which is the newest is decided by step
numbers and checksums: no clock and no pointer to the latest one is trusted.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mars
from mars.lab import plainfile, sealed, tensorfile
from mars.lab.errors import LabError
from mars.lab.rundir import reason, sync_directory, temporary_name, write_atomically
from mars.lab.sealed import CheckpointError

__all__ = ["CheckpointError", "best", "load", "newest", "rng_state", "save", "set_rng_state"]

MODEL, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.pt", "training.pt"

# ".old": a checkpoint whose successor of the same step was being put in its place.
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


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
    optimizer_state = plainfile.plain(optimizer.state_dict(), "optimizer")
    extra = plainfile.plain({"rng": rng_state(), **training, "step": step}, "training")
    temporary = temporary_name(final)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        files: dict[str, Callable[[sealed.HashedFile], object]] = {
            MODEL: lambda file: tensorfile.write_tensors(file, model.state_dict()),
            OPTIMIZER: lambda file: plainfile.write(file, optimizer_state),
            TRAINING: lambda file: plainfile.write(file, extra),
        }
        about = {"step": step, "optimizer": _signature(optimizer), "versions": _versions()}
        sealed.write(temporary, files, about)
        _publish(temporary, final)
        _note_best(folder, step, best)
    except OSError as error:
        raise CheckpointError(
            f"cannot save checkpoint {final}: {reason(error)}; earlier ones are untouched"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if keep is not None:
        _delete_old(folder, step, keep)
    return final


def newest(run: Path, report: Callable[[str], object]) -> Path | None:
    """The checkpoint of the highest step that is intact; every refused one is reported."""
    for _, path in _all(Path(run) / "checkpoints"):
        try:
            _verify(path)
        except CheckpointError as error:
            report(f"checkpoint refused: {error}")
        else:
            return path
    return None


def best(run: Path) -> Path | None:
    """The checkpoint with the lowest loss, if there is one and it is intact."""
    folder = Path(run) / "checkpoints"
    noted = _noted_best(folder)
    if noted is not None:
        with contextlib.suppress(CheckpointError):
            path = folder / f"step-{noted[0]:08d}"
            _verify(path)
            return path
    return None


def load(path: Path, model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Verify a checkpoint, put it into model and optimizer, return what else was saved.

    What does not fit is a CheckpointError that names the first difference, and changes nothing.
    The random numbers are the caller's to restore: ``set_rng_state(loaded["rng"])``.
    """
    path = Path(path)
    manifest = _verify(path)
    target = model.state_dict()
    unfit = tensorfile.difference(path / MODEL, target)
    if unfit is not None:
        raise CheckpointError(f"{path} is not of this model: {unfit}")
    extra: dict[str, Any] = plainfile.read(path / TRAINING)
    if optimizer is not None:
        unfit = _optimizer_difference(manifest["optimizer"], _signature(optimizer))
        if unfit is not None:
            raise CheckpointError(f"{path} is not of this optimizer: {unfit}")
        _load_optimizer(path, optimizer)
    tensorfile.read_into(path / MODEL, target)
    return extra


def rng_state() -> dict[str, Any]:
    """The state of the random numbers of torch (CPU, and CUDA if in use), Python and NumPy."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned, on the devices that there are."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


# Names, order, and what may go.


def _all(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of whatever is named like a checkpoint, the newest first."""
    found = []
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def _verify(path: Path) -> dict[str, Any]:
    manifest = sealed.verify(path)
    _check_manifest(path, manifest)
    return manifest


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    match = _NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest["step"]:
        raise CheckpointError(f"{path.name}: its manifest is that of step {manifest['step']}")
    for name in (MODEL, OPTIMIZER, TRAINING):
        if name not in manifest["files"]:
            raise CheckpointError(f"{path.name}: {name} is not in its manifest")


def _looks_valid(path: Path) -> bool:
    """All but the checksums of the contents, which take as long as reading them."""
    try:
        _check_manifest(path, sealed.read_manifest(path))
    except CheckpointError:
        return False
    return True


def _publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name; at no moment is there none where there was one."""
    old = final.with_name(final.name + ".old")
    if final.exists():
        if old.exists():
            _delete(old)
        final.rename(old)
    temporary.rename(final)
    sync_directory(final.parent)
    if old.exists():
        _delete(old)


def _delete(path: Path) -> None:
    """Delete at one blow: a half deleted checkpoint would look like a broken one. May fail."""
    with contextlib.suppress(OSError):
        gone = temporary_name(path)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _delete_old(folder: Path, step: int, keep: int) -> None:
    """Keep this step's checkpoint, the latest before it that look valid, and the best."""
    noted = _noted_best(folder)
    mine = folder / f"step-{step:08d}"
    if not _looks_valid(mine):
        return  # a file system that lost what it had synced: the others may be all there is
    kept = 0
    for other, path in _all(folder):
        if other > step:
            continue  # refused when the run was resumed; replaced when the run gets there
        if path == mine or (kept < keep and _looks_valid(path)):
            kept += 1
        elif noted is None or other != noted[0]:
            _delete(path)


def _noted_best(folder: Path) -> tuple[int, float] | None:
    try:
        note = json.loads((folder / "best.json").read_text())
        return int(note["step"]), float(note["loss"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _note_best(folder: Path, step: int, loss: float | None) -> None:
    if loss is None or not math.isfinite(loss):
        return
    noted = _noted_best(folder)
    # One of a later step is of a course of training that has been abandoned.
    older = noted is not None and noted[0] < step and noted[1] <= loss
    if noted is not None and older and _looks_valid(folder / f"step-{noted[0]:08d}"):
        return
    note = json.dumps({"step": step, "loss": float(loss)}) + "\n"
    write_atomically(folder / "best.json", note.encode())


# Whose it is.


def _versions() -> dict[str, str]:
    return {
        "mars": mars.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _signature(optimizer: Any) -> dict[str, Any]:
    """By which a checkpoint of another optimizer, or of other groups, is recognised."""
    groups = getattr(optimizer, "param_groups", [])
    shapes = [[list(p.shape) for p in group["params"]] for group in groups]
    return {"class": type(optimizer).__qualname__, "groups": shapes}


def _optimizer_difference(saved: dict[str, Any], own: dict[str, Any]) -> str | None:
    if saved["class"] != own["class"]:
        return f"it was saved by {saved['class']}, this is {own['class']}"
    theirs, ours = saved["groups"], own["groups"]
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} parameter groups, this one {len(ours)}"
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if len(a) != len(b):
            return f"its group {i} has {len(a)} parameters, this one's {len(b)}"
        for j, (shape, other) in enumerate(zip(a, b, strict=True)):
            if shape != other:
                return (
                    f"parameter {j} of its group {i} has shape {tuple(shape)}, this one's "
                    f"{tuple(other)}"
                )
    return None


def _load_optimizer(path: Path, optimizer: Any) -> None:
    state = plainfile.read(path / OPTIMIZER)
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(state)
    except Exception as error:
        optimizer.load_state_dict(before)  # of several optimizers in one, some may have loaded
        raise CheckpointError(f"{path} is not of this optimizer: {error}") from error

"""Checkpoints in their folder: names, order, the best one, and what may go.

Which is the newest is decided by step numbers: no clock and no pointer to the latest is trusted.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import torch

import mars
from mars.lab import sealed
from mars.lab.rundir import sync_directory, temporary_name, write_json
from mars.lab.sealed import CheckpointError

MODEL, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.pt", "training.pt"
SHARDS = ".metadata"  # of a sharded checkpoint, in place of MODEL: where each piece lies

# ".old": a checkpoint whose successor of the same step was being put in its place.
_NAME = re.compile(r"step-(\d{8,})(\.old)?")


def in_order(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of whatever is named like a checkpoint, the newest first."""
    found = []
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """That it is of this step, and names the files that there must be."""
    match = _NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest["step"]:
        raise CheckpointError(f"{path.name}: its manifest is that of step {manifest['step']}")
    weights = SHARDS if is_sharded(manifest) else MODEL
    for name in (weights, OPTIMIZER, TRAINING):
        if name not in manifest["files"]:
            raise CheckpointError(f"{path.name}: {name} is not in its manifest")


def is_sharded(manifest: dict[str, Any]) -> bool:
    """Whether torch.distributed.checkpoint wrote the tensors, a file a process."""
    return manifest.get("layout") == "sharded"


def looks_valid(path: Path) -> bool:
    """All but the checksums of the contents, which take as long as reading them."""
    try:
        check_manifest(path, sealed.read_manifest(path))
    except CheckpointError:
        return False
    return True


def publish(temporary: Path, final: Path) -> None:
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


def delete_old(folder: Path, step: int, keep: int) -> None:
    """Keep this step's checkpoint, the latest before it that look valid, and the best."""
    noted = noted_best(folder)
    mine = folder / f"step-{step:08d}"
    if not looks_valid(mine):
        return  # a file system that lost what it had synced: the others may be all there is
    kept = 0
    for other, path in in_order(folder):
        if other > step:
            continue  # refused when the run was resumed; replaced when the run gets there
        if path == mine or (kept < keep and looks_valid(path)):
            kept += 1
        elif noted is None or other != noted[0]:
            _delete(path)


def noted_best(folder: Path) -> tuple[int, float] | None:
    """Step and loss of the best one."""
    try:
        note = json.loads((folder / "best.json").read_text())
        return int(note["step"]), float(note["loss"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def note_best(folder: Path, step: int, loss: float | None) -> None:
    """This one is the best, unless an older one of this course of training is."""
    if loss is None or not math.isfinite(loss):
        return
    noted = noted_best(folder)
    # One of a later step is of a course of training that has been abandoned.
    older = noted is not None and noted[0] < step and noted[1] <= loss
    if noted is not None and older and looks_valid(folder / f"step-{noted[0]:08d}"):
        return
    write_json(folder / "best.json", {"step": step, "loss": float(loss)}, indent=None)


def versions() -> dict[str, str]:
    """Who wrote it."""
    return {
        "mars": mars.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }

"""`mars convert`: a checkpoint in one file to shards, or back.

Training needs none of it: both forms load into any number of processes. It is for who wants
model.safetensors of a sharded run, or shards to read in parts.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mars.lab import optimizer_state, plainfile, retention, sealed, tensorfile
from mars.lab.errors import LabError
from mars.lab.parallel import World
from mars.lab.retention import MODEL, OPTIMIZER, TRAINING
from mars.lab.rundir import RunDirectory, reason, temporary_name
from mars.lab.sealed import CheckpointError

CONFIG = "config.json"  # of the run; what is put elsewhere takes it along
Files = dict[str, Callable[[sealed.HashedFile], object]]


@dataclass(frozen=True)
class ConvertArgs:
    """Change the form of a checkpoint."""

    checkpoint: Path
    """The checkpoint: runs/NAME/checkpoints/step-00000200."""

    to: Literal["single", "sharded"] = "single"
    """model.safetensors and optimizer.pt, or the files of torch.distributed.checkpoint."""

    out: Path | None = None
    """A directory that is not there yet; by default the checkpoint itself is replaced."""


def convert_command(args: ConvertArgs) -> Path:
    """Convert, and say where it is."""
    path = args.checkpoint.resolve()
    if not (path / sealed.MANIFEST).is_file():
        raise LabError(f"{args.checkpoint} is not a checkpoint: give runs/NAME/checkpoints/step-…")
    if args.out is not None and args.out.exists():
        raise LabError(f"{args.out} already exists")
    final = path if args.out is None else args.out.resolve()
    run, moved = path.parent.parent, (path / CONFIG).is_file()  # one that was put elsewhere
    config = (path if moved else run) / CONFIG
    # Nobody trains there while a checkpoint is replaced.
    owned = RunDirectory(run).lock() if args.out is None and not moved else nullcontext()
    temporary = temporary_name(final)
    with owned:
        manifest = sealed.verify(path)
        retention.check_manifest(path, manifest)
        if retention.is_sharded(manifest) == (args.to == "sharded"):
            raise LabError(f"{args.checkpoint} is {args.to} already")
        try:
            temporary.mkdir(parents=True)
            (_to_shards if args.to == "sharded" else _to_one)(path, manifest, temporary)
            if (args.out is not None or moved) and config.is_file():
                shutil.copy(config, temporary)
            retention.publish(temporary, final)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {final}: {reason(error)}; {args.checkpoint} is as it was"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    sys.stdout.write(f"{final}\n")
    return final


def _names(manifest: dict[str, Any], state: dict[str, Any]) -> list[list[str]]:
    names = manifest["optimizer"].get("names")
    if names is None or any(name is None for group in names for name in group):
        raise LabError(
            "the checkpoint does not say which parameter is which: go on training from it with "
            "torchrun and --loop.parallel fsdp2, which saves shards"
        )
    return optimizer_state.numbered(state, names)


def _about(manifest: dict[str, Any], **more: Any) -> dict[str, Any]:
    kept = {name: manifest[name] for name in ("step", "optimizer", "versions")}
    return {**kept, **more}


def _plain_files(optimizer: Any, path: Path) -> Files:
    training = plainfile.read(path / TRAINING)
    return {
        OPTIMIZER: lambda file: plainfile.write(file, optimizer),
        TRAINING: lambda file: plainfile.write(file, training),
    }


def _to_one(path: Path, manifest: dict[str, Any], temporary: Path) -> None:
    from mars.lab import sharded

    shards = sharded.Shards(path, World())
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in shards.entries.items()
    }
    sharded.read(path, tensors, World())
    prefix = sharded.MODEL_PREFIX
    weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    kept = {k: v for k, v in tensors.items() if k.startswith(optimizer_state.PREFIX)}
    rest = plainfile.read(path / OPTIMIZER)
    state = optimizer_state.put_together(rest, _names(manifest, rest), kept)
    files: Files = {MODEL: lambda file: tensorfile.write_tensors(file, weights)}
    sealed.write(temporary, {**files, **_plain_files(state, path)}, _about(manifest))


def _to_shards(path: Path, manifest: dict[str, Any], temporary: Path) -> None:
    from mars.lab import sharded

    state = plainfile.read(path / OPTIMIZER)
    kept, rest = optimizer_state.take_apart(state, _names(manifest, state))
    weights: dict[str, Tensor] = {
        sharded.MODEL_PREFIX + name: t for name, t in tensorfile.read(path / MODEL).items()
    }
    seals = sharded.write(temporary, {**weights, **kept}, World())
    about = _about(manifest, layout="sharded", ranks=1)
    sealed.write(temporary, _plain_files(rest, path), about, seals)

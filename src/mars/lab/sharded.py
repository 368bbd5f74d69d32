"""Tensors of a checkpoint in shards: torch.distributed.checkpoint (DCP) under our seal.

DCP decides which process writes which piece of which tensor, and finds the pieces again for any
number of processes. Three things are ours: every byte is hashed while it is written; nothing but
tensors is given to DCP, whose other items are unpickled when loaded; and its index, a pickle too,
is read by an unpickler that knows the dozen classes it consists of and no others.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mars.lab import optimizer_state, plainfile
from mars.lab.dtensors import empty_like
from mars.lab.parallel import World
from mars.lab.retention import OPTIMIZER, SHARDS
from mars.lab.rundir import reason
from mars.lab.sealed import CheckpointError, HashedFile
from mars.lab.tensorfile import mismatch

MODEL_PREFIX = "model."
_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    *((f"{_DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
}  # fmt: skip


class _Files(FileSystem):
    """Hashes what is written."""

    def __init__(self) -> None:
        self.seals: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = HashedFile(Path(path))
        try:
            yield file
            self.seals[Path(path).name] = file.seal
        except RuntimeError as error:
            raise (file.error or error) from error
        finally:
            file.close()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.seals[Path(new_path).name] = self.seals.pop(Path(path).name)


class _Writer(FileSystemWriter):
    def __init__(self, path: Path) -> None:
        # All is in memory already. Copying ahead would wait for the work of the first GPU, and make
        # a context on it for every process: a new thread does not know its process's device.
        super().__init__(path, per_thread_copy_ahead=0)
        self.fs = self.files = _Files()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # not where it was made: it is renamed


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed there")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return index(Path(self.path))


def index(path: Path) -> Metadata:
    """Which tensors there are, and where their pieces lie."""
    try:
        with open(path / SHARDS, "rb") as file:
            found = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path.name}: {SHARDS} is not loaded: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path.name}: {SHARDS} is not an index of tensors")
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path.name}: {name} in {SHARDS} is not a tensor")
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """DCP warns where there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        yield


def write(path: Path, tensors: Mapping[str, Tensor], world: World) -> dict[str, dict[str, Any]]:
    """Write this process's pieces; the seals of its files. All processes must call it."""
    writer = _Writer(path)
    try:
        with _alone():
            save(
                dict(tensors), storage_writer=writer, process_group=world.group,
                no_dist=world.mode is None,
            )  # fmt: skip
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        text = reason(cause) if isinstance(cause, OSError) else str(cause)
        raise CheckpointError(text) from None
    return writer.files.seals


def read(path: Path, targets: Mapping[str, Tensor], world: World) -> None:
    """Fill tensors, or this process's shards of them. All processes must call it."""
    try:
        with _alone():
            load(
                dict(targets), storage_reader=_Reader(path), process_group=world.group,
                no_dist=world.mode is None,
            )  # fmt: skip
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{path.name} cannot be read: {cause}") from None


def tensors_of(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], Any]:
    """All tensors by name, and what is left of the optimizer's state_dict."""
    called = optimizer_state.names(model, optimizer)
    tensors, rest = optimizer_state.take_apart(optimizer.state_dict(), called)
    weights = {MODEL_PREFIX + name: t for name, t in model.state_dict().items()}
    return {**weights, **tensors}, plainfile.plain(rest, "optimizer")


class Shards:
    """A sharded checkpoint, to be loaded; all processes must."""

    def __init__(self, path: Path, world: World) -> None:
        self.path, self.world = path, world
        found = index(path).state_dict_metadata
        self.entries = {k: v for k, v in found.items() if isinstance(v, TensorStorageMetadata)}

    def difference(self, target: Mapping[str, Tensor]) -> str | None:
        """The first thing in which its model does not fit these tensors."""
        saved = {
            name.removeprefix(MODEL_PREFIX): (entry.size, entry.properties.dtype)
            for name, entry in self.entries.items()
            if name.startswith(MODEL_PREFIX)
        }
        return mismatch(saved, target)

    def optimizer_state(self, model: nn.Module, optimizer: Any) -> Any:
        """The state_dict for this optimizer, its tensors laid out as its parameters."""
        parameters = dict(model.named_parameters())
        targets: dict[str, Tensor] = {}
        for name, entry in self.entries.items():
            if name.startswith(optimizer_state.PREFIX):
                p = parameters[optimizer_state.split(name)[0]]
                dtype = entry.properties.dtype
                if entry.size == p.shape:
                    targets[name] = empty_like(p, dtype)
                else:  # small; load_state_dict brings it where it belongs
                    targets[name] = torch.empty(entry.size, dtype=dtype)
        rest = self.world.together(lambda: plainfile.read(self.path / OPTIMIZER))
        read(self.path, targets, self.world)
        return optimizer_state.put_together(rest, optimizer_state.names(model, optimizer), targets)

    def read_into(self, target: Mapping[str, Tensor]) -> None:
        """Copy the model's tensors into these; call ``difference`` before."""
        read(self.path, {MODEL_PREFIX + name: t for name, t in target.items()}, self.world)

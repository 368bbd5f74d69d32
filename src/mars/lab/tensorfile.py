"""Weights in a .safetensors file, written as a stream: one tensor in memory at a time.

safetensors' own writer takes either all bytes at once or a path, so nothing could be hashed on the
way; and it refuses tied weights. Here a tied tensor is written once, and the file's metadata
(alias: name) says who else it is, as ``safetensors.torch.save_model`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mars.lab import safefile
from mars.lab.dtensors import fill
from mars.lab.errors import LabError
from mars.lab.safefile import SafeFile, SafeFileError

DTYPES = {kind: name for name, kind in safefile.DTYPES.items()}


class Writable(Protocol):
    """What write_tensors needs of a file."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of it."""
        ...


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that are, in memory, one that has been named before: {alias: name}."""
    first: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, t in tensors.items():
        if t.numel():
            key = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride())
            if first.setdefault(key, name) != name:
                found[name] = first[key]
    return found


def write_tensors(file: Writable, tensors: Mapping[str, Any]) -> None:
    """Write a state_dict."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or t.dtype not in DTYPES or t.layout != torch.strided:
            what = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise LabError(f"{name} of the model is {what}, which a checkpoint cannot hold")
    same = aliases(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **same}}
    # Wide types first: each tensor is then aligned to its type without holes between them.
    order = [name for name in tensors if name not in same]
    order.sort(key=lambda name: -tensors[name].element_size())
    end = 0
    for name in order:
        t = tensors[name]
        begin, end = end, end + t.numel() * t.element_size()
        header[name] = {
            "dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = tensors[name].detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
        if flat.numel():
            file.write(memoryview(flat.view(torch.uint8).numpy()))


def read_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a file's tensors into these, in place; call ``difference`` before."""
    file = SafeFile(path)
    stored = _stored(file)
    for name, t in tensors.items():
        fill(t, file.tensor(stored[name]))


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by all of their names."""
    file = SafeFile(path)
    return {name: file.tensor(stored) for name, stored in _stored(file).items()}


def difference(path: Path, tensors: Mapping[str, Tensor]) -> str | None:
    """The first thing in which a file does not fit these tensors."""
    try:
        file = SafeFile(path)
    except SafeFileError as error:
        return f"{path.name} is not a safetensors file: {error}"
    return mismatch(
        {
            name: (file.shape(stored), safefile.DTYPES[file.dtype(stored)])
            for name, stored in _stored(file).items()
        },
        tensors,
    )


def mismatch(
    saved: Mapping[str, tuple[Sequence[int], torch.dtype]], tensors: Mapping[str, Tensor]
) -> str | None:
    """The first thing in which saved shapes and dtypes do not fit a model's tensors."""
    for name, t in tensors.items():
        if name not in saved:
            return f"it lacks {name}"
        shape, dtype = saved[name]
        if tuple(shape) != tuple(t.shape):
            return f"{name} has shape {tuple(shape)}, the model's {tuple(t.shape)}"
        if dtype != t.dtype:
            return f"{name} is of type {dtype}, the model's {t.dtype}"
    unknown = sorted(set(saved) - set(tensors))
    return f"it has {unknown[0]}, which the model lacks" if unknown else None


def _stored(file: SafeFile) -> dict[str, str]:
    """Every name of a tensor in the file, and the name under which it is stored."""
    names = file.names
    return {
        **{k: v for k, v in file.metadata.items() if v in names},
        **{name: name for name in names},
    }

"""Reads .safetensors files with nothing but NumPy and torch, a tensor at a time.

The format: eight bytes with the length of a header, the header (JSON: type, shape and place of each
tensor, and some metadata), then the bytes of the tensors. Every number of a header is checked
before it is used. Files are mapped, so that a tensor is read when it is asked for.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
HEADER_LIMIT = 100_000_000  # bytes, as in the format's own reader


class SafeFileError(Exception):
    """Not a file of this format, or a damaged one."""


class SafeFile:
    """The tensors of a file: ``SafeFile(path).tensor("transformer.wte.weight")``."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        if size < 8:
            raise SafeFileError(f"it has {size} bytes")
        # Copy on write: torch wants memory that it may write to; the file never changes.
        self._bytes = np.memmap(path, np.uint8, mode="c")
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if not 0 < length <= min(size - 8, HEADER_LIMIT):
            raise SafeFileError("its header is longer than the file")
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes())
        except ValueError:
            raise SafeFileError("its header is not JSON") from None
        if not isinstance(header, dict):
            raise SafeFileError("its header is not a JSON object")
        metadata = header.pop("__metadata__", None) or {}
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        self._begin = 8 + length
        self._entries = {
            name: _entry(name, entry, size - self._begin) for name, entry in header.items()
        }

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> list[int]:
        return self._entries[name][1]

    def dtype(self, name: str) -> str:
        """As the format calls it: F32, BF16, …"""
        return self._entries[name][0]

    def tensor(self, name: str) -> Tensor:
        dtype, shape, begin, end = self._entries[name]
        data = self._bytes[self._begin + begin : self._begin + end]
        kind = DTYPES[dtype]
        if data.ctypes.data % kind.itemsize:
            data = data.copy()
        return torch.from_numpy(np.asarray(data)).view(kind).reshape(shape)


def _entry(name: str, entry: Any, size: int) -> tuple[str, list[int], int, int]:
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        whole = all(type(n) is int and 0 <= n < 1 << 63 for n in (begin, end, *shape))
        known = dtype in DTYPES
    except (TypeError, KeyError, ValueError):
        raise SafeFileError(f"its header describes {name} wrongly") from None
    if not known:
        raise SafeFileError(f"{name} is of type {dtype}, which is not read here")
    if not whole or end > size or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise SafeFileError(f"the place of {name} in the file does not fit its shape")
    return dtype, shape, begin, end

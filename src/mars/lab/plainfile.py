"""Files of torch.save that hold nothing but tensors and plain values, and load as such.

Loading never runs code of the file (``weights_only=True``). What could not be loaded so is
converted or refused when it is saved, not when it is needed.
"""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mars.lab.sealed import CheckpointError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def plain(value: Any, where: str) -> Any:
    """The same in types that load with weights_only=True, tensors not copied."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        known = (Tensor, nn.Parameter, *torch.serialization.get_safe_globals())
        if type(value) in known:
            return value.detach()
    elif isinstance(value, dict):
        return {plain(k, where): plain(v, f"{where}.{k}") for k, v in value.items()}
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = [plain(item, f"{where}.{i}") for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return tuple(items) if isinstance(value, tuple) else set(items)
    elif isinstance(value, np.generic):
        return value.item()
    elif isinstance(value, enum.Enum):
        return plain(value.value, where)
    elif isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    for kind in (int, float, str):  # classes derived of them
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(f"{where} is of type {type(value).__name__}: a checkpoint cannot hold it")


def write(file: Any, value: Any) -> None:
    """Write a value that ``plain`` returned."""
    torch.save(value, file)


def read(path: Path) -> Any:
    """Read what ``write`` wrote."""
    try:
        return torch.load(path, map_location=_place, weights_only=True)
    except torch.cuda.OutOfMemoryError as error:  # nothing is wrong with the file
        raise CheckpointError(
            f"{path.parent.name}: {path.name} does not fit in the GPU's memory beside what is there"
        ) from error
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        what = "it holds more than tensors and plain values, or was not written by torch.save"
        raise CheckpointError(f"{path.parent.name}: {path.name} is not loaded: {what}") from error


def _place(storage: Any, location: str) -> Any:
    """What was on some GPU comes to this process's GPU, if there is one; the rest to memory."""
    return storage.cuda() if location.startswith("cuda") and torch.cuda.is_available() else storage

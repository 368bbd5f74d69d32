"""Reading a pickle that may hold arrays, lists, dicts, numbers and strings, and nothing else.

A pickle is a program: whoever wrote it decides what `pickle.load` calls. CIFAR's Python archives
are pickles of Python 2, so there is no way around one; here nothing but the making of an array can
be called, and everything else is refused by its name.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from mars.lab.errors import LabError

_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Functions made anew each time, so that a pickle cannot change one for the next."""
        if module in _ARRAYS and name == "_reconstruct":
            return lambda *_: np.empty(0, np.uint8)  # its content comes with the state
        if (module, name) == ("numpy", "dtype"):
            # Python 2 wrote 0 and 1 for the flags, of which numpy now complains.
            return lambda code, *_: np.dtype(code, False, True)
        if (module, name) == ("numpy", "ndarray"):
            return lambda *_: self.find_class(module, "ndarray()")  # _reconstruct is told of it
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")


def load(data: bytes, where: str) -> dict[bytes, Any]:
    """The dict that a pickle holds; its strings, as Python 2 wrote them, are bytes."""
    try:
        value = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise LabError(
            f"{where} is refused: {error or type(error).__name__}; CIFAR's own files hold arrays, "
            "lists and strings alone"
        ) from error
    if not isinstance(value, dict):
        raise LabError(f"{where} holds a {type(value).__name__}, not the dict of a CIFAR file")
    return value

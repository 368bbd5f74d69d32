"""`digits`: small real images that ship with the package (data/corpus/ORIGIN.md)."""

from __future__ import annotations

import numpy as np

from mars.lab.data.embedded import embedded_bytes
from mars.lab.images.dataset import Raw, Sizes

COUNT, SIDE, WHITE = 1797, 8, 16
VALID = 360  # the last: written by people of whom training has seen little or nothing
SIZES = Sizes(COUNT - VALID, VALID, 10, 1, SIDE)


def digits() -> Raw:
    """1,437 digits to train on and 360 to validate on, 8×8, values 0 … 16 spread over 0 … 255."""
    data = np.frombuffer(embedded_bytes("digits.bin"), np.uint8)
    values = data[: COUNT * SIDE * SIDE].reshape(COUNT, 1, SIDE, SIDE).astype(np.uint16)
    pixels = ((values * 255 + WHITE // 2) // WHITE).astype(np.uint8)
    labels = data[COUNT * SIDE * SIDE :].astype(np.int64)
    cut = COUNT - VALID
    return Raw(
        {"train": pixels[:cut], "valid": pixels[cut:]},
        {"train": labels[:cut], "valid": labels[cut:]},
        tuple("0123456789"),
    )

"""Random crops and flips: which ones, and how they are done to a whole batch at once.

What happens to a row of a batch is a pure function of (seed, step, row), so micro-batches, ranks
and resumed runs cannot change it. Pixels stay bytes until they are on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# In Philox's counter, so that no draw is one of those that decide the order of an epoch.
_STREAM = 0x696D6167


def draws(seed: int, step: int, first: int, last: int, pad: int, flip: bool) -> Tensor:
    """What to do to the rows first … last of a step's batch: int64 (rows, 3) of dy, dx, flipped.

    dy and dx, 0 … 2·pad, are where the crop begins in the image with its border; flipped is 0
    or 1. A row has its own place in Philox's stream, whose raw words numpy promises to keep.

    >>> draws(0, 7, 0, 4, pad=4, flip=True)[2:].equal(draws(0, 7, 2, 4, pad=4, flip=True))
    True
    """
    key, counter = np.array([seed, step], np.uint64), np.array([first, 0, 0, _STREAM], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(4 * (last - first))
    words = words.reshape(-1, 4)[:, :3] % np.array([2 * pad + 1, 2 * pad + 1, 1 + flip], np.uint64)
    return torch.from_numpy(words.astype(np.int64))


def transform(
    pixels_u8: Tensor,
    draws: Tensor | None,
    pad: int,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Crop, flip and normalise a batch on its own device; channels-last in memory.

    As torchvision's RandomCrop(size, padding=pad), RandomHorizontalFlip, ToTensor and Normalize
    do in this order: the border is black (bytes of 0), not zero after normalising.

    Args:
        pixels_u8: uint8 (B, C, H, W), in any layout.
        draws: (B, 3) as `draws` makes them, on any device; None only normalises.
        pad: pixels of border on each side; 0 … 2·pad must hold every dy and dx.
        mean, std: per channel, of values 0 … 1.
        dtype: of the result; the arithmetic is float32.
    """
    device = pixels_u8.device
    if draws is None:
        x_BHWC = pixels_u8.permute(0, 2, 3, 1).contiguous()
    else:
        count, _, height, width = pixels_u8.shape
        dy_B, dx_B, flipped_B = draws.to(device, non_blocking=True).unbind(1)
        across = torch.arange(width, device=device)
        rows_BH = torch.arange(height, device=device) + dy_B[:, None]
        cols_BW = torch.where(flipped_B[:, None] == 1, across.flip(0), across) + dx_B[:, None]
        image_B = torch.arange(count, device=device)
        bordered = F.pad(pixels_u8, (pad, pad, pad, pad))
        # Indices on both sides of the channels' slice put the channels last.
        x_BHWC = bordered[image_B[:, None, None], :, rows_BH[:, :, None], cols_BW[:, None, :]]
    mean_C = torch.as_tensor(mean, dtype=torch.float32, device=device)
    std_C = torch.as_tensor(std, dtype=torch.float32, device=device)
    normal_BHWC = (x_BHWC.to(torch.float32) / 255 - mean_C) / std_C
    return normal_BHWC.to(dtype).permute(0, 3, 1, 2)

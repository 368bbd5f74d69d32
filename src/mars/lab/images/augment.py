"""Random crops, flips and blank squares: which ones, and how a whole batch is done at once.

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


def draws(
    seed: int, step: int, first: int, last: int, pad: int, flip: bool, size: int = 0
) -> Tensor:
    """What to do to the rows first … last of a step's batch: int64 (rows, 3) of dy, dx, flipped.

    dy and dx, 0 … 2·pad, are where the crop begins in the image with its border; flipped is 0
    or 1. With the size of an image two more columns: a pixel of it, y and x, for a blank square.
    A row has its own place in Philox's stream, whose raw words numpy promises to keep.

    >>> draws(0, 7, 0, 4, pad=4, flip=True)[2:].equal(draws(0, 7, 2, 4, pad=4, flip=True))
    True
    """
    key, counter = np.array([seed, step], np.uint64), np.array([first, 0, 0, _STREAM], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(4 * (last - first)).reshape(-1, 4)
    drawn = words[:, :3] % np.array([2 * pad + 1, 2 * pad + 1, 1 + flip], np.uint64)
    if size:
        pixel = words[:, 3] % np.uint64(size * size)
        drawn = np.column_stack([drawn, pixel // np.uint64(size), pixel % np.uint64(size)])
    return torch.from_numpy(drawn.astype(np.int64))


def transform(
    pixels_u8: Tensor,
    draws: Tensor | None,
    pad: int,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    dtype: torch.dtype,
    cutout: int = 0,
) -> Tensor:
    """Crop, flip, normalise and blank a batch on its own device; channels-last in memory.

    As torchvision's RandomCrop(size, padding=pad), RandomHorizontalFlip, ToTensor and Normalize
    do in this order: the border is black (bytes of 0), not zero after normalising.

    Args:
        pixels_u8: uint8 (B, C, H, W), in any layout.
        draws: (B, 3), with cutout (B, 5), as `draws` makes them, on any device; None only
            normalises.
        pad: pixels of border on each side; 0 … 2·pad must hold every dy and dx.
        mean, std: per channel, of values 0 … 1.
        dtype: of the result; the arithmetic is float32.
        cutout: side of a square around the drawn pixel that becomes 0, the mean colour; what of
            it is beyond the edge is lost (DeVries and Taylor 2017, arXiv 1708.04552).
    """
    device = pixels_u8.device
    count, _, height, width = pixels_u8.shape
    if draws is None:
        x_BHWC = pixels_u8.permute(0, 2, 3, 1).contiguous()
    else:
        draws = draws.to(device, non_blocking=True)
        dy_B, dx_B, flipped_B = draws[:, :3].unbind(1)
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
    if draws is not None and cutout:
        inside = [_inside(draws[:, 3 + n], cutout, side) for n, side in enumerate((height, width))]
        blank_BHW = inside[0][:, :, None] & inside[1][:, None, :]
        normal_BHWC = normal_BHWC.masked_fill(blank_BHW[..., None], 0.0)
    return normal_BHWC.to(dtype).permute(0, 3, 1, 2)


def _inside(centre_B: Tensor, cutout: int, side: int) -> Tensor:
    """Which of an image's rows (or columns) the square covers: bool (B, side)."""
    from_BS = torch.arange(side, device=centre_B.device) - (centre_B - cutout // 2)[:, None]
    return (from_BS >= 0) & (from_BS < cutout)

"""From the host to the device without waiting for what is queued there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_host(values: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the CPU, whatever the default device is, that this device can read by itself."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host


def upload(values: Sequence[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy on the device; it is queued, and the pinned memory outlives it."""
    return on_host(values, dtype, device).to(device, non_blocking=True)

"""The few things that are asked of a tensor which may be sharded over processes (a DTensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mars.sharding import is_sharded


def whole(t: Tensor) -> Tensor:
    """All of it; of a DTensor, all ranks must ask."""
    value: Tensor = t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]
    return value


def shard_like(value: Tensor, p: Tensor) -> Tensor:
    """A whole tensor laid out as ``p``: each rank takes its part of its own, nothing is sent."""
    if not is_sharded(p):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = p.device_mesh  # type: ignore[attr-defined]
    placements: Any = p.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(p.device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def fill(p: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into ``p``, or into the shard of it that is here."""
    p.copy_(shard_like(value, p))


def empty_like(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for something laid out as ``p``."""
    return torch.empty_like(p, dtype=dtype, requires_grad=False)


def copy_to_cpu(t: Tensor, mesh: Any) -> Tensor:
    """A copy in memory that nobody else writes to; ``mesh`` is that of the CPUs."""
    if not is_sharded(t):
        return t.detach().to("cpu", copy=True)
    from torch.distributed.tensor import DTensor

    local: Tensor = t.detach().to_local()  # type: ignore[attr-defined]
    placements: Any = t.placements  # type: ignore[attr-defined]
    return DTensor.from_local(
        local.to("cpu", copy=True), mesh, placements, run_check=False, shape=t.shape,
        stride=t.stride(),
    )  # fmt: skip

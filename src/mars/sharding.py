"""Who holds what when tensors are spread over processes, and norms over all of it. No update rule.

Only two operations of a step are not elementwise, the norm of c and Newton–Schulz; everything else
runs on the part of a tensor that is here. The norms are reduced in this file, matrices are brought
together in `mars.exchange`, by the plan that `owners` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mars.rule import MATRIX

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group = Mapping[str, Any]
MODES = (None, "replicate", "partition")


class Layout(NamedTuple):
    """Where the parts of one tensor are."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]  # of the whole tensor, a complex one as its real view
    cut: tuple[int, ...]  # the dimensions of the mesh that it is cut along

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The processes that hold the other parts, one group a dimension of the mesh."""
        return tuple(self.mesh.get_group(dim) for dim in self.cut)

    @property
    def dim(self) -> int | None:
        """The dimension of the tensor that is cut into plain blocks; None if it is not so simple.

        FSDP with tensor parallelism cuts twice: those are gathered as a whole (`mars.exchange`).
        """
        if len(self.cut) != 1:
            return None
        placement = self.placements[self.cut[0]]
        return int(placement.dim) if type(placement).__name__ == "Shard" else None

    def sizes(self) -> list[int]:
        """How long the blocks are along `dim`, rank by rank."""
        assert self.dim is not None
        ranks = self.mesh.size(self.cut[0])
        return [block(self.shape[self.dim], ranks, rank) for rank in range(ranks)]


def block(length: int, ranks: int, rank: int) -> int:
    """How much a rank has, DTensor's way: as torch.chunk, and nothing for those that are left."""
    full = -(-length // ranks)
    return max(0, min(full, length - full * rank))


def is_sharded(p: Tensor) -> bool:
    """Whether it is a DTensor (asked without importing that module)."""
    return hasattr(p, "placements") and hasattr(p, "device_mesh")


def here(value: Any) -> Tensor:
    """The part of a DTensor that is here; any other tensor itself."""
    part = getattr(value, "_local_tensor", value)
    return part if type(part) is Tensor else _waited(part)


def is_cut(p: Any) -> bool:
    """Whether other processes have other parts of it."""
    ways = enumerate(getattr(p, "placements", ()))
    return any(not way.is_replicate() and p.device_mesh.size(i) > 1 for i, way in ways)


def _name(p: Tensor, group: Group) -> str:
    place = next(i for i, q in enumerate(group["params"]) if q is p)
    names = group.get("param_names")
    return names[place] if names else f"parameter {place} of its group"


def layout_of(p: Any, group: Group) -> Layout | None:
    """The layout of a parameter of this group; None if all of it is here."""
    if not is_sharded(p):
        return None
    if group["differentiable"]:
        raise RuntimeError("differentiable=True does not work with DTensors")
    mesh, placements = p.device_mesh, tuple(p.placements)
    for placement in placements:
        if placement.is_partial():
            raise RuntimeError(
                f"MARS cannot step {_name(p, group)}: its placements {placements} say that it is "
                "a sum over ranks. Redistribute the parameter to Shard or Replicate"
            )
    cut = tuple(
        i for i, way in enumerate(placements) if not way.is_replicate() and mesh.size(i) > 1
    )
    shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
    return Layout(mesh, placements, shape, cut) if cut else None


def local(p: Any, value: Any, group: Group) -> Any:
    """The part of ``value`` (a DTensor p, its gradient or its state) that is here."""
    if value is None or (not is_sharded(value) and value.ndim == 0):
        return value  # a buffer that there is not, the step count
    if not is_sharded(value):
        raise RuntimeError(
            f"{_name(p, group)} is a DTensor, and its gradient or state is a plain tensor of shape "
            f"{tuple(value.shape)}. Load state by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if value.placements != p.placements:
        raise RuntimeError(
            f"{_name(p, group)} has the placements {p.placements}, its state {value.placements}"
        )
    return here(value)


def _waited(value: Any) -> Tensor:
    """Not a promise of a collective that still runs."""
    return value.wait() if hasattr(value, "wait") else value  # type: ignore[no-any-return]


def laid_out_alike(p: Any, g: Any) -> bool:
    """Whether p and its gradient are both plain, or DTensors cut alike."""
    same: bool = getattr(p, "placements", None) == getattr(g, "placements", None)
    return same and here(p).shape == here(g).shape


def gradient(p: Any, group: Group) -> Any:
    """p.grad of a DTensor, laid out as p: that of a sequence-parallel norm is a sum over ranks."""
    g = p.grad
    if is_sharded(g) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
        if group["consume_grads"]:
            p.grad = g  # it will be the last gradient
    return g


def whole_norms(
    norms: Sequence[Tensor], layouts: Sequence[Sequence[Layout | None]],
    places: Sequence[Sequence[Any]],
) -> list[Tensor]:  # fmt: skip
    """The norms of whole tensors in float64, from those of their parts; lists of them as vectors.

    ``places`` are the same on every rank, and say the order: ranks need not have the same engine
    for the same tensor, nor the same lists.
    """
    return [s.sqrt() for s in _reduced([n.double().square() for n in norms], layouts, places)]


def whole_sums(sums: Sequence[Tensor], layouts: Sequence[Layout | None]) -> list[Tensor]:
    """Sums over whole tensors in float64, from those over their parts."""
    vectors = [s.double().reshape(1) for s in sums]
    own, places = [[layout] for layout in layouts], [[i] for i in range(len(sums))]
    return [s[0] for s in _reduced(vectors, own, places)]


def _reduced(
    sums: list[Tensor], layouts: Sequence[Sequence[Layout | None]], places: Sequence[Sequence[Any]]
) -> list[Tensor]:
    """Vectors of sums over parts become sums over whole tensors: one reduction a mesh.

    Every rank takes part, also with an empty part; a NaN anywhere is a NaN everywhere.
    """
    for device in sorted({s.device for s in sums}, key=str):
        own = [i for i, s in enumerate(sums) if s.device == device]
        rows = [row for i in own for row in zip(places[i], layouts[i], strict=True)]
        together: dict[Any, list[tuple[Any, int]]] = {}
        for position, (place, layout) in enumerate(rows):
            if layout is not None:
                together.setdefault((layout.mesh, layout.cut), []).append((place, position))
        flat = torch.cat([sums[i] for i in own])
        for members in sorted(map(sorted, together.values())):
            layout = rows[members[0][1]][1]
            assert layout is not None
            runs = _runs([position for _, position in members])
            parts = torch.cat([flat[run] for run in runs])
            for group in layout.groups:
                dist.all_reduce(parts, group=group)
            for run, part in zip(runs, parts.split([r.stop - r.start for r in runs]), strict=True):
                flat[run] = part
        for i, part in zip(own, flat.split([len(sums[i]) for i in own]), strict=True):
            sums[i] = part
    return sums


def _runs(positions: Sequence[int]) -> list[slice]:
    """Positions as slices, of which there are few: an index would have to be uploaded."""
    runs: list[slice] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = slice(runs[-1].start, position + 1)
        else:
            runs.append(slice(position, position + 1))
    return runs


class Ranks(NamedTuple):
    """How plain tensors are spread: by themselves, or as `MARS(ranks=...)` says."""

    mode: str | None = None
    group: ProcessGroup | None = None  # None: all processes

    @classmethod
    def checked(cls, mode: Any, group: Any) -> Ranks:
        if mode not in MODES:
            raise ValueError(f"Invalid ranks: {mode!r} (it must be one of {list(MODES)})")
        if group is not None and mode is None:
            raise ValueError(
                'process_group needs ranks="replicate" (the processes have the same tensors, as '
                'under DDP) or ranks="partition" (each has others)'
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"process_group must be a ProcessGroup, not {type(group).__name__}")
        return cls(mode, group)

    def without(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group without `ranks`, which wrappers copy into it, and which is not its to say."""
        if group.get("ranks", self.mode) != self.mode:
            raise ValueError("ranks is an option of the whole optimizer, not of a group")
        return {name: value for name, value in group.items() if name != "ranks"}

    def _many(self) -> bool:
        return (
            self.mode is not None
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size(self.group) > 1
        )

    @property
    def replicate(self) -> bool:
        """All ranks have the same tensors and gradients."""
        return self.mode == "replicate" and self._many()

    @property
    def partition(self) -> bool:
        """Every rank has other tensors."""
        return self.mode == "partition" and self._many()

    def norm(self, own: Tensor) -> Tensor:
        """The norm over the tensors of all ranks, from the norm over those of this one."""
        if not self.partition:
            return own
        square = own.square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()


ALONE = Ranks()


def flops(kind: str, shape: Sequence[int], steps: int) -> int:
    """The multiplications and additions of Newton–Schulz on a matrix, or on a stack of them."""
    *many, rows, cols = shape
    short, long = min(rows, cols), max(rows, cols)
    steps *= prod(many)
    return steps * MATRIX[kind].flops(short, long)


@lru_cache(64)  # gradients may come and go: as many plans as that
def owners(costs: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Which rank orthogonalises which matrix: the most expensive first, each to the least loaded.

    The same on every rank. No rank does more than another plus the most expensive matrix.
    """
    load = [0] * ranks
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owner[i]] += costs[i]
    return tuple(owner)


@lru_cache(64)  # gradients may come and go: as many plans as that
def rounds(costs: tuple[int, ...], owner: tuple[int, ...], count: int) -> tuple[int, ...]:
    """In which round a matrix travels: each owner's work in ``count`` parts, about equal."""
    done = dict.fromkeys(owner, 0)
    total = dict.fromkeys(owner, 0)
    for cost, rank in zip(costs, owner, strict=True):
        total[rank] += cost
    out = []
    for cost, rank in zip(costs, owner, strict=True):
        out.append(min(count - 1, count * done[rank] // max(1, total[rank])))
        done[rank] += cost
    return tuple(out)

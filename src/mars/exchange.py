"""Matrices on their way to the rank that orthogonalises them, and back. No update rule.

Sharded matrices: every rank sends its part to the owner and gets its part of the result, in two
all-to-alls for each of two rounds. The second round travels while the first is worked on, and the
result of the first while the second is. Matrices that all ranks have (DDP): every owner sends its
results to all. In both cases a rank works on its share alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mars.rule import KINDS, matrix_shape
from mars.sharding import Layout, Ranks, block, flops, layout_of, owners, rounds
from mars.state import kind_of
from mars.table import format_table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROUNDS = 2
SHOWN = 4  # names in a line of the plan

Solve = Callable[[list[Tensor]], list[Tensor]]


@dataclass
class Job:
    """One matrix or stack: the part here, what it is a part of, and what is done to the whole."""

    part: Tensor
    shape: tuple[int, ...]
    matrix: tuple[int, ...]  # the shape in which it is one
    layout: Layout | None  # None: all of it is here
    cost: int
    solve: Solve  # takes and returns a list of whole matrices; shared by a batch
    there: torch.dtype  # in which it travels to its owner
    back: torch.dtype  # and back
    result: Tensor | None = None  # the part of the result that belongs here

    def arrived(self) -> Tensor:
        assert self.result is not None
        return self.result

    def part_shape(self, rank: int) -> tuple[int, ...]:
        assert self.layout is not None
        dim = self.layout.dim
        assert dim is not None
        size = block(self.shape[dim], self.layout.mesh.size(self.layout.cut[0]), rank)
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])


def start(jobs: Sequence[Job], ranks: Ranks) -> Callable[[], None]:
    """Send the matrices off. Calling the result finishes: every job then has its result."""
    travelling: dict[Any, list[Job]] = {}
    for job in jobs:
        key: Any = ("all", ranks.group)
        if job.layout is not None:
            key = ("part", *job.layout.groups) if job.layout.dim is not None else ("whole",)
        travelling.setdefault(key, []).append(job)
    started: list[Callable[[], None]] = []
    for (way, *groups), own in travelling.items():
        if way == "whole":
            started.append(_Everywhere(own).finish)
            continue
        group = groups[0]
        plan = owners(tuple(job.cost for job in own), dist.get_world_size(group))
        alike: dict[Any, list[int]] = {}  # one buffer has one dtype
        for i, job in enumerate(own):
            alike.setdefault((job.there, job.back, job.part.device), []).append(i)
        for members in alike.values():
            make = _Scattered if way == "part" else _Shared
            some, plan_of_some = [own[i] for i in members], tuple(plan[i] for i in members)
            started.append(make(some, plan_of_some, group).finish)

    def finish() -> None:
        for each in started:
            each()

    return finish


def plan_text(groups: Sequence[Mapping[str, Any]], ranks: Ranks) -> str:
    """Who orthogonalises what, if all parameters of these groups have gradients; "" if nobody."""
    ways: dict[Any, list[tuple[str, tuple[int, ...], int]]] = {}
    for number, group in enumerate(groups):
        for place, p in enumerate(group["params"]):
            kind, layout = kind_of(p, group), layout_of(p, group)
            if not KINDS[kind].matrix or (layout is None and not ranks.replicate):
                continue
            names = group.get("param_names")
            name = names[place] if names else f"{number}.{place}"
            shape = tuple(p.shape) if layout is None else layout.shape
            owned = layout is None or layout.dim is not None
            cells = (layout.groups[0] if layout else ranks.group) if owned else None
            matrix = matrix_shape(shape, group["matrix_rule"] == "stack")
            ways.setdefault((owned, cells), []).append(
                (name, shape, flops(kind, matrix, group["ns_steps"]))
            )
    return "\n\n".join(
        _table(found, dist.get_world_size(cells) if owned else 0)
        for (owned, cells), found in ways.items()
    )


def _table(found: list[tuple[str, tuple[int, ...], int]], world: int) -> str:
    if not world:
        return f"Newton–Schulz of {len(found)} matrices on every rank (cut in more than one way)"
    owner = owners(tuple(cost for *_, cost in found), world)
    rows = [("rank", "matrices", "MFLOP", "names")]
    for rank in range(world):
        own = [row for row, r in zip(found, owner, strict=True) if r == rank]
        work = f"{sum(cost for *_, cost in own) / 1e6:,.3f}"
        names = ", ".join(name for name, *_ in own[:SHOWN]) + ", …" * (len(own) > SHOWN)
        rows.append((str(rank), str(len(own)), work, names))
    text = format_table(rows, right=(0, 1, 2))
    return f"Newton–Schulz of {len(found)} matrices over {world} ranks\n{text}"


def _solved(jobs: Iterable[Job], matrices: list[Tensor]) -> list[Tensor]:
    """The matrices orthogonalised, those of one batch together."""
    alike: dict[int, list[int]] = {}
    owned = list(jobs)
    for i, job in enumerate(owned):
        alike.setdefault(id(job.solve), []).append(i)
    out = list(matrices)
    for members in alike.values():
        results = owned[members[0]].solve([matrices[i] for i in members])
        for i, result in zip(members, results, strict=True):
            out[i] = result
    return out


def _flat(parts: Iterable[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parts one behind the other."""
    flat = [part.to(dtype).reshape(-1) for part in parts]
    return torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)


def _unflat(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of what `_flat` has put together."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]


class _Scattered:
    """Matrices whose parts are on the ranks of one group."""

    def __init__(self, jobs: list[Job], owner: tuple[int, ...], group: ProcessGroup) -> None:
        self.jobs, self.owner, self.group = jobs, owner, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        costs = tuple(job.cost for job in jobs)
        count = min(ROUNDS, max(Counter(owner).values()))
        # Whose matrices go where in which round: indices, by owner.
        self.turns: list[list[list[int]]] = [[[] for _ in range(self.world)] for _ in range(count)]
        for i, now in enumerate(rounds(costs, owner, count)):
            self.turns[now][owner[i]].append(i)
        self.on_the_way = [self._to_owners(by_owner) for by_owner in self.turns]

    def _shapes(self, members: Sequence[int], rank: int) -> list[tuple[int, ...]]:
        return [self.jobs[i].part_shape(rank) for i in members]

    def _length(self, members: Sequence[int], rank: int) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes(members, rank))

    def _all_to_all(self, send: Tensor, sizes: list[int], out: list[int]) -> tuple[Tensor, Any]:
        received = send.new_empty(sum(out))
        work = dist.all_to_all_single(received, send, out, sizes, self.group, async_op=True)
        return received, (work, send)  # what is being sent must live as long

    def _to_owners(self, by_owner: list[list[int]]) -> tuple[Tensor, Any]:
        parts = [self.jobs[i].part for members in by_owner for i in members]
        send = _flat(parts, self.jobs[0].there, self.jobs[0].part.device)
        sizes = [self._length(members, self.rank) for members in by_owner]
        mine = by_owner[self.rank]
        return self._all_to_all(send, sizes, [self._length(mine, r) for r in range(self.world)])

    def _to_parts(self, by_owner: list[list[int]], results: list[Tensor]) -> tuple[Tensor, Any]:
        mine = by_owner[self.rank]
        cut = [
            result.reshape(self.jobs[i].shape).split(self._layout(i).sizes(), self._dim(i))
            for i, result in zip(mine, results, strict=True)
        ]
        parts = [pieces[rank] for rank in range(self.world) for pieces in cut]
        send = _flat(parts, self.jobs[0].back, self.jobs[0].part.device)
        sizes = [self._length(mine, rank) for rank in range(self.world)]
        return self._all_to_all(send, sizes, [self._length(m, self.rank) for m in by_owner])

    def _layout(self, i: int) -> Layout:
        layout = self.jobs[i].layout
        assert layout is not None
        return layout

    def _dim(self, i: int) -> int:
        dim = self._layout(i).dim
        assert dim is not None
        return dim

    def _whole(self, received: Tensor, mine: list[int]) -> list[Tensor]:
        """The matrices of this rank, put together from what the others sent."""
        shapes = [shape for r in range(self.world) for shape in self._shapes(mine, r)]
        pieces = _unflat(received, shapes)
        return [
            torch.cat(pieces[n :: len(mine)], self._dim(i)).reshape(self.jobs[i].matrix)
            for n, i in enumerate(mine)
        ]

    def finish(self) -> None:
        returning = []
        for by_owner, (received, (work, _)) in zip(self.turns, self.on_the_way, strict=True):
            mine = by_owner[self.rank]
            work.wait()
            results = _solved([self.jobs[i] for i in mine], self._whole(received, mine))
            returning.append(self._to_parts(by_owner, results))
        for by_owner, (received, (work, _)) in zip(self.turns, returning, strict=True):
            work.wait()
            members = [i for own in by_owner for i in own]
            for i, part in zip(
                members, _unflat(received, self._shapes(members, self.rank)), strict=True
            ):
                self.jobs[i].result = part


class _Shared:
    """Matrices that every rank of the group has as a whole."""

    def __init__(self, jobs: list[Job], owner: tuple[int, ...], group: ProcessGroup | None) -> None:
        self.jobs, self.group = jobs, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.own: list[list[int]] = [[] for _ in range(self.world)]
        for i, r in enumerate(owner):
            self.own[r].append(i)

    def finish(self) -> None:
        mine = [self.jobs[i] for i in self.own[self.rank]]
        results = _solved(mine, [job.part.reshape(job.matrix) for job in mine])
        lengths = [sum(self.jobs[i].part.numel() for i in own) for own in self.own]
        longest = max(lengths)  # a gather wants equal lengths
        dtype, device = self.jobs[0].back, self.jobs[0].part.device
        send = torch.zeros(longest, dtype=dtype, device=device)
        send[: lengths[self.rank]] = _flat(results, dtype, device)
        received = send.new_empty(self.world * longest)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(received, send, group=self.group)
        for own, part in zip(self.own, received.view(self.world, longest), strict=True):
            shapes = [self.jobs[i].shape for i in own]
            length = sum(torch.Size(shape).numel() for shape in shapes)
            for i, result in zip(own, _unflat(part[:length], shapes), strict=True):
                self.jobs[i].result = result


class _Everywhere:
    """Matrices that are cut in more than one way: every rank gathers and solves all of them."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs

    def finish(self) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        for job in self.jobs:
            layout = job.layout
            assert layout is not None
            stride = torch.empty(job.shape, device="meta").stride()
            whole = DTensor.from_local(
                job.part.contiguous(), layout.mesh, layout.placements, run_check=False,
                shape=torch.Size(job.shape), stride=stride,
            ).full_tensor()  # fmt: skip
            (result,) = job.solve([whole.reshape(job.matrix)])
            copies = DTensor.from_local(
                result.reshape(job.shape), layout.mesh, [Replicate()] * layout.mesh.ndim,
                run_check=False,
            )  # fmt: skip
            job.result = copies.redistribute(placements=layout.placements).to_local()

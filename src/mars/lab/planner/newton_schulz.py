"""What Newton–Schulz costs: operations by shape, time by tiles and waves, and who owns what.

A product of n x k by k x m is 2·n·k·m operations. The counts follow the fused engine
(`mars.engines.fused.matrices`): matrices of one shape are a stack; from 2:1 on five steps go by the
Gram matrix; products that equal their transposes are computed by half where that kernel runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mars.lab.planner.gpus import Gpu
from mars.sharding import owners

Matrix = tuple[int, int]

STEPS = 5
STACK_ELEMENTS = 1 << 28  # this, the tile and the rows are the fused engine's; a test ties them
SYMMETRIC_TILE = 128
LIBRARY_TILE = (128, 256)  # cuBLAS on stacks; alone a product gets smaller ones, which fill better
ALONE_TILE = (128, 128)
SMALLEST_ROWS = 512  # below, torch.bmm computes symmetric products too
HALF_BYTES = 2  # the iteration is in 16 bits

# How many products of which sort: (short x long)·(long x short), short³ symmetric; then plain ones,
# short³ and (short x short)·(short x long).
BY_STEPS = (STEPS, STEPS, 0, STEPS)
BY_GRAM = (2, 5 + 6, 3, 2)


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape or its transpose."""

    count: int
    short: int
    long: int

    @property
    def gram(self) -> bool:
        return self.long >= 2 * self.short

    @property
    def products(self) -> tuple[int, int, int, int]:
        return BY_GRAM if self.gram else BY_STEPS

    @property
    def launches(self) -> int:
        return sum(self.products) + 2

    @property
    def work_space_bytes(self) -> dict[str, int]:
        rows = self.count * self.short * HALF_BYTES
        small = rows * self.short * (2 if self.gram else 1)
        return {"X": rows * self.long, "Y": rows * self.long, "A": small, "B": small}


def stacks(matrices: Sequence[Matrix]) -> list[Stack]:
    """As the fused engine stacks them."""
    found = []
    for (short, long), count in Counter((min(m), max(m)) for m in matrices).items():
        size = max(1, STACK_ELEMENTS // (short * long))
        found += [
            Stack(min(size, count - first), short, long) for first in range(0, count, size)
        ]  # fmt: skip
    return found


def flops(matrix: Matrix, halves: bool = True) -> int:
    """Operations of one matrix, symmetric products by half."""
    stack = Stack(1, min(matrix), max(matrix))
    square, grown = 2 * stack.short**3, 2 * stack.short**2 * stack.long
    wide, small, plain, last = stack.products
    symmetric = wide * grown + small * square
    return (symmetric // 2 if halves else symmetric) + plain * square + last * grown


def plain_seconds(
    gpu: Gpu, count: int, rows: int, cols: int, inner: int, tile: tuple[int, int] = LIBRARY_TILE
) -> float:
    """A product of whole matrices: waves of tiles over the processors, idle ones included."""
    tiles = count * -(-rows // tile[0]) * -(-cols // tile[1])
    waves = -(-tiles // gpu.processors)
    executed = waves * gpu.processors * tile[0] * tile[1] * 2 * inner
    return executed / gpu.product_flops_per_second


def symmetric_seconds(gpu: Gpu, count: int, rows: int, inner: int) -> float:
    """A product that equals its transpose: tiles on and below the diagonal, where that runs."""
    side = -(-rows // SYMMETRIC_TILE)
    tiles = count * side * (side + 1) // 2
    if not (gpu.halves and rows >= SMALLEST_ROWS and tiles >= gpu.processors):
        return plain_seconds(gpu, count, rows, rows, inner)
    waves = -(-tiles // gpu.processors)
    executed = waves * gpu.processors * SYMMETRIC_TILE**2 * 2 * inner
    return executed / gpu.symmetric_flops_per_second


def seconds(gpu: Gpu, matrices: Sequence[Matrix]) -> float:
    """All products of the fused engine's iteration."""
    total = 0.0
    for stack in stacks(matrices):
        count, short, long = stack.count, stack.short, stack.long
        wide, small, plain, last = stack.products
        total += wide * symmetric_seconds(gpu, count, short, long)
        total += small * symmetric_seconds(gpu, count, short, short)
        total += plain * plain_seconds(gpu, count, short, short, short)
        total += last * plain_seconds(gpu, count, short, long, short)
    return total


def muon_seconds(gpu: Gpu, matrices: Sequence[Matrix]) -> float:
    """All products of torch.optim.Muon: one matrix after the other."""
    total = 0.0
    for (short, long), count in Counter((min(m), max(m)) for m in matrices).items():
        one = plain_seconds(gpu, 1, short, short, long, ALONE_TILE)
        one += plain_seconds(gpu, 1, short, short, short, ALONE_TILE)
        one += plain_seconds(gpu, 1, short, long, short, ALONE_TILE)
        total += STEPS * count * one
    return total


def launches(matrices: Sequence[Matrix]) -> int:
    return sum(stack.launches for stack in stacks(matrices))


def work_space_bytes(matrices: Sequence[Matrix]) -> int:
    """Each of the four buffers is made for the stack that needs most of it."""
    needs = [stack.work_space_bytes for stack in stacks(matrices)]
    return sum(max((need[name] for need in needs), default=0) for name in "XYAB")


@dataclass(frozen=True)
class Ownership:
    """Which rank orthogonalises which matrices."""

    owned: tuple[tuple[int, ...], ...]  # by rank: indices into the matrices
    loads_flops: tuple[int, ...]

    @property
    def max_over_mean(self) -> float:
        total = sum(self.loads_flops)
        return max(self.loads_flops) * len(self.loads_flops) / total if total else 1.0


def balance(costs: Sequence[int], ranks: int) -> Ownership:
    """The library's own plan (`mars.sharding.owners`)."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index, rank in enumerate(owners(tuple(costs), ranks)):
        owned[rank].append(index)
    loads = tuple(sum(costs[index] for index in own) for own in owned)
    return Ownership(tuple(map(tuple, owned)), loads)


def loads(matrices: Sequence[Matrix], ownership: Ownership) -> list[list[Matrix]]:
    """What ranks own, as shapes; ranks that own the same shapes are one entry."""
    sorts: set[tuple[tuple[Matrix, int], ...]] = set()
    for own in ownership.owned:
        counted = Counter((min(matrices[i]), max(matrices[i])) for i in own)
        sorts.add(tuple(sorted(counted.items())))
    return [[m for m, count in sort for _ in range(count)] for sort in sorted(sorts)]

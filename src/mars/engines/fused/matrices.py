"""The matrix types: Newton–Schulz on stacks, between the kernels that fill and empty them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mars.engines.batch import Batch
from mars.engines.fused import matrix as kernels
from mars.rule import KINDS, moonlight, shampoo
from mars.rule.newton_schulz import COEFFICIENTS, NewtonSchulz

if TYPE_CHECKING:
    from mars.engines.fused.launch import Launch

LIMIT = 1 << 28  # elements of a stack: what the work space is made for
TILE = 64
BM, BN, BK, WARPS, STAGES = 128, 128, 64, 8, 4  # tiles of a symmetric product


@dataclass
class Stack:
    """Matrices of one kind and shape (short, long), transposes included."""

    kind: str
    short: int
    long: int
    ns: NewtonSchulz
    scales: Tensor  # one a matrix
    matrices: Tensor  # for each: the number of its tensor, and whether it is tall
    aligned: bool  # addresses and rows, to 16 bytes


def step(X: Tensor, Y: Tensor, A: Tensor, B: Tensor, a: float, b: float, c: float) -> None:
    """Y ← (a·1 + b·A + c·A²)·X with A = X·Xᵀ; A and B are work space."""
    symmetric(X, A)
    symmetric(A, B, c, A, b, a)
    torch.bmm(B, X, out=Y)


def symmetric(
    S: Tensor, out: Tensor, alpha: float = 1.0, C: Tensor | None = None, beta: float = 0.0,
    diagonal: float = 0.0,
) -> None:  # fmt: skip
    """out ← α·S·Sᵀ + β·C + diagonal·1, by one half of the product where that pays."""
    n, M, K = S.shape
    tiles = sum((i * BM + BM - 1) // BN + 1 for i in range(-(-M // BM)))
    if _has_kernel(S) and M >= 512 and tiles * n >= _processors(S.device):
        from triton.tools.tensor_descriptor import TensorDescriptor

        flat = S.view(n * M, K)
        left = TensorDescriptor.from_tensor(flat, [BM, BK])
        right = TensorDescriptor.from_tensor(flat, [BN, BK])
        kernels.symmetric[(tiles, n)](
            left, right, out if C is None else C, out, M, K, alpha, beta, diagonal, C is not None,
            BM, BN, BK, num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=True,
        )  # fmt: skip
        return
    if C is None:
        torch.bmm(S, S.mT, out=out)
    else:
        torch.baddbmm(C, S, S.mT, beta=beta, alpha=alpha, out=out)
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)


def _has_kernel(S: Tensor) -> bool:
    """Half-precision stacks on Hopper and later (the kernel loads by tensor descriptors)."""
    return (
        S.is_cuda
        and S.dtype in (torch.bfloat16, torch.float16)
        and S.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(S.device) >= (9, 0)
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Stacks:
    """All stacks of a launch, and their common work space."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        self.device = device
        members: dict[tuple[Any, ...], list[tuple[int, int, int, bool]]] = defaultdict(list)
        number = 0
        for b in batches:
            for i, x in enumerate(b.x):
                if KINDS[b.kind].matrix and x.numel():
                    rows, cols = x.flatten(1).shape
                    held = (x, b.m[i], *b.low[i : i + 1])
                    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in held)
                    key = (b.kind, min(rows, cols), max(rows, cols), b.k.ns)
                    members[key].append((number, rows, cols, aligned))
                number += 1
        self.stacks: list[Stack] = []
        for (kind, short, long, ns), found in members.items():
            scale = shampoo.scale if kind == "mars-shampoo" else moonlight.scale
            size = max(1, LIMIT // (short * long))
            for first in range(0, len(found), size):
                part = found[first : first + size]
                scales = torch.tensor([scale(rows, cols) for _, rows, cols, _ in part])
                matrices = torch.tensor([[number, rows > cols] for number, rows, cols, _ in part])
                aligned = short % 16 == 0 and long % 16 == 0 and all(a for *_, a in part)
                on_device = (scales.to(device), matrices.to(device, torch.int64))
                self.stacks.append(Stack(kind, short, long, ns, *on_device, aligned))
        self.space: dict[tuple[str, torch.dtype], Tensor] = {}
        for stack in self.stacks:
            dtype, n = getattr(torch, stack.ns.dtype), len(stack.matrices)
            for name, size in (("X", stack.long), ("Y", stack.long), ("A", stack.short),
                               ("B", stack.short)):  # fmt: skip
                elements = n * stack.short * size
                space = self.space.get((name, dtype))
                if space is None or space.numel() < elements:
                    self.space[name, dtype] = torch.empty(elements, dtype=dtype, device=device)

    def step(
        self, launch: Launch, gradients: Tensor, grad: Any, found_inf: Tensor, amp: bool
    ) -> None:
        """Orthogonalise the momenta that the launch has left, and move the parameters."""
        for stack in self.stacks:
            n, dtype = len(stack.matrices), getattr(torch, stack.ns.dtype)
            X, Y = (self._part(name, dtype, n, stack.short, stack.long) for name in "XY")
            A, B = (self._part(name, dtype, n, stack.short, stack.short) for name in "AB")
            # Tiles of a matrix and of its transpose are equally many.
            grid = (-(-stack.short // TILE) * -(-stack.long // TILE), n)
            shape = (stack.short, stack.long)
            options = {"num_warps": 4, "enable_fp_fusion": True}
            kernels.gather[grid](
                stack.matrices, launch.table, gradients, launch.figures, X, *shape,
                stack.kind == "mars-shampoo", grad, launch.forms[1], stack.aligned, TILE, **options,
            )  # fmt: skip
            table = COEFFICIENTS[stack.ns.coefficients]
            for i in range(stack.ns.steps):
                step(X, Y, A, B, *table[min(i, len(table) - 1)])
                X, Y = Y, X
            kernels.scatter[grid](
                stack.matrices, launch.table, launch.figures, X, *shape, stack.scales, found_inf,
                grad, stack.aligned, amp, TILE, **options,
            )  # fmt: skip

    def _part(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        elements = shape[0] * shape[1] * shape[2]
        return self.space[name, dtype][:elements].view(shape)

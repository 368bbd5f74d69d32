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
from mars.engines.fused.host import upload
from mars.rule import KINDS, MATRIX
from mars.rule.newton_schulz import NewtonSchulz, Quintic

if TYPE_CHECKING:
    from mars.engines.fused.launch import Launch

LIMIT = 1 << 28  # elements of a stack: what the work space is made for
TILE = 64
BM, BN, BK, WARPS, STAGES = 128, 128, 64, 8, 4  # tiles of a symmetric product
RESTART, MOST = 2, 5  # of `by_gram`: the step that begins anew, and how many steps it is good for


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

    @property
    def gram(self) -> bool:
        """Whether `by_gram` is cheaper, and as good."""
        half = self.ns.dtype in ("bfloat16", "float16")
        return half and self.long >= 2 * self.short and self.ns.steps <= MOST

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.gram else getattr(torch, self.ns.dtype)


def by_steps(X: Tensor, Y: Tensor, A: Tensor, B: Tensor, table: Sequence[Quintic]) -> Tensor:
    """X ← (a·1 + b·A + c·A²)·X with A = X·Xᵀ for each (a, b, c). The rest is work space."""
    for a, b, c in table:
        symmetric(X, A)
        symmetric(A, B, c, A, b, a)
        torch.bmm(B, X, out=Y)
        X, Y = Y, X
    return X


def by_gram(X: Tensor, Y: Tensor, A: Tensor, B: Tensor, table: Sequence[Quintic]) -> Tensor:
    """The same, X multiplied twice only, in float16. A and B hold two matrices for each of X.

    With B = a·1 + b·A + c·A² a step turns X into B·X and A = X·Xᵀ into B·A·B, so that X can wait
    until the end, as P·X with the product P of all B. All of these are polynomials of the first A:
    they commute, and their products equal their transposes. But what rounding does to the smallest
    eigenvalues of A, a step multiplies by up to a², so A is formed anew from X in between. With 8
    bits (bfloat16) even that is too late; with the 11 of float16 (all numbers here are below 100)
    the result is closer to the float64 iteration than that of `by_steps` in bfloat16.
    """
    (A, P), (B, W) = A.chunk(2), B.chunk(2)
    for i, (a, b, c) in enumerate(table):
        fresh = i in (0, RESTART)
        if i == RESTART:
            torch.bmm(P, X, out=Y)
            X, Y = Y, X
        if fresh:
            symmetric(X, A)
            symmetric(A, P, c, A, b, a)
        else:
            symmetric(A, B, c, A, b, a)
        if i + 1 not in (RESTART, len(table)):
            symmetric(P if fresh else B, W, R=A)
            symmetric(W, A, R=P if fresh else B)
        if not fresh:  # of P both halves are needed: what rounding adds to them differs
            torch.bmm(B, P, out=W)
            P, W = W, P
    return torch.bmm(P, X, out=Y)


def symmetric(
    S: Tensor, out: Tensor, alpha: float = 1.0, C: Tensor | None = None, beta: float = 0.0,
    diagonal: float = 0.0, R: Tensor | None = None,
) -> None:  # fmt: skip
    """out ← α·S·Rᵀ + β·C + diagonal·1, by one half of the product where that pays.

    R is S, or commutes with it and both equal their transposes.
    """
    n, M, K = S.shape
    R = S if R is None else R
    tiles = sum((i * BM + BM - 1) // BN + 1 for i in range(-(-M // BM)))
    if _has_kernel(S) and M >= 512 and tiles * n >= _processors(S.device):
        from triton.tools.tensor_descriptor import TensorDescriptor

        left = TensorDescriptor.from_tensor(S.view(n * M, K), [BM, BK])
        right = TensorDescriptor.from_tensor(R.view(n * M, K), [BN, BK])
        kernels.symmetric[(tiles, n)](
            left, right, out if C is None else C, out, M, K, alpha, beta, diagonal, C is not None,
            BM, BN, BK, num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=True,
        )  # fmt: skip
        return
    if C is None:
        torch.bmm(S, R.mT, out=out)
    else:
        torch.baddbmm(C, S, R.mT, beta=beta, alpha=alpha, out=out)
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
            scale = MATRIX[kind].scale
            size = max(1, LIMIT // (short * long))
            for first in range(0, len(found), size):
                part = found[first : first + size]
                scales = [scale(rows, cols) for _, rows, cols, _ in part]
                matrices = [[number, rows > cols] for number, rows, cols, _ in part]
                aligned = short % 16 == 0 and long % 16 == 0 and all(a for *_, a in part)
                on_device = (
                    upload(scales, torch.float32, device),
                    upload(matrices, torch.int64, device),
                )
                self.stacks.append(Stack(kind, short, long, ns, *on_device, aligned))
        self.space: dict[str, Tensor] = {}
        for stack in self.stacks:
            for name in "XYAB":
                n, rows, cols = self._shape(name, stack)
                size = n * rows * cols * stack.dtype.itemsize
                if name not in self.space or self.space[name].numel() < size:
                    self.space[name] = torch.empty(size, dtype=torch.uint8, device=device)

    def step(
        self, launch: Launch, gradients: Tensor, grad: Any, found_inf: Tensor, amp: bool
    ) -> None:
        """Orthogonalise the momenta that the launch has left, and move the parameters."""
        for stack in self.stacks:
            X, Y, A, B = (self._part(name, stack) for name in "XYAB")
            # Tiles of a matrix and of its transpose are equally many.
            grid = (-(-stack.short // TILE) * -(-stack.long // TILE), len(stack.matrices))
            shape = (stack.short, stack.long)
            options = {"num_warps": 4, "enable_fp_fusion": True}
            kernels.gather[grid](
                stack.matrices, launch.table, gradients, launch.figures, X, *shape,
                MATRIX[stack.kind].ROUNDS_FIRST, grad, launch.forms[1], stack.aligned, TILE,
                **options,
            )  # fmt: skip
            X = (by_gram if stack.gram else by_steps)(X, Y, A, B, stack.ns.polynomials())
            kernels.scatter[grid](
                stack.matrices, launch.table, launch.figures, X, *shape, stack.scales, found_inf,
                grad, stack.aligned, amp, TILE, **options,
            )  # fmt: skip

    def _shape(self, name: str, stack: Stack) -> tuple[int, int, int]:
        n, rows = len(stack.matrices), stack.short
        return (n, rows, stack.long) if name in "XY" else (n + n * stack.gram, rows, rows)

    def _part(self, name: str, stack: Stack) -> Tensor:
        n, rows, cols = self._shape(name, stack)
        size = n * rows * cols * stack.dtype.itemsize
        return self.space[name][:size].view(stack.dtype).view(n, rows, cols)

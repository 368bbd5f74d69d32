"""Newton–Schulz: the nearest (semi-)orthogonal matrix by odd polynomials, no SVD.

Each step maps every singular value s of X to a·s + b·s³ + c·s⁵, towards 1, and leaves the
singular vectors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Quintic = tuple[float, float, float]

# A set lists one polynomial a step; the last one repeats.
COEFFICIENTS: dict[str, tuple[Quintic, ...]] = {
    # Jordan et al., Muon (2024): the steepest slope at zero; ends anywhere in about [0.7, 1.2].
    "muon": ((3.4445, -4.7750, 2.0315),),
    # Amsel et al., The Polar Express (arXiv 2505.16932): each step minimax-optimal after the
    # steps before it, for singular values in [1e-3, 1]; divided by a safety factor of 1.01.
    "polar-express": (
        *(
            (a / 1.01, b / 1.01**3, c / 1.01**5)
            for a, b, c in (
                (8.28721201814563, -23.595886519098837, 17.300387312530933),
                (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
                (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
                (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            )
        ),
        (1.875, -1.25, 0.375),
    ),
}


class NewtonSchulz(NamedTuple):
    """The iteration, configured. Takes a matrix, or a stack of matrices of one shape.

    The two authors' codes order it differently, and in bfloat16 the order shows (a few percent
    of the result after five steps), so each type keeps its own: see `shampoo` and `muon`.
    """

    steps: int = 5
    coefficients: str = "muon"
    dtype: str = "bfloat16"

    def polynomials(self) -> list[Quintic]:
        """(a, b, c) of every step."""
        known = COEFFICIENTS[self.coefficients]
        return [known[min(i, len(known) - 1)] for i in range(self.steps)]

    def shampoo(self, M: Tensor, eps: float) -> Tensor:
        """MARS-Shampoo's order: ‖M‖ before rounding, and X ← a·X + b·B + c·A·B with B = A·X."""

        def step(X: Tensor, a: float, b: float, c: float) -> Tensor:
            A = X @ X.mT
            B = A @ X
            return a * X + b * B + c * A @ B

        return self._iterate(M, _length(M) + eps, step)

    def muon(self, M: Tensor, eps: float = 1e-7) -> Tensor:
        """Muon's and MARS-M's order: X ← a·X + (b·A + c·A²)·X; fewer operations if rows < cols."""

        def step(X: Tensor, a: float, b: float, c: float) -> Tensor:
            A = X @ X.mT
            B = b * A + c * A @ A
            return a * X + B @ X

        return self._iterate(M, _length(self._rounded(M)) + eps, step)

    def _rounded(self, M: Tensor) -> Tensor:
        """As the authors do it, before the division; float16 has too few exponents for that."""
        return M if self.dtype == "float16" else M.to(getattr(torch, self.dtype))

    def _iterate(self, M: Tensor, length: Tensor, step: Callable[..., Tensor]) -> Tensor:
        """X₀ = M/length, then the steps on whichever side of X·Xᵀ is smaller."""
        dtype = getattr(torch, self.dtype)
        X = (self._rounded(M) / length).to(dtype)
        X = X.unsqueeze(0) if M.ndim == 2 else X  # one code path: a stack gives the same bits
        tall = X.shape[-2] > X.shape[-1]
        X = X.mT if tall else X
        place = "cpu" if X.is_meta else X.device.type  # a place that knows autocast
        with torch.autocast(place, enabled=False):  # the dtype is what was asked for
            for a, b, c in self.polynomials():
                X = step(X, a, b, c)
        X = X.mT if tall else X
        return X.reshape(M.shape).to(M.dtype)


def _length(M: Tensor) -> Tensor:
    """‖M‖_F of each matrix, of shape (…, 1, 1)."""
    length: Tensor = torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True)
    return length

"""MARS in float64 NumPy, written from the formulas and from nothing in src: the tests' oracle."""

from __future__ import annotations

import numpy as np

MUON = [(3.4445, -4.7750, 2.0315)]
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
]


def newton_schulz(m: np.ndarray, steps: int, table: str, eps: float) -> np.ndarray:
    """On singular values: the iteration maps s to a·s + b·s³ + c·s⁵ and keeps the vectors."""
    if m.size == 0:
        return m
    u, s, vt = np.linalg.svd(m / (np.linalg.norm(m) + eps), full_matrices=False)
    for i in range(steps):
        if table == "muon":
            a, b, c = MUON[0]
        elif i < len(POLAR_EXPRESS):
            a, b, c = (q / 1.01 ** (2 * j + 1) for j, q in enumerate(POLAR_EXPRESS[i]))
        else:
            a, b, c = 1.875, -1.25, 0.375
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


class Oracle:
    """Steps a list of arrays. Options are those of mars.MARS."""

    def __init__(self, xs: list[np.ndarray], **options: object) -> None:
        self.o = {
            "lr": 3e-3, "betas": (0.95, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
            "gamma": 0.025, "is_approx": True, "mars_type": "mars-adamw", "optimize_1d": False,
            "lr_1d": 3e-3, "betas_1d": (0.9, 0.95), "weight_decay_1d": 0.1, "maximize": False,
            "clip": "tensor", "second_moment": "corrected", "matrix_rule": "2d", "ns_steps": 5,
            "ns_coefficients": "muon", **options,
        }  # fmt: skip
        self.x = [x.astype(np.float64).copy() for x in xs]
        self.m = [np.zeros_like(x) for x in self.x]
        self.v = [np.zeros_like(x) for x in self.x]
        self.v_max = [np.zeros_like(x) for x in self.x]
        self.h = [np.zeros_like(x) for x in self.x]
        self.t = 0

    def kind(self, x: np.ndarray) -> str:
        o = self.o
        if o["mars_type"] == "plain-adamw":
            return "adamw-own"
        if x.ndim == 2 or (x.ndim > 2 and o["matrix_rule"] != "2d"):
            return str(o["mars_type"])
        if not o["optimize_1d"]:
            return "adamw-1d"
        return "mars-lion" if o["mars_type"] == "mars-lion" else "mars-adamw"

    def step(self, gs: list[np.ndarray], hs: list[np.ndarray] | None = None) -> None:
        """One step; ``hs`` are the last gradients in exact mode."""
        o = self.o
        self.t += 1
        sign = -1.0 if o["maximize"] else 1.0
        gs = [sign * g.astype(np.float64) for g in gs]
        if hs is not None:
            self.h = [sign * h.astype(np.float64) for h in hs]
        b1, b2 = o["betas"]
        kappa = o["gamma"] * b1 / (1 - b1)
        corrected = {}
        for i, (x, g) in enumerate(zip(self.x, gs, strict=True)):
            if self.kind(x).startswith("mars"):
                corrected[i] = g + kappa * (g - self.h[i])
        total = np.sqrt(sum(np.sum(c**2) for c in corrected.values()))
        for i, (x, g) in enumerate(zip(self.x, gs, strict=True)):
            kind = self.kind(x)
            if i in corrected:
                c = corrected[i]
                length = {"tensor": np.sqrt(np.sum(c**2)), "global": total, None: 0.0}[o["clip"]]
                c = c / max(1.0, length)
                self.x[i] = self.move(i, x, c, g, kind, b1, b2, o["lr"], o["weight_decay"])
            elif kind == "adamw-own":
                self.x[i] = self.move(i, x, g, g, kind, b1, b2, o["lr"], o["weight_decay"])
            else:
                one_d = (*o["betas_1d"], o["lr_1d"], o["weight_decay_1d"])
                self.x[i] = self.move(i, x, g, g, kind, *one_d)
        if hs is None:
            self.h = gs

    def orthogonal(self, m, kind, b1):
        o = self.o
        rows, cols = m.shape
        ns = (o["ns_steps"], o["ns_coefficients"])
        if kind == "mars-shampoo":
            scale = np.sqrt(max(1, rows / max(1, cols)))
            return scale * newton_schulz(m / (1 - b1), *ns, o["eps"])
        return 0.2 * np.sqrt(max(rows, cols)) * newton_schulz(m, *ns, 1e-7)

    def move(self, i, x, c, g, kind, b1, b2, lr, decay):
        o, t = self.o, self.t
        self.m[i] = m = b1 * self.m[i] + (1 - b1) * c
        if kind == "mars-lion":
            u = np.sign(m)
        elif kind in ("mars-shampoo", "mars-m"):
            if o["matrix_rule"] == "stack":
                u = np.zeros_like(m)
                for place in np.ndindex(m.shape[:-2]):
                    u[place] = self.orthogonal(m[place], kind, b1)
            else:
                flat = m.reshape(m.shape[0], int(np.prod(m.shape[1:])))
                u = self.orthogonal(flat, kind, b1).reshape(m.shape)
        else:
            square = g if o["second_moment"] == "raw" else c
            self.v[i] = b2 * self.v[i] + (1 - b2) * square**2
            self.v_max[i] = np.maximum(self.v_max[i], self.v[i])
            v = self.v_max[i] if o["amsgrad"] else self.v[i]
            u = m / (1 - b1**t) / (np.sqrt(v) / np.sqrt(1 - b2**t) + o["eps"])
        return x - lr * (u + decay * x)

"""What a launch needs: tables of addresses and numbers, and the order of the work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import accumulate, chain
from operator import and_, or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mars.engines.batch import Batch
from mars.engines.fused import kernel
from mars.engines.fused import layout as at
from mars.engines.fused.host import on_host, upload
from mars.engines.fused.matrices import Stacks
from mars.rule import KINDS

BLOCK = 512
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
NORM_ITEM, EXACT_ITEM, UPDATE_ITEM = 16384, 65536, 8192
SIZE = 128  # tensors that a program of the first launch prepares
SLOTS = 8  # tables of addresses that are kept, for gradients that come back to where they were

GRAD = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Slots:
    """Small tables on the device, looked up by content and written without waiting.

    All use is on one stream, in order, so a slot may be overwritten while a kernel that reads it is
    still queued: the copy is queued behind it.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.held: dict[tuple[Any, ...], Tensor] = {}
        self.captured: dict[tuple[Any, ...], Tensor] = {}  # a graph replays on these for ever

    def has(self, values: tuple[Any, ...]) -> bool:
        return values in self.held or values in self.captured

    def get(self, values: tuple[Any, ...], capturing: bool) -> Tensor:
        if values in self.captured:
            return self.captured[values]
        slot = self.held.pop(values, None)
        if slot is None:
            if len(self.held) < SLOTS:
                slot = torch.empty(self.size, dtype=self.dtype, device=self.device)
            else:
                slot = self.held.pop(next(iter(self.held)))  # the one not used for longest
            slot.copy_(on_host(values, self.dtype, self.device), non_blocking=True)
        (self.captured if capturing else self.held)[values] = slot
        return slot


def items_of(
    op: tl.constexpr, tensor: int, size: int, item: int, backwards: bool = False
) -> Tensor:
    """Rows (op and tensor, item) of the list of work, for one tensor."""
    index = torch.arange(max(1, -(-size // item)), dtype=torch.int32, device="cpu")
    entry = torch.full_like(index, (op.value << 28) + tensor)
    return torch.stack([entry, index.flip(0) if backwards else index], 1)


def schedule(sizes: Sequence[int], flags: Sequence[int], together: bool, normed: bool) -> Tensor:
    """The list of work, int32 (n, 2). An item waits only for items that stand before it."""
    clipped = [bool(flag & at.CLIPPED.value) for flag in flags]
    small = [c and n <= UPDATE_ITEM and not together for c, n in zip(clipped, sizes, strict=True)]
    everyone = range(len(sizes))
    exact = [i for i in everyone if clipped[i] and not small[i]]
    parts = [items_of(at.NORM, i, sizes[i], NORM_ITEM) for i in (everyone if normed else exact)]
    parts += [items_of(at.EXACT, i, sizes[i], EXACT_ITEM) for i in exact]
    # Backwards: what the norms read last is still in the cache.
    updates = [i for i in reversed(everyone) if not small[i]]
    parts += [items_of(at.UPDATE, i, sizes[i], UPDATE_ITEM, True) for i in updates]
    ones = [(at.SMALL.value << 28) + i for i in everyone if small[i]]
    parts.append(torch.tensor([ones, [0] * len(ones)], dtype=torch.int32, device="cpu").T)
    return torch.cat(parts)


def _flags(b: Batch) -> int:
    kind = KINDS[b.kind]
    true = {
        at.HAS_H: b.h, at.HAS_V: kind.second_moment, at.HAS_V_MAX: b.v_max,
        at.KEEP_G: b.h and b.keep_g, at.CONSUME: b.h and b.consume, at.IS_MATRIX: kind.matrix,
        at.CLIPPED: b.h and b.k.clip is not None, at.MIXED: kind.corrected and not b.h,
        at.RAW_SQUARE: b.k.raw,
    }  # fmt: skip
    return sum(flag.value for flag, holds in true.items() if holds)


def _hyper(b: Batch) -> tuple[list[float], list[int]]:
    """A row of hyper-parameters, and the addresses of lr and γ where they are tensors."""
    k = b.k
    gamma = k.gamma if KINDS[b.kind].corrected else 0.0
    addresses = [v.data_ptr() if isinstance(v, Tensor) else 0 for v in (k.lr, gamma)]
    b1, b2 = float(k.beta1), float(k.beta2)
    row = [
        b.ratio if isinstance(k.lr, Tensor) else k.lr * b.ratio, b1, b2, k.eps, float(k.decay),
        0.0 if isinstance(gamma, Tensor) else float(gamma), -1.0 if k.maximize else 1.0,
        float(k.raw), float(k.clip == "global"), b.max_grad_norm or 0.0,
        math.log(b1) if b1 else -math.inf, math.log(b2) if b2 else -math.inf,
    ]  # fmt: skip
    return row, addresses


def form(b: Batch) -> tuple[int, int, int]:
    """Formats of (h, m, v), as lean.py numbers them."""
    numbers = {torch.bfloat16: 1, torch.uint8: 2}
    h = 0 if not b.h or b.h[0].dtype == b.x[0].dtype else numbers[b.h[0].dtype]
    return h, numbers.get(b.m[0].dtype, 0), numbers.get(b.v[0].dtype, 0) if b.v else 0


def forms(batches: Sequence[Batch]) -> set[tuple[int, ...]]:
    """The combinations of formats that occur; a format that a batch does not have fits any."""
    columns: list[set[int]] = [set(), set(), set()]
    for b in batches:
        for column, number, held in zip(columns, form(b), (b.h, b.m, b.v), strict=True):
            if held:
                column.add(number)
    if any(len(column) > 1 for column in columns):
        return {form(b) for b in batches}
    return {tuple(next(iter(column), 0) for column in columns)}


class Launch:
    """Everything about the launches for some batches that stays the same from step to step."""

    def __init__(self, batches: Sequence[Batch], norm: Tensor | None = None) -> None:
        """``norm``: where to write the norm of all gradients, if it is asked for."""
        self.device, self.dtype = batches[0].x[0].device, batches[0].x[0].dtype
        (self.forms,) = forms(batches)
        # By how much rounding can lengthen a stored last gradient.
        half = self.dtype != torch.float32
        self.slack = (1.0 + 2.0**-7 * half, 1.0 + 2.0**-7, 1.0 + 2.0**-3)[self.forms[0]]
        self.normed = any(b.max_grad_norm is not None for b in batches)
        # Whether a norm over all tensors is asked for.
        self.together = self.normed or any(b.k.clip == "global" and b.h for b in batches)
        rows, flags = [], []
        for number, b in enumerate(batches):
            columns = (b.x, b.low, b.h_exp, b.m, b.m_exp, b.v, b.v_exp, b.v_max, b.t)
            for i, x in enumerate(b.x):
                addresses = [column[i].data_ptr() if column else 0 for column in columns]
                rows.append([*addresses, x.numel(), _flags(b), number])
                flags.append(_flags(b))
        sizes = [row[at.NUMEL.value] for row in rows]
        self.n = len(rows)
        totals = []
        for item in (NORM_ITEM, EXACT_ITEM, UPDATE_ITEM):
            counts = [max(1, -(-size // item)) for size in sizes]
            *firsts, total = accumulate(counts, initial=0)
            totals.append(total)
            for row, first, count in zip(rows, firsts, counts, strict=True):
                row += [first, count]
        clipped = sum(bool(flag & at.CLIPPED.value) for flag in flags)
        self.counts = (self.n if self.normed else clipped, clipped)  # tensors with NORM, with EXACT
        self.flags = (reduce(or_, flags), reduce(and_, flags))
        self.table = upload(rows, torch.int64, self.device)
        self.work = upload(self._schedule(sizes, flags), torch.int32, self.device)
        counters = at.CONTROL.value + at.COUNTERS.value * self.n
        self.counters = torch.zeros(counters, dtype=torch.int32, device=self.device)
        wide: Any = {"dtype": torch.float32, "device": self.device}  # whatever the default is
        self.figures = torch.ones(self.n, at.FIGURES.value, **wide)
        self.sums = [torch.empty(total, **wide) for total in totals]
        given = norm is not None and self.normed
        self.norm = norm if given else torch.zeros((), **wide)
        self.one, self.zero = torch.ones((), **wide), torch.zeros((), **wide)
        self.gradients = Slots(2 * self.n, torch.int64, self.device)
        self.hypers = Slots(at.HYPERS.value * len(batches), torch.float64, self.device)
        self.addresses = Slots(2 * len(batches), torch.int64, self.device)
        self.stacks = Stacks(batches, self.device)

    def _schedule(self, sizes: Sequence[int], flags: Sequence[int]) -> Tensor:
        return schedule(sizes, flags, self.together, self.normed)

    def _tables(
        self, batches: Sequence[Batch], g: Sequence[int], h: Sequence[int]
    ) -> list[tuple[Slots, tuple[Any, ...]]]:
        """What the device must have for this step: hyper-parameters and addresses."""
        rows, pointers = zip(*(_hyper(b) for b in batches), strict=True)
        return [
            (self.hypers, tuple(chain.from_iterable(rows))),
            (self.addresses, tuple(chain.from_iterable(pointers))),
            (self.gradients, (*g, *h)),
        ]

    def ready(self, batches: Sequence[Batch], g: Sequence[int], h: Sequence[int]) -> bool:
        """Whether all of that is there already; a graph cannot capture its upload."""
        return all(slots.has(values) for slots, values in self._tables(batches, g, h))

    def run(
        self, batches: Sequence[Batch], g: Sequence[int], h: Sequence[int], h_known: bool,
        grad_scale: Tensor | None, found_inf: Tensor | None, capturing: bool,
    ) -> None:  # fmt: skip
        """Step the batches; ``g`` and ``h`` are the addresses of gradients and last gradients."""
        amp = found_inf is not None or grad_scale is not None
        scale = self.one if grad_scale is None else grad_scale.to(self.device, non_blocking=True)
        inf = self.zero if found_inf is None else found_inf.to(self.device, non_blocking=True)
        self.begin(batches, g, h, scale, inf, amp, capturing)
        self.step(h_known, inf, amp)

    def begin(
        self, batches: Sequence[Batch], g: Sequence[int], h: Sequence[int], scale: Tensor,
        inf: Tensor, amp: bool, capturing: bool,
    ) -> None:  # fmt: skip
        """Count the steps, and turn hyper-parameters into the numbers of each tensor."""
        tables = self._tables(batches, g, h)
        hypers, addresses, gradients = (slots.get(values, capturing) for slots, values in tables)
        self.now = hypers, gradients
        with self.on_device():
            kernel.prepare[(-(-self.n // SIZE),)](
                self.table, self.n, hypers, addresses, self.counters, self.figures, scale, inf,
                amp, self.slack, SIZE, **OPTIONS,
            )  # fmt: skip

    def step(self, h_known: bool, inf: Tensor, amp: bool) -> None:
        """Work through the list, then Newton–Schulz."""
        hypers, gradients = self.now
        with self.on_device():
            kernel.step[(len(self.work),)](
                self.table, gradients, hypers, self.work, self.n, *self.counts, int(h_known),
                self.counters, self.figures, *self.sums, self.norm, inf,
                *self.flags, GRAD[self.dtype], *self.forms, self.together, amp, BLOCK, NORM_ITEM,
                EXACT_ITEM, UPDATE_ITEM, **OPTIONS,
            )  # fmt: skip
            self.stacks.step(self, gradients, GRAD[self.dtype], inf, amp)

    def on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

"""How a step is timed, and how many bytes it holds and has to move."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mars.bench.candidates import Candidate
from mars.bench.shapes import Shape

WARM_UP = 5  # steps before the clock starts: state is made, kernels are compiled


class Measured(NamedTuple):
    """What was found for one candidate. None is what cannot be known here."""

    ms: float  # median of a step, from one synchronisation with the device to the next
    spread: float  # how far the middle half of these steps lies apart, as a share of the median
    gpu_ms: float | None  # median of a step among steps that are queued without waiting
    state: float | None  # bytes of state a parameter
    floor: float | None  # bytes a parameter that the step cannot avoid to read and write
    extra: int | None  # bytes at the peak of a step beside parameters, gradients and state


class Tensors:
    """Parameters and two sets of gradients that take turns, shared by all candidates."""

    def __init__(
        self, shapes: list[Shape], dtype: torch.dtype, device: torch.device, grad_norm: float
    ) -> None:
        def new() -> list[Tensor]:
            return [torch.empty(s.size, dtype=dtype, device=device) for s in shapes]

        self.device, self.grad_norm = device, grad_norm
        self.hidden = [s.hidden for s in shapes]
        self.values = new()
        self.params = [nn.Parameter(value) for value in self.values]
        self.gradients = (new(), new())

    @torch.no_grad()
    def reset(self) -> None:
        """The same start for every candidate, whatever the one before did to values and memory."""
        random = torch.Generator(self.device).manual_seed(0)
        for p, value in zip(self.params, self.values, strict=True):
            p.grad = None
            p.data = value.normal_(0.0, 0.02, generator=random)
        for g in chain(*self.gradients):
            g.normal_(0.0, self.grad_norm / max(1, g.numel()) ** 0.5, generator=random)

    def chosen(self, hidden_only: bool) -> list[int]:
        return [i for i, hidden in enumerate(self.hidden) if hidden or not hidden_only]


class Run:
    """One candidate on its parameters: ``step`` as often as one likes, gradients taking turns.

    With consume_grads the step keeps a set of gradients as its last ones; the next step is given
    the other set, and by the time it comes back its owner has let go of it. So nothing is copied.
    """

    def __init__(self, candidate: Candidate, tensors: Tensors) -> None:
        index = tensors.chosen(candidate.hidden)
        if not index:
            raise RuntimeError("no hidden matrices here")
        self.params = [tensors.params[i] for i in index]
        self.gradients = [[g[i] for i in index] for g in tensors.gradients]
        self.device, self.before, self.turn = tensors.device, candidate.before, 0
        self.optimizer = candidate.make(self.params)
        # An optimizer that made p.grad itself (heavyball's slabs) wants it written, not set.
        self.bound = all(p.grad is not None for p in self.params)

    @torch.no_grad()
    def prepare(self) -> None:
        """Hand out the gradients of the next step; not timed."""
        for p, g in zip(self.params, self.gradients[self.turn % 2], strict=True):
            if self.bound and p.grad is not None:
                p.grad.copy_(g)
            else:
                p.grad = g
        self.turn += 1

    def step(self) -> None:
        if self.before is not None:
            self.before(self.params)
        self.optimizer.step()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def waiting_ms(
    device: torch.device, step: Callable[[], object], repeat: int,
    prepare: Callable[[], object] = lambda: None,
) -> tuple[float, float]:  # fmt: skip
    """Median milliseconds from an idle device to an idle device, and their relative spread."""
    times = []
    for _ in range(repeat):
        prepare()
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times * 2, n=4, method="inclusive")  # of one step, too
    return median, (high - low) / median


def queued_ms(
    device: torch.device, step: Callable[[], object], repeat: int,
    prepare: Callable[[], object] = lambda: None,
) -> float | None:  # fmt: skip
    """Median milliseconds on the GPU's clock of steps that are queued back to back.

    Where the host is slower than the GPU this is the host's time; ``prepare`` is in neither.
    """
    if device.type != "cuda":
        return None
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        prepare()
        start.record()
        step()
        end.record()
    synchronize(device)
    return float(statistics.median(start.elapsed_time(end) for start, end in events))


def measure(candidate: Candidate, tensors: Tensors, repeat: int) -> Measured:
    """Warm up, then time the candidate. Raises what the candidate raises."""
    tensors.reset()
    on_gpu = tensors.device.type == "cuda"
    held = torch.cuda.memory_allocated(tensors.device) if on_gpu else 0
    run = Run(candidate, tensors)
    for _ in range(WARM_UP):
        run.prepare()
        run.step()
    synchronize(tensors.device)
    run.prepare()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(tensors.device)
    run.step()
    synchronize(tensors.device)
    peak = torch.cuda.max_memory_allocated(tensors.device) if on_gpu else 0
    ms, spread = waiting_ms(tensors.device, run.step, repeat, run.prepare)
    gpu_ms = queued_ms(tensors.device, run.step, repeat, run.prepare)
    traffic = Traffic.of(run.optimizer, run.params, run.gradients, candidate.norm_of_all)
    count = sum(p.numel() for p in run.params)
    known = traffic.state > 0
    return Measured(
        ms, spread, gpu_ms,
        state=traffic.state / count if known else None,
        floor=traffic.floor / count if known else None,
        extra=peak - held - traffic.own if on_gpu and known else None,
    )  # fmt: skip


class Traffic(NamedTuple):
    """Bytes of state, of those that are not a gradient's memory, and bytes a step has to move."""

    state: int
    own: int
    floor: int

    @classmethod
    def of(
        cls, optimizer: Optimizer, params: Iterable[Tensor], gradients: Iterable[list[Tensor]],
        norm_of_all: bool = False,
    ) -> Traffic:  # fmt: skip
        """Read g, read and write x and each buffer.

        A last gradient that *is* a former gradient (consume_grads) is only read. A norm of all
        gradients together reads them once more, as they do not stay in any cache.
        """
        first, second = gradients
        lent = {g.data_ptr() for g in chain(first, second)}
        state = own = 0
        for buffer in _tensors(optimizer.state):
            state += _bytes(buffer)
            own += _bytes(buffer) if buffer.data_ptr() not in lent else 0
        reads_of_g = 2 if norm_of_all else 1
        floor = reads_of_g * sum(map(_bytes, first)) + 2 * sum(map(_bytes, params)) + state + own
        return cls(state, own, floor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested state, but for scalars such as step counts."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of one large copy on the device, read and written: what can be had."""
    size = 2**28
    if device.type == "cuda":
        size = min(2**30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()  # the pages of the target exist from now on
    ms = queued_ms(device, copy, 10) or waiting_ms(device, copy, 10)[0]
    return 2 * size / (1e-3 * ms)


def settle() -> None:
    """Leave the C library's allocator as training does: it keeps blocks of up to 32 MB.

    In a fresh process it asks the system for each one anew, and torch's AdamW on a CPU, which has
    many, takes half as long again.
    """
    torch.empty((1 << 23) - 8192, dtype=torch.float32, device="cpu")


@contextmanager
def quick_release() -> Iterator[None]:
    """Inside, garbage is sought only among what came since: a tenth of the time, with torch."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release(device: torch.device) -> None:
    """Give back what the last candidate held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

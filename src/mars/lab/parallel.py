"""Many processes as one run: who this one is under torchrun, and how they agree.

A run of one process is the same without a process group: every function here then returns what it
was given. What only one process may do (write, lock, decide) rank 0 does, and its result, or its
error, is everybody's: no rank goes on where another stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mars.lab.config import Run
from mars.lab.errors import Elsewhere, LabError, first_line

T = TypeVar("T")

# How long a process waits for another. torchrun ends the others when one has died; this is for
# machines that vanish. Rank 0 may write a checkpoint meanwhile, so it is not seconds.
TIMEOUT = timedelta(minutes=10)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether torchrun, or something like it, started this process."""
    return all(name in os.environ for name in _TORCHRUN)


def own_rank() -> int:
    """The number of this process among all; 0 without torchrun."""
    return int(os.environ["RANK"]) if launched() else 0


def local_rank() -> int | None:
    """The number of this process on its machine, which is that of its GPU; None: no torchrun."""
    return int(os.environ["LOCAL_RANK"]) if launched() else None


@dataclass
class World:
    """The processes of a run, and this one among them."""

    rank: int = 0
    size: int = 1
    mode: str | None = None  # ddp, fsdp2; None: one process, nothing is wrapped
    shards: int = 1  # processes that hold a copy of the model between them
    group: Any = None  # of processes; None: that of all
    mesh: Any = None  # of devices, under fsdp2
    _pending: tuple[Any, Tensor] | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that logs, shows and decides."""
        return self.rank == 0

    # To agree.

    def on_first(self, do: Callable[[], T]) -> T:
        """What rank 0 gets from it, on all ranks; its LabError is everybody's."""
        if self.mode is None:
            return do()
        box: list[Any] = [None, None]
        error: LabError | None = None
        if self.first:
            try:
                box[0] = do()
            except LabError as raised:
                error, box[1] = raised, str(raised)
        dist.broadcast_object_list(box, src=0, group=self.group)
        if error is not None:
            raise error
        if box[1] is not None:
            raise Elsewhere(box[1])
        value: T = box[0]
        return value

    def together(self, do: Callable[[], T]) -> T:
        """Every rank does it; if one fails, all do, and the first that failed says why.

        Where ``do`` has gone through this itself, who was to speak then does so now.
        """
        if self.mode is None:
            return do()
        value, error = None, None
        try:
            value = do()
        except LabError as raised:
            error = raised
        found = None if error is None else (isinstance(error, Elsewhere), self.rank, str(error))
        failed = [one for one in self.gather(found) if one is not None]
        if failed:
            _, speaker, text = min(failed)
            raise error if error is not None and speaker == self.rank else Elsewhere(text)
        return value  # type: ignore[return-value]

    def error(self, error: LabError) -> LabError:
        """For what all ranks find alike: the error itself on rank 0, silence elsewhere."""
        return error if self.first else Elsewhere(str(error))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        if self.mode is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def poll(self, code: int) -> int:
        """The largest code that any rank gave at the *last* poll.

        One poll late, because the exchange goes on behind the step between them and costs nothing.
        """
        if self.mode is None:
            return code
        answer = self.settle()
        mine = torch.tensor(code)
        self._pending = dist.all_reduce(mine, dist.ReduceOp.MAX, async_op=True), mine
        return answer

    def settle(self) -> int:
        """Wait for the last poll."""
        if self._pending is None:
            return 0
        work, answer = self._pending
        self._pending = None
        work.wait()
        return int(answer)

    # To calculate.

    def mean(self, value: Tensor) -> Tensor:
        """Mean over the ranks; the value itself is overwritten."""
        return self.sum(value).div_(self.size)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the ranks; the value itself is overwritten."""
        if self.mode is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def seed(self, seed: int) -> None:
        """Seed the random numbers of this process: those of dropout, other ones on every rank."""
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * self.rank) % (1 << 63))

    def aside(self) -> World:
        """The same ranks with a channel of their own, for a thread beside the training."""
        return dataclasses.replace(self, group=dist.new_group(backend="gloo", timeout=TIMEOUT))


def shape(run: Run) -> World:
    """The processes as they would be: nothing is started. Checks what can be checked."""
    loop = run.loop
    if not launched():
        if loop.parallel != "auto":
            raise LabError(
                f"loop.parallel is {loop.parallel}, but this is one process: start it with "
                "`torchrun --nproc_per_node=N -m mars.lab train`, or give --loop.parallel auto"
            )
        return World()
    size = int(os.environ["WORLD_SIZE"])
    mode = "ddp" if loop.parallel == "auto" else loop.parallel
    shards = (loop.shards or size) if mode == "fsdp2" else 1
    if loop.shards and mode != "fsdp2":
        raise LabError("loop.shards is for loop.parallel fsdp2")
    if size % shards:
        raise LabError(f"loop.shards ({shards}) must divide the number of processes ({size})")
    if mode == "fsdp2" and loop.precision == "fp16":
        raise LabError("loop.precision fp16 does not go with loop.parallel fsdp2: use bf16")
    if loop.batch_size % size:
        raise LabError(
            f"loop.batch_size ({loop.batch_size}) must be a multiple of the number of processes "
            f"({size})"
        )
    return World(own_rank(), size, mode, shards)


@contextlib.contextmanager
def joined(run: Run, device: torch.device) -> Iterator[World]:
    """The processes of a run, connected."""
    world = shape(run)
    if world.mode is None:
        yield world
        return
    ours = not dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ours:
        _connect(world, device)
    try:
        if world.mode == "fsdp2":
            world.mesh = _mesh(device.type, world)
        yield world
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        text = f"another process has ended or is lost: {first_line(error)}"
        raise LabError(f"rank {world.rank}: {text}") from None
    if ours:  # after an error the others may be gone, and ending together would hang
        dist.destroy_process_group()


def _connect(world: World, device: torch.device) -> None:
    """Find the other processes."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_gpu = device.type == "cuda"
    try:
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        # torchrun's store outlives a restart: without a prefix, addresses of the dead are in it.
        store = PrefixStore(f"mars-{again}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT, store=store, rank=rank,
            world_size=size,
            device_id=device if on_gpu else None,  # or NCCL guesses it at the first barrier
        )  # fmt: skip
    except RuntimeError as error:
        text = first_line(error)
        raise LabError(f"rank {world.rank} cannot connect to the other processes: {text}") from None


def _mesh(kind: str, world: World) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if world.shards == world.size:
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    copies = world.size // world.shards
    return init_device_mesh(kind, (copies, world.shards), mesh_dim_names=("copy", "shard"))


def _is_lost(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()

"""A model over many processes: whole in each (DDP) or in shards (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mars.lab.models import GPT
from mars.lab.parallel import World
from mars.lab.tasks import Task


def make(task: Task, world: World, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on its device, with the same initial weights for any number of processes."""
    seed = task.run.loop.seed
    if world.mode != "fsdp2":
        return task.model(seed).to(device)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Parameters travel in 16 bits, gradients are added in 32.
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    with torch.device("meta"):  # no process ever holds all of it
        model = GPT(task.run.gpt, seed=None, fp8_head=task.run.loop.fp8_head)
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=world.mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.initialise(seed)
    return model


def compile_in_place(model: nn.Module, world: World) -> None:
    """Compile the model; names of parameters stay.

    For every shape anew: else the other number of rows in a validation, which comes first, would
    make torch compile the training for any number of rows, and that is slower.
    """
    if world.mode == "ddp":
        from torch._dynamo import config

        # It cuts graphs where a bucket of gradients is full, so that they can be sent meanwhile. A
        # GPT is compiled piece by piece, which does that; cut again, every block would be two.
        config.optimize_ddp = not isinstance(model, GPT)
    if world.mode == "fsdp2" and isinstance(model, GPT):
        # FSDP2 gathers parameters in hooks: those stay outside of what is compiled.
        for piece in model.pieces:
            piece.forward = torch.compile(piece.forward, dynamic=False)
    else:
        model.compile(dynamic=False)


def connect(model: nn.Module, world: World) -> Callable[..., Tensor]:
    """What is called for the loss; the model itself keeps the names of its parameters.

    Under DDP the processes talk to each other here: all of them must have come so far.
    """
    if world.mode != "ddp":
        return model
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


@contextlib.contextmanager
def accumulating(wrapped: Any, more: bool) -> Iterator[None]:
    """Around a forward and backward pass: if ``more`` are to come, gradients are not yet sent.

    FSDP2 adds up the shards all the same: unsent gradients would be those of the whole model.
    """
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and more:
        with wrapped.no_sync():
            yield
        return
    if hasattr(wrapped, "set_requires_all_reduce"):
        wrapped.set_requires_all_reduce(not more)  # between the copies of HSDP
    yield


def reshard(model: Any) -> None:
    """After a forward pass without a backward pass: FSDP2 leaves the root's parameters gathered."""
    if hasattr(model, "reshard"):
        model.reshard()

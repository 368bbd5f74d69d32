"""Bytes on the fullest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mars.bench.shapes import Shape
from mars.lab.models.loss import GPU_SHARE, chunk_rows
from mars.lab.planner.gpus import RESERVED_BYTES, Gpu
from mars.lab.planner.models import Model
from mars.lab.planner.network import Cluster

HALF_BYTES = 2  # of what is multiplied


def local_shapes(shapes: Sequence[Shape], shards: int) -> list[Shape]:
    """The first rank's part of every tensor, as FSDP2 cuts it: rows, rounded up."""
    return [Shape((-(-s.size[0] // shards), *s.size[1:]), s.hidden) for s in shapes]


def padded_elements(shapes: Sequence[Shape], shards: int) -> int:
    """What a collective moves: every rank's part is as large as the first one's."""
    return shards * sum(shape.numel for shape in local_shapes(shapes, shards))


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank. ``peak`` is that of the fullest moment, not the sum of all."""

    parameters: float
    gradients: float
    state: float
    activations: float
    logits: float  # a chunk of them
    gathered: float  # whole blocks, where parameters are sharded
    work_space: float  # Newton–Schulz
    accumulates: bool  # gradients are there during the forward pass

    @property
    def peak(self) -> float:
        """Held always, and the largest of: the end of the forward pass, the end of the backward
        pass, the optimizer's step."""
        held = self.parameters + self.state
        forward = self.activations + self.logits + self.gathered
        forward += self.gradients if self.accumulates else 0.0
        return held + max(forward, self.gradients + self.gathered, self.gradients + self.work_space)

    def room(self, gpu: Gpu) -> float:
        """What is left; below zero it does not fit."""
        return gpu.memory_bytes - RESERVED_BYTES - self.peak


def activations_bytes(model: Model, micro_batch: int, recompute: bool) -> float:
    tokens = micro_batch * model.run.gpt.block_size
    return tokens * model.kept_bytes_per_token(recompute)


def logits_bytes(model: Model, gpu: Gpu, micro_batch: int) -> float:
    """A chunk of logits, the gradient of the head and that of the hidden states.

    In 8 bits the chunk's gradient is two tensors of half its size beside it, hidden states and head
    are held in both orders, and there is one gradient of the head more, to add to the first.
    """
    m = model.run.gpt
    rows, row_bytes = micro_batch * m.block_size, m.vocab_size * HALF_BYTES
    chunk = chunk_rows(rows, row_bytes, int(gpu.memory_bytes) // GPU_SHARE)
    logits, head = min(rows, chunk) * row_bytes, m.vocab_size * m.n_embd * 4
    held = logits + head + rows * m.n_embd * HALF_BYTES
    if model.run.loop.fp8_head:
        held += logits + 2 * (rows + m.vocab_size) * m.n_embd + head * (rows > chunk)
    return held


def gathered_bytes(model: Model, cluster: Cluster, reduce_bytes: int) -> float:
    """Two blocks and the tables in 16 bits, and the gradients of two blocks on their way out."""
    if cluster.shards == 1:
        return 0.0
    blocks = 2 * sum(shape.numel for shape in model.blocks) / model.layers
    tables = sum(shape.numel for shape in model.tables)
    return HALF_BYTES * (blocks + tables) + (HALF_BYTES + reduce_bytes) * blocks

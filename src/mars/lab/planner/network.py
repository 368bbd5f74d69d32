"""What ranks say to each other: bytes of each collective, and seconds on a ring.

Nothing here was timed: this machine has one GPU. Bytes are checked against real processes (tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mars.lab.errors import LabError
from mars.lab.planner.gpus import LINK_SHARE, Gpu

Strategy = Literal["ddp", "fsdp2", "hsdp"]

NEAR_SECONDS, FAR_SECONDS = 1e-6, 5e-6  # a step of a ring within a node, and between two; assumed


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes, and how a model is spread over them."""

    gpu: Gpu
    gpus: int
    node: int  # GPUs of a node
    strategy: Strategy

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node)

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model together."""
        if self.strategy == "ddp":
            return 1
        return min(self.gpus, self.node) if self.strategy == "hsdp" else self.gpus

    @property
    def owners(self) -> int:
        """Ranks that share Newton–Schulz: those with all the momenta, or that shard them."""
        return self.gpus if self.strategy == "ddp" else self.shards


def check(cluster: Cluster) -> Cluster:
    for name, value in (("gpus", cluster.gpus), ("nodes-of", cluster.node)):
        if value < 1:
            raise LabError(f"--{name} must be above 0, not {value}")
    if cluster.gpus > cluster.node and cluster.gpus % cluster.node:
        raise LabError(f"--gpus ({cluster.gpus}) must be a multiple of --nodes-of ({cluster.node})")
    return cluster


def ring_seconds(cluster: Cluster, sent_bytes: float, ranks: int, collectives: int) -> float:
    """A collective in which every rank of a ring sends so many bytes.

    Rings cross a node's boundary once, and every adapter of the node carries its own, so that
    between nodes a rank gets the lesser of its link and all adapters of a node together.
    """
    if ranks < 2:
        return 0.0
    near, gpu = min(ranks, cluster.node), cluster.gpu
    speed, latency = gpu.link_bytes_per_second, (ranks - 1) * NEAR_SECONDS
    if ranks > near:
        speed = min(speed, near * gpu.node_bytes_per_second)
        nodes = ranks // near
        latency = (ranks - nodes) * NEAR_SECONDS + nodes * FAR_SECONDS
    return sent_bytes / (LINK_SHARE * speed) + collectives * latency


def all_to_all_seconds(cluster: Cluster, sent_bytes: float, ranks: int, collectives: int) -> float:
    """Every rank sends other bytes to every other: what leaves the node goes by its own adapter."""
    if ranks < 2:
        return 0.0
    near = min(ranks, cluster.node)
    inside, outside = (near - 1) / (ranks - 1), (ranks - near) / (ranks - 1)
    gpu = cluster.gpu
    slower = max(inside / gpu.link_bytes_per_second, outside / gpu.node_bytes_per_second)
    latency = (ranks - 1) * NEAR_SECONDS + (FAR_SECONDS if outside else 0.0)
    return sent_bytes * slower / LINK_SHARE + collectives * latency


def across_seconds(cluster: Cluster, sent_bytes: float, collectives: int) -> float:
    """The same among the GPUs of one number in all nodes (HSDP's replicas): by one adapter each."""
    if cluster.nodes < 2:
        return 0.0
    speed = LINK_SHARE * cluster.gpu.node_bytes_per_second
    return sent_bytes / speed + collectives * (cluster.nodes - 1) * FAR_SECONDS


def part(ranks: int) -> float:
    """What of a tensor a rank sends when it is gathered from all ranks, or reduced to them."""
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step, and how long that takes."""

    gathered_bytes: float = 0.0  # parameters, FSDP2 and HSDP: before forward and backward
    reduced_bytes: float = 0.0  # gradients
    seconds: float = 0.0

    @property
    def sent_bytes(self) -> float:
        return self.gathered_bytes + self.reduced_bytes


def training_traffic(
    cluster: Cluster, blocks: float, tables: float, layers: int, passes: int,
    gather_bytes: int, reduce_bytes: int,
) -> Traffic:  # fmt: skip
    """Gradients of a step, and parameters where they are sharded. Elements are with padding.

    DDP and HSDP's replicas reduce once a step. Shards are reduced after every pass; blocks are
    gathered for the forward and for the backward pass, tables once for both.
    """
    groups, elements = layers + 1, blocks + tables
    if cluster.strategy == "ddp":
        sent = 2 * part(cluster.gpus) * elements * reduce_bytes
        time = ring_seconds(cluster, sent, cluster.gpus, 2 * groups)
        return Traffic(0.0, sent, time)
    shards = cluster.shards
    gathered = passes * part(shards) * (2 * blocks + tables) * gather_bytes
    reduced = passes * part(shards) * elements * reduce_bytes
    time = ring_seconds(cluster, gathered + reduced, shards, 3 * groups * passes)
    if cluster.strategy == "hsdp" and cluster.nodes > 1:
        again = 2 * part(cluster.nodes) * elements / shards * reduce_bytes
        time += across_seconds(cluster, again, 2 * groups)
        reduced += again
    return Traffic(gathered, reduced, time)


def owner_bytes(cluster: Cluster, elements: float, element_bytes: int) -> float:
    """Sent by a rank so that each matrix is orthogonalised by one owner.

    Sharded: shards of the momenta to the owners, and of the results back, by all-to-all. DDP: every
    rank has the momenta; results are gathered.
    """
    ranks = cluster.owners
    if cluster.strategy == "ddp":
        return part(ranks) * elements * element_bytes
    return 2 * part(ranks) * elements / ranks * element_bytes


def naive_bytes(cluster: Cluster, elements: float, element_bytes: int) -> float:
    """Sent by a rank if every rank orthogonalises everything: all shards to all ranks."""
    return part(cluster.shards) * elements * element_bytes

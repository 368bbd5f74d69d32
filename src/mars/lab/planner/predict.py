"""The plan: every optimizer's memory, traffic and step on a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mars.lab import hardware
from mars.lab.errors import LabError
from mars.lab.planner import memory, network, newton_schulz, steps
from mars.lab.planner.gpus import ATTENTION_SHARE, BLOCK_BYTES, CAST_BYTES, LAYER_SHARE
from mars.lab.planner.memory import Memory
from mars.lab.planner.models import Model
from mars.lab.planner.network import Cluster, Traffic
from mars.lab.planner.steps import RULES, Engine, Optimizer, Setting

FORWARD_SHARE = 1 / 3  # of forward and backward: what recomputation does once more
BLOCK_LAUNCHES = 20  # of a pass: 12 products; norms, GELU and attention, both ways
LAUNCH_SECONDS = 5e-6  # of the host, assumed; a graph's kernels cannot be much shorter either
MOST_GPUS = 1 << 16  # as far as "fits from … GPUs" looks


@dataclass(frozen=True)
class Job:
    """What is planned, resolved."""

    model: Model
    cluster: Cluster
    batch: int  # sequences of a step
    micro_batch: int  # of a pass, on each GPU
    setting: Setting
    reduce_bytes: int = 4  # an element of a gradient, on its way
    gather_bytes: int = 2  # of a parameter
    engine: Literal["auto", "fused", "foreach"] = "auto"
    recompute: bool = False
    mfu: float | None = None  # of forward and backward, if somebody knows it
    default_batch: int | None = None  # the recipe's, where `batch` is what came of it by rounding

    @property
    def passes(self) -> int:
        return self.batch // (self.cluster.gpus * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.model.run.gpt.block_size

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of a step on each GPU: products, attention, and bytes."""
        model, gpu = self.model, self.cluster.gpu
        peak, copy = gpu.peak_flops_per_second, gpu.copy_bytes_per_second
        again = 1 + FORWARD_SHARE if self.recompute else 1.0
        tokens = again * self.tokens / self.cluster.gpus
        if self.mfu is not None:
            return tokens * model.flops_per_token / (self.mfu * peak)
        a_token = (
            model.layer_flops_per_token / (LAYER_SHARE * peak)
            + model.attention_flops_per_token / (ATTENTION_SHARE * peak)
            + BLOCK_BYTES * model.layers * model.run.gpt.n_embd / copy
        )
        cast = CAST_BYTES * model.elements / self.cluster.shards / copy
        return tokens * a_token + (self.passes * cast if self.setting.param_bytes == 4 else 0.0)

    @property
    def launch_seconds(self) -> float:
        """What launching a pass takes the host at least; not modelled, but told of."""
        return self.model.layers * BLOCK_LAUNCHES * LAUNCH_SECONDS

    @property
    def host_bound(self) -> bool:
        """Whether a pass is so short that its time is the host's."""
        return self.compute_seconds < self.passes * self.launch_seconds

    @property
    def model_flops_utilization(self) -> float:
        """MFU of forward and backward; what is recomputed does not count."""
        flops = self.tokens * self.model.flops_per_token / self.cluster.gpus
        return flops / (self.compute_seconds * self.cluster.gpu.peak_flops_per_second)


@dataclass(frozen=True)
class Iteration:
    """Newton–Schulz: every rank all of it, or every matrix one owner."""

    flops: int  # of the whole model
    naive_seconds: float
    naive_sent_bytes: float
    owned_seconds: float
    owned_sent_bytes: float
    owned_max_flops: int
    max_over_mean: float


@dataclass(frozen=True)
class Prediction:
    """One optimizer."""

    name: str
    label: str
    engine: str
    memory: Memory
    room_bytes: float
    fits: bool
    fits_from_gpus: int | None  # by FSDP2
    step_bytes: float  # moved by the optimizer's step in this rank's memory
    iteration: Iteration | None
    optimizer_seconds: float
    naive_optimizer_seconds: float  # with Newton–Schulz repeated by every rank
    compute_seconds: float
    traffic: Traffic
    exposed_seconds: float  # of the traffic
    step_seconds: float
    tokens_per_second: float
    optimizer_share: float


def default_micro_batch(model: Model, cluster: Cluster, batch: int, recompute: bool) -> int:
    """The lab's rule: a divisor of a GPU's part, at most 32k tokens and 40 % of the memory."""
    context, own = model.run.gpt.block_size, max(1, batch // cluster.gpus)
    room = hardware.ACTIVATION_SHARE * cluster.gpu.memory_bytes
    most = min(hardware.GPU_TOKENS, room / model.kept_bytes_per_token(recompute))
    limit = max(1, min(int(most) // context, own))
    return max(n for n in range(1, limit + 1) if own % n == 0)


def nearest(batch: int, unit: int) -> int:
    """The multiple of a unit that is nearest to a batch, the upper one of two.

    >>> nearest(480, 64), nearest(480, 7), nearest(3, 8)
    (512, 483, 8)
    """
    return max(1, (batch + unit // 2) // unit) * unit


def check(job: Job) -> Job:
    if job.batch < job.cluster.gpus:
        raise LabError(
            f"a batch of {job.batch} sequences leaves some of {job.cluster.gpus} GPUs without any: "
            f"--batch {job.cluster.gpus}"
        )
    if job.micro_batch < 1 or job.micro_batch * job.cluster.gpus > job.batch:
        most = job.batch // job.cluster.gpus
        raise LabError(
            f"--micro-batch must be 1 to {most} ({job.batch} sequences on {job.cluster.gpus} "
            f"GPUs), not {job.micro_batch}"
        )
    if job.mfu is not None and not 0 < job.mfu <= 1:
        raise LabError(f"--mfu is a share of the peak, above 0 to 1, not {job.mfu}")
    network.check(job.cluster)
    return job


def setting_of(job: Job, optimizer: Optimizer) -> Setting:
    """What holds for one optimizer.

    Gradients of DDP and FSDP2 are views of larger buffers, and are copied even if consumed. The
    library's fused engine steps everything but matrices whose Newton–Schulz ranks share, which go
    by foreach; beside those, and in shards, norms are computed by launches of their own.
    """
    alone = job.cluster.gpus == 1
    engine: Engine = "fused"
    shared = False
    matrix = RULES[optimizer.hidden].matrix
    if not optimizer.torch and not alone:
        engine, shared = "foreach" if matrix else "fused", job.cluster.shards > 1 or matrix
    if not optimizer.torch and job.engine != "auto":
        engine, shared = job.engine, shared and job.engine == "fused"
    return dataclasses.replace(
        job.setting,
        engine=engine,
        shared=shared,
        consume=optimizer.consume and alone,
        clip_tensor=not optimizer.unclipped,
        raw=optimizer.unclipped,
    )


def rank_memory(job: Job, optimizer: Optimizer) -> Memory:
    """The fullest rank."""
    shards, setting = job.cluster.shards, setting_of(job, optimizer)
    local = memory.local_shapes(job.model.shapes, shards)
    held = float(sum(shape.numel for shape in local) * setting.param_bytes)
    space = max(steps.space_bytes(optimizer, local, own, setting) for own in loads(job, optimizer))
    return Memory(
        parameters=held,
        gradients=held,
        state=steps.state_bytes(optimizer, local, setting),
        activations=memory.activations_bytes(job.model, job.micro_batch, job.recompute),
        logits=memory.logits_bytes(job.model, job.cluster.gpu, job.micro_batch),
        gathered=memory.gathered_bytes(job.model, job.cluster, job.reduce_bytes),
        work_space=space,
        accumulates=job.passes > 1,
    )


def ownership(job: Job, optimizer: Optimizer) -> newton_schulz.Ownership:
    costs = steps.ownership_costs(optimizer, job.model.matrices)
    return newton_schulz.balance(costs, job.cluster.owners)


def loads(job: Job, optimizer: Optimizer) -> list[list[newton_schulz.Matrix]]:
    """The matrices that ranks own, by sort of rank."""
    if not RULES[optimizer.hidden].matrix:
        return [[]]
    return newton_schulz.loads(job.model.matrices, ownership(job, optimizer))


def iteration(job: Job, optimizer: Optimizer) -> Iteration | None:
    """Newton–Schulz on the cluster; None for what has none."""
    if not RULES[optimizer.hidden].matrix:
        return None
    gpu, matrices, cluster = job.cluster.gpu, job.model.matrices, job.cluster
    engine = setting_of(job, optimizer).engine
    elements = sum(rows * cols for rows, cols in matrices)
    alone = steps.newton_schulz_seconds(gpu, optimizer, matrices, engine)
    owned = alone  # torch's Muon knows no owners
    if not optimizer.torch:
        each = loads(job, optimizer)
        owned = max(steps.newton_schulz_seconds(gpu, optimizer, own, engine) for own in each)
    halved = engine == "fused" and not optimizer.torch
    every = [newton_schulz.flops(matrix) for matrix in matrices]
    plan = ownership(job, optimizer)
    return Iteration(
        flops=sum(every if halved else steps.ownership_costs(optimizer, matrices)),
        naive_seconds=alone,
        naive_sent_bytes=network.naive_bytes(cluster, elements, newton_schulz.HALF_BYTES),
        owned_seconds=owned,
        owned_sent_bytes=network.owner_bytes(cluster, elements, newton_schulz.HALF_BYTES),
        owned_max_flops=max(plan.loads_flops),
        max_over_mean=plan.max_over_mean,
    )


def optimizer_seconds(
    job: Job, optimizer: Optimizer, work: Iteration | None
) -> tuple[float, float]:
    """Of a step: with owners, and with every rank doing all of Newton–Schulz."""
    setting, cluster = setting_of(job, optimizer), job.cluster
    local = memory.local_shapes(job.model.shapes, cluster.shards)
    moving = steps.moving_seconds(cluster.gpu, optimizer, local, setting)

    def with_host(device: float, launches: int) -> float:
        return max(device, steps.host_seconds(optimizer, local, setting, launches))

    if work is None:
        return with_host(moving, 0), with_host(moving, 0)
    matrices = job.model.matrices
    sorts = len({(min(m), max(m)) for m in matrices})
    naive = moving + work.naive_seconds
    naive += network.ring_seconds(cluster, work.naive_sent_bytes, cluster.shards, sorts)
    naive = with_host(naive, newton_schulz.launches(matrices))
    if optimizer.torch:
        return naive, naive
    talk = network.ring_seconds if cluster.strategy == "ddp" else network.all_to_all_seconds
    owned = moving + work.owned_seconds
    owned += talk(cluster, work.owned_sent_bytes, cluster.owners, 2 * sorts)
    return with_host(owned, max(map(newton_schulz.launches, loads(job, optimizer)))), naive


def training_traffic(job: Job) -> Traffic:
    """Gradients, and gathered parameters (in 16 bits)."""
    shards = job.cluster.shards
    return network.training_traffic(
        job.cluster,
        memory.padded_elements(job.model.blocks, shards),
        memory.padded_elements(job.model.tables, shards),
        job.model.layers,
        job.passes,
        job.gather_bytes,
        job.reduce_bytes,
    )


def exposed_seconds(job: Job, traffic: Traffic, compute: float) -> float:
    """Traffic that computing does not hide: what is longer, and the first or last block's part."""
    if job.cluster.gpus == 1:
        return 0.0
    hidden_by = compute * (1 - FORWARD_SHARE) if job.cluster.strategy == "ddp" else compute
    hidden_by /= job.passes if job.cluster.strategy == "ddp" else 1  # only the last pass reduces
    return max(traffic.seconds - hidden_by, traffic.seconds / (job.model.layers + 1))


def predict(job: Job, optimizer: Optimizer) -> Prediction:
    """Everything about one optimizer."""
    gpu, cluster = job.cluster.gpu, job.cluster
    local = memory.local_shapes(job.model.shapes, cluster.shards)
    used = rank_memory(job, optimizer)
    work = iteration(job, optimizer)
    own, naive = optimizer_seconds(job, optimizer, work)
    compute = job.compute_seconds
    traffic = training_traffic(job)
    exposed = exposed_seconds(job, traffic, compute)
    total = compute + exposed + own
    return Prediction(
        name=optimizer.name,
        label=optimizer.label,
        engine=setting_of(job, optimizer).engine,
        memory=used,
        room_bytes=used.room(gpu),
        fits=used.room(gpu) >= 0,
        fits_from_gpus=None if used.room(gpu) >= 0 else fits_from(job, optimizer),
        step_bytes=steps.step_bytes(optimizer, local, setting_of(job, optimizer)),
        iteration=work,
        optimizer_seconds=own,
        naive_optimizer_seconds=naive,
        compute_seconds=compute,
        traffic=traffic,
        exposed_seconds=exposed,
        step_seconds=total,
        tokens_per_second=job.tokens / total,
        optimizer_share=own / total,
    )


def _larger(job: Job) -> Iterator[Job]:
    power = 2
    while power <= MOST_GPUS:
        node = min(job.cluster.node, power)
        gpus = -(-power // node) * node  # whole nodes
        cluster = dataclasses.replace(job.cluster, gpus=gpus, node=node, strategy="fsdp2")
        unit = gpus * job.micro_batch
        batch = -(-job.batch // unit) * unit  # whole passes
        yield dataclasses.replace(job, cluster=cluster, batch=batch)
        power *= 2


def fits_from(job: Job, optimizer: Optimizer) -> int | None:
    """The smallest power of two of GPUs, filled up to whole nodes, that hold it by FSDP2, a pass as
    large as now."""
    for larger in _larger(job):
        if rank_memory(larger, optimizer).room(job.cluster.gpu) >= 0:
            return larger.cluster.gpus
    return None


def as_json(job: Job, predictions: list[Prediction]) -> dict[str, Any]:
    """Everything, with the units in the names."""
    return {
        "model": {
            "name": job.model.name,
            "elements": job.model.elements,
            "hidden_matrices": len(job.model.matrices),
            "flops_per_token": job.model.flops_per_token,
        },
        "cluster": dataclasses.asdict(job.cluster),
        "batch": job.batch,
        "default_batch": job.default_batch,
        "micro_batch": job.micro_batch,
        "passes": job.passes,
        "tokens": job.tokens,
        "setting": {**dataclasses.asdict(job.setting), "engine": job.engine},
        "reduce_bytes": job.reduce_bytes,
        "recompute": job.recompute,
        "mfu": job.model_flops_utilization,
        "host_bound": job.host_bound,
        "optimizers": [{**dataclasses.asdict(p), "peak_bytes": p.memory.peak} for p in predictions],
    }

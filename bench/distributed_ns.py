"""Newton–Schulz on many ranks: one owner for each matrix against every rank doing all of it.

    python bench/distributed_ns.py [--ranks 4] [--width 256] [--layers 6] [--out FILE.json]

Gloo processes on this machine, matrices of a GPT cut as FSDP2 cuts them (rows) or whole as under
DDP, times as medians over repetitions, the slowest rank counting, the ways taken in turn. The naive
gather is made as good as it can be: one collective for all matrices, in the same dtype, the same
stacked iteration; it differs only in that every rank gets and works on all. A table and, with
`--out`, a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from mars import exchange
from mars.engines import Batch, foreach
from mars.rule import Hyper
from mars.rule.newton_schulz import NewtonSchulz
from mars.sharding import ALONE, Layout, Ranks, block, flops

SENT = 0  # bytes to other ranks


def counted(function: Callable, copies: Callable[[int], float]) -> Callable:
    """A collective that counts what it sends; ``copies``: how many times its input, by ranks."""

    def call(received, send, *rest, **options):
        global SENT
        SENT += int(send.numel() * send.element_size() * copies(dist.get_world_size()))
        return function(received, send, *rest, **options)

    return call


def shapes(width: int, layers: int) -> list[tuple[int, int]]:
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


def blocks(length: int, world: int) -> list[int]:
    return [block(length, world, rank) for rank in range(world)]


def jobs(matrices: list[torch.Tensor], layout: Callable, batch: Batch, world: int) -> list:
    solve = partial(foreach.orthogonal, batch)
    dtype = getattr(torch, batch.k.ns.dtype)
    made = []
    for m in matrices:
        own = layout(m)
        part = m if own is None else m.split(blocks(m.shape[0], world))[dist.get_rank()]
        cost = flops(batch.kind, m.shape, batch.k.ns.steps)
        shape = tuple(m.shape)
        made.append(exchange.Job(part, shape, shape, own, cost, solve, dtype, dtype))
    return made


def by_owners(own: list, ranks: Ranks, rounds: int) -> list[torch.Tensor]:
    exchange.ROUNDS = rounds
    exchange.start(own, ranks)()
    return [job.arrived() for job in own]


def naively(own: list, batch: Batch, world: int) -> list[torch.Tensor]:
    """One gather of everything (padded: a gather wants equal lengths), all of it everywhere."""
    sizes = [job.part_shape(0) for job in own]
    dtype = own[0].there
    send = torch.zeros(sum(torch.Size(s).numel() for s in sizes), dtype=dtype)
    places = send.split([torch.Size(s).numel() for s in sizes])
    for job, place in zip(own, places, strict=True):
        place[: job.part.numel()] = job.part.reshape(-1)
    received = torch.empty(world * len(send), dtype=dtype)
    dist.all_gather_single(received, send)
    pieces = [r.split([torch.Size(s).numel() for s in sizes]) for r in received.split(len(send))]
    whole = []
    for i, job in enumerate(own):
        rows = [
            p[i][: torch.Size(job.part_shape(r)).numel()].view(job.part_shape(r))
            for r, p in enumerate(pieces)
        ]
        whole.append(torch.cat(rows))
    solved = foreach.orthogonal(batch, whole)
    rank = dist.get_rank()
    return [m.split(blocks(m.shape[0], world))[rank] for m in solved]


def work(rank: int, options: argparse.Namespace, directory: str) -> None:
    global SENT
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=options.ranks
    )
    world = options.ranks
    dist.all_to_all_single = counted(dist.all_to_all_single, lambda n: (n - 1) / n)
    dist.all_gather_single = counted(dist.all_gather_single, lambda n: n - 1)
    over = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in shapes(options.width, options.layers)]
    ns = NewtonSchulz(dtype=options.dtype)
    batch = Batch("mars-m", Hyper(0.0, 0.95, 0.99, 0.0, 0.0, ns=ns), 0, True, True)
    cut = jobs(matrices, lambda m: Layout(over, (Shard(0),), tuple(m.shape), (0,)), batch, world)
    same = jobs(matrices, lambda m: None, batch, world)
    ways: dict[str, Callable[[], list[torch.Tensor]]] = {
        "sharded: every rank gathers and does all": lambda: naively(cut, batch, world),
        "sharded: owners, one round": lambda: by_owners(cut, ALONE, 1),
        "sharded: owners, two rounds": lambda: by_owners(cut, ALONE, 2),
        "replicated: every rank does all": lambda: foreach.orthogonal(batch, matrices),
        "replicated: owners": lambda: by_owners(same, Ranks("replicate"), 1),
    }
    expected = foreach.orthogonal(batch, matrices)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, int] = {}
    for repetition in range(options.repetitions + 1):
        for name, way in ways.items():
            dist.barrier()
            SENT, start = 0, time.perf_counter()
            results = way()
            slowest = torch.tensor(time.perf_counter() - start)
            bytes_sent = torch.tensor(float(SENT))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(bytes_sent)
            sent[name] = int(bytes_sent)
            if repetition:  # the first one warms up
                seconds[name].append(float(slowest))
            for result, whole in zip(results, expected, strict=True):
                if name.startswith("sharded"):
                    whole = whole.split(blocks(whole.shape[0], world))[rank]
                torch.testing.assert_close(result, whole, rtol=1e-3, atol=1e-3)
    if rank == 0:
        report = {"seconds": {n: statistics.median(s) for n, s in seconds.items()}, "sent": sent}
        Path(directory, "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="of the iteration, and on the wire")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, args=(options, directory), nprocs=options.ranks)
        report = json.loads(Path(directory, "report.json").read_text())
    every = shapes(options.width, options.layers)
    report |= {
        "ranks": options.ranks, "width": options.width, "layers": options.layers,
        "dtype": options.dtype, "matrices": len(every), "repetitions": options.repetitions,
        "elements": sum(rows * cols for rows, cols in every), "shapes": every,
        "flops": sum(flops("mars-m", shape, 5) for shape in every),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, gloo",
        "load": os.getloadavg()[1], "torch": torch.__version__,
    }  # fmt: skip
    print(
        f"{report['matrices']} matrices, {report['elements'] / 1e6:.1f}M elements, "
        f"{report['flops'] / 1e9:.1f} GFLOP, {options.ranks} ranks on {report['machine']}"
    )
    print(f"{'':42} {'ms':>7} {'against naive':>14} {'MB sent':>8}")
    for name, seconds in report["seconds"].items():
        naive = next(s for n, s in report["seconds"].items() if n[:4] == name[:4])
        sent = report["sent"][name] / 1e6
        print(f"{name:42} {seconds * 1e3:7.0f} {seconds / naive:14.2f} {sent:8.1f}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

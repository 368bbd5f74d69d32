"""The model against what was measured: every row of the benchmarks and of the training speeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mars.bench.shapes import PARAMETER_SETS
from mars.lab import recipes
from mars.lab.errors import LabError
from mars.lab.planner import gpus, models, network, newton_schulz, steps
from mars.lab.planner.gpus import Gpu
from mars.lab.planner.network import Cluster, Strategy
from mars.lab.planner.predict import Job, predict, rank_memory
from mars.lab.planner.steps import OPTIMIZERS, RULES, Optimizer, Setting
from mars.sharding import flops

BENCHMARKS = (
    "bench_small_h200.json", "bench_xl_h200.json", "bench_more_h200.json", "bench_clip_h200.json",
)  # fmt: skip
TRAINING = "train_speed_h200.json"
COST = "cost_h200.json"
PROCESSES = "distributed_ns_cpu.json"
SHARDS = "shards_h200.json"
LARGE = 0.2  # an error worth a word

_PLAIN = Optimizer("plain-adamw", "plain AdamW", "plain-adamw", "plain-adamw", "plain-adamw")
_VARIANTS: dict[str, dict[str, Any]] = {
    "consume_grads": {"consume": True},
    "max_grad_norm": {"clip_all": True},
    "no clip": {"clip_tensor": False},
    "no clip, raw": {"clip_tensor": False, "raw": True},
    "bfloat16 state": {"state": "bfloat16"},
    "8-bit state": {"state": "8bit"},
}
# Rows that constants were taken from.
_FITTED = (
    ("gpt2-xl", "torch AdamW fused"), ("gpt2-xl", "foreach"), ("gpt2-xl", "8-bit"),
    ("gpt2-xl", "mars-m fused"), ("tiny-10k", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One measured number, and what the model says."""

    where: str
    name: str
    quantity: str  # with its unit
    predicted: float
    measured: float
    fitted: bool  # the row served to set a constant: its error says little

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def results_directory(given: Path | None) -> Path:
    """Where the committed results are."""
    own = Path(__file__).parents[4] / "docs" / "results"  # of sources that were not copied
    here = Path("docs") / "results"
    path = given if given else (own if own.is_dir() else here)
    missing = [
        name for name in (*BENCHMARKS, TRAINING, COST, PROCESSES) if not (path / name).is_file()
    ]
    if missing:
        raise LabError(
            f"no {missing[0]} in {path}: give the repository's docs/results with --results DIR"
        )
    return path


def compare(directory: Path) -> list[Compared]:
    """Everything that was measured and is modelled."""
    found: list[Compared] = []
    for file in BENCHMARKS:
        content = _read(directory / file)
        for run in content.get("runs", [content]):
            # What the allocator rounds up, and the benchmark holds, is in everybody's peak.
            extra = {row["name"]: row["extra"] for row in run["rows"] if not row["skipped"]}
            for row in run["rows"]:
                found += _benchmark(row, extra.get("torch AdamW fused, hidden", 0))
    found += _training(_read(directory / TRAINING))
    found += of_cost(_read(directory / COST))
    return [*found, *_processes(_read(directory / PROCESSES))]


def not_modelled(directory: Path) -> list[str]:
    """Measured rows that the model says nothing about."""
    names = []
    for file in BENCHMARKS:
        content = _read(directory / file)
        rows = [row for run in content.get("runs", [content]) for row in run["rows"]]
        names += [f"{r['parameters']}: {r['name']}" for r in rows if not r["skipped"]
                  and _candidate(r["name"]) is None]  # fmt: skip
    plain = [r for r in _read(directory / TRAINING)["rows"] if not r["name"].startswith("ours")]
    cut = _read(directory / SHARDS)  # the host's time for DTensors
    shards = [f"one of {cut['ranks']} shards of {cut['model']}: {name}" for name in cut["ms"]]
    return [*names, *(f"training, batch {r['batch']}: {r['name']}" for r in plain), *shards]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read: {error}") from error


def _candidate(name: str) -> tuple[Optimizer, Setting] | None:
    """A benchmark's candidate as the model knows it."""
    setting = Setting(clip_all="clip_grad_norm_" in name)
    known = {"torch AdamW": OPTIMIZERS["adamw"], "torch Muon": OPTIMIZERS["muon"]}
    for start, optimizer in known.items():
        if name.startswith(start):
            return optimizer, replace(setting, engine="foreach" if "foreach" in name else "fused")
    kind, _, rest = name.partition(" ")
    if kind not in RULES:
        return None
    engine, _, variant = rest.partition(", ")
    setting = replace(setting, engine="foreach" if engine == "foreach" else "fused")
    setting = replace(setting, **_VARIANTS.get(variant, {}))
    return (_PLAIN if kind == "plain-adamw" else OPTIMIZERS[kind]), setting


def _benchmark(row: dict[str, Any], everybodys_bytes: int) -> Iterator[Compared]:
    known = None if row["skipped"] else _candidate(row["name"])
    if known is None:
        return
    optimizer, setting = known
    shapes = PARAMETER_SETS[row["parameters"]]()
    if row["on"] == "hidden":
        shapes = [shape for shape in shapes if shape.hidden]
    where, name = row["parameters"], row["name"]
    fitted = any(where == at and what in name for at, what in _FITTED)
    gpu = gpus.find("h200")
    seconds = steps.one_gpu_seconds(gpu, optimizer, shapes, setting)
    yield Compared(where, name, "step, ms", 1e3 * seconds, row["gpu_ms"], fitted)
    state = steps.state_bytes(optimizer, shapes, setting) / sum(s.numel for s in shapes)
    yield Compared(where, name, "state, bytes a parameter", state, row["state"], False)
    matrices = [(s.size[0], s.size[1]) for s in shapes if s.hidden]
    space = steps.space_bytes(optimizer, shapes, matrices, setting) / 1e6
    if space:
        measured = (row["extra"] - everybodys_bytes) / 1e6
        foreach = setting.engine == "foreach"
        yield Compared(where, name, "work space, MB", space, measured, foreach)


_TRAINED = {"ours, AdamW": "adamw", "ours, MARS-AdamW": "mars-adamw", "ours, MARS-M": "mars-m"}


def _training(content: dict[str, Any]) -> Iterator[Compared]:
    model = models.of_run(recipes.make("gpt2-small"), "gpt2-small")
    cluster = Cluster(gpus.find("h200"), 1, 8, "ddp")
    for row in content["rows"]:
        if row["name"] not in _TRAINED:
            continue
        optimizer, batch = OPTIMIZERS[_TRAINED[row["name"]]], row["batch"]
        job = Job(model, cluster, batch, batch, Setting())
        where = f"training, {batch} x 1024"
        time = 1e3 * predict(job, optimizer).step_seconds
        yield Compared(where, row["name"], "step, ms", time, row["milliseconds"], False)
        peak = rank_memory(job, optimizer).peak / 1e9
        yield Compared(where, row["name"], "peak, GB", peak, row["peak_memory"] / 1e9, False)


# Sizes that the rates of forward and backward were taken from, in steps of AdamW.
_PASSES_FITTED = ("gpt2-small", "gpt3-2.7b")


def of_cost(content: dict[str, Any]) -> Iterator[Compared]:
    """Rows of bench/cost.py; on a device that is not known only the state can be predicted."""
    gpu = gpus.by_driver(content["device"])
    for row in content["rows"]:
        if row["status"] != "measured":
            continue
        optimizer = OPTIMIZERS[row["optimizer"]]
        found = predict(job_of_cost(row, gpu or gpus.find("h200")), optimizer)
        figures = [("state, GB", found.memory.state / 1e9, row["state_bytes"] / 1e9)]
        if gpu is not None:
            figures += [
                ("optimizer, ms", 1e3 * found.optimizer_seconds, row["optimizer_ms"]),
                ("step, ms", 1e3 * found.step_seconds, row["step_ms"]),
                ("peak, GB", found.memory.peak / 1e9, row["peak_bytes"] / 1e9),
            ]
        for quantity, predicted, measured in figures:
            fitted = (optimizer.name == "adamw" and row["model"] in _PASSES_FITTED
                      and quantity == "step, ms")  # fmt: skip
            where = f"training, {row['size']}"
            yield Compared(where, optimizer.label, quantity, predicted, measured, fitted)


def job_of_cost(row: dict[str, Any], gpu: Gpu) -> Job:
    """One micro-batch on one GPU."""
    micro = row["micro_batch"]
    model = models.at_context(models.find(row["model"]), row["tokens"] // micro)
    setting = Setting({"float32": 4, "bfloat16": 2}[row["params"]], row["state"])
    cluster = Cluster(gpu, 1, 1, "ddp")
    return Job(model, cluster, micro, micro, setting)


def _processes(content: dict[str, Any]) -> Iterator[Compared]:
    """Newton–Schulz by owners against every rank doing all of it, on real processes (gloo)."""
    ranks, bits = content["ranks"], {"float32": 4, "bfloat16": 2}[content["dtype"]]
    where = f"{ranks} processes"
    costs = [flops("mars-m", shape, newton_schulz.STEPS) for shape in content["shapes"]]
    share = newton_schulz.balance(costs, ranks).max_over_mean / ranks
    kinds: tuple[tuple[Strategy, str, tuple[str, str]], ...] = (
        ("fsdp2", "sharded", ("every rank gathers and does all", "owners, one round")),
        ("ddp", "replicated", ("every rank does all", "owners")),
    )
    for strategy, name, ways in kinds:
        cluster = Cluster(gpus.find("h200"), ranks, ranks, strategy)
        naive, owned = (f"{name}: {way}" for way in ways)
        sent = {
            naive: network.naive_bytes(cluster, content["elements"], bits),
            owned: network.owner_bytes(cluster, content["elements"], bits),
        }
        for way, predicted in sent.items():
            if content["sent"][way]:
                measured = content["sent"][way] / 1e6
                yield Compared(where, way, "sent, MB", ranks * predicted / 1e6, measured, False)
        measured = content["seconds"][owned] / content["seconds"][naive]
        yield Compared(where, owned, "time of naive", share, measured, False)

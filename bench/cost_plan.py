"""What bench/cost.py measures and what fits: sizes, formats of state, micro-batches, plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mars.lab import hardware
from mars.lab.planner import gpus, models, predict
from mars.lab.planner.gpus import RESERVED_BYTES, Gpu
from mars.lab.planner.models import Model
from mars.lab.planner.network import Cluster
from mars.lab.planner.predict import Job
from mars.lab.planner.steps import OPTIMIZERS, Form, Setting

CONTEXT = 1024  # tokens of a sequence
STEP_TOKENS = 1 << 19  # of a step as large models are trained; a cell has a micro-batch
# Recipes and published shapes, the order of the table.
SIZES = {
    "tiny": "gpt-tiny", "125M": "gpt2-small", "355M": "gpt2-medium", "774M": "gpt2-large",
    "1.5B": "gpt2-xl", "3B": "gpt3-2.7b", "7B": "gpt3-6.7b", "13B": "gpt3-13b",
}  # fmt: skip
PREDICTED = ("13B",)
# The order of measuring, what says most first: both ends and the middle of the sizes; who is to be
# compared with AdamW, then the others.
ORDER = ("125M", "1.5B", "7B", "3B", "355M", "774M")
ENTRANTS = ("adamw", "mars-adamw", "mars-m", "muon", "mars-lion", "mars-shampoo")
FREE_SHARE = 0.1  # of the memory that a micro-batch leaves free: the planner is not exact
DOUBT = 1.1  # what the planner thinks too large by less is tried all the same


class Kept(NamedTuple):
    """How weights and optimizer state are kept."""

    params: str
    state: Form


def forms(name: str) -> list[Kept]:
    """From the most to the fewest bytes. torch's state has the dtype of the weights, and of 16-bit
    weights only MARS keeps the low halves."""
    if OPTIMIZERS[name].torch:
        return [Kept("float32", "float32"), Kept("bfloat16", "bfloat16")]
    of_float32: list[Form] = ["float32", "bfloat16", "8bit"]
    return [*(Kept("float32", state) for state in of_float32), Kept("bfloat16", "8bit")]


@dataclass(frozen=True)
class Place:
    """Where it is measured. An unknown device has no end of memory, and is planned as an H200."""

    device: torch.device
    gpu: Gpu
    known: bool  # predicted times are those of this device
    memory_bytes: float

    @property
    def autocast(self) -> bool:
        return hardware.choose_precision("auto", self.device) == torch.bfloat16


def here(name: str) -> Place:
    device = hardware.choose_device(name)
    if device.type != "cuda":
        return Place(device, gpus.find("h200"), False, math.inf)
    total = float(torch.cuda.get_device_properties(device).total_memory)
    gpu = gpus.by_driver(torch.cuda.get_device_name(device), total)
    return Place(device, gpu or gpus.find("h200"), gpu is not None, total)


def model_of(size: str) -> Model:
    found = models.find(SIZES[size])
    return models.at_context(found, min(CONTEXT, found.run.gpt.block_size))


def job_of(model: Model, gpu: Gpu, micro: int, kept: Kept) -> Job:
    setting = Setting({"float32": 4, "bfloat16": 2}[kept.params], kept.state)
    return Job(model, Cluster(gpu, 1, 1, "ddp"), micro, micro, setting)


def needs(model: Model, gpu: Gpu, micro: int, name: str, kept: Kept) -> float:
    """Bytes of a GPU's memory, by the planner."""
    return (
        predict.rank_memory(job_of(model, gpu, micro, kept), OPTIMIZERS[name]).peak + RESERVED_BYTES
    )


def fitting(model: Model, place: Place, micro: int, name: str, doubt: float = 1.0) -> list[Kept]:
    room = doubt * place.memory_bytes
    return [k for k in forms(name) if needs(model, place.gpu, micro, name, k) <= room]


def micro_batch(model: Model, place: Place, most: int) -> int:
    """Sequences of a step: as many for all, so that nobody needs fewer bits of state for them."""
    first = [(name, kept) for name in ENTRANTS for kept in fitting(model, place, 1, name)[:1]]
    room = (1 - FREE_SHARE) * place.memory_bytes
    micro = 1
    while first and 2 * micro <= most and all(
        needs(model, place.gpu, 2 * micro, name, kept) <= room for name, kept in first
    ):  # fmt: skip
        micro *= 2
    return micro


def ratios(own: dict[str, Any], base: dict[str, Any], tokens: int) -> dict[str, float]:
    """Of an optimizer to AdamW; "accumulated" is the speed where gradients are added up first.

    There AdamW's passes count for both: they are the same, but for how warm the device is.
    """
    a_pass = tokens / base["tokens_per_second"] - base["optimizer_ms"] / 1e3
    passes = a_pass * STEP_TOKENS / tokens
    longer = (passes + base["optimizer_ms"] / 1e3) / (passes + own["optimizer_ms"] / 1e3)
    figures = ("tokens_per_second", "optimizer_ms")
    return {**{figure: own[figure] / base[figure] for figure in figures}, "accumulated": longer}


def planned_rows(gpu: Gpu, most: int) -> Iterator[dict[str, Any]]:
    """What is too large to be measured, or to be waited for, as a row of its own kind."""
    for size in PREDICTED:
        model = model_of(size)
        place = Place(torch.device("meta"), gpu, True, gpu.memory_bytes)
        micro = micro_batch(model, place, most)
        for name in ENTRANTS:
            row = {
                "size": size, "model": SIZES[size], "optimizer": name, "elements": model.elements,
                "micro_batch": micro, "tokens": micro * model.run.gpt.block_size,
            }  # fmt: skip
            kept = next(iter(fitting(model, place, micro, name)), None)
            if kept is None:
                least = needs(model, gpu, 1, name, forms(name)[-1])
                yield {**row, "status": "does not fit", "needs_bytes": least}
            else:
                yield {**row, "status": "predicted", **kept._asdict()}

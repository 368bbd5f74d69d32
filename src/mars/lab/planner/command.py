"""`mars plan MODEL`: will it fit, and what does MARS cost there."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mars.lab.errors import LabError, UsageError, meant
from mars.lab.planner import models, predict, validate, words
from mars.lab.planner.gpus import find as find_gpu
from mars.lab.planner.network import Cluster, check
from mars.lab.planner.predict import Job
from mars.lab.planner.steps import OPTIMIZERS, Form, Optimizer, Setting
from mars.lab.report import fit
from mars.lab.rundir import reason, write_json

BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class PlanArgs:
    """Predict memory, traffic and time of a step on GPUs you do not have."""

    gpus: int = 1
    """How many GPUs."""
    gpu: str = "h200"
    """Which: h200, h100, a100 (80 GB), b200, l40s, rtx4090."""
    strategy: Literal["ddp", "fsdp2", "hsdp"] = "fsdp2"
    """Copies (ddp), shards over all GPUs (fsdp2), or shards in a node and copies between nodes."""
    nodes_of: int = 8
    """GPUs of a node."""
    optimizer: tuple[str, ...] = ("all",)
    """Which optimizers: adamw, muon, mars-adamw, mars-adamw-consume, mars-adamw-no-clip (and with a
    raw second moment), mars-lion, mars-shampoo, mars-m, mars-m-no-clip, or all of them."""
    state: Form = "float32"
    """How MARS keeps its state."""
    params: Literal["fp32", "bf16"] = "fp32"
    """Parameters and gradients; MARS keeps the low halves of bf16 ones."""
    batch: int | None = None
    """Sequences of a step, over all GPUs; by default the recipe's (4M tokens for a Llama), rounded
    to whole passes."""
    micro_batch: int | None = None
    """Sequences of a pass on each GPU; by default at most 32k tokens and 40 % of the memory."""
    context: int | None = None
    """Tokens of a sequence; by default the model's."""
    recompute: bool = False
    """Keep the inputs of blocks only, and compute them again in the backward pass."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """How gradients are sent."""
    engine: Literal["auto", "fused", "foreach"] = "auto"
    """MARS's engine; auto is what the library uses: foreach for matrices that ranks share, fused
    for everything else."""
    mfu: float | None = None
    """Share of the peak that forward and backward reach; by default from products, attention and
    bytes, at the rates that were measured on an H200."""
    json: Path | None = None
    """Write everything to this file, too."""
    validate: bool = False
    """Print the model's predictions beside everything that was measured, and stop."""
    results: Path | None = None
    """For --validate: the directory of measurements; by default the repository's docs/results."""


def plan_command(name: str | None, args: PlanArgs) -> None:
    """Print the plan of a model, or how far the model of it is off."""
    _check_writable(args.json)
    if args.validate:
        directory = validate.results_directory(args.results)
        compared, others = validate.compare(directory), validate.not_modelled(directory)
        sys.stdout.write(words.errors(compared, others) + "\n")
        _write(args.json, [{**dataclasses.asdict(c), "error": c.error} for c in compared])
        return
    if name is None:
        known = ", ".join(models.KNOWN)
        raise UsageError(f"mars plan needs a model: {known}; or --validate")
    job = job_of(name, args)
    predictions = [predict.predict(job, optimizer) for optimizer in chosen(args.optimizer)]
    sys.stdout.write(words.describe(job, predictions, fit.room()) + "\n")
    _write(args.json, {
        **predict.as_json(job, predictions),
        "answer": words.answer(job, predictions),
        "assumptions": words.assumptions(job),
    })  # fmt: skip


def job_of(name: str, args: PlanArgs) -> Job:
    """What the words mean; a LabError says what cannot be."""
    model = models.find(name)
    if args.context is not None:
        if args.context < 1:
            raise LabError(f"--context must be above 0, not {args.context}")
        model = models.at_context(model, args.context)
    cluster = check(Cluster(find_gpu(args.gpu), args.gpus, args.nodes_of, args.strategy))
    batch = _batch(model, args)
    if batch < 1:
        raise LabError(f"--batch must be above 0, not {args.batch}")
    default = model.run.loop.batch_size
    micro = args.micro_batch
    if micro is None:
        micro = predict.default_micro_batch(model, cluster, batch, args.recompute)
    setting = Setting(BYTES[args.params], args.state)
    reduce = min(BYTES[args.reduce], 2 if args.params == "bf16" else 4)
    job = Job(
        model,
        cluster,
        batch,
        micro,
        setting,
        reduce,
        engine=args.engine,
        recompute=args.recompute,
        mfu=args.mfu,
        default_batch=default if args.batch is None and batch != default else None,
    )
    _check_whole(predict.check(job), args)
    return job


def _check_whole(job: Job, args: PlanArgs) -> None:
    """As `mars train` has it: processes have equal parts, in equal passes."""
    gpus, micro = args.gpus, args.micro_batch
    unit = gpus * (micro or 1)
    if job.batch % unit == 0:
        return
    words = {"--gpus": gpus if gpus > 1 else None, "--micro-batch": micro}
    names = " times ".join(f"{name} ({n})" for name, n in words.items() if n)
    raise LabError(
        f"--batch ({job.batch}) must be a multiple of {names}: the nearest is "
        f"--batch {predict.nearest(job.batch, unit)}"
    )


def _batch(model: models.Model, args: PlanArgs) -> int:
    """Sequences of a step: as asked for; a default yields to the GPUs and to passes."""
    if args.batch is not None:
        return args.batch
    default, micro = model.run.loop.batch_size, args.micro_batch or 1
    batch = predict.nearest(default, args.gpus)
    if 1 <= micro <= batch // args.gpus:  # another one is refused, for this batch
        batch = predict.nearest(default, args.gpus * micro)
    return batch


def chosen(names: tuple[str, ...]) -> list[Optimizer]:
    """The optimizers of these names, each once."""
    for name in names:
        if name != "all" and name not in OPTIMIZERS:
            hint = meant(name, OPTIMIZERS) or f"known: all, {', '.join(OPTIMIZERS)}"
            raise LabError(f"unknown optimizer {name!r}: {hint}")
    return [o for o in OPTIMIZERS.values() if "all" in names or o.name in names]


def _check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be, before anything is printed."""
    if path is None:
        return
    if path.is_dir():
        raise LabError(f"--json {path} cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise LabError(f"--json {path} cannot be written: there is no folder {path.parent}")
    places = [path] if path.exists() else []
    places += [path.resolve().parent] if _is_whole(path) else []
    if not all(os.access(place, os.W_OK) for place in places):
        raise LabError(f"--json {path} cannot be written: permission denied")


def _is_whole(path: Path) -> bool:
    """Whether the file can be replaced by another: a terminal or a pipe cannot."""
    if path.exists() and not os.access(path.resolve().parent, os.W_OK):
        return False  # of a folder that takes no other file: written in place
    return path.is_file() or not path.exists()


def _write(path: Path | None, values: object) -> None:
    if path is None:
        return
    if _is_whole(path):  # what is there stays until all of it is written; a link stays a link
        write_json(path.resolve(), values, indent=1)
        return
    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise LabError(f"--json {path} cannot be written: {reason(error)}") from error
